"""A sweep whose values optuna chooses, by the summaries of the runs so far."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import UserError, require_int, require_one_of
from sarathi_lab.config.instantiate import Job, build
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import BEST
from sarathi_lab.config.sweeper import LabSweeper

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"
MOST_VALUES = 10_000  # of a range of fractions, which are counted one by one


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
            raise UserError(
                "hydra/sweeper=optuna_search needs the package optuna, which is missing; pip "
                "install optuna"
            )

    def make_jobs(self) -> tuple[list[Job], int]:
        """Compose the jobs at the ends of the search space, to check before anything runs."""
        self._check()
        if not self.swept:
            raise UserError(
                "hydra/sweeper=optuna_search has nothing to search; add a space such as "
                "'chunk=range(128,1025,step=64)'"
            )
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
        """The job of these values: the checked one if there is one."""
        settings = [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in fixed]
        settings += [f"{key}={value}" for key, value in params.items()]
        checked = (job for job in self.jobs if job.settings == tuple(settings) and job.prepared)
        return next(checked, None) or self.compose_job(settings)

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
            raise UserError(
                f"hydra.sweeper.objective={self.objective} is not in {path}; use one of "
                f"{', '.join(summary)}"
            )
        return None if math.isnan(value := summary[self.objective]) else value

    def _report(self, study: optuna.Study) -> None:
        finished = [trial for trial in study.trials if trial.value is not None]
        if not finished:
            return
        best = study.best_trial
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        text = f"\nbest of {len(finished)} trials: {values}, {self.objective} {best.value:.6g}"
        console().print(text, style="bold")
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
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if isinstance(space := override.value(), IntervalSweep):
        return [str(space.start), str(space.end)]
    if isinstance(space, RangeSweep):
        return [str(_values(space)[0]), str(_values(space)[-1])]
    return list(override.sweep_string_iterator())


def _values(space: RangeSweep) -> Sequence[float]:
    """The values of range(...), ascending. Raises UserError if they are none, or too many."""
    values = space.range()
    few = values if isinstance(values, range) else list(islice(values, MOST_VALUES + 1))
    if not few or (few is not values and len(few) > MOST_VALUES):
        raise UserError(
            f"range({space.start},{space.stop},{space.step}) has no value, or more than "
            f"{MOST_VALUES}; exchange its ends, or use interval({space.start},{space.stop})"
        )
    return few if few[0] <= few[-1] else few[::-1]


def _distribution(override: Override) -> optuna.distributions.BaseDistribution:
    """The space of a,b,c or choice(...); of range(start,stop,step); of interval(low,high)."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space = override.value()
    if isinstance(space, ChoiceSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    options: dict[str, Any]
    low: Any
    high: Any
    if isinstance(space, RangeSweep):
        steps = _values(space)
        low, high, options = steps[0], steps[-1], {"step": abs(space.step)}
    else:
        assert isinstance(space, IntervalSweep)
        low, high, options = space.start, space.end, {"log": "log" in space.tags}
    is_whole = all(isinstance(value, int) for value in (low, high, options.get("step", 1)))
    return (IntDistribution if is_whole else FloatDistribution)(low, high, **options)
