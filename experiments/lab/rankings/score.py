"""Which budget or policy wins: simulated rankings beside those of the logs of ppas-vllm.

    python experiments/lab/rankings/score.py predict NAME [SETTING=VALUE ...] [--client SECONDS]
    python experiments/lab/rankings/score.py score NAME ...      # of recorded predictions
    python experiments/lab/rankings/score.py ties NAME ...       # were another gap taken for a tie
    python experiments/lab/rankings/score.py ratios NAME ...     # how far those of two runs are off
    python experiments/lab/rankings/score.py import FOLDER       # logs.csv.gz anew, of the raw logs

`predict` serves every run of logs.csv.gz, without its times, and records results/NAME.csv, with the
commits and the settings beside it, then scores it; scores.csv has the scores of all predictions,
ties.csv what `ties` counts.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sarathi_lab.config.csv_files import csv_file, write_csv
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.config.sweeper import compose
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.after_sarathi.adaptive_budgets import phased
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, VllmV1
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.policy.zoo import PPas
from sarathi_lab.results.intervals import ends_of_median, ends_of_share

HERE = Path(__file__).parent
LOGS = HERE / "logs.csv.gz"
RESULTS = HERE / "results"
SCORES = RESULTS / "scores.csv"
TIES = RESULTS / "ties.csv"
# The simulator is off by as much for all seeds of a setting, and the seeds are the same five in
# every setting: what it gets right in one setting is one case.
SETTING = ["gpu", "model", "prompt_len", "output_len", "phases"]
TRACE = [*SETTING, "seed"]
WAITS = ["latency", "ttft", "tpot"]  # means of a run, seconds
RECORDED = ["configured_prompt_tokens", "configured_output_tokens", "phase_schedule", "seed"]
RECORDED += ["max_num_batched_tokens", "num_requests"]
GAP = 0.05  # of the larger mean latency, from which a pair counts
# A predicted gap of up to this share is a tie, and its order is not called: kernels are 5 to 10 %
# off on these GPUs, and two runs share most of that error. It was chosen when scores were known;
# OTHER_TIES show what hangs on it.
TIE = 0.05
OTHER_TIES = (0.0, 0.02, 0.03, TIE, 0.07, 0.1)
# An RTX 5090 is the RTX PRO 6000's chip with fewer multiprocessors, a third of its memory, and half
# its rate of 16-bit products. Attention reaches 0.603 of the whole rate there, more than the half,
# so that here it is as near the peak as products are.
# Attention is vLLM's default by GPU (its `get_flash_attn_version`); no log names another.
HARDWARE = {
    "A100": ["hardware=a100", "host.attention_kernel=flash_attention_2"],
    "H100": ["hardware=h100", "host.attention_kernel=flash_attention_3"],
    "RTX5090": [
        "host.attention_kernel=flash_attention_2",
        *("hardware=rtx-pro-6000", "hardware.name=rtx-5090", "hardware.num_sms=170"),
        *("hardware.flops_per_second=209.5e12", "hardware.memory_bytes=33.683e9"),
        *("hardware.attention_efficiency=0.95", "hardware.causal_efficiency=0.95"),
    ],
}
MODELS = {
    "qwen_0.5b": "qwen2.5-0.5b",
    "qwen_3b": "qwen2.5-3b",
    "llama_3b": "llama3.2-3b",
    "smollm3_3b": "smollm3-3b",
}
# The logs' is vLLM 0.22.1, scheduled ahead, too, with its default graphs.
SERVER = ["executor=simulated", "host=vllm_0_19", "host.graphs.mode=full_and_piecewise"]
BLOCK_SIZE, MAX_NUM_SEQS = 16, 256


def read_logs(folder: Path) -> pd.DataFrame:
    """Read the means of every run in the raw logs."""
    rows = []
    for path in sorted(folder.glob("*/*.txt")):
        for line in path.read_text().splitlines():
            if line.startswith("RUN:"):
                # A line of its command stands before the lines of a run's numbers.
                stated = re.findall(r"--model (\S+)", line)
                model = MODELS[stated[0]]
            elif line.startswith("{"):
                row = ast.literal_eval(line)
                assert not row["failed"], f"{path}: {line}"
                is_p_pas = row["config_name"].startswith("ppas")
                policy = "p_pas" if is_p_pas else "vllm_v1"
                means = [round(row[f"avg_{wait}"], 6) for wait in WAITS]
                settings = [row[name] for name in RECORDED]
                rows.append([path.parent.name, model, *settings, policy, *means])
    lengths = ["prompt_len", "output_len", "phases", "seed", "budget", "num_requests"]
    return pd.DataFrame(rows, columns=["gpu", "model", *lengths, "policy", *WAITS])


@dataclass
class Client:
    """The logs' client: one event loop, which `per_token` seconds of each prompt's tokens occupy.

    Prompts that come while it is occupied follow at once, and all are sent, and tokens that came
    meanwhile seen, when it is free again (client.py measures both).
    """

    per_token: float
    begun: list[float] = field(default_factory=list)  # seconds, by request
    busy: list[list[float]] = field(default_factory=list)  # without a gap between

    def send(self, requests: Sequence[Request]) -> list[Request]:
        """Make the requests as the server gets them."""
        for request in requests:
            arrival = request.arrival_time
            if not self.busy or arrival > self.busy[-1][1]:
                self.busy.append([arrival, arrival])
            interval = self.busy[-1]
            self.begun.append(interval[1])
            interval[1] += self.per_token * request.prompt_len
        sent = self.seen(np.array(self.begun)).tolist()
        sent_requests = []
        for request, time in zip(requests, sent, strict=True):
            sent_requests.append(replace(request, arrival_time=time))
        return sent_requests

    def seen(self, times: np.ndarray) -> np.ndarray:
        """Delay what happens while the loop is occupied."""
        starts, ends = np.array(self.busy).T
        last = np.searchsorted(starts, times, side="right") - 1
        # Before the first interval (-1) the loop is free.
        free_again = np.where(last >= 0, ends[last], times)
        return np.maximum(times, free_again)

    def waits(self, table: pd.DataFrame) -> dict[str, float]:
        """Average the waits as the client counts them, from when it begins with a prompt."""
        times = table[["first_token_time", "finish_time"]].to_numpy(float)
        first = self.seen(times[:, 0])
        last = self.seen(times[:, 1])
        start = np.array(self.begun)[table.request_id]
        num_gaps = np.maximum(table.output_len - 1, 1)
        tpot = (last - first) / num_gaps
        return {
            "latency": np.mean(last - start),
            "ttft": np.mean(first - start),
            "tpot": np.mean(tpot),
        }


def server(gpu: str, model: str, settings: Sequence[str]) -> tuple[SimulatedBackend, ModelSpec]:
    arguments = [*SERVER, *HARDWARE[gpu], f"model={model}", *settings]
    cfg = compose(arguments).jobs[0].cfg
    backend = build(cfg.executor)
    spec, _ = resolve_model(cfg, backend)
    return backend, spec


def policy_of(name: str, budget: int) -> Policy:
    kind = PPas if name == "p_pas" else VllmV1
    return kind(max_num_batched_tokens=budget)


def predict(
    runs: pd.DataFrame, settings: Sequence[str], per_token: float
) -> Iterator[dict[str, float]]:
    """Serve each run and average what its client waits."""
    servers = {}
    for run in runs.itertuples():
        key = run.gpu, run.model
        if key not in servers:
            servers[key] = server(*key, settings)
        backend, spec = servers[key]
        times = phased(phases_of(run.phases), run.seed)
        # The logs' own count: another draw of the arrivals would be another run.
        assert len(times) == run.num_requests, run
        requests = []
        for number, time in enumerate(times):
            requests.append(Request(number, time, run.prompt_len, run.output_len))
        client = Client(per_token)
        policy = policy_of(run.policy, run.budget)
        setup = setup_of(policy, MAX_NUM_SEQS, spec.max_position)
        num_blocks = backend.kv_blocks(spec, BLOCK_SIZE, setup)
        engine = EngineConfig(
            policy, MAX_NUM_SEQS, num_blocks, BLOCK_SIZE, max_model_len=spec.max_position
        )
        executor = backend.build(spec, None, engine.sizes())
        yield client.waits(serve(client.send(requests), engine, executor).requests())


def phases_of(text: str) -> list[tuple[float, ...]]:
    """Read the phases of a load, such as "60:2,30:8", seconds and requests/s of each."""
    phases = []
    for phase in text.split(","):
        numbers = map(float, phase.split(":"))
        phases.append(tuple(numbers))
    return phases


def score(logs: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, float]:
    """Count right pairs and picks, and average regrets and errors."""
    with_guesses = logs.assign(guess=predicted.latency)
    pairs = pairs_by_setting(with_guesses)
    scored: dict[str, float] = {"pairs": len(pairs), "right": pairs.right.sum()}
    scored |= score_called(pairs)
    scored |= score_picks([trace for _, trace in with_guesses.groupby(TRACE)])
    scored |= cost_beside_p_pas(with_guesses)
    errors = predicted[WAITS] / logs[WAITS] - 1
    for wait in WAITS:
        scored[f"error_{wait}"] = errors[wait].abs().mean()
    for wait in WAITS:
        scored[f"bias_{wait}"] = errors[wait].median()
    return scored


def pairs_by_setting(with_guesses: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs of runs on all arrival sequences (`pairs_of`) with their `setting`."""
    tables = []
    for (*setting, _), trace in with_guesses.groupby(TRACE):
        pairs = pd.DataFrame(pairs_of(trace))
        tables.append(pairs.assign(setting=str(setting)))
    return pd.concat(tables, ignore_index=True)


