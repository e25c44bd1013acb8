"""What of a real server's run is replayed: load, engine, devices and host, as they were run
and with other settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build, class_of, resolved
from sarathi_lab.engine.arrivals import behind_front_end
from sarathi_lab.engine.config import SINGLE, EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.replay.clients import (
    Client,
    Loop,
    asked_client,
    describe,
    loop_of,
    measured_thought,
)
from sarathi_lab.extensions.replay.comparison import ReplayedLoad
from sarathi_lab.extensions.replay.impossible_prompts import require_possible
from sarathi_lab.extensions.replay.iteration_log import cautions_of_log
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.extensions.replay.run_config import (
    AUTO,
    RunConfig,
    devices,
    is_of_other_version,
    num_blocks,
    server_of,
    shared_experts,
)
from sarathi_lab.extensions.replay.sent_again import (
    arrivals_of,
    cached_text,
    num_conversations,
    requests_of,
)
from sarathi_lab.extensions.replay.settings import (
    differences,
    further_facts,
    replay_settings,
    typed_settings,
)
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.policy.systems import setup_of

KEYS = ("executor", "model", "policy", "cache", "batch", "max_model_len", "queue_order")


@dataclass(frozen=True)
class Replay:
    """A load of a real server and the settings of its replay; `notes` state where they are from."""

    run: RealRun
    backend: SimulatedBackend
    spec: ModelSpec
    engine: EngineConfig
    config: Mapping[str, Any]
    client: Client
    loop: Loop | None
    notes: Sequence[str] = ()

    @property
    def is_cache_stated(self) -> bool:
        return isinstance(self.config["cache"]["num_blocks"], int)

    @property
    def think_time(self) -> float:
        """Seconds between an answer and the next request of its user."""
        return 0.0 if self.loop is None else self.loop.think_time

    def does_the_same_as(self, replay: Replay) -> bool:
        own = (self.engine, self.backend, self.spec, self.loop)
        return own == (replay.engine, replay.backend, replay.spec, replay.loop)

    def executor(self) -> Executor:
        return self.backend.build(self.spec, None, self.engine.sizes())

    def load(self) -> ReplayedLoad:
        """Serve the run's requests and return both."""
        ledger = Ledger()
        # The last token of an output is not computed.
        requests = self.run.requests
        total = int(requests.prompt_len.sum() + requests.output_len.sum() - len(requests))
        with progress_of("replaying", total, "tokens") as advance:
            ledger.on_iteration = advance
            sent = arrivals_of(self.run, self.loop)
            arrivals = behind_front_end(sent, self.backend.request_time)
            serve(arrivals, self.engine, self.executor(), ledger)
        return ReplayedLoad(self.run, ledger.iterations(), ledger.requests())

    def describe(self) -> list[str]:
        """List the settings of the run and where they are from."""
        run = self.run
        engine = self.engine
        host = self.backend.host
        load = f"{len(run.logged)} logged iterations"
        if not run.requests.empty:
            load = f"{len(run.requests)} requests over {run.requests.arrival_time.max():.1f} s"
            if run.has_conversations:
                number = num_conversations(run)
                load += f", {number} conversations, whose turns wait for their answers"
            if self.loop is not None:
                load += f", {describe(self.loop, self.client)}"
            if cached_text(run):
                num_cached = int((run.conversation.cached_len > 0).sum())
                fate = "from the start" if engine.shares_prefixes else "computed again"
                load += f", cached tokens of {num_cached} of them {fate}"
        server = f"{server_of(run)} {run.version or '(no version)'}"
        tokens = _tokens_of(engine.policy)
        sequences = self.config["batch"]
        settings = f"{tokens} and {sequences} sequences an iteration, host={host.name}"
        if is_of_other_version(host.name, run.version):
            settings += ", of another version"
        if host.overlaps:
            settings += ", scheduled ahead of the device"
        cache = f"cache {engine.num_blocks} x {engine.block_size} tokens"
        if not self.is_cache_stated:
            cache += ", as the hardware has room for"
        if engine.shares_prefixes:
            cache += ", prefixes shared"
        lines = [f"{server} with {settings}", f"{load}; {cache}"]
        others = further_facts(run, engine.policy)
        if others:
            lines.append(f"otherwise than by default: {', '.join(others)}")
        lines += self.backend.assumptions
        lines += [*self.notes, *run.settings.notes()]
        return [*lines, *run.cautions, *cautions_of_log(run.logged)]


def _tokens_of(policy: Policy) -> str:
    """Describe the tokens of an iteration, which policies of whole prompts do not limit here."""
    if policy.budget is None:
        return "whole prompts"
    return f"{policy.budget} tokens"


@dataclass(frozen=True)
class Case:
    """A load as it was run, and with other settings of the command line (None: the same), which
    `changed` describes.
    """

    as_run: Replay
    what_if: Replay | None
    changed: Sequence[str] = ()

    @property
    def run(self) -> RealRun:
        return self.as_run.run


