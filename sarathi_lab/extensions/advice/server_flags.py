"""A token budget as the flags of serving systems, by the rules of `servers.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from sarathi_lab.config.errors import UserError


@dataclass(frozen=True)
class ServerFlag:
    """A server's settings: `flags` in order, and the tokens of one iteration that they mean."""

    server: str
    flags: tuple[str, ...]
    effective_budget: int
    note: str
    source: str


@dataclass(frozen=True)
class Server:
    """A row of servers.yaml: flag templates, and the rule of the budget as bounds and a unit."""

    name: str
    flags: tuple[str, ...]
    rule: str
    remark: str
    source: str
    minimum: tuple[str | int, ...]
    unit: str | int = 1
    maximum: str | int | None = None
    whole: tuple[str, ...] = ()  # with chunked prefill off; empty without such a switch

    def settings(self, wanted: int, tokens: Mapping[str, int]) -> ServerFlag:
        """Choose the least budget from `wanted` tokens that the rule allows, or the largest;
        `tokens` are the quantities that the row may name.
        """

        def value(name: str | int) -> int:
            return name if isinstance(name, int) else tokens[name]

        unit = value(self.unit)
        budget = -(-max(wanted, *map(value, self.minimum)) // unit) * unit
        if self.maximum is not None:
            budget = min(budget, value(self.maximum) // unit * unit)
        *flags, rule, remark = (
            template.format(budget=budget, **tokens)
            for template in (*self.flags, self.rule, self.remark)
        )
        if budget != wanted:
            moved = "rounded up" if budget > wanted else "lowered"
            remark = f"{moved} from {wanted} to {budget}: {rule}; {remark}"
        return ServerFlag(self.name, tuple(flags), budget, remark, self.source)


@cache
def read_servers() -> tuple[Server, ...]:
    rows = yaml.safe_load(Path(__file__).with_name("servers.yaml").read_text())
    return tuple(Server(**row) for row in rows)


def server_flags(
    budget: int,
    *,
    batch_size: int,
    max_model_len: int,
    page_size: int = 64,
    is_whole: bool = False,
) -> list[ServerFlag]:
    """List the settings of every server for iterations of `budget` tokens, decodes included; with
    `is_whole` of those that can disable cutting, for a budget that fits any prompt.

    The rules are those of servers.yaml; `page_size` is of servers that let one choose it. Raises
    UserError for a page above `max_model_len`.
    """
    if max_model_len < page_size:
        raise UserError(
            f"max_model_len={max_model_len} is less than one page of {page_size}; use a smaller "
            "page_size"
        )
    num_decodes = batch_size - 1  # the most beside a prompt
    tokens = {
        "batch_size": batch_size,
        "max_model_len": max_model_len,
        "page_size": page_size,
        "num_decodes": num_decodes,
        "all_tokens": batch_size * max_model_len,
        "page_beside_decodes": page_size + num_decodes,
    }
    servers = read_servers()
    if is_whole:
        remark = "chunked prefill is off, so it cuts no prompt"
        whole = (server for server in servers if server.whole)
        servers = tuple(replace(one, flags=one.whole, unit=1, remark=remark) for one in whole)
    return [server.settings(budget, tokens) for server in servers]
