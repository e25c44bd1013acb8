"""What Hydra's launchers for clusters lack for a sweep: a job that is lost stops no other, and the
ends of Slurm's jobs are read from squeue, as sacct answers only where accounting is kept.
"""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from sarathi_lab.config.errors import RunError

POLL_SECONDS = 30  # between two questions to Slurm, at most; results are looked for every second
# Of squeue's states those in which a job will not run again.
ENDS = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
FORGOTTEN = "forgotten"  # some minutes after its end


def prepare(name: str, settings: DictConfig) -> None:
    """Let the launcher of that name and `settings` wait for each job of a sweep, whatever became of
    others; its `launch` then returns how each ended: "" if by itself.
    """
    if name == "ray":
        _prepare_ray(settings)
    elif name.startswith("submitit"):
        _prepare_submitit()


def _prepare_ray(settings: DictConfig) -> None:
    import ray
    from hydra_plugins.hydra_ray_launcher import _core

    def end(job: Any) -> str:
        try:
            ray.get(job)
        except ray.exceptions.RayError as error:
            return f"Ray lost it ({type(error).__name__}); its process was killed, or its machine"
        return ""

    with open_dict(settings):
        # A run that kills its process would do it again.
        settings.ray.remote.setdefault("max_retries", 0)
        own = {"log_to_driver": False, "logging_level": "error"}  # jobs have files for their words
        # The plugin gives a size, with which Ray joins no cluster that is there.
        for name, value in (own | {"object_store_memory": None}).items():
            settings.ray.init.setdefault(name, value)
    _core.ray = SimpleNamespace(get=end)


def _prepare_submitit() -> None:
    from submitit.core import core
    from submitit.slurm import slurm

    class Watcher(slurm.SlurmInfoWatcher):
        """Knows the states of jobs from squeue."""

        def update(self) -> None:
            self._num_calls += 1
            self._last_status_check = time.time()
            if (states := queue_states()) is None:
                return  # Slurm does not answer now: what is known stays
            for job in self._registered - self._finished:
                state = states.get(job, FORGOTTEN)
                self._info_dict[job] = {"State": state}
                if state in (*ENDS, FORGOTTEN):
                    self._finished.add(job)

        def is_done(self, job_id: str, mode: str = "standard") -> bool:
            self.update_if_long_enough(mode)
            return job_id in self._finished

    def ends(job: Any) -> list[str]:
        job.wait()
        if job.paths.result_pickle.exists():
            return [""]
        return [f"job {job.job_id} was ended as {job.state}; its log is {job.paths.stderr}"]

    slurm.SlurmJob.watcher = Watcher(delay_s=POLL_SECONDS)
    setattr(core.Job, "results", ends)  # noqa: B010 (mypy lets nobody assign to a method)


def queue_states() -> dict[str, str] | None:
    """Slurm's states of this user's jobs by id, those of the last minutes included; None if Slurm
    does not answer.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return dict(line.split("|") for line in done.stdout.splitlines())


def time_over(error: Exception) -> RunError | None:
    """What to tell of a job whose time on the cluster was over, None of other errors."""
    if type(error).__name__ != "UncompletedJobError":  # of submitit, which need not be installed
        return None
    minutes = HydraConfig.get().launcher.get("timeout_min")
    return RunError(
        f"it took more than hydra.launcher.timeout_min={minutes}; allow more, or let it begin anew "
        "by hydra.launcher.max_num_timeout=1"
    )
