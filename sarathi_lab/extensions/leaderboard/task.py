"""The task `leaderboard`: one policy in one contest a job, and the board of a sweep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import delayed
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.console import amount, print_place, print_words
from sarathi_lab.config.errors import UserError, require_int, require_one_of, require_text
from sarathi_lab.config.instantiate import (
    class_name,
    load_option,
    option_files,
)
from sarathi_lab.config.jobs import Job
from sarathi_lab.config.paths import of_lab, readable
from sarathi_lab.config.run_context import RunContext, SweepRecord
from sarathi_lab.experiment.simulate import results_of
from sarathi_lab.extensions.leaderboard import board, pages, verdicts
from sarathi_lab.extensions.leaderboard.comparison import FEWEST_SEEDS
from sarathi_lab.extensions.leaderboard.runs import (
    CONTEST,
    DEFAULT,
    GOODPUT,
    LABELS,
    Contest,
    Trial,
    row_of,
    run_all,
)
from sarathi_lab.results.result import Result, show
from sarathi_lab.tasks.base import Task

OF_JOB = "runs.csv"  # in the folder of a job
# Settings of a sweep that make another contest, not another policy.
OF_CONTESTS = ("experiment", "workload", "model", "hardware", "seed", "repetition")


def _numbers(default: Sequence[int], minimum: int, example: str) -> Any:
    """Return a field of a dataclass with different whole numbers from `minimum`, or none."""
    return listed(
        default,
        complaint=f"is no list; use {example}",
        each=partial(require_int, minimum=minimum, fix=f"use {example}"),
        twice=f"repeats one; use {example}",
        may_be_empty=True,
    )


@dataclass(frozen=True)
class Leaderboard(Task):
    """Runs a policy in one contest, at its system's default budget and at its best of `budgets`;
    shows the policies of a sweep in distinguished groups, among those recorded in `beside`.

    A run is judged by all `objectives`. Runs have the seeds from `seed` to `seed + seeds - 1`;
    those that choose a budget have `selection_seeds`. `processes` run at a time; None: one a core.
    """

    reads = (
        "policy",
        "workload",
        "executor",
        "model",
        "hardware",
        "host",
        "dtype",
        "seed",
        "chunk",
        "batch",
        "pd_ratio",
        "seq_len",
        "max_model_len",
        "cache",
        "queue_order",
        "prompt_classes",
        "stall",
        "cluster",
        "speculation",
    )
    workload: str = "workload"
    objectives: Sequence[str] = listed(
        (),
        complaint="compares by nothing; list options of slo, such as [strict]",
        each=partial(require_text, fix="name an option of slo"),
    )
    seeds: int = whole(8, minimum=1, fix="use a number of sets of requests, such as 8")
    budgets: Sequence[int] = _numbers(
        (512, 1024, 2048, 4096, 8192), 1, "tokens, such as [512,2048]"
    )
    selection_seeds: Sequence[int] = _numbers((), 0, "seeds, such as [20,21]")
    rates: Mapping[str, float] = field(default_factory=dict)
    beside: str | None = None
    processes: int | None = whole(None, minimum=1, fix="use a number such as 2, or null")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.objectives:
            require_one_of("task.objectives", name, option_files("slo"))
        if self.budgets and not self.selection_seeds:
            raise UserError(
                "task.selection_seeds=[] leaves no requests to choose a budget by; list some, such "
                "as [20,21], or use task.budgets=[] for default budgets only"
            )

    def check(self, cfg: DictConfig) -> Contest:
        """Return the contest with the policy of `cfg` in it; its default budget is planned."""
        require_int("seed", cfg.seed, 0, "use the first seed, such as 0")
        both = {*self._seeds(cfg)} & {*self.selection_seeds}
        if both:
            raise UserError(
                f"task.selection_seeds={list(self.selection_seeds)}: seed {min(both)} is one that "
                "policies are compared on, which would flatter the budgets that it chose; use "
                "others"
            )
        self._recorded()
        contest = self._contest(cfg, class_name(cfg.policy))
        seeds = [*self._seeds(cfg)]
        default = contest.default_budget(seeds[0])
        # A trace may have no rows for the last ones.
        for seed in {seeds[0], seeds[-1], *self.selection_seeds[-1:]}:
            contest.plan(seed, default)
        return contest

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Run the policy with all seeds and budgets; leaves a row a run."""
        contest = self._contest(cfg, label_of(cfg, context))
        seeds = self._seeds(cfg)
        runs = run_all(contest, seeds, self.selection_seeds, self.budgets, self._run_trials)
        return Result(tables={OF_JOB: runs}, shown=[_in_short(runs)], places={})

    def _run_trials(self, contest: Contest, trials: Sequence[Trial]) -> list[dict[str, object]]:
        """Run `trials`, several at a time, and return the rows of those that are possible."""
        calls = []
        for trial in trials:
            call = delayed(row_of)(contest, trial)
            calls.append(call)
        rows = results_of(calls, self.processes, contest.policy, "runs")
        return [row for row in rows if row is not None]

    def _contest(self, cfg: DictConfig, policy: str) -> Contest:
        objectives = {name: load_option("slo", name) for name in self.objectives}
        return Contest(cfg, self.workload, policy, objectives)

    def _seeds(self, cfg: DictConfig) -> range:
        return range(cfg.seed, cfg.seed + self.seeds)

    def report_sweep(self, job: Job, record: SweepRecord, *, is_tracked: bool) -> None:
        """Show what has finished among what is recorded, and write tables, pictures and page."""
        tables = []
        for number in record.begun():
            file = record.job_dir(number) / OF_JOB
            if file.is_file():  # not of a job that stopped
                tables.append(pd.read_csv(file))
        if not tables:
            print_words(f"no finished runs in {record.folder}")
            return
        # Jobs that differ in what no run reads have the same runs.
        runs = board.as_recorded(pd.concat(tables, ignore_index=True)).drop_duplicates()
        recorded = self._recorded()
        beside = board.beside(runs, recorded)
        if len(recorded):
            _warn_of_unmatched(beside.iloc[-len(runs) :], str(self.beside))
        _publish(beside, record.folder)

    def _recorded(self) -> pd.DataFrame:
        """Read the runs of an earlier leaderboard. Raises UserError."""
        if self.beside is None:
            return pd.DataFrame(columns=LABELS)
        advice = "name the runs.csv.gz of a leaderboard, or use null for none"
        with readable(f"task.beside={self.beside}", advice):
            return _read(of_lab(Path(self.beside)))