def score_picks(traces: Sequence[pd.DataFrame]) -> dict[str, float]:
    """Count the arrival sequences on which the run with the least predicted latency is the best,
    and average how much longer than the best latency its own is (`regret_lab`), and that of each
    choice that needs no prediction, where the sequence has such a run.
    """
    num_best = 0
    regrets: dict[str, list[float]] = {"lab": [], "2048": [], "16384": [], "p_pas": []}
    for trace in traces:
        best = trace.latency.min()
        pick = trace.loc[trace.guess.idxmin()]
        num_best += pick.latency == best
        names = np.where(trace.policy == "p_pas", "p_pas", trace.budget.astype(str))
        latencies = dict(zip(names, trace.latency, strict=True))
        latencies["lab"] = pick.latency
        for name, values in regrets.items():
            if name in latencies:
                values.append(latencies[name] / best - 1)
    scored: dict[str, float] = {"traces": len(traces), "best": num_best}
    for name, values in regrets.items():
        scored[f"regret_{name}"] = np.mean(values) if values else np.nan
    return scored


def cost_beside_p_pas(with_guesses: pd.DataFrame) -> dict[str, float]:
    """Subtract the regret of always taking P-PAS from that of following the simulator, in the mean
    over the seeds of each setting.

    Returns:
        The median over settings, below zero where following costs less, and its interval with its
        level; empty without P-PAS.
    """
    differences = []
    for _, of_setting in with_guesses.groupby(SETTING):
        scored = score_picks([trace for _, trace in of_setting.groupby("seed")])
        difference = scored["regret_lab"] - scored["regret_p_pas"]
        if not np.isnan(difference):
            differences.append(difference)
    if not differences:
        return {}
    low, high, level = ends_of_median(differences, is_series=False)
    return {
        "beside_p_pas": float(np.median(differences)),
        "beside_p_pas_low": low,
        "beside_p_pas_high": high,
        "beside_p_pas_level": level,
    }


