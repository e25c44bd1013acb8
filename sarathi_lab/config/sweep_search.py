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
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from sarathi_lab.config.checked import check_fields, one_of, whole
from sarathi_lab.config.console import console
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.sweep_record import BEST, SweepRecord

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"
MOST_VALUES = 10_000  # of a range of fractions, which are counted one by one
Launch = Callable[[Mapping[int, Sequence[str]]], None]


@dataclass(frozen=True)
class OptunaSearch:
    """Maximise or minimise `objective`, a name of summary.json, in `n_trials` trials, `parallel` of
    them at a time.

    A trial of values that a run has had takes over its outcome. `params` are settings as on the
    command line.
    """

    objective: str
    direction: Literal["maximize", "minimize"] = one_of(valid=("maximize", "minimize"))
    n_trials: int = whole(minimum=1, fix="use the number of trials, such as 20")
    parallel: int = whole(minimum=1, fix="use the number of trials at a time, such as 1")
    seed: int = whole(minimum=0, fix="use a number such as 0")
    params: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "hydra.sweeper.")
        if importlib.util.find_spec("optuna") is None:
            raise UserError(
                "hydra/sweeper=optuna_search needs the package optuna, which is missing; pip "
                "install optuna"
            )

    def check_objective(self, quantities: Iterable[str]) -> None:
        """Refuse what summary.json can't have: `quantities` and their ratios to baselines."""
        require_one_of("hydra.sweeper.objective", self.objective.partition("_vs_")[0], quantities)

    def identity(self) -> dict[str, Any]:
        """What makes it another search: all but how many run at a time."""
        own = asdict(self)
        return {key: own[key] for key in own if key not in ("parallel", "params")}

    def extremes(self, overrides: Sequence[Override]) -> list[list[str]]:
        """The jobs at the ends of the search space, to check before anything runs."""
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
        from optuna.trial import TrialState

        study = self._study(record)
        space = {o.get_key_element(): _distribution(o) for o in overrides if o.is_sweep_override()}
        fixed = [
            f"{o.get_key_element()}={o.get_value_element_as_str()}"
            for o in overrides
            if not o.is_sweep_override()
        ]
        known = _retry_unfinished(study)
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
                key = _key(trial.params)
                if key not in known:
                    known[key] = self._value(record, trial.number)
                state = TrialState.FAIL if known[key] is None else TrialState.COMPLETE
                study.tell(trial, known[key], state)
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

    def _value(self, record: SweepRecord, number: int) -> float | None:
        """What the run of a trial came to; None if it failed."""
        if not record.is_finished(number):
            return None
        path = record.job_dir(number) / "summary.json"
        summary = json.loads(path.read_text())
        if self.objective not in summary:
            raise UserError(
                f"hydra.sweeper.objective={self.objective} is not in {path}; use one of "
                f"{', '.join(summary)}"
            )
        return None if math.isnan(value := summary[self.objective]) else value

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
            content = {"params": best.params, "objective": self.objective, "value": best.value}
            write_json(record.folder / BEST, {**content, "trials": len(finished)})


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
