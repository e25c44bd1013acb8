"""What was simulated as the flags of the server whose policy it was, by the rules of
`servers.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from sarathi_lab.policy import Policy

# Parameters that are tokens of a page of the cache, or of which chunks are multiples.
UNITS = ("page_size", "chunk_unit_size")
LEFT_OUT = ("watermark", "reserve")  # of how the lab's cache stands for the server's


@dataclass(frozen=True)
class Simulated:
    """What a server's flags must repeat.

    Attributes:
        policy: The policy with its token budget.
        batch_size: The most sequences at a time.
        max_model_len: The most tokens of a sequence.
        kv_tokens: Tokens of the cache.
        options: What else was simulated, by the names of `options` in servers.yaml: a value, or
            True where the name has it.
    """

    policy: Policy
    batch_size: int
    max_model_len: int
    kv_tokens: int = 0
    options: Mapping[str, object] = field(default_factory=dict)


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


@cache
def read_servers() -> list[dict[str, Any]]:
    """Read the rows of servers.yaml, whose fields are described there."""
    rows: list[dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("servers.yaml").read_text()
    )
    return rows


def server_of(policy: Policy) -> dict[str, Any] | None:
    """Return the row of the server that serves by `policy`; None for a rule that no server has."""
    for server in read_servers():
        wanted = {**server["policy"]}
        has_name = wanted.pop("name") == policy.name
        if has_name and all(getattr(policy, name) == value for name, value in wanted.items()):
            return server
    return None


def unit_of(policy: Policy) -> int:
    """Return the tokens that the budget of the policy's server is a multiple of."""
    server = server_of(policy)
    unit = server.get("unit", 1) if server is not None else 1
    return _own_unit(policy) if unit == "unit" else int(unit)


def whole_variant(policy: Policy) -> dict[str, Any] | None:
    """Return the parameters by which the policy's server leaves prompts whole; None if none do."""
    server = server_of(policy)
    whole: dict[str, Any] | None = server.get("whole") if server is not None else None
    return None if whole is None else whole["policy"]


def server_flags(simulated: Simulated) -> ServerFlags | None:
    """Return the flags of the policy's server; None for a rule that no server has.

    The budget is the least from the simulated one on that the server's rule allows, or the largest.
    """
    policy = simulated.policy
    server = server_of(policy)
    if server is None:
        return None
    tokens = _tokens(simulated)
    budget = _allowed_budget(server, cast(int, policy.budget), tokens)
    tokens["budget"] = budget
    flags = [template.format(**tokens) for template in server["flags"]]
    flags += _cutting(server, policy)
    lines: list[str] = []
    without: list[str] = []
    for name, value in {**simulated.options, **chosen_parameters(policy)}.items():
        texts = {**server.get("options", {}), **server.get("parameters", {})}
        in_file = server.get("file", {})
        if name in texts:
            flags.append(texts[name].format(typed(value), **tokens))
        elif name in in_file:
            lines.append(in_file[name].format(typed(value), **tokens))
        else:
            without.append(name if value is True else f"{name}={typed(value)}")
    lines = [line for line in lines if line]
    if lines:
        flags.append("--config options.yaml")
    return ServerFlags(
        server=server["name"],
        command=server["command"],
        flags=" ".join(flag for flag in flags if flag),
        file=tuple(lines),
        effective_budget=budget,
        note=_note(server, policy, budget, tokens, without),
        source=server["source"],
    )


def _tokens(simulated: Simulated) -> dict[str, int]:
    """Return the numbers that servers.yaml names."""
    num_decodes = simulated.batch_size - 1  # the most beside a prompt
    unit = _own_unit(simulated.policy)
    return {
        "batch_size": simulated.batch_size,
        "max_model_len": simulated.max_model_len,
        "kv_tokens": simulated.kv_tokens,
        "unit": unit,
        "num_decodes": num_decodes,
        "all_tokens": simulated.batch_size * simulated.max_model_len,
        "unit_beside_decodes": unit + num_decodes,
    }


def _own_unit(policy: Policy) -> int:
    """Return the tokens of the policy's page, or of which it cuts prompts; 1 without such a one."""
    for name in UNITS:
        if (unit := getattr(policy, name, None)) is not None:
            return int(unit)
    return 1


def _allowed_budget(server: Mapping[str, Any], wanted: int, tokens: Mapping[str, int]) -> int:
    """Return the least budget from `wanted` on that the server's rule allows, or the largest."""
    least = max(wanted, *(tokens.get(name, name) for name in server["minimum"]))
    unit = tokens.get(server.get("unit", 1), server.get("unit", 1))
    budget: int = -(-least // unit) * unit
    if "maximum" in server:
        budget = min(budget, tokens[server["maximum"]] // unit * unit)
    return budget


def _cutting(server: Mapping[str, Any], policy: Policy) -> list[str]:
    """Return the flags that let prompts be cut, or be left whole, where a server has both."""
    chunked: list[str] = server.get("chunked", [])
    whole: list[str] = server["whole"]["flags"] if _is_whole(server, policy) else chunked
    return whole


def _is_whole(server: Mapping[str, Any], policy: Policy) -> bool:
    parameters = server.get("whole", {}).get("policy", {})
    values = [getattr(policy, name) == value for name, value in parameters.items()]
    return bool(values) and all(values)


def chosen_parameters(policy: Policy) -> dict[str, object]:
    """Return the policy's parameters that are not at their defaults, but for its budget."""
    chosen: dict[str, object] = {}
    for parameter in fields(cast(Any, policy)):
        value = getattr(policy, parameter.name)
        is_left_out = parameter.name in (policy.budget_field, *LEFT_OUT)
        is_default = parameter.default is not MISSING and value == parameter.default
        if not is_left_out and not is_default and isinstance(value, int | float | str):
            chosen[parameter.name] = value
    return chosen


def _note(
    server: Mapping[str, Any],
    policy: Policy,
    budget: int,
    tokens: Mapping[str, int],
    without: list[str],
) -> str:
    remark = server["remark"].format(**tokens)
    if _is_whole(server, policy):
        remark = "chunked prefill is off, so it cuts no prompt"
    notes = [remark]
    wanted = cast(int, policy.budget)
    if budget != wanted:
        moved = "rounded up" if budget > wanted else "lowered"
        rule = server["rule"].format(**tokens)
        notes.insert(0, f"{moved} from {wanted} to {budget}: {rule}")
    if without:
        notes.append(f"simulated, and no flag here: {', '.join(without)}")
    return "; ".join(notes)


def typed(value: object) -> str:
    """Write a value as flags have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
