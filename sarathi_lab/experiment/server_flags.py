"""A token budget as the flags of serving systems that chunk prompts, each system's rules kept.

The budget is `chunk` of the policies: tokens of one iteration, decodes included. The systems and
their rules are listed in servers.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from sarathi_lab.config.errors import UserError, require_int


@dataclass(frozen=True)
class ServerFlag:
    """A server's settings: `flags` to type in order, and the tokens of one iteration they mean."""

    server: str
    flags: tuple[str, ...]
    effective_budget: int
    note: str
    source: str


@dataclass(frozen=True)
class Scenario:
    """Sequences of a batch, tokens of the longest sequence, and tokens of a cache page."""

    batch_size: int
    max_model_len: int
    page_size: int

    def tokens(self) -> dict[str, int]:
        """All quantities that servers.yaml may name."""
        num_decodes = self.batch_size - 1  # the most beside a prompt
        return {
            **vars(self),
            "num_decodes": num_decodes,
            "all_tokens": self.batch_size * self.max_model_len,
            "page_beside_decodes": self.page_size + num_decodes,
        }


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

    def settings(self, wanted: int, scenario: Scenario) -> ServerFlag:
        """The least budget from `wanted` tokens on that the rule allows, or the most it allows.

        The note states a rule that moves it.
        """
        tokens = scenario.tokens()

        def value(name: str | int) -> int:
            return name if isinstance(name, int) else tokens[name]

        unit = value(self.unit)
        budget = -(-max(wanted, *map(value, self.minimum)) // unit) * unit
        if self.maximum is not None:
            budget = min(budget, value(self.maximum) // unit * unit)

        def filled(template: str) -> str:
            return template.format(budget=budget, **tokens)

        moved = "rounded up" if budget > wanted else "lowered"
        why = (
            "" if budget == wanted else f"{moved} from {wanted} to {budget}: {filled(self.rule)}; "
        )
        flags = tuple(map(filled, self.flags))
        return ServerFlag(self.name, flags, budget, why + filled(self.remark), self.source)


@cache
def read_servers() -> tuple[Server, ...]:
    """The rows of servers.yaml."""
    rows = yaml.safe_load(Path(__file__).with_name("servers.yaml").read_text())
    return tuple(Server(**row) for row in rows)


def flags(
    budget: int, *, batch_size: int, max_model_len: int, page_size: int = 64
) -> list[ServerFlag]:
    """The settings of every server for iterations of `budget` tokens, decodes included.

    `page_size` is the tokens of a cache page or block of servers that let one choose it. Raises
    UserError for numbers below 1, and for sequences shorter than a page: no budget suits these.
    """
    require_int("budget", budget, 1, "use a number of tokens such as 256")
    require_int("batch_size", batch_size, 1, "use a number of sequences such as 8")
    require_int("page_size", page_size, 1, "use a number of tokens such as 64")
    require_int("max_model_len", max_model_len, 1, "use a number of tokens such as 4096")
    if max_model_len < page_size:
        raise UserError(
            f"max_model_len={max_model_len} is less than one page of {page_size}; use a smaller "
            "page_size"
        )
    scenario = Scenario(batch_size, max_model_len, page_size)
    return [server.settings(budget, scenario) for server in read_servers()]