@cache  # for all jobs that are checked
def _read(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file)
    missing = [name for name in LABELS if name not in table]
    if missing:
        raise ValueError(f"it has no column {missing[0]}")
    return table


def _warn_of_unmatched(runs: pd.DataFrame, recorded: str) -> None:
    """Warn of the contests of `runs` in which no run is recorded."""
    unmatched = runs[~runs.is_new].drop_duplicates(CONTEST)
    if unmatched.empty:
        return
    contests = unmatched.workload + " on " + unmatched.device
    names = ", ".join(contests)
    show([f"warning: {recorded} has no run of the same requests: {names}"])


def label_of(cfg: DictConfig, context: RunContext) -> str:
    """Return the policy's name in tables: its option or class, and the settings that are stated of
    it, such as "vllm_v1 chunk=1024".
    """
    name = class_name(cfg.policy)
    settings: dict[str, object] = {}
    if context.policy is not None:
        name = context.policy
        settings |= {
            key: context.stated[key] for key in context.stated if key.startswith("policy.")
        }
    settings |= context.varied
    if cfg.chunk is not None:
        settings["chunk"] = cfg.chunk
    texts = [name]
    for setting, value in settings.items():
        group = setting.partition(".")[0].partition("/")[0]
        if group not in OF_CONTESTS and setting not in ("policy", "policy._target_"):
            texts.append(f"{setting}={value}")
    return " ".join(texts)


def _in_short(runs: pd.DataFrame) -> str:
    """Describe in a line at which budget a policy ran, with the goodput by the first objective."""
    objective = board.objectives(runs)[0]
    default = runs[runs.role == DEFAULT]
    goodputs = default[f"{GOODPUT}{objective}"]
    line = f"  goodput, {objective}: {amount(goodputs.mean())} requests/s"
    budget = default.budget.iloc[0]
    if pd.isna(budget):
        return line
    return f"{line} at its budget of {budget:g} tokens"


def _publish(runs: pd.DataFrame, folder: Path) -> None:
    """Show the board of `runs`, and write it with them into `folder`."""
    ranked = board.board(runs)
    show([verdicts.of_sweep(ranked)])
    num_seeds = int(ranked.seeds.min())
    if num_seeds < FEWEST_SEEDS:
        show([f"{num_seeds} of {FEWEST_SEEDS} seeds that decide; use task.seeds=8 for more"])
    for path in pages.write(ranked, runs, folder):
        print_place(path.stem, path)


def publish(folder: Path) -> int:
    """Write tables, pictures and page of the runs in `folder`, as a sweep does at its end."""
    with readable(folder / pages.RUNS, "name the folder of a leaderboard's runs.csv.gz"):
        runs = _read(folder / pages.RUNS)
    _publish(runs.assign(is_new=False), folder)
    return 0
