"""vLLM's schedulers with policies of the lab: on fake workers, on real ones, and in a server."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from vllm_engine import SIZES, TINY, backend_of, requests_of_tokens, tiny_checkpoint, tokens_of
from vllm_engine import served as served_by_lab
from vllm_scheduler import (
    Case,
    FakeWorkers,
    as_vllm,
    case,
    lab_steps,
    make_scheduler,
)

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import option_files, parameter_names, read_option
from sarathi_lab.engine.request import Request
from sarathi_lab.extensions.vllm_server import policy_of
from sarathi_lab.policy import Orca

pytestmark = pytest.mark.vllm

BY_CLOCK = {  # schedules of these depend on the time that requests have waited
    *("cache_aware", "highest_response_ratio", "lars", "preflow"),
    *("reserve_for_short", "short_request_first", "shortest_remaining"),
}
IS_ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def scheduler_class(is_async: bool) -> Any:
    from sarathi_lab.extensions.vllm_server import AsyncScheduler, Scheduler

    return AsyncScheduler if is_async else Scheduler


def random_settings(chosen: random.Random, name: str, batch_size: int) -> dict[str, Any]:
    names = parameter_names(read_option("policy", option_files("policy", [])[name]), "policy")
    chunk = 256 if name.startswith("ascend") else chosen.randint(batch_size, 24)
    return {"policy": name, **({"chunk": chunk} if "chunk" in names else {})}


def random_case(chosen: random.Random, name: str) -> tuple[Case, dict[str, Any]]:
    """Draw requests, a cache that is often scarce, and settings of the policy."""
    requests, now = [], 0.0
    for i in range(chosen.randint(1, 8)):
        now += chosen.choice((0, 0, 0, 1, 2, 5))
        length, output_len = chosen.randint(1, 28), chosen.randint(1, 12)
        requests.append(Request(i, now, length, output_len, range(length), chosen.randint(0, 2)))
    batch_size, order = chosen.randint(1, 5), chosen.choice(("fcfs", "priority"))
    sizes: dict[str, Any] = {"batch_size": batch_size, "queue_order": order}
    sizes["block_size"] = chosen.choice((1, 2, 4, 8))
    sizes["max_model_len"] = max(one.total_len for one in requests)
    settings = random_settings(chosen, name, batch_size)
    policy = policy_of(settings, batch_size, sizes["max_model_len"])
    spare = chosen.choice((0, 1, 3, 8, 100))
    return case(policy, tuple(requests), spare, **sizes), settings


def served(
    tried: Case, settings: dict[str, Any], is_async: bool, aborts: random.Random | None
) -> FakeWorkers:
    from vllm.v1.request import RequestStatus

    def abort_one(scheduler: Any) -> None:
        if aborts and aborts.random() < 0.05 and scheduler.requests:
            name = aborts.choice(list(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    of_vllm = {"max_num_batched_tokens": 300, "async_scheduling": is_async}
    additional = {"sarathi_lab": settings}
    scheduler = make_scheduler(scheduler_class(is_async), tried.engine, of_vllm, additional)
    workers = FakeWorkers(scheduler, depth=1 + is_async)
    workers.serve(tried, before_step=abort_one)
    return workers


@IS_ASYNC
def test_every_policy_is_followed(is_async):
    """The batches are those of the lab's engine, and none is left behind by aborted requests."""
    chosen = random.Random(is_async)
    num_served = num_evicted = 0
    for name in option_files("policy", []):
        for number in range(4):
            aborts = chosen if number == 3 else None
            try:
                tried, settings = random_case(chosen, name)
                tried.engine.check(tried.requests)
                workers = served(tried, settings, is_async, aborts)
            except UserError:
                continue
            decider = workers.scheduler._decider
            num_served, num_evicted = num_served + 1, num_evicted + decider.num_preemptions
            assert decider.blocks.num_free == decider.blocks.num_blocks, name
            assert not [*decider.running, *decider.waiting, *workers.scheduler._requests], name
            if aborts is None:
                wanted = {one.request_id: one.output_len for one in tried.requests}
                assert workers.num_tokens == wanted, name
                assert is_async or name in BY_CLOCK or workers.steps == lab_steps(tried), name
    assert num_served > 100
    assert num_evicted > 20


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def core(request: pytest.FixtureRequest) -> Iterator[Any]:
    """vLLM's engine core, in this process."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from sarathi_lab.executor.vllm.workers import make_config

    config = make_config(backend_of().arguments(TINY, tiny_checkpoint(), SIZES), "auto")
    config.scheduler_config.async_scheduling = request.param
    found = EngineCore(config, Executor.get_class(config), log_stats=False)
    yield found
    found.shutdown()


def generated(core: Any, requests: list[Request]) -> dict[int, list[int]]:
    """Serve the requests, and return their tokens."""
    for request in requests:
        core.add_request(as_vllm(request))
    tokens: dict[int, list[int]] = {one.request_id: [] for one in requests}
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_fn()
        for output in [one for each in (outputs or {}).values() for one in each.outputs]:
            tokens[int(output.request_id)] += output.new_token_ids
    return tokens


def test_tokens_are_those_under_vllms_scheduler(core):
    requests = requests_of_tokens(longest=90)
    expected = generated(core, requests)
    assert [len(tokens) for tokens in expected.values()] == [one.output_len for one in requests]
    own, num_evicted = core.scheduler, 0
    for name, num_blocks in (
        *(("orca", 48), ("sarathi", 48), ("request_level", 48)),
        *(("vllm_v1", 9), ("sarathi_serve", 9)),
    ):
        config, cache = own.vllm_config, copy(own.kv_cache_config)
        settings = {"policy": name, **({} if num_blocks > 9 else {"chunk": 48})}
        if name == "sarathi_serve":
            settings["policy.reserve"] = "chunk"
        config.additional_config, cache.num_blocks = {"sarathi_lab": settings}, num_blocks
        cls = scheduler_class(config.scheduler_config.async_scheduling)
        manager = own.structured_output_manager
        scheduler = cls(config, cache, manager, block_size=own.block_size)
        scheduler.finished_req_ids = core.scheduler.finished_req_ids  # for workers to forget
        core.scheduler = scheduler
        assert generated(core, requests) == expected, name
        num_evicted += scheduler._decider.num_preemptions
    core.scheduler = own
    assert num_evicted > 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"watermark": 0.1}, "can't run with watermark; start vLLM without"),
        ({"async_scheduling": True}, "can't run with async_scheduling=True and this class"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens=8 is below the 9 tokens"),
    ],
)
def test_what_a_policy_has_no_use_for_is_refused(settings, message):
    tried, of_policy = random_case(random.Random(0), "vllm_v1")
    of_policy["chunk"] = 9
    with pytest.raises(UserError, match=message):
        make_scheduler(scheduler_class(False), tried.engine, settings, {"sarathi_lab": of_policy})
    small = replace(tried.engine, num_blocks=1)
    with pytest.raises(UserError, match="can never fit the KV cache"):
        make_scheduler(scheduler_class(False), small, {}, {"sarathi_lab": of_policy})
    cached = replace(tried.engine, shares_prefixes=True)
    with pytest.raises(UserError, match="prefix caching"):
        make_scheduler(scheduler_class(False), cached, {}, {"sarathi_lab": of_policy})


def test_a_newer_version_is_warned_of(monkeypatch, caplog):
    tried, of_policy = random_case(random.Random(0), "orca")
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    settings = {"max_num_batched_tokens": 300}
    with caplog.at_level(logging.WARNING, "vllm"):
        make_scheduler(scheduler_class(False), tried.engine, settings, {"sarathi_lab": of_policy})
    assert "not 0.99.0" in caplog.text


def test_a_server_is_checked_before_it_starts():
    from sarathi_lab.extensions.vllm_server.__main__ import server_arguments

    policy = '{"sarathi_lab": {"policy": "sarathi", "chunk": 48}}'
    model = ["--model", str(tiny_checkpoint()), "--skip-tokenizer-init", "--dtype", "float32"]
    arguments = [*model, "--additional-config", policy, "--port", "1"]
    class_name = "sarathi_lab.extensions.vllm_server.Scheduler"  # as on a CPU nothing is async
    added = ["--no-enable-prefix-caching", "--scheduler-cls", class_name]
    assert server_arguments(arguments) == [*arguments, *added]
    with pytest.raises(UserError, match="prefix caching"):
        server_arguments([*arguments, "--enable-prefix-caching"])
    with pytest.raises(UserError, match="pipeline stages"):
        server_arguments([*arguments, "--pipeline-parallel-size", "2"])


def test_a_server_answers_concurrent_requests_as_the_lab_does(vllm_executor, tmp_path):
    requests = requests_of_tokens()
    expected = tokens_of(served_by_lab(vllm_executor, Orca(), requests, 48))
    with socket.socket() as free, (tmp_path / "log").open("w") as log:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        arguments = [
            *("--model", str(tiny_checkpoint()), "--served-model-name", "tiny", "--port", url[17:]),
            *("--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init"),
            *("--block-size", "32", "--max-model-len", "256", "--max-num-seqs", "4"),
            *("--num-gpu-blocks-override", "13", "--additional-config"),
            '{"sarathi_lab": {"policy": "sarathi_serve", "chunk": 48, "policy.reserve": "chunk"}}',
        ]
        program = [sys.executable, "-m", "sarathi_lab.extensions.vllm_server", *arguments]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        server = subprocess.Popen(program, env=environment, stdout=log, stderr=log)
    try:
        wait_for(server, f"{url}/health")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(partial(ask, f"{url}/v1/completions"), requests))
    finally:
        server.terminate()
        server.wait(60)
    assert answers == expected


def wait_for(server: subprocess.Popen[bytes], address: str) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server has ended")


def ask(address: str, request: Request) -> list[int]:
    prompt = list(map(int, request.prompt_token_ids))
    content = {"model": "tiny", "prompt": prompt, "max_tokens": request.output_len}
    content |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    body = json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
        return json.load(answer)["choices"][0]["token_ids"]
