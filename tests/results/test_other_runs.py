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
    of_two_rates = pd.concat(
        [
            under_load(**{"workload.rate": 1}),
            under_load(**{"workload.rate": 2}).assign(tbt_p99=[0.1, 0.1, 0.2, 0.1]),
        ]
    ).assign(swept="[policy,workload.rate]")
    sentence = "Equal in every quantity on 1 of 2 workloads: vllm_v1 and trtllm."
    assert sentence in conclusion(of_two_rates)
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
    assert no_baselines[0] == f"\n{sentence}"
    # What the noise of a machine may explain is not decided.
    measured = conclusion(swept.assign(executor="torch"))[0]
    assert "undecided in throughput 130" in measured
    assert measured.endswith("One run each has no measure of noise.")


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
    _, caution, _ = conclusion(at_rates({"sglang": [0.1], "vllm_v1": [0.2]}))
    assert caution.startswith("These are single draws of arrivals")
    assert caution.endswith("seed=range(7) shows what they decide.")
    of_seeds = [at_rates({"sglang": [0.1], "vllm_v1": [0.2]}, seed=seed) for seed in range(6)]
    sentences = conclusion(pd.concat(of_seeds))
    assert sentences[0].endswith("; seed=range(7) has 95% for the best of 2 settings.")
    assert "single draws" not in " ".join(sentences)


def test_a_comparison_of_policies_counts_what_it_leaves_out() -> None:
    first, *_, on_workloads, _, _ = conclusion(at_rates({"sglang": [0.1] * 7, "trtllm": [0.2] * 7}))
    assert first.startswith("\nsglang workload.rate=1 beside trtllm: better")
    assert on_workloads.startswith("Policies are compared on 4 of 7 workloads")
    waits = {"sglang": [0.1], "trtllm": [0.2], "vllm_v1": [0.3], "orca_": [0.4], "max": [0.5]}
    assert "Only the 3 next best policies are compared with the best one." in conclusion(
        at_rates(waits)
    )
    at_two = at_rates({policy: wait * 2 for policy, wait in waits.items()})
    left_out = "Only the next best policy of each workload is compared with the best one."
    assert left_out in conclusion(at_two)
    assert left_out not in conclusion(at_two[at_two.policy.isin(["sglang", "max"])])


def test_a_policy_that_equals_the_best_one_hides_no_difference_to_the_others() -> None:
    twins = at_rates({"vllm_v1": [0.1, 0.1], "sarathi_serve": [0.1, 0.1], "sglang": [0.2, 0.3]})
    first, second, *_ = conclusion(twins)
    assert first.startswith("\nvllm_v1 workload.rate=1 beside sglang: better in TTFT P50 100")
    assert second.startswith("vllm_v1 workload.rate=2 beside sglang: better in TTFT P50 100")
    only_remark, _ = conclusion(twins[twins.policy != "sglang"].assign(duration=9.0))
    assert only_remark.startswith("\nNo policy is the reference; baselines=[sarathi_serve]")


def test_a_baseline_that_is_no_reference_is_named() -> None:
    waits = at_rates({"vllm_v1": [0.1], "sglang": [0.2], "trtllm": [0.3]})
    runs = waits.assign(is_baseline=waits.policy != "vllm_v1")
    remark = "Sentences compare with sglang, and not with trtllm"
    assert any(sentence.startswith(remark) for sentence in conclusion(runs))
    one = runs[runs.policy != "trtllm"]
    assert not any(sentence.startswith("Sentences compare") for sentence in conclusion(one))


def test_workloads_between_the_extremes_are_those_that_are_compared() -> None:
    waits = at_rates({"orca": [1.0] * 6, "sglang": [0.6, 0.5, 0.7, 0.8, 0.9, 0.1]})
    with_reference = waits.assign(is_baseline=waits.policy == "orca")
    least, largest, between, *_ = conclusion(with_reference)
    assert least.startswith("\nsglang workload.rate=6 beside orca")
    assert largest.startswith("sglang workload.rate=5 beside orca")
    assert between == "4 of 6 workloads lie between in TTFT P50."
    # Of the third rate nothing is known.
    unknown = with_reference.assign(ttft_p50=waits.ttft_p50.where(waits["workload.rate"] != 3))
    _, _, between, on_unknown, *_ = conclusion(unknown)
    assert between == "3 of 6 workloads lie between in TTFT P50."
    assert on_unknown == "1 of 6 workloads have no TTFT P50."
    # The waits of the last rate depend on the length of the run.
    unsteady = with_reference.assign(is_steady=1.0 - (waits["workload.rate"] == 6))
    least, _, between, on_unsteady, *_ = conclusion(unsteady)
    assert least.startswith("\nsglang workload.rate=2 beside orca")
    assert between == "3 of 6 workloads lie between in TTFT P50."
    assert on_unsteady == "On 1 of 6 workloads a run is not steady."
    # Where all are unsteady, tokens/s decide, which do not depend on it.
    speeds = with_reference.throughput + with_reference["workload.rate"] * (waits.policy != "orca")
    least, largest, between, *_ = conclusion(unsteady.assign(is_steady=0.0, throughput=speeds))
    assert least.startswith("\nsglang workload.rate=1 beside orca")
    assert largest.startswith("sglang workload.rate=6 beside orca")
    assert between == "4 of 6 workloads lie between in throughput."


def test_a_sweep_says_how_many_requests_failed() -> None:
    note = "3 requests of 2 of 4 runs failed; the columns count the others"
    assert note in notes_of(under_load(num_failed=[2, 1, 0, None]))
    assert notes_of(under_load(num_failed=0)) == []
