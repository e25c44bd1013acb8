"""What a commit had recorded and predicted, and what is now, in tables side by side.

    python tools/before_and_after.py COMMIT [--silicon FOLDER]

Both sides are judged by today's rules:

- verdicts of claims by level, intervals without a width, levels that exclude each other;
- mean errors against the paper's points, and the share of these within the intervals;
- measured servers: errors of replays, means of a token's time, orders of two servers;
- pairs of budgets and policies on real servers that are called, and called rightly;
- measured attention calls: chunks and decodes in one call, and, with FOLDER (`systems/data` of
  PyPI package aiconfigurator-core), decodes whose heads share no keys. They are the same calls on
  both sides, by the formulas of each;
- requests/s that a front end bounds.

What can't be computed here is named last, with the reason. Errors of other kernels are printed by
`tools/cost_model/fit.py --silicon`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

import sarathi_lab as lab
from sarathi_lab.config.csv_files import csv_files
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment.claims import VERDICTS, kind_of, verdicts
from sarathi_lab.experiment.recorded import error_rows
from sarathi_lab.experiment.registry import KEYS, PAPERS
from sarathi_lab.results.load import SIMULATED, load_paper

ERRORS = Path("sarathi/paper/results/errors.csv")
SERVERS = Path("lab/silicon_points/results")
PROFILED = "-profiled"
Numbers = Callable[[Path], "pd.Series | pd.DataFrame"]
TYPES = {"panel": str, "series": str, "x": float}
PARTS = ("experiments", "sarathi_lab", "conf")  # of a checkout: records, and what predicts
TOOLS = Path(__file__).parent
LEVELS = {"cpu": "measured on CPUs", "kernels-": "measured kernels", SIMULATED: "simulated GPUs"}
RUNS = "lab/real_servers/results"
RANKINGS = Path("lab/rankings/results/scores.csv")
# Predictions of rankings that are recorded: the first ones, and the last.
RECORDED = {"f587a4db": "before", "last recorded": "rereads"}
MIXED_CALLS = {  # measured calls of vLLM 0.19: the hardware, heads and KV heads
    "rtx-4090-llama-3.1-8b": ("rtx-4090", 32, 8),
    "rtx-pro-6000-qwen3-30b-a3b": ("rtx-pro-6000", 32, 4),
}
HEAD_SIZE = 128
LONG = "64 decodes of 2,048 tokens and more"
UNGROUPED_CARDS = ("a100", "l40s", "rtx-pro-6000")  # where flash-attention 2 runs
SHORT_CONTEXT = 64  # tokens
HOSTS = {
    "vllm_0_19": "vllm_v1",
    "vllm_http": "vllm_v1",
    "sglang_0_5": "sglang",
    "sglang_http": "sglang",
}
SHORT_REQUESTS = {
    "executor": "simulated",
    "hardware": "h100",
    "model": "llama3.1-8b",
    "batch": 256,
    "baselines": [],
    "workload.num_requests": 500,
    "workload.prompt_len": 128,
    "workload.output_len": 4,
}
NOT_COMPUTED = {
    "chunks behind a context on an A6000": "its kernels of today are in no public table that was "
    "found; host.attention_kernel=flash_attention_2 simulates them",
    "replays of large models over PCIe": "no run is recorded here; of a public one, "
    "experiments/lab/real_servers/two_gpus.py prints a host before and now",
    "throughputs of one H100": "no run is recorded here; hardware.flops_per_second and "
    "hardware.bytes_per_second scale a file to a card",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT", help="with records in experiments/")
    parser.add_argument("--silicon", metavar="FOLDER", type=Path, help="measured decodes")
    options = parser.parse_args()
    return exit_code(lambda: compare(options.commit, options.silicon), "nothing is written")


def compare(commit: str, silicon: Path | None = None) -> int:
    """Print the tables of what `commit` had recorded and predicted, and of what is now."""
    with TemporaryDirectory() as folder:
        before = recorded_at(commit, Path(folder))
        sides = {commit[:12]: before, "now": EXPERIMENTS}
        for title, numbers in RECORDS.items():
            print_beside(title, sides, numbers)
        for name, root in sides.items():
            excluded = ", ".join(disjoint_levels(verdicts(root))) or "none"
            print(f"\nLevels that exclude each other, {name}: {excluded}")
        print("\nPairs of budgets and policies on real servers: rightly called, called, all")
        print(rankings().to_string())
        calls = measured_calls(silicon)

        def errors(root: Path) -> pd.Series:
            return attention_errors(calls, root.parent, Path(folder))

        print_beside("Mean error of measured attention calls [%]", sides, errors)
    print("\nRequests/s of 500 requests of 128 + 4 tokens at once (Llama-3.1-8B, simulated H100)")
    print(front_ends().to_string())
    print("\nNot computed:")
    for number, reason in NOT_COMPUTED.items():
        print(f"  {number}: {reason}")
    return 0


def print_beside(title: str, sides: Mapping[str, Path], numbers: Numbers) -> None:
    """Print what `numbers` says of each side's records, a column or block of columns a side."""
    columns = {}
    for name, root in sides.items():
        columns[name] = numbers(root)
    print(f"\n{title}")
    print(pd.concat(columns, axis=1).to_string(na_rep="not recorded"))


