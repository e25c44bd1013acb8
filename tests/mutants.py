"""How many small faults in a room's code its tests notice: `python tests/mutants.py --help`.

Needs `pip install cosmic-ray coverage`: cosmic-ray makes the mutants, coverage says which tests run
the line that one changes. A random place in the code gets one of its mutants, in a fork that runs
those tests; CONTRIBUTING.md says how to read the score.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import gc
import importlib
import json
import os
import pickle
import random
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # where tests/kernels is no package that transformers would find
KEPT = ROOT / "build" / "mutants"
METRICS = ["metrics", "serving_metrics", "window", "slo", "decode_cost", "intervals"]
METRIC_TESTS = ["metrics", "serving_metrics", "windows", "intervals"]
SIMULATOR_TESTS = [
    *("simulator", "attention_cost", "cost_fit", "experts", "matmul"),
    *("parallel", "tables", "overlap"),
]
ROOMS = {
    "engine": [*ROOT.glob("sarathi_lab/engine/*.py")],
    "policy": [*ROOT.glob("sarathi_lab/policy/*.py")],
    "metrics": [ROOT / f"sarathi_lab/results/{name}.py" for name in METRICS],
    "simulator": [*ROOT.glob("sarathi_lab/executor/simulated/*.py")],
}
TESTS = [
    *("tests/engine", "tests/policy"),
    *(f"tests/results/test_{name}.py" for name in METRIC_TESTS),
    *(f"tests/executor/test_{name}.py" for name in SIMULATOR_TESTS),
]
LEFT_OUT = [  # over 5 s each, a process of its own or a real device
    "tests/engine/test_arrivals.py::test_users_on_a_real_device",
    "tests/engine/test_queue_load.py::test_five",
    "tests/engine/test_swapping.py::test_swapping_changes_no_token",
    "tests/executor/test_cost_fit.py::test_the_recorded_constants_are_the_fitted_ones",
    "tests/executor/test_simulator.py::test_simulation_does_not_import_torch",
    "tests/policy/test_same_schedules.py::test_a_sweep_gives_what_was_recorded",
    "tests/policy/test_same_schedules.py::test_the_command_leaves_what_was_recorded",
]
# Bits of a float are a TypeError, which any test notices; small numbers are the same objects.
NOT_TRIED = re.compile(
    r"NoOp|_(Add|Sub|Mul|Div|FloorDiv|Mod|Pow)_(RShift|LShift|Bit.*)|(Eq|Lt|LtE|Gt|GtE)_Is(Not)?$"
)
FIRST_SECONDS = 10  # of tests; --again runs the rest of them for what survives these
CPU_SECONDS = 60  # of a mutant that never ends
MEMORY_BYTES = 6 << 30


class Mutant(tuple[str, str, int]):
    """(file, operator of cosmic-ray, its occurrence in the file)."""

    @property
    def path(self) -> Path:
        return ROOT / self[0]

    def source(self) -> str:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        code = mutate_code(self.path.read_text(), get_operator(self[1])(), self[2])
        assert code is not None
        return code

    def diff(self) -> str:
        before, after = self.path.read_text().splitlines(), self.source().splitlines()
        lines = difflib.unified_diff(before, after, self[0], self[1], lineterm="", n=0)
        return "\n".join(lines)

    def line(self) -> int:
        """The number of the first line that differs."""
        before, after = self.path.read_text().splitlines(), self.source().splitlines()
        pairs = enumerate(zip(before, after, strict=False), start=1)
        return next(number for number, (old, new) in pairs if old != new)


def executed(source: str) -> str | None:
    """What of a source computes, which annotations (strings here) and decorators (they freeze or
    cache) do not. None for what is no Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(0)
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
    return ast.dump(tree)


def changes(mutant: Mutant) -> bool:
    """Whether other code runs with it than without."""
    return executed(mutant.source()) not in (None, executed(mutant.path.read_text()))


def places(path: Path) -> list[list[Mutant]]:
    """The places in a file where mutants begin, each with its mutants."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    name, nodes = str(path.relative_to(ROOT)), [*ast_nodes(get_ast(path.read_text()))]
    signs = [node for node in nodes if node.type == "operator"]  # of most of cosmic-ray's operators
    found = defaultdict(list)
    for operator in operator_names():
        if NOT_TRIED.search(operator):
            continue
        try:
            made = get_operator(operator)()
        except TypeError:
            continue  # it wants arguments
        among = signs if "ReplaceBinaryOperator" in operator else nodes
        spots = (spot for node in among for spot in made.mutation_positions(node))
        for occurrence, (start, _) in enumerate(spots):
            found[start].append(Mutant((name, operator, occurrence)))
    return [found[start] for start in sorted(found)]


def sample(count: int, seed: int) -> dict[str, list[Mutant]]:
    """`count` mutants, of each room in proportion to its places: one of a place's mutants each."""
    every = {
        room: [one for path in sorted(paths) for one in places(path)]
        for room, paths in ROOMS.items()
    }
    total = sum(map(len, every.values()))
    chosen = {}
    for room, here in every.items():
        dice = random.Random(f"{seed} {room}")
        dice.shuffle(here)
        some = filter(changes, (dice.choice(mutants) for mutants in here))
        chosen[room] = [*islice(some, round(count * len(here) / total))]
    return chosen


def kept_sample(count: int, seed: int) -> dict[str, list[Mutant]]:
    """`sample`, made once: a run that goes on must not draw others where the code has changed."""
    path = KEPT / f"sample-{count}-{seed}.json"
    if not path.exists():
        path.write_text(json.dumps(sample(count, seed)))
    return {room: [*map(Mutant, some)] for room, some in json.loads(path.read_text()).items()}