def pairs_of(trace: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Compare the runs on one arrival sequence whose real latencies differ by more than `GAP`.

    Yields:
        Of each pair whether the prediction has its order (`right`), the predicted gap, the rate of
        the bursts, and whether the pair's order is that of the larger or of the smaller budget,
        P-PAS first in both.
    """
    for (_, a), (_, b) in combinations(trace.iterrows(), 2):
        if abs(a.latency - b.latency) <= GAP * max(a.latency, b.latency):
            continue
        faster, slower = a, b
        if a.latency >= b.latency:
            faster, slower = b, a
        is_large_first = faster.budget > slower.budget
        is_small_first = faster.budget < slower.budget
        if "p_pas" in (a.policy, b.policy):
            # It has no budget of its own: either rule puts it before any.
            is_large_first = is_small_first = faster.policy == "p_pas"
        yield {
            "right": faster.guess < slower.guess,
            "gap": abs(a.guess - b.guess) / max(a.guess, b.guess),
            "burst": max(rate for _, rate in phases_of(a.phases)),
            "large_first": is_large_first,
            "small_first": is_small_first,
        }


def errors_of_ratios(logs: pd.DataFrame, predicted: pd.DataFrame, wait: str) -> pd.Series:
    """Compute how far the predicted ratios of a wait of two runs on one arrival sequence are off,
    as a share: 0.07 where it is 7 % more or less than the logs' ratio. Most of what is off by as
    much in both runs is not in it.
    """
    off = np.log(predicted[wait] / logs[wait])
    differences = []
    for _, trace in off.groupby([logs[name] for name in TRACE]):
        for first, second in combinations(trace, 2):
            differences.append(abs(first - second))
    return np.expm1(pd.Series(differences))


def score_called(pairs: pd.DataFrame, tie: float = TIE) -> dict[str, float]:
    """Score the pairs whose predicted gap is no tie, and the rule that needs no simulator.

    Returns:
        How many pairs were called, in how many settings, how many of these rightly, the interval of
        that share, as if each setting had one pair, and the pairs, all and called, that P-PAS
        before any budget, the larger budget below one rate of the bursts and the smaller from it on
        have right, at the rate that serves this rule best.
    """
    called = pairs[pairs.gap > tie]
    num_settings = called.setting.nunique()
    low, high, _ = ends_of_share(called.right.mean(), num_settings)
    return {
        "called": len(called),
        "called_settings": num_settings,
        "called_right": called.right.sum(),
        "share_low": low,
        "share_high": high,
        "rule_right": right_by_rule(pairs),
        "rule_right_called": right_by_rule(called),
    }


def right_by_rule(pairs: pd.DataFrame) -> int:
    """Count the pairs that the rule of `score_called` has right, at its best rate."""
    rates = [*pairs.burst.unique(), np.inf]  # with none of them, the larger budget always
    counts = []
    for rate in rates:
        is_right = np.where(pairs.burst < rate, pairs.large_first, pairs.small_first)
        counts.append(is_right.sum())
    return int(max(counts))


def last_commit(path: Path) -> str:
    """Return the last commit that changed `path` and its day."""
    command = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%h, %as", "--", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def record(name: str, runs: pd.DataFrame, settings: Sequence[str], per_token: float) -> None:
    """Predict all runs and write them down with where they come from."""
    table = pd.DataFrame(predict(runs, settings, per_token)).round(5)
    origin = {
        "sarathi_lab": last_commit(REPOSITORY / "sarathi_lab"),
        "conf": last_commit(REPOSITORY / "conf"),
        "settings": " ".join(settings),
        "client": per_token,
    }
    text = yaml.safe_dump(origin, sort_keys=False)
    (RESULTS / f"{name}.yaml").write_text(text)
    write_csv(RESULTS / f"{name}.csv", table.to_csv(index_label="run"))


def read_prediction(name: str) -> pd.DataFrame:
    """Read the recorded waits of every run, by its number."""
    return pd.read_csv(csv_file(RESULTS / f"{name}.csv"), index_col="run")


def scores(name: str, logs: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Score what is recorded: each GPU's models, and each GPU."""
    predicted = read_prediction(name)
    origin = yaml.safe_load((RESULTS / f"{name}.yaml").read_text())
    for gpu, of_gpu in logs.groupby("gpu"):
        groups = dict(list(of_gpu.groupby("model")))
        if len(groups) > 1:
            groups["all"] = of_gpu
        for model, group in groups.items():
            scored = score(group, predicted.loc[group.index])
            yield {"prediction": name, "gpu": gpu, "model": model, **scored, **origin}


def write_ties(names: Sequence[str], logs: pd.DataFrame) -> None:
    """Score the called pairs of each GPU with other gaps taken for ties, and print them."""
    rows = []
    for name in names:
        predicted = read_prediction(name)
        for gpu, of_gpu in logs.groupby("gpu"):
            guesses = predicted.loc[of_gpu.index].latency
            pairs = pairs_by_setting(of_gpu.assign(guess=guesses))
            for tie in OTHER_TIES:
                scored = score_called(pairs, tie)
                rows.append({"prediction": name, "gpu": gpu, "tie": tie, **scored})
    table = pd.DataFrame(rows).round(4)
    table.to_csv(TIES, index=False)
    print(table.to_string(index=False))


def print_ratios(names: Sequence[str], logs: pd.DataFrame) -> None:
    """Print the median error of recorded predictions' ratios, of each GPU and of all."""
    for name in names:
        predicted = read_prediction(name)
        for gpu, of_gpu in [*logs.groupby("gpu"), ("all", logs)]:
            for wait in WAITS:
                errors = errors_of_ratios(of_gpu, predicted.loc[of_gpu.index], wait)
                median, tail = errors.quantile([0.5, 0.9])
                print(f"{name} {gpu} {wait}: {len(errors)} ratios, {median:.3f} {tail:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["predict", "score", "ties", "ratios", "import"])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--client", type=float, default=0.0, help="seconds a prompt token")
    options = parser.parse_args()
    if options.what == "import":
        logs = read_logs(Path(options.names[0]))
        write_csv(LOGS.with_suffix(""), logs.to_csv(index=False))
        return
    logs = pd.read_csv(LOGS)
    predictions = options.names
    if options.what == "ties":
        write_ties(predictions, logs)
        return
    if options.what == "ratios":
        print_ratios(predictions, logs)
        return
    if options.what == "predict":
        name, *settings = options.names
        runs = logs.drop(columns=WAITS)  # so that no prediction can depend on them
        record(name, runs, settings, options.client)
        predictions = [name]
    write_scores(predictions, logs)


def write_scores(predictions: Sequence[str], logs: pd.DataFrame) -> None:
    """Score recorded predictions, in place of their earlier scores, and print the scores."""
    rows = []
    for name in predictions:
        rows.extend(scores(name, logs))
    scored = pd.DataFrame(rows)
    tables = [scored.round(4)]
    if SCORES.exists():
        recorded = pd.read_csv(SCORES)
        is_scored_again = recorded.prediction.isin(predictions)
        tables.insert(0, recorded[~is_scored_again])
    pd.concat(tables).to_csv(SCORES, index=False)
    shown = scored.drop(columns=["sarathi_lab", "conf", "settings"])
    print(shown.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
