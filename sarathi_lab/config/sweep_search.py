"""Lets optuna choose what to try: each run's summary tells it how good its values were.

The ask-and-tell way of optuna itself: Hydra's own optuna plugin (1.3.0) asks for optuna before
version 3, and begins anew each time, while a search here goes on from its journal.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import UserError, require_int, require_one_of
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.sweep_record import BEST, SweepRecord

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"
Launch = Callable[[Mapping[int, Sequence[str]]], None]


@dataclass(frozen=True)
class OptunaSearch:
    """Maximise or minimise `objective`, a name of summary.json, in `n_trials` trials, `parallel` of
    them at a time.

    A trial of values that a run has had takes over its outcome. `params` are settings as on the
    command line.
    """

    objective: str
    direction: Literal["maximize", "minimize"]
    n_trials: int
    parallel: int
    seed: int
    params: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, minimum, fix in (
            ("n_trials", 1, "the number of trials, such as 20"),
            ("parallel", 1, "the number of trials at a time, such as 1"),
            ("seed", 0, "a number such as 0"),
        ):
            require_int(f"hydra.sweeper.{name}", getattr(self, name), minimum, f"use {fix}")
        require_one_of("hydra.sweeper.direction", self.direction, ("maximize", "minimize"))
        if importlib.util.find_spec("optuna") is None:
            raise UserError(
                "hydra/sweeper=optuna_search needs the package optuna, which is missing; pip "
                "install optuna"
            )

    def check_objective(self, quantities: Iterable[str]) -> None:
        """Refuse an objective that summary.json can't have, which holds `quantities` and their
        ratios to baselines.
        """
        require_one_of("hydra.sweeper.objective", self.objective.partition("_vs_")[0], quantities)

    def identity(self) -> dict[str, Any]:
        """What makes it another search: all but how many run at a time."""
        return {
            key: value for key, value in asdict(self).items() if key not in ("parallel", "params")
        }

    def extremes(self, overrides: Sequence[Override]) -> list[list[str]]:
        """The jobs at the ends of the search space, to check before anything runs. Raises
        UserError.
        """
        if not any(override.is_sweep_override() for override in overrides):
            raise UserError(
                "hydra/sweeper=optuna_search has nothing to search; add a space such as "
                "'chunk=range(128,1025,step=64)'"
            )
        ends = [[f"{o.get_key_element()}={value}" for value in _ends(o)] for o in overrides]
        return [list(job) for job in product(*ends)]

    def run(self, record: SweepRecord, overrides: Sequence[Override], launch: Launch) -> None:
        """Search until `n_trials` trials have a result or have failed now; leaves best.json.

        `launch` runs jobs, by number and settings, and returns when all have ended.
        """
        study = self._study(record)
        space = {o.get_key_element(): _distribution(o) for o in overrides if o.is_sweep_override()}
        fixed = [
            f"{o.get_key_element()}={o.get_value_element_as_str()}"
            for o in overrides
            if not o.is_sweep_override()
        ]
        known = self._retry_unfinished(study)
        num_left = self.n_trials - sum(trial.value is not None for trial in study.trials)
        while num_left > 0:
            trials = [study.ask(space) for _ in range(min(self.parallel, num_left))]
            jobs = {
                trial.number: [*fixed, *(f"{key}={value}" for key, value in trial.params.items())]
                for trial in trials
                if _key(trial.params) not in known
            }
            launch(jobs)
            for trial in trials:
                self._tell(study, trial, record, known)
            num_left -= len(trials)
        self._report(study, record)

    def _study(self, record: SweepRecord) -> optuna.Study:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(record.folder / JOURNAL)))
        study = optuna.create_study(
            study_name="search", storage=storage, direction=self.direction, load_if_exists=True
        )
        # Another seed for each continuation, or its first proposals would be those of the first
        # start.
        study.sampler = optuna.samplers.TPESampler(seed=self.seed + len(study.trials))
        return study

    def _retry_unfinished(self, study: optuna.Study) -> dict[str, float]:
        """Queue the values of trials without a result, and return the results of the others by
        their values.
        """
        from optuna.trial import TrialState

        known = {
            _key(trial.params): trial.value for trial in study.trials if trial.value is not None
        }
        lost = {
            _key(trial.params): trial.params
            for trial in study.trials
            if trial.value is None and trial.params
        }
        for trial in study.trials:
            if trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
        for key in lost.keys() - known.keys():
            study.enqueue_trial(lost[key])
        return known

    def _tell(
        self, study: optuna.Study, trial: optuna.Trial, record: SweepRecord, known: dict[str, float]
    ) -> None:
        from optuna.trial import TrialState

        key = _key(trial.params)
        if key not in known:
            known[key] = self._value(record, trial.number)
        if math.isnan(known[key]):
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, known[key])

    def _value(self, record: SweepRecord, number: int) -> float:
        """What the run of a trial came to; NaN if it failed, so that this command does not try its
        values again.
        """
        if not record.is_finished(number):
            return math.nan
        path = record.job_dir(number) / "summary.json"
        summary = json.loads(path.read_text())
        if self.objective not in summary:
            known = ", ".join(summary)
            raise UserError(
                f"hydra.sweeper.objective={self.objective} is not in {path}; use one of {known}"
            )
        return summary[self.objective]

    def _report(self, study: optuna.Study, record: SweepRecord) -> None:
        finished = [trial for trial in study.trials if trial.value is not None]
        if not finished:
            return
        best = study.best_trial
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        console().print(
            f"\nbest of {len(finished)} trials: {values}, {self.objective} {best.value:.6g}",
            style="bold",
        )
        if len(finished) >= self.n_trials:
            content = {
                "params": best.params,
                "objective": self.objective,
                "value": best.value,
                "trials": len(finished),
            }
            write_json(record.folder / BEST, content)


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)


def _ends(override: Override) -> list[str]:
    """The values of a choice, the first and the last of what is a range, or the only value of what
    is no space.
    """
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if isinstance(space := override.value(), IntervalSweep):
        return [str(space.start), str(space.end)]
    values = list(override.sweep_string_iterator())
    return [values[0], values[-1]] if isinstance(space, RangeSweep) else values


def _distribution(override: Override) -> optuna.distributions.BaseDistribution:
    """The search space that a setting spans: a,b,c or choice(...); range(start,stop,step);
    interval(low,high).
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space = override.value()
    if isinstance(space, ChoiceSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    if isinstance(space, RangeSweep):
        values = sorted(space.range())
        if isinstance(space.step, int) and all(isinstance(value, int) for value in values):
            return IntDistribution(values[0], values[-1], step=abs(space.step))
        return FloatDistribution(values[0], values[-1], step=abs(space.step))
    assert isinstance(space, IntervalSweep)
    assert space.start is not None
    assert space.end is not None
    is_log = "log" in space.tags
    if isinstance(space.start, int) and isinstance(space.end, int):
        return IntDistribution(space.start, space.end, log=is_log)
    return FloatDistribution(space.start, space.end, log=is_log)