def recorded_at(commit: str, folder: Path) -> Path:
    """Write the checkout of `commit` into a folder, and return its experiments/. Raises UserError
    for what git can't read.
    """
    # A commit that begins with a dash is no option of git's.
    command = ["git", "archive", "--format=tar", "--end-of-options", commit, *PARTS]
    archive = subprocess.run(command, capture_output=True, check=False, cwd=EXPERIMENTS.parent)
    if archive.returncode:
        reason = " ".join(archive.stderr.decode().split()).removeprefix("fatal: ")
        raise UserError(f"{commit}: git has no records of it ({reason}); name a commit of git log")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "experiments"


def claims_by_verdict(root: Path) -> pd.DataFrame:
    """Return how often each verdict (rows) is given at each level (columns)."""
    judged = verdicts(root)
    counts = {}
    for prefix, level in LEVELS.items():
        of_level = judged[judged.device.str.startswith(prefix)]
        counts[level] = of_level.verdict.map(kind_of).value_counts().reindex(VERDICTS)
    return pd.DataFrame(counts).fillna(0).astype(int)


def widths(root: Path) -> pd.Series:
    """Return how many recorded intervals there are, and how many have no width."""
    numbers = {"intervals": 0, "without a width": 0}
    for path in csv_files(root, f"*/*/results/{SIMULATED}*/*.csv"):
        table = pd.read_csv(path)
        if {"low", "high", "num_pairs"} <= set(table):
            numbers["intervals"] += int(table.low.notna().sum())
            numbers["without a width"] += int((table.high <= table.low).sum())
    return pd.Series(numbers)


def disjoint_levels(judged: pd.DataFrame) -> Iterator[str]:
    """Yield the claims whose intervals by formula and by tables exclude each other on a GPU."""
    for claim, rows in judged.groupby("id", sort=False):
        for first, second in combinations(rows.itertuples(), 2):
            if second.device != f"{first.device}{PROFILED}":
                continue
            if first.high < second.low or second.high < first.low:
                yield f"{claim} on {first.device.removeprefix(SIMULATED)}"


def errors_of_paper(root: Path) -> pd.Series:
    """Return the mean errors by row of the paper's figures and device, in percent."""
    table = pd.read_csv(root / ERRORS).set_index(["row", "device"])
    return (100 * table["mean"]).round(2)