def case_of(cfg: DictConfig, run: RealRun) -> Case:
    """Prepare both replays. Raises UserError for what can't be simulated."""
    stated = run.settings.stated
    replicas = stated.get("cluster.num", 1)
    if replicas > 1 and not stated.get("cluster.shares_experts", False):
        raise UserError(
            f"{run.source}: {replicas} replicas (data_parallel_size, SGLang's dp_size) are "
            "simulated only where they share experts, by vLLM's enable_expert_parallel; take a run "
            "of one replica"
        )
    executor_class = class_of(cfg, "executor")
    if not issubclass(executor_class, SimulatedBackend):
        raise UserError(
            f"task=validate replays in simulation, and {executor_class.__name__} simulates "
            "nothing; use executor=simulated"
        )
    if cfg.hardware.name != AUTO:
        run = replace(run, link=None)  # which is that of the run's own devices
    composed = RunConfig(cfg, run, replay_settings(cfg, run))
    as_run = composed.cfg
    what_if = composed.what_if()
    notes = composed.notes
    if composed.assumed:
        notes.insert(0, f"assumed, as nothing states them: {', '.join(composed.assumed)}")
    client, client_of_user = _clients(cfg, run)
    if client is not run.client:
        notes.append(f"as you state: {_named(client)}")
    replay = _replay(as_run, run, client)
    require_possible(run, replay.spec, replay.backend.peaks())
    replay = replace(replay, notes=notes)
    think_time = cfg.workload.get("think_time")
    if think_time is None:
        think_time = replay.think_time
    replay_what_if = _replay(what_if, run, client_of_user, float(think_time))
    # What the user states changes nothing, or nothing is stated.
    if replay.does_the_same_as(replay_what_if):
        return Case(replay, None)
    if run.requests.empty and replay.engine != replay_what_if.engine:
        raise UserError(
            f"{run.source} has no arrivals, so that only its schedule is simulated; drop policy, "
            f"chunk and batch, or name a client's file with task.log={run.source}"
        )
    changed = differences(as_run, what_if)
    changed += _changes_of_load(replay, replay_what_if)
    return Case(replay, replay_what_if, changed)


def _clients(cfg: DictConfig, run: RealRun) -> tuple[Client, Client]:
    """Return how requests were sent, and how they are sent with the user's settings: another
    closed loop than a file states is that of a further replay.
    """
    typed = typed_settings(cfg)
    asked = asked_client(cfg.workload, typed, run.client)
    think_time = cfg.workload.get("think_time")
    if think_time is not None and (asked or run.client).users is None:
        raise UserError(
            f"workload.think_time={think_time} has no effect on {run.source}, whose requests are "
            f"not sent by users who wait for answers; drop it, or add workload.users=8"
        )
    if asked is None:
        return run.client, run.client
    # The recorded times are no other load.
    is_of_run = asked.users is None or not run.client.is_stated
    if is_of_run:
        return asked, asked
    return run.client, asked


def _named(client: Client) -> str:
    if client.users is None:
        return "the recorded times of sending"
    return f"workload.users={client.users}"


def _changes_of_load(as_run: Replay, what_if: Replay) -> list[str]:
    """Describe how `what_if` sends requests otherwise, such as "workload.users=8 (4)"."""
    changed = []
    before = _named(as_run.client)
    after = _named(what_if.client)
    if after != before:
        changed.append(f"{after} ({before})")
    thought = what_if.think_time
    if what_if.loop is not None and thought != as_run.think_time:
        changed.append(f"workload.think_time={thought:.3g} s ({as_run.think_time:.3g} s)")
    return changed


def _replay(
    cfg: DictConfig,
    run: RealRun,
    client: Client,
    think_time: float | None = None,
) -> Replay:
    """Make a replay with the settings of `cfg`, and users who think for `think_time` seconds (None:
    as recorded). Raises UserError.
    """
    backend, spec = devices(cfg, run)
    backend.check(spec, 0)
    policy: Policy = build(cfg.policy, Policy)
    if policy.budget == AUTO:
        raise UserError("chunk=auto is chosen for a workload, not for a run; name tokens")
    longest = cfg.max_model_len or run.longest
    batch_size = require_int("batch", cfg.batch, 1, "use the most sequences at a time")
    if backend.num_stages > 1:
        policy, batch_size = policy.for_stages(batch_size, backend.num_stages)
    window_pool = setup_of(policy, batch_size, longest).rule.window_pool
    engine = EngineConfig(
        policy.on_device(lambda: backend.predictor(spec), batch_size, longest),
        batch_size=batch_size,
        num_blocks=num_blocks(cfg, run, backend, spec, cfg.batch),
        block_size=cfg.cache.block_size,
        max_model_len=longest,
        num_micro_batches=backend.num_stages,
        queue_order=cfg.queue_order,
        shares_prefixes=cfg.cache.prefix,
        aligns_chunks=cfg.cache.align_chunks,
        state_tokens=backend.state_tokens(spec),
        window=backend.window_in_cache(spec, window_pool),
        cluster=shared_experts(cfg, run) or SINGLE,
    )
    engine.check(requests_of(run))
    if think_time is None:
        think_time = 0.0
        if not run.has_conversations:
            think_time = measured_thought(run.requests, client)
    loop = loop_of(run.requests, client, think_time)
    config = {key: value for key, value in resolved(cfg).items() if key in KEYS}
    config["users"] = None if loop is None else [loop.users, loop.think_time]
    return Replay(run, backend, spec, engine, config, client, loop)
