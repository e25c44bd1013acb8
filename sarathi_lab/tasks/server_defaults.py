"""Arrivals, budget, sequences and cache of a run that does not state them.

Where all requests are there from the start they are SARATHI's, as in its figures. Where requests
arrive over time they are those of the server whose policy runs, as that is what a user compares:
eight sequences would queue where a server takes hundreds.
"""

from __future__ import annotations

from omegaconf import DictConfig

from sarathi_lab.config.arrivals import implied_arrivals
from sarathi_lab.config.errors import require_int
from sarathi_lab.config.instantiate import PAPER_BATCH, build, class_of, reads_chunk
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.served_system import CacheRoom, ServedSystem, ServingDevice
from sarathi_lab.model.roofline import TILE
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy.systems import VLLM, setup_of
from sarathi_lab.results.report import OF_ALL
from sarathi_lab.tasks.run_cache import FILLS_MEMORY, memory_share
from sarathi_lab.workload import LoadedRequests

AUTO = "auto"  # for a chunk: the one that the device's cost model predicts to be best
PAPER_CHUNK = 256  # tokens of an iteration (SARATHI, section 5)
# Rules of papers have no server. With one set for all of them, two differ in their rule only; it
# is the set of the server that most of the served policies follow.
OF_PAPERS = VLLM


def fill_defaults(
    cfg: DictConfig, backend: Backend, spec: ModelSpec, load: LoadedRequests
) -> str | None:
    """Fill in what `cfg` leaves open (null): arrivals, chunk, batch, and under arrivals the cache.

    Args:
        cfg: The configuration of a run, which is changed.
        backend: Its device.
        spec: Its model.
        load: Its requests, which decide whose defaults hold.

    Returns:
        In words what was assumed; None where requests do not arrive over time, or everything was
        stated.
    """
    assumed = [_fill_arrivals(cfg, load)]
    device = backend.serving_device
    if load.all_wait:
        _fill_paper(cfg)
    elif device is not None:
        assumed.append(_fill_served(cfg, backend, spec, device, load))
    else:
        # A measured run takes the memory and the minutes of the machine at hand, with which others
        # work, too. A server's sizes are for who asks for them.
        assumed.append(_fill_measured(cfg))
    return "; ".join(filter(None, assumed)) or None


def _fill_arrivals(cfg: DictConfig, load: LoadedRequests) -> str | None:
    """Fill in the kind of arrivals that other settings imply, and return it in words."""
    kind = load.arrival_kind
    if kind is None or cfg.workload.get("arrivals", kind) is not None:
        return None
    cfg.workload.arrivals = kind
    _, name = implied_arrivals(cfg.workload)
    return f"workload.arrivals={kind}, as workload.{name} is set" if name else None


def _fill_paper(cfg: DictConfig) -> None:
    if cfg.chunk is None:
        cfg.chunk = PAPER_CHUNK
    if cfg.batch is None:
        cfg.batch = PAPER_BATCH


def _fill_measured(cfg: DictConfig) -> str | None:
    """Fill in the paper's sizes, and return them in words beside what asks for a server's."""
    assumed = []
    if cfg.chunk is None and reads_chunk(cfg.policy):
        assumed.append(f"chunk={PAPER_CHUNK}")
    if cfg.batch is None:
        assumed.append(f"batch={PAPER_BATCH}")
    _fill_paper(cfg)
    if not assumed:
        return None
    return (
        f"{' '.join(assumed)}, the paper's, as a measured device takes no more than is stated; "
        "a server's are such as chunk=2048 batch=256 cache.num_blocks=auto"
    )


def _fill_served(
    cfg: DictConfig,
    backend: Backend,
    spec: ModelSpec,
    device: ServingDevice,
    load: LoadedRequests,
) -> str | None:
    """Fill in the defaults of the policy's system on `device`, and return them in words."""
    system: ServedSystem | None = None
    policy_class = class_of(cfg, "policy")
    if issubclass(policy_class, Policy):
        system = policy_class.system
    defaults = system or OF_PAPERS
    assumed = []
    fills_cache = cfg.cache.num_blocks is None
    if fills_cache:
        cfg.cache.num_blocks = FILLS_MEMORY
    if cfg.chunk is None:
        # A server refuses a budget below its sequences, so a stated batch raises it.
        stated_batch = cfg.batch if isinstance(cfg.batch, int) else 0
        cfg.chunk = max(defaults.token_budget(device), stated_batch)
        if reads_chunk(cfg.policy):
            assumed.append(f"chunk={cfg.chunk}")
    if cfg.batch is None:
        number = defaults.num_sequences(device, _cache_room(cfg, backend, spec, load))
        cfg.batch = _most_sequences(cfg, number)
        assumed.append(f"batch={cfg.batch}")
        if cfg.batch < number:
            # Of chunk=auto the budget is not chosen yet.
            is_stated = isinstance(cfg.chunk, int)
            whose = "the budget" if is_stated else "the smallest chunk that is tried"
            assumed.append(f"(of {number}, as many as {whose} has tokens for)")
    if fills_cache:
        assumed.append(f"cache.num_blocks={FILLS_MEMORY} (fills the memory)")
    if not assumed:
        return None
    whose = "" if system else OF_ALL
    return f"{' '.join(assumed)}, as {defaults.name}'s defaults on {device.name}{whose}"


def _cache_room(
    cfg: DictConfig, backend: Backend, spec: ModelSpec, load: LoadedRequests
) -> CacheRoom:
    """Return the tokens of the cache as stated, or as its server would leave to it."""
    advice = "use a number of tokens such as 16"
    block_size = require_int("cache.block_size", cfg.cache.block_size, 1, advice)
    num_blocks = cfg.cache.num_blocks
    if not isinstance(num_blocks, int):
        policy = build(cfg.policy, Policy)
        longest = cfg.max_model_len or max(request.total_len for request in load.requests)
        # What it leaves hardly depends on the sequences, which are to be found.
        setup = setup_of(policy, PAPER_BATCH, longest, memory_share(cfg))
        num_blocks = backend.kv_blocks(spec, block_size, setup)
    return CacheRoom(num_blocks * block_size, spec.max_position)


def _most_sequences(cfg: DictConfig, number: int) -> int:
    """Return `number`, or as many sequences as the policy's smallest iteration has tokens for, as
    vLLM lowers its default below a stated budget; where the chunk is chosen (auto), as the smallest
    that is tried.
    """
    policy: Policy = build(cfg.policy, Policy)
    smallest = policy.smallest_budget
    if policy.budget == AUTO:
        smallest = TILE
    if policy.decodes_on_top or not isinstance(smallest, int):
        return number
    return max(1, min(number, smallest))