def measured_servers(root: Path) -> pd.Series:
    """Return the mean errors of a token's time [%] by GPU, model, server and level, and how many
    pairs of two servers have the real order of it, such as "46 of 58".
    """
    folder = root / SERVERS
    errors = pd.read_csv(folder / "errors.csv")
    numbers = {}
    for row in errors.itertuples():
        key = (row.gpu, f"{row.model}, {row.backend}", row.cost_model)
        numbers[key] = f"{100 * row.tpot_mean:.1f}"
    if (folder / "orders.csv").is_file():
        orders = pd.read_csv(folder / "orders.csv").query("metric == 'tpot'")
        for row in orders.itertuples():
            key = (row.gpu, f"{row.model}, {row.backend} over {row.other}", row.cost_model)
            numbers[key] = f"{row.right} of {row.pairs}"
    return pd.Series(numbers)


def replayed_runs(root: Path) -> pd.Series:
    """Return the errors [%] of the mean waits of the pinned runs, by run and metric."""
    errors = {}
    for path in sorted((root / RUNS).glob("*.csv")):
        table = pd.read_csv(path)
        for row in table[table["quantile"] == "mean"].itertuples():
            errors[path.stem, row.metric] = f"{100 * row.error:+.1f}"
    return pd.Series(errors)


def rankings() -> pd.DataFrame:
    """Return by GPU how many pairs of real runs are rightly called, called, and there are, of the
    recorded predictions, whatever commit is asked for: none is predicted anew.
    """
    scores = pd.read_csv(EXPERIMENTS / RANKINGS)
    table = {}
    for column, prediction in RECORDED.items():
        of_models = scores[scores.prediction == prediction]
        # The last row of a GPU is of all its models; there may be one model only.
        own = of_models.drop_duplicates("gpu", keep="last").set_index("gpu")
        counts = own[["called_right", "called", "pairs"]].astype(int).astype(str)
        table[column] = counts.agg(", ".join, axis=1)
    return pd.DataFrame(table)


def measured_calls(silicon: Path | None) -> pd.DataFrame:
    """Read measured attention calls: `group` says of what, the other columns are those of
    `attention_times` and the measured `seconds`.
    """
    tables = []
    for run, (hardware, heads, kv_heads) in MIXED_CALLS.items():
        path = EXPERIMENTS / "lab" / "real_servers" / run / "tp1" / "attention.csv.gz"
        calls = pd.read_csv(path).query("prefill_chunk > 0 and n_decode > 0")
        kind = {"hardware": hardware, "heads": heads, "kv_heads": kv_heads}
        calls = calls.assign(**kind, head_size=HEAD_SIZE, seconds=calls.time_us / 1e6)
        long = calls.query("n_decode >= 64 and kv_decode >= 2048")
        tables.append(calls.assign(group="chunk and decodes in one call"))
        tables.append(long.assign(group=f"the same, {LONG}"))
    if silicon is not None:
        tables.extend(ungrouped_decodes(silicon))
    return pd.concat(tables, ignore_index=True)


def ungrouped_decodes(folder: Path) -> Iterator[pd.DataFrame]:
    """Yield measured decodes with a KV head for each query head that nothing was fitted to."""
    sys.path.insert(0, str(TOOLS / "cost_model"))
    import fit_silicon
    import silicon

    for card in UNGROUPED_CARDS:
        decodes, _ = silicon.decodes(folder, card, "vllm")
        rows = fit_silicon.from_memory(decodes, card, load_option("hardware", card))
        rows = rows[(rows.heads == rows.kv_heads) & ~rows.fitted]
        sizes = {"n_decode": rows.batch, "kv_decode": rows.length}
        calls = rows.assign(hardware=card, prefill_chunk=0, kv_prefill=0, **sizes)
        is_short = calls.kv_decode <= SHORT_CONTEXT
        name = f"decodes, a KV head for each query head, {{}} {SHORT_CONTEXT} tokens"
        yield calls[is_short].assign(group=name.format("up to"))
        yield calls[~is_short].assign(group=name.format("more than"))


