"""Fig 12 of the paper, reduced: the order of the three systems, the bubbles' ratio, and the
tables.
"""

from __future__ import annotations

import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.experiment import pipeline
from sarathi_lab.experiment.registry import CATALOG, paper_jobs
from sarathi_lab.experiment.simulate import simulate

NUM_REQUESTS = (
    600  # with fewer, filling and draining the pipeline's 216 places outweigh what lies between
)


@pytest.fixture(scope="module")
def reduced():
    """Requests by system, on the fitted GPU; test_paper has the other one."""
    options = load_option("model", "gpt3-175b"), load_option("hardware", "a100_fig12")
    return {
        name: pipeline.requests_of(pipeline.serve(name, *options, NUM_REQUESTS))
        for name in pipeline.SYSTEMS
    }


@pytest.fixture(scope="module")
def completed(reduced) -> dict[str, float]:
    """Seconds by system."""
    return {n: pipeline.completion_time(table.finish_time) for n, table in reduced.items()}


@pytest.fixture(scope="module")
def bubbles(reduced) -> dict[str, float]:
    """Seconds of the median request by pipeline."""
    return {n: reduced[n].bubble_time.median() for n in pipeline.PIPELINES}


def test_sarathi_is_done_before_the_replicas_and_these_before_orca(completed, bubbles):
    assert completed["sarathi"] < completed["tp_8rep"] < completed["tp_pp_orca"]
    assert completed["tp_pp_orca"] / completed["sarathi"] > 1.4
    assert bubbles["tp_pp_orca"] / bubbles["sarathi"] > 2


def test_replicas_share_the_requests_evenly():
    options = load_option("model", "gpt3-175b"), load_option("hardware", "a100")
    ledgers = pipeline.serve("tp_8rep", *options, num_requests=20)
    assert [ledger.requests().request_id.tolist() for ledger in ledgers] == [
        list(range(replica, 20, 8)) for replica in range(8)
    ]


def test_what_is_found_is_taken_at_the_papers_points(reduced, completed, bubbles):
    curves = CATALOG["fig12"].paper_points().query("panel != 'ratios'")
    found = pipeline.at_points(reduced, curves)
    assert len(found) == len(curves)
    middle = found[(found.panel == "a") & (found.x - 0.5).abs().lt(0.01)]
    assert middle.groupby("series").y.mean()["sarathi"] == pytest.approx(
        bubbles["sarathi"], rel=0.05
    )
    last = found[found.panel == "b"].sort_values("x").groupby("series").y.last()
    scale = pipeline.NUM_REQUESTS / NUM_REQUESTS
    assert last["sarathi"] == pytest.approx(scale * completed["sarathi"], rel=0.05)


def test_every_point_is_predicted_with_an_error():
    (table,) = simulate(paper_jobs(CATALOG["fig12"], every=50)[1:], processes=1)
    assert len(table) == len(CATALOG["fig12"].paper_points())
    assert ((table.low > 0) & (table.low < table.y) & (table.y < table.high)).all()


def test_the_headlines_of_the_paper_follow_from_its_points():
    ratios = pipeline.ratios(CATALOG["fig12"].paper_points())
    assert list(ratios.values()) == pytest.approx([6.29, 1.91, 1.48, 1.29], abs=0.006)
