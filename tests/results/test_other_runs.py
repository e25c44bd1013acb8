"""What a sweep's conclusion says of runs that are not the best."""

from __future__ import annotations

import pandas as pd

from sarathi_lab.results.conclusion import conclusion
from sarathi_lab.results.report import notes_of


def offline(**columns: object) -> pd.DataFrame:
    """Orca and request-level batching as baselines, and a policy with three chunks."""
    policies = ["orca", "request_level", *["sarathi"] * 3]
    runs = pd.DataFrame({"policy": policies, "chunk": [None, None, 128, 256, 512]})
    return runs.assign(
        is_baseline=[True, True, False, False, False],
        swept="[chunk]",
        executor="simulated",
        throughput=[100.0, 98, 88, 120, 110],
        tbt_p99=[0.3, 0.08, 0.07, 0.1, 0.15],
        duration=[1.0, 1.1, 1.2, 0.9, 0.95],
        **columns,
    )


def under_load(**columns: object) -> pd.DataFrame:
    runs = pd.DataFrame({"policy": ["vllm_v1", "sglang", "trtllm", "lmdeploy"]})
    return runs.assign(
        is_baseline=[True, False, False, False],
        swept="[policy]",
        executor="simulated",
        arrives_over_time=True,
        is_steady=1.0,
        throughput=100.0,
        ttft_p50=[0.2, 0.1, 0.2, 0.3],
        ttft_p99=[0.5, 0.4, 0.5, 0.6],
        tbt_p99=[0.1, 0.1, 0.1, 0.1],
        **columns,
    )


def test_runs_that_are_worse_than_the_baseline_are_named() -> None:
    sentences = conclusion(offline())
    assert sentences[-1] == "Worse than orca in tokens/s: sarathi chunk=128 (0.88 times)."
    waits = conclusion(under_load())
    worse = "Worse than vllm_v1 in waits, and better in none: lmdeploy (TTFT P50 1.50 times)."
    assert worse in waits
    unsteady = conclusion(under_load().assign(is_steady=[1, 1, 1, 0]))
    assert worse not in unsteady


def test_more_tokens_at_the_price_of_waits_say_so_in_one_sentence() -> None:
    gain = "Beside request_level: 1.22 times the tokens/s; TBT P99 100 against 80 ms (1.25 times)."
    assert conclusion(offline())[0].endswith(gain)


def test_runs_of_equal_quantities_are_named_with_or_without_a_baseline() -> None:
    assert "Equal in every quantity: vllm_v1 and trtllm." in conclusion(under_load())
    no_baselines = under_load().assign(is_baseline=False)
    *_, no_reference, equal = conclusion(no_baselines)
    assert "compared with each other alone; baselines=[lmdeploy] compares" in no_reference
    assert equal == "Equal in every quantity: vllm_v1 and trtllm."
    at_rates = pd.concat(
        [
            under_load(**{"workload.rate": 1}),
            under_load(**{"workload.rate": 2}).assign(tbt_p99=[0.1, 0.1, 0.2, 0.1]),
        ]
    ).assign(swept="[policy,workload.rate]")
    sentence = "Equal in every quantity on 1 of 2 workloads: vllm_v1 and trtllm."
    assert sentence in conclusion(at_rates)
    equal = [line for line in conclusion(offline()) if line.startswith("Equal")]
    assert not equal


def test_policies_of_a_sweep_are_compared_with_each_other_by_their_best_runs() -> None:
    own = {"my.First": [90.0, 130.0], "my.Second": [125.0, 120.0]}
    rows = []
    for policy, values in own.items():
        for chunk, throughput in zip((128, 256), values, strict=True):
            rows.append({"policy": policy, "chunk": chunk, "throughput": throughput})
    swept = pd.DataFrame(rows).assign(is_baseline=False, swept="[policy,chunk]", tbt_p99=0.1)
    sentence = (
        "my.First chunk=256 beside my.Second chunk=128: better in throughput 130 against 125 "
        "tokens/s (1.04 times); equal in TBT P99 100 ms."
    )
    baseline = {"policy": "orca", "throughput": 100.0, "is_baseline": True, "tbt_p99": 0.1}
    with_orca = pd.concat([pd.DataFrame([baseline]), swept]).assign(swept="[policy,chunk]")
    assert sentence in conclusion(with_orca.assign(executor="simulated"))
    no_baselines = conclusion(swept.assign(executor="simulated"))
    assert no_baselines[:2] == ["", sentence]
    # What the noise of a machine may explain is not decided.
    assert "undecided in throughput 130" in conclusion(swept.assign(executor="torch"))[1]


def test_a_sweep_says_how_many_requests_failed() -> None:
    note = "3 requests of 2 of 4 runs failed; the columns count the others"
    assert note in notes_of(under_load(num_failed=[2, 1, 0, None]))
    assert notes_of(under_load(num_failed=0)) == []