def in_fork(work: Callable[[], int], cpu_seconds: int = 3600) -> int:
    """The exit status of `work()` in a child that has at most `cpu_seconds`."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        silence = os.open(KEPT / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        status = int(work())
    finally:
        os._exit(status)


def run_tests(nodes: list[str], *plugins: Any) -> int:
    """pytest's exit status."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0"]
    options += ["-o", "timeout=0", "--tb=short", "--assert=plain"]
    left_out = [f"--deselect={node}" for node in LEFT_OUT]
    return pytest.main([*options, *left_out, *nodes], plugins=[*plugins])


class Watch:
    """A plugin of pytest that notes which test runs which line, and for how long."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.started = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = time.process_time() - self.started


class Choose:
    """A plugin of pytest that runs some tests of the files, in this order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.names if name in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (KEPT / "failed").write_text(report.nodeid)


def watch_tests() -> int:
    """Run all tests once, and keep what each of them runs."""
    import coverage

    files = [path for paths in ROOMS.values() for path in paths]
    cover = coverage.Coverage(data_file=None, include=[str(path) for path in files])
    watch = Watch(cover)
    cover.start()
    status = run_tests(TESTS, watch)
    cover.stop()
    data = cover.get_data()
    lines = {str(path.relative_to(ROOT)): data.contexts_by_lineno(str(path)) for path in files}
    others = [name for name in sys.modules if not name.startswith(("sarathi", "tests", "_"))]
    (KEPT / "watched.pickle").write_bytes(pickle.dumps((lines, watch.seconds, others)))
    return status


def covering(mutant: Mutant, lines: Any, seconds: dict[str, float], most: float) -> list[str]:
    """The tests that run its line, the quickest first, or its file if that runs at import; those
    that take `most` seconds in all.
    """
    here = lines[mutant[0]]
    names = set(here.get(mutant.line(), ()))
    if not names - {""}:
        names = {name for some in here.values() for name in some}
    kills = Counter(read(KEPT / "kills.json"))  # what noticed others is likely to notice this
    quick = sorted(names & set(seconds), key=lambda name: (-kills[name], seconds[name], name))
    spent = accumulate(seconds[name] for name in quick)
    return [name for name, so_far in zip(quick, spent, strict=True) if so_far <= most]


def survives(mutant: Mutant, tests: list[str]) -> bool:
    """Whether all `tests` pass with the mutant in the place of its module."""
    source = mutant.source()
    if not tests:
        return True

    def work() -> int:
        import hypothesis

        find = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")]
        hypothesis.settings.register_profile("mutants", phases=find, database=None)
        hypothesis.settings.load_profile("mutants")
        get_code = SourceFileLoader.get_code

        def changed(self: SourceFileLoader, name: str) -> Any:
            same = self.path == str(mutant.path)
            return compile(source, self.path, "exec") if same else get_code(self, name)

        SourceFileLoader.get_code = changed  # type: ignore[method-assign]
        files = dict.fromkeys(name.partition("::")[0] for name in tests)
        return run_tests([*files], Choose(tests))

    return in_fork(work, CPU_SECONDS) == 0


def read(path: Path) -> list[Any]:
    """A list in a file of JSON, empty where there is none."""
    return json.loads(path.read_text()) if path.exists() else []


def prepare() -> tuple[Any, dict[str, float]]:
    """What the tests run, and into memory what they import but the lab."""
    if not (KEPT / "watched.pickle").exists() and (status := in_fork(watch_tests)):
        raise SystemExit(f"the tests fail without a mutant: pytest ends with {status}")
    lines, seconds, others = pickle.loads((KEPT / "watched.pickle").read_bytes())
    for name in others:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return lines, seconds


def judged(mutants: list[Mutant], again: bool, until: float) -> Iterator[tuple[Mutant, bool]]:
    """Every mutant and whether it survives: as known, or as it turns out while there is time."""
    path, failed = KEPT / "survives.json", KEPT / "failed"
    known = {tuple(key): alive for key, alive in read(path)}
    lines, seconds = prepare()
    for mutant in mutants:
        if (mutant not in known or (again and known[mutant])) and time.monotonic() < until:
            most = float("inf") if again else FIRST_SECONDS
            known[mutant] = survives(mutant, covering(mutant, lines, seconds, most))
            path.write_text(json.dumps([*known.items()]))
            if failed.exists():
                noticed = [*read(KEPT / "kills.json"), failed.read_text()]
                (KEPT / "kills.json").write_text(json.dumps(noticed))
                failed.unlink()
        if mutant in known:
            yield mutant, known[mutant]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=400, help="mutants of all rooms together")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--rooms", nargs="*", default=[*ROOMS], choices=ROOMS)
    options.add_argument("--seconds", type=float, default=float("inf"), help="then go on later")
    options.add_argument("--again", action="store_true", help="run those that survived once more")
    chosen = options.parse_args()
    until = time.monotonic() + chosen.seconds
    KEPT.mkdir(parents=True, exist_ok=True)
    for room, mutants in kept_sample(chosen.count, chosen.seed).items():
        if room not in chosen.rooms:
            continue
        outcome = dict(judged(mutants, chosen.again, until))
        for mutant in (one for one, alive in outcome.items() if alive):
            print(mutant.diff(), flush=True)
        count = Counter(outcome.values())
        if outcome:
            low, high = binomtest(count[False], len(outcome)).proportion_ci(method="wilson")
            print(
                f"{room}: {count[False]} of {len(outcome)} killed ({low:.0%} to {high:.0%}), "
                f"{len(mutants) - len(outcome)} not run yet"
            )


if __name__ == "__main__":
    main()