def attention_errors(calls: pd.DataFrame, checkout: Path, folder: Path) -> pd.Series:
    """Return the mean errors [%] of `calls` by the formulas of a checkout, by card and group."""
    path = folder / "calls.csv"
    calls.to_csv(path, index=False)
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(TOOLS / "attention_times.py"), str(path)]
    subprocess.run(command, check=True, env=environment, cwd=checkout)
    predicted = pd.read_csv(path)
    error = (predicted.predicted / predicted.seconds - 1).abs()
    return (100 * error).groupby([predicted.group, predicted.hardware]).mean().round(1)


def front_ends() -> pd.DataFrame:
    """Serve short requests by a server's hosts without and with a front end, and return requests/s
    beside the most that the front end lets through. No host of the first side has one.
    """
    rates = {}
    for name, policy in HOSTS.items():
        results = lab.serve(host=name, policy=policy, **SHORT_REQUESTS)
        (rate,) = results.runs.request_throughput
        host = load_option("host", name)
        most = 1 / host.request if host.request else None
        rates[name] = {"simulated": rate, "at most": most}
    return pd.DataFrame(rates).T.round(0)


def shares_within(root: Path) -> pd.DataFrame:
    """Return `coverage` of what is recorded, rounded."""
    return coverage(tested_points(root)).round(2)


def coverage(tested: pd.DataFrame) -> pd.DataFrame:
    """Return the number of points and the share within their intervals: by figure and device, and
    by level over all figures but the twelfth, whose points are of one run.
    """
    by_figure = tested.groupby(["figure", "device"]).is_within.agg(["size", "mean"])
    others = tested[tested.figure != "fig12"].assign(figure="all but fig12")
    by_level = others.groupby(["figure", "level"]).is_within.agg(["size", "mean"])
    return pd.concat([by_figure, by_level])


def tested_points(root: Path) -> pd.DataFrame:
    """Return the paper's points whose prediction has an interval: `figure`, `device`, `level`, and
    `is_within`. A point that the profile was made from, or that constants were fitted to, is no
    test of it.
    """
    tables = []
    for figure in PAPERS:
        paper = load_paper(figure)[[*KEYS, "y"]].astype(TYPES)
        for path in csv_files(root, f"*/{figure}/results/{SIMULATED}*/{figure}.csv"):
            device = path.parent.name.removeprefix(SIMULATED)
            if device.startswith("pipeline"):
                continue  # its iterations were measured, on a CPU
            level = PROFILED.removeprefix("-") if device.endswith(PROFILED) else "analytic"
            table = pd.read_csv(path, dtype=TYPES).fillna({"panel": ""})
            both = table.merge(paper, on=KEYS, suffixes=("", "_of_paper"))
            both = both[both.low < both.high]
            both = both.drop(used_points(figure, both, level, device))
            is_within = (both.low <= both.y_of_paper) & (both.y_of_paper <= both.high)
            labels = {"figure": figure, "device": device, "level": level}
            tables.append(pd.DataFrame({"is_within": is_within}).assign(**labels))
    return pd.concat(tables, ignore_index=True)


def used_points(figure: str, points: pd.DataFrame, level: str, device: str) -> pd.Index:
    """Return which points the level's profile was made from or constants were fitted to. Of a
    hardware file that was fitted to some points of a figure, these are all of its points.
    """
    used = points.index[:0]
    for row in error_rows(figure):
        if row.fitted == device:
            return points.index
        if level in (row.given, row.fitted):
            used = used.union(points.query(row.where).index)
    return used


RECORDS: dict[str, Numbers] = {
    "Claims by verdict (a claim once on each device)": claims_by_verdict,
    "Of predicted values and medians over seeds": widths,
    "Mean error against the paper's points [%]": errors_of_paper,
    "Share of the paper's points within the interval of the prediction": shares_within,
    "Mean error of a token's time on measured servers [%]; pairs in order": measured_servers,
    "Errors of replayed runs, by measured operations [%]": replayed_runs,
}

if __name__ == "__main__":
    sys.exit(main())
