"""What a sweep comes to, in sentences."""

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


def test_runs_of_equal_quantities_are_named_with_or_without_a_baseline() -> None:
    equal = "Equal in every quantity: vllm_v1, trtllm."
    assert conclusion(under_load())[-1] == equal
    assert conclusion(under_load().assign(is_baseline=False))[-1] == equal
    assert not [line for line in conclusion(offline()) if line.startswith("Equal")]


def test_the_best_run_is_held_against_both_baselines_and_worse_runs_are_named() -> None:
    assert conclusion(offline())[1:] == [
        "sarathi chunk=256 beside request_level: better in throughput 120 against 98 tokens/s "
        "(1.22 times); worse in TBT P99 100 against 80 ms (1.25 times).",
        "Worse than orca in tokens/s: sarathi chunk=128 (0.88 times).",
    ]
    many = pd.DataFrame({"policy": "sarathi", "chunk": range(64, 70), "throughput": 50.0})
    slow = pd.concat([offline(), many.assign(executor="simulated", is_baseline=False)])
    assert conclusion(slow)[2].endswith("sarathi chunk=66 (0.50 times), and 3 more.")
    # One measured run each does not decide what is worse.
    measured = conclusion(offline().assign(executor="torch"))
    assert not [line for line in measured if line.startswith("Worse")]


def test_policies_of_a_sweep_are_compared_with_each_other_by_their_best_runs() -> None:
    own = {"my.First": [90.0, 130.0], "my.Second": [125.0, 120.0]}
    rows = []
    for policy, values in own.items():
        for chunk, throughput in zip((128, 256), values, strict=True):
            rows.append({"policy": policy, "chunk": chunk, "throughput": throughput})
    swept = pd.DataFrame(rows).assign(is_baseline=False, swept="[policy,chunk]", tbt_p99=0.1)
    sentence = (
        "my.First chunk=256 beside my.Second chunk=128: better in throughput 130 against 125 "
        "tokens/s (1.04 times); equal in TBT P99."
    )
    baseline = {"policy": "orca", "throughput": 100.0, "is_baseline": True, "tbt_p99": 0.1}
    with_orca = pd.concat([pd.DataFrame([baseline]), swept]).assign(swept="[policy,chunk]")
    assert sentence in conclusion(with_orca.assign(executor="simulated"))
    no_baselines = conclusion(swept.assign(executor="simulated"))
    assert no_baselines[0] == f"\n{sentence}"
    # What the noise of a machine may explain is not decided.
    measured, remark = conclusion(swept.assign(executor="torch"))
    assert "undecided in throughput 130" in measured
    assert remark == "One run each has no measure of noise."


def at_rates(waits_of_policy: dict[str, list[float]], **columns: object) -> pd.DataFrame:
    """A sweep without a reference: a policy's waits for the first token [s] at rates 1, 2, ..."""
    rows = []
    for policy, waits in waits_of_policy.items():
        for rate, wait in enumerate(waits, start=1):
            rows.append({"policy": policy, "workload.rate": rate, "ttft_p50": wait})
    return pd.DataFrame(rows).assign(
        is_baseline=False,
        swept="[policy,workload.rate]",
        executor="simulated",
        tbt_p99=0.1,
        throughput=100.0,
        **{"workload.arrivals": "poisson"},
        **columns,
    )


def test_policies_without_a_reference_are_single_draws_too() -> None:
    _, caution = conclusion(at_rates({"sglang": [0.1], "vllm_v1": [0.2]}))
    assert caution.startswith("These are single draws of arrivals")
    assert caution.endswith("seed=range(7) shows what they decide.")
    of_seeds = [at_rates({"sglang": [0.1], "vllm_v1": [0.2]}, seed=seed) for seed in range(6)]
    sentences = conclusion(pd.concat(of_seeds))
    assert sentences[1].endswith("each by itself; seed=range(7) has 95% for the best of 2.")
    assert "single draws" not in " ".join(sentences)


def test_of_many_workloads_the_first_and_the_last_have_sentences() -> None:
    waits = at_rates({"orca": [1.0] * 6, "sglang": [0.6, 0.5, 0.7, 0.8, 0.9, 0.1]})
    first, last, between, *_ = conclusion(waits.assign(is_baseline=waits.policy == "orca"))
    assert first.startswith("\nsglang workload.rate=1 beside orca: better in TTFT P50 600")
    assert last.startswith("sglang workload.rate=6 beside orca: better in TTFT P50 100")
    assert between == "The table has the 4 workloads between these."


def test_a_policy_that_equals_the_best_one_hides_no_difference_to_the_others() -> None:
    twins = at_rates({"vllm_v1": [0.1, 0.1], "sarathi_serve": [0.1, 0.1], "sglang": [0.2, 0.3]})
    first, second, *_ = conclusion(twins)
    assert first.startswith("\nvllm_v1 workload.rate=1 beside sglang: better in TTFT P50 100")
    assert second.startswith("vllm_v1 workload.rate=2 beside sglang: better in TTFT P50 100")
    (only_remark,) = conclusion(twins[twins.policy != "sglang"])
    assert only_remark.startswith("\nEqual in every quantity: vllm_v1 workload.rate=1, ")


def test_a_sweep_says_how_many_requests_failed() -> None:
    note = "3 requests of 2 of 4 runs failed; the columns count the others"
    assert note in notes_of(under_load(num_failed=[2, 1, 0, None]))
    assert notes_of(under_load(num_failed=0)) == []
