"""Sessions of agents: the turns' order, their prompts, and the cache that they share."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import SarathiServe
from sarathi_lab.workload.synthetic import Agentic

BLOCK = 4
SIZES = {"num_requests": 9, "turns": 3, "seed": 0, "shared_prefix_len": 8}
SIZES |= {"prompt_p50": 6, "prompt_p90": 12, "output_p50": 3, "output_p90": 6, "max_len": 64}


def small(**settings):
    return Agentic(**SIZES | settings)


def served(load, executor=None, **own):
    """Who was served, with the prompts that they were sent with."""
    arrivals, sent = load.arrivals(), {}
    pop = arrivals.pop
    arrivals.pop = lambda: sent.setdefault((request := pop()).request_id, request)
    sizes = {"batch_size": 4, "num_blocks": 200, "block_size": BLOCK, "shares_prefixes": True}
    engine = EngineConfig(SarathiServe(chunk=16), **sizes | own)
    ledger = serve(arrivals, engine, executor or SimulatedExecutor(lambda batch: 0.01))
    return ledger.requests().set_index("request_id"), sent


def check_sessions(load, requests, sent):
    assert len(requests) == len(load.requests)
    for turns in load.sessions:
        assert sent[turns[0].request.request_id].arrival_time == turns[0].request.arrival_time
        for before, after in pairwise(turns):
            first, then = before.request.request_id, after.request.request_id
            due = requests.finish_time[first] + after.pause
            assert sent[then].arrival_time == pytest.approx(due)
            answered = sent[first].prompt_len + before.request.output_len
            was = np.asarray(sent[first].prompt_token_ids)
            own = np.asarray(sent[then].prompt_token_ids)
            assert len(own) == sent[then].prompt_len == answered + len(after.new_tokens)
            assert (own[: len(was)] == was).all()
            assert (own[answered:] == after.new_tokens).all()
            if (answers := requests.output_token_ids[first])[0] >= 0:
                assert own[len(was) : answered].tolist() == list(answers)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.integers(1, 6), st.integers(1, 20), st.sampled_from([0, 8, 30]))
def test_turns_come_in_order_and_each_prompt_begins_with_all_that_was_said(
    seed, turns, number, system
):
    sizes = {"turns": turns, "num_requests": number, "shared_prefix_len": system}
    load = small(seed=seed, arrivals="poisson", rate=5.0, **sizes).generate(None)
    assert len(load.requests) == number
    assert all(len(session) <= turns for session in load.sessions)
    assert all(request.total_len <= 64 for request in load.requests)
    requests, sent = served(load)
    check_sessions(load, requests, sent)
    # With room for all, what a turn finds are the full blocks of what was said. An answer's last
    # token has no keys, and a block that ends in the one before is not published (`PrefixCache`).
    for session in load.sessions:
        for before, after in pairwise(session):
            said = before.request.total_len - 1 - (before.request.output_len > 1)
            hit = requests.prefix_hit_tokens[after.request.request_id]
            assert hit == said // BLOCK * BLOCK
    starts = [np.asarray(session[0].new_tokens)[:system].tolist() for session in load.sessions]
    assert all(start == starts[0] for start in starts)


def test_users_have_a_session_at_a_time():
    load = small(arrivals="users", users=2, think_time=1.0, num_requests=12).generate(None)
    requests, _ = served(load)
    first = [turns[0].request.request_id for turns in load.sessions]
    last = [turns[-1].request.request_id for turns in load.sessions]
    begins = requests.arrival_time[first].tolist()
    ends = sorted(requests.finish_time[last].tolist())
    assert begins[:2] == [0.0, 0.0]
    assert begins[2:] == pytest.approx([end + 1.0 for end in ends[: len(begins) - 2]])


def test_a_seed_gives_the_same_turns_and_another_others():
    def tokens(seed):
        load = small(seed=seed).generate(100)
        return [(t.new_tokens.tolist(), t.pause, t.request) for own in load.sessions for t in own]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_the_real_engine_sends_its_own_answers_back():
    spec = load_option("model", "tiny")
    model = load_model(spec, None, DEVICE, torch.float32, seed=0)
    load = small(num_requests=6, pause_p50=1e-4, pause_p90=1e-3).generate(spec.vocab_size)
    executor = TorchExecutor(model, num_blocks=80, block_size=BLOCK)
    requests, sent = served(load, executor, num_blocks=80)
    check_sessions(load, requests, sent)
    assert all(min(answer) >= 0 for answer in requests.output_token_ids)
    assert (requests.prefix_hit_tokens > 0).any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pause_p90": 0.5}, "is not above workload.pause_p50"),
        ({"shared_prefix_len": 60}, "no room for a first turn"),
    ],
)
def test_what_sessions_do_not_have_is_refused(wrong, words):
    with pytest.raises(UserError, match=words):
        small(**wrong)
