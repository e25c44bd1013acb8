"""What was simulated as the flags of the server whose policy it was, by the rules of
`servers.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import build
from sarathi_lab.policy import Policy
from sarathi_lab.policy.systems import NULL_BLOCKS
from sarathi_lab.tasks.plan import AUTO, Plan
from sarathi_lab.workload import Workload
from sarathi_lab.workload.traces import Trace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Parameters that are tokens of a page of the cache, or of which chunks are multiples.
UNITS = ("page_size", "chunk_unit_size")
BLOCK_SIZE = 16  # of servers, and of the lab's cache, by default
NO_HOST = "none"  # the option of `host` that simulates no server's
# Settings that a server's flags repeat, with the value that needs none; None: any does, as servers
# differ in their defaults.
USUAL = {
    "executor.tensor_parallel": 1,
    "executor.pipeline_parallel": 1,
    "executor.weights": AUTO,
    "dtype": AUTO,
    "cache.dtype": AUTO,
    "cache.prefix": None,
    "cache.num_blocks": AUTO,
    "cache.block_size": BLOCK_SIZE,
    "cache.align_chunks": False,
    "cache.memory_share": None,
    "queue_order": None,
    "cluster.router": "least_loaded",
}
Texts = Mapping[str, str]


@dataclass(frozen=True)
class Simulated:
    """What a server's flags must repeat.

    Attributes:
        policy: The policy with its token budget.
        batch_size: The most sequences at a time.
        max_model_len: The most tokens of a sequence.
        num_blocks: Blocks of the cache.
        block_size: Tokens of a block.
        options: What else was simulated: values by the names of settings.
    """

    policy: Policy
    batch_size: int
    max_model_len: int
    num_blocks: int = 0
    block_size: int = BLOCK_SIZE
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        return cast(int, self.policy.budget)

    @property
    def tokens(self) -> dict[str, int]:
        """The numbers that servers.yaml names, but for the budget."""
        num_decodes = self.batch_size - 1  # the most beside a prompt
        unit = own_unit(self.policy)
        return {
            "batch_size": self.batch_size,
            "max_model_len": self.max_model_len,
            "kv_tokens": self.num_blocks * self.block_size,
            "blocks_with_null": self.num_blocks + NULL_BLOCKS,
            "unit": unit,
            "num_decodes": num_decodes,
            "all_tokens": self.batch_size * self.max_model_len,
            "unit_beside_decodes": unit + num_decodes,
        }


@dataclass(frozen=True)
class ServerFlags:
    """How to start a server as it was simulated; `file` has the lines of its YAML file, `note` what
    its flags mean and what has none.
    """

    server: str
    command: str
    flags: str
    file: tuple[str, ...]
    effective_budget: int  # tokens of an iteration that the flags mean
    note: str
    source: str


@dataclass(frozen=True)
class Server:
    """A row of servers.yaml, which describes its fields."""

    name: str
    policy: Mapping[str, object]
    command: str
    flags: Sequence[str]
    rule: str
    remark: str
    source: str
    minimum: Sequence[int | str]
    maximum: str | None = None
    unit: int | str = 1
    chunked: Sequence[str] = ()
    uncut: Mapping[str, Any] = field(default_factory=dict)
    options: Texts = field(default_factory=dict)
    of_checkpoint: Sequence[str] = ()
    parameters: Texts = field(default_factory=dict)
    file: Texts = field(default_factory=dict)

    def serves_by(self, policy: Policy) -> bool:
        """Return whether a policy is the server's."""
        named = {"name": policy.name, **parameters_of(policy)}
        return self.policy.items() <= named.items()

    def leaves_whole(self, policy: Policy) -> bool:
        """Return whether it cuts no prompt under a policy, which has a parameter for that."""
        if not self.uncut:
            return False
        switched: Mapping[str, object] = self.uncut["policy"]
        return switched.items() <= parameters_of(policy).items()

    def allowed_budget(self, wanted: int, tokens: Mapping[str, int]) -> int:
        """Return the least budget from `wanted` on that its rule allows, or the largest.

        Args:
            wanted: Tokens of an iteration.
            tokens: Numbers by the names of servers.yaml.
        """
        minima = [_number(name, tokens) for name in self.minimum]
        least = max(wanted, *minima)
        unit = _number(self.unit, tokens)
        num_units = math.ceil(least / unit)
        if self.maximum is not None:
            most_tokens = tokens[self.maximum]
            num_units = min(num_units, most_tokens // unit)
        return num_units * unit


def _number(name: int | str, tokens: Mapping[str, int]) -> int:
    """Return a number of servers.yaml, which may be a name of one of `tokens`, as batch_size is."""
    if isinstance(name, str):
        return tokens[name]
    return name


@cache
def read_servers() -> list[Server]:
    """Read servers.yaml."""
    path = Path(__file__).with_name("servers.yaml")
    rows = yaml.safe_load(path.read_text())
    return [Server(**row) for row in rows]


def server_of(policy: Policy) -> Server | None:
    """Return the server that serves by `policy`; None for a rule that no server has."""
    for server in read_servers():
        if server.serves_by(policy):
            return server
    return None


def unit_of(policy: Policy) -> int:
    """Return the tokens that the budget of the policy's server is a multiple of."""
    server = server_of(policy)
    if server is None:
        return 1
    return _number(server.unit, {"unit": own_unit(policy)})


def least_budget(policy: Policy, batch_size: int) -> int:
    """Return the least token budget that the policy's server has with `batch_size` sequences."""
    server = server_of(policy)
    if server is None:
        return batch_size
    numbers = Simulated(policy, batch_size, max_model_len=1).tokens
    minima = [_number(name, numbers) for name in server.minimum]
    return max(batch_size, *minima)


def own_unit(policy: Policy) -> int:
    """Return the tokens of the policy's page, or of which it cuts prompts; 1 without such a one."""
    parameters = parameters_of(policy)
    for name in UNITS:
        unit = parameters.get(name)
        if isinstance(unit, int):
            return unit
    return 1


def whole_variant(policy: Policy) -> Mapping[str, Any]:
    """Return the parameters by which the policy's server leaves prompts whole; empty if none do."""
    server = server_of(policy)
    if server is None or not server.uncut:
        return {}
    parameters: Mapping[str, Any] = server.uncut["policy"]
    return parameters


def parameters_of(policy: Policy) -> dict[str, object]:
    """Return the policy's parameters by name."""
    parameters = {}
    for parameter in fields(cast("DataclassInstance", policy)):
        parameters[parameter.name] = getattr(policy, parameter.name)
    return parameters


def chosen_parameters(policy: Policy) -> dict[str, object]:
    """Return the policy's parameters that are not at their defaults, but for its budget."""
    values = parameters_of(policy)
    chosen: dict[str, object] = {}
    for parameter in fields(cast("DataclassInstance", policy)):
        name = parameter.name
        value = values[name]
        is_budget = name == policy.budget_field
        is_default = value == parameter.default
        # What is no number or text, such as a policy inside another one, can't be typed.
        is_typed = isinstance(value, int | float | str)
        if is_typed and not is_budget and not is_default:
            chosen[name] = value
    return chosen


def _longest_of_workload(plan: Plan) -> int:
    """Return the most tokens of a sequence: the workload's bound, as other seeds draw longer
    requests than those of the run, or of a trace its longest row, within the model's positions.
    """
    if plan.config["max_model_len"] is not None:
        return plan.max_model_len
    bound = plan.config["workload"].get("max_len")
    max_position = plan.spec.max_position
    if isinstance(bound, int):
        return max(plan.max_model_len, min(bound, max_position))
    workload = build(plan.cfg.workload, Workload)
    if isinstance(workload, Trace):
        whole_trace = replace(workload, max_requests=None, part=0)
        load = whole_trace.within(max_position).generate(None)
        return max(request.total_len for request in load.requests)
    return plan.max_model_len


def simulated(plan: Plan) -> Simulated:
    """Return what a server must repeat of a run."""
    engine = plan.engine
    return Simulated(
        plan.policy,
        engine.batch_size,
        _longest_of_workload(plan),
        engine.num_blocks,
        engine.block_size,
        simulated_options(plan),
    )


def simulated_options(plan: Plan) -> dict[str, object]:
    """Return what was simulated beside policy and sizes, by the names of servers.yaml."""
    config = OmegaConf.create(plan.config)
    options = _options_of_host(plan.config["host"])
    for name, usual in USUAL.items():
        value = OmegaConf.select(config, name)
        if value not in (usual, None):
            options[name] = value
    num_engines = plan.engine.cluster.num_instances
    if num_engines > 1:
        name = "engines"
        if plan.spec.num_experts:
            # Servers whose engines share the experts of a mixture have the same flag for it.
            name = "engines of a mixture"
        options[name] = num_engines
    drafts = plan.engine.speculation.tokens
    if drafts:
        options["drafts"] = drafts
    return options


def _options_of_host(host: Mapping[str, Any]) -> dict[str, object]:
    """Return what was simulated of a host, where it is a server's."""
    if host["name"] == NO_HOST:
        return {}
    options = {"host.overlaps": host["overlaps"]}
    graphs = host["graphs"]
    if graphs is None or graphs["mode"] is None:
        return options
    options["host.graphs.mode"] = graphs["mode"]
    if graphs["mode"] == "none":
        return options
    if graphs["sizes"] is None:
        options["host.graphs.largest"] = graphs["largest"]
    else:
        options["host.graphs.sizes"] = " ".join(map(str, graphs["sizes"]))
    return options


def server_flags(simulated: Simulated) -> ServerFlags | None:
    """Return the flags of the policy's server; None for a rule that no server has.

    The budget is the least from the simulated one on that the server's rule allows, or the largest.
    """
    policy = simulated.policy
    server = server_of(policy)
    if server is None:
        return None
    tokens = simulated.tokens
    budget = server.allowed_budget(simulated.budget, tokens)
    tokens["budget"] = budget
    is_whole = server.leaves_whole(policy)
    flags = [template.format(**tokens) for template in server.flags]
    if is_whole:
        flags += server.uncut["flags"]
    else:
        flags += server.chunked
    entries: list[str] = []
    of_checkpoint: list[str] = []
    without: list[str] = []
    texts = {**server.options, **server.parameters}
    spellings = {**texts, **server.file}
    settings = {**simulated.options, **chosen_parameters(policy)}
    for name, value in settings.items():
        text = typed(value)
        with_value = f"{name}={text}"
        # A server may have a flag for one value of a setting, another or none for others.
        spelled = name
        if with_value in spellings:
            spelled = with_value
        if spelled in texts:
            flags.append(texts[spelled].format(text, **tokens))
        elif spelled in server.file:
            entries.append(server.file[spelled].format(text, **tokens))
        elif with_value in server.of_checkpoint:
            of_checkpoint.append(with_value)
        else:
            without.append(with_value)
    lines = _yaml_lines(entries)
    if lines:
        flags.append("--config options.yaml")
    notes: list[str] = []
    if budget != simulated.budget:
        notes.append(_moved(server, simulated.budget, tokens))
    if is_whole:
        notes.append("chunked prefill is off, so it cuts no prompt")
    else:
        notes.append(server.remark.format(**tokens))
        if least_budget(policy, simulated.batch_size + 1) > budget:
            notes.append(f"beside more than its {simulated.batch_size} sequences it cuts no prompt")
    if of_checkpoint:
        notes.append(f"{', '.join(of_checkpoint)} needs no flag, as the checkpoint states it")
    if without:
        notes.append(f"simulated, and no flag here: {', '.join(without)}")
    return ServerFlags(
        server=server.name,
        command=server.command,
        flags=" ".join(flag for flag in flags if flag),
        file=tuple(lines),
        effective_budget=budget,
        note="; ".join(notes),
        source=server.source,
    )


def _yaml_lines(entries: Sequence[str]) -> list[str]:
    """Return entries such as "section.key: value" as lines of a YAML file, a line a section."""
    lines: list[str] = []
    sections: dict[str, list[str]] = {}
    for entry in entries:
        section, dot, of_section = entry.partition(".")
        if dot:
            sections.setdefault(section, []).append(of_section)
        elif entry:  # an empty one is what the server does by default
            lines.append(entry)
    for section, content in sections.items():
        lines.append(f"{section}: {{{', '.join(content)}}}")
    return lines


def _moved(server: Server, wanted: int, tokens: Mapping[str, int]) -> str:
    """Explain why the budget is not the simulated one."""
    budget = tokens["budget"]
    moved = "lowered"
    if budget > wanted:
        moved = "rounded up"
    rule = server.rule.format(**tokens)
    return f"{moved} from {wanted} to {budget}: {rule}"


def typed(value: object) -> str:
    """Write a value as flags have it."""
    text = str(value)
    if isinstance(value, bool):
        return text.lower()
    return text
