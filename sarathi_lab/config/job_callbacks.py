"""The callbacks of Hydra's node, for the jobs that the lab or a launcher runs."""

from __future__ import annotations

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig


class JobCallbacks(Callback):
    """All callbacks of `hydra.callbacks` as one, called at the start and the end of a job."""

    def __init__(self, config: DictConfig) -> None:
        self._callbacks: list[Callback] = []
        callbacks = config.hydra.callbacks or {}
        for settings in callbacks.values():
            callback = instantiate(settings)
            self._callbacks.append(callback)

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: object
    ) -> None:
        for callback in self._callbacks:
            callback.on_job_start(config, task_function=task_function, **kwargs)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        # As Hydra does: the first to begin is the last to end.
        for callback in reversed(self._callbacks):
            callback.on_job_end(config, job_return, **kwargs)
