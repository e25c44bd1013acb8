"""A sweep whose values optuna chooses, by the summaries of the runs so far."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep

from sarathi_lab.config.console import print_words
from sarathi_lab.config.errors import UserError, require_int, require_one_of
from sarathi_lab.config.instantiate import Job, build
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import BEST
from sarathi_lab.config.sweeper import LabSweeper

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"


class OptunaSearch(LabSweeper):
    """Maximise or minimise `objective`, a name of summary.json, in `n_trials` trials, `parallel` of
    them at a time, by optuna's ask and tell; a search that was stopped goes on from its journal.
    """

    is_search = True

    def __init__(
        self,
        *,
        objective: str,
        direction: str,
        n_trials: int,
        parallel: int,
        seed: int,
        params: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> None:
        super().__init__(params, dry_run=dry_run)
        self.objective, self.direction, self.seed = objective, direction, seed
        self.n_trials, self.parallel = n_trials, parallel

    def _check(self) -> None:
        require_one_of("hydra.sweeper.direction", self.direction, ("maximize", "minimize"))
        for name, minimum in (("n_trials", 1), ("parallel", 1), ("seed", 0)):
            fix = "use a number such as 20"
            require_int(f"hydra.sweeper.{name}", getattr(self, name), minimum, fix)
        if importlib.util.find_spec("optuna") is None:
            reason = "needs the package optuna, which is missing"
            raise UserError(f"hydra/sweeper=optuna_search {reason}; pip install optuna")

    def make_jobs(self) -> tuple[list[Job], int]:
        """Compose the jobs at the ends of the search space, to check before anything runs."""
        self._check()
        if not self.swept:
            fix = "add a space such as 'chunk=range(128,1025,step=64)'"
            raise UserError(f"hydra/sweeper=optuna_search has nothing to search; {fix}")
        ends = [[f"{o.get_key_element()}={value}" for value in _ends(o)] for o in self.settings]
        jobs = [self.compose_job(one) for one in self.without_unread(list(product(*ends)))]
        for job in jobs:
            job.num_rounds(self.swept, is_search=True)
        build(jobs[0].cfg.task).check_objective(self.objective)
        names = ("objective", "direction", "n_trials", "seed")
        self.search_settings = {name: getattr(self, name) for name in names}
        return jobs, self.n_trials

    def run_jobs(self) -> None:
        """Search until `n_trials` trials have a result or have failed now; leaves best.json."""
        from optuna.trial import TrialState

        study, fixed = self._study(), [o for o in self.settings if not o.is_sweep_override()]
        space = {o.get_key_element(): _distribution(o) for o in self.settings if o not in fixed}
        known = _retry_unfinished(study)
        num_left = self.n_trials - sum(trial.value is not None for trial in study.trials)
        while num_left > 0:
            trials = [study.ask(space) for _ in range(min(self.parallel, num_left))]
            new = [trial for trial in trials if _key(trial.params) not in known]
            self.launch({trial.number: self._job(fixed, trial.params) for trial in new})
            known |= {_key(trial.params): self._value(trial.number) for trial in new}
            for trial in trials:
                value = known[_key(trial.params)]
                state = TrialState.FAIL if value is None else TrialState.COMPLETE
                study.tell(trial, value, state)
            num_left -= len(trials)
        self._report(study)

    def _job(self, fixed: Sequence[Override], params: Mapping[str, Any]) -> Job:
        settings = [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in fixed]
        return self.compose_job([*settings, *(f"{key}={value}" for key, value in params.items())])

    def _study(self) -> optuna.Study:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = JournalFileBackend(str(self.record.folder / JOURNAL))
        study = optuna.create_study(
            study_name="search",
            storage=optuna.storages.JournalStorage(journal),
            direction=self.direction,
            load_if_exists=True,
        )
        # Another seed for each continuation, or its first proposals would be those of the first
        # start.
        study.sampler = optuna.samplers.TPESampler(seed=self.seed + len(study.trials))
        return study

    def _value(self, number: int) -> float | None:
        """The objective of a trial's run; None if it failed."""
        if not self.record.is_finished(number):
            return None
        path = self.record.job_dir(number) / "summary.json"
        summary = json.loads(path.read_text())
        if self.objective not in summary:
            fix = f"use one of {', '.join(summary)}"
            raise UserError(f"hydra.sweeper.objective={self.objective} is not in {path}; {fix}")
        return None if math.isnan(value := summary[self.objective]) else value

    def _report(self, study: optuna.Study) -> None:
        finished = [trial for trial in study.trials if trial.value is not None]
        if not finished:
            return
        best = study.best_trial
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        text = f"\nbest of {len(finished)} trials: {values}, {self.objective} {best.value:.6g}"
        print_words(text, style="bold")
        if len(finished) >= self.n_trials:
            content = {"params": best.params, "objective": self.objective, "value": best.value}
            write_json(self.record.folder / BEST, {**content, "trials": len(finished)})


def _retry_unfinished(study: optuna.Study) -> dict[str, float | None]:
    """Queue the values of trials without a result; returns others' results by their values."""
    from optuna.trial import TrialState

    trials = study.trials
    known = {_key(trial.params): trial.value for trial in trials if trial.value is not None}
    lost = {_key(trial.params): trial.params for trial in trials if trial.value is None}
    for trial in trials:
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
    for key, params in lost.items():
        if params and key not in known:
            study.enqueue_trial(params)
    return known


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)


def _ends(override: Override) -> list[str]:
    """All values of a choice, the first and last of a range, the only one of what is no space."""
    if isinstance(space := override.value(), IntervalSweep | RangeSweep):
        return [str(bound) for bound in _bounds(space)]
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def _bounds(space: Any) -> tuple[Any, Any]:
    """The least and the largest value of a space. Raises UserError if it has none."""
    if isinstance(space, IntervalSweep):
        return space.start, space.end
    number = math.ceil((space.stop - space.start) / space.step)
    if number < 1:
        text = f"range({space.start},{space.stop},{space.step})"
        raise UserError(f"{text} has no value; exchange its ends")
    last = space.start + (number - 1) * space.step
    return min(space.start, last), max(space.start, last)


def _distribution(override: Override) -> optuna.distributions.BaseDistribution:
    """The space of a,b,c or choice(...); of range(start,stop,step); of interval(low,high)."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space: Any = override.value()
    if isinstance(space, ChoiceSweep | Glob):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    low, high = _bounds(space)
    if isinstance(space, IntervalSweep):
        options: dict[str, Any] = {"log": "log" in space.tags}
    else:
        options = {"step": abs(space.step)}
    is_whole = all(isinstance(value, int) for value in (low, high, options.get("step", 1)))
    return (IntDistribution if is_whole else FloatDistribution)(low, high, **options)
