"""A token budget as the flags of serving systems, by the rules of `servers.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sarathi_lab.config.errors import UserError


@cache
def read_servers() -> list[dict[str, Any]]:
    """Read the rows of servers.yaml, whose fields are described there."""
    rows: list[dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("servers.yaml").read_text()
    )
    return rows


def server_flags(
    budget: int,
    *,
    batch_size: int,
    max_model_len: int,
    page_size: int = 64,
    is_whole: bool = False,
) -> pd.DataFrame:
    """List the settings of every server for iterations of `budget` tokens, decodes included; with
    `is_whole` of those that can disable cutting, for a budget that fits any prompt.

    Columns: server, flags (one line to type), effective_budget (tokens of an iteration that they
    mean: the least from `budget` on that the rule allows, or the largest), note, source.
    `page_size` is of servers that let one choose it. Raises UserError for one above
    `max_model_len`.
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
        off = {"unit": 1, "remark": "chunked prefill is off, so it cuts no prompt"}
        servers = [{**one, "flags": one["whole"], **off} for one in servers if "whole" in one]
    return pd.DataFrame([_settings(server, budget, tokens) for server in servers])


def _settings(
    server: Mapping[str, Any], wanted: int, tokens: Mapping[str, int]
) -> dict[str, object]:
    """Return a server's row; its bounds and unit are tokens, or names in `tokens`."""
    least = max(wanted, *(tokens.get(name, name) for name in server["minimum"]))
    unit = tokens.get(server.get("unit", 1), server.get("unit", 1))
    budget = -(-least // unit) * unit
    if "maximum" in server:
        budget = min(budget, tokens[server["maximum"]] // unit * unit)
    flags, rule, note = (
        template.format(budget=budget, **tokens)
        for template in (" ".join(server["flags"]), server["rule"], server["remark"])
    )
    if budget != wanted:
        moved = "rounded up" if budget > wanted else "lowered"
        note = f"{moved} from {wanted} to {budget}: {rule}; {note}"
    return {
        "server": server["name"],
        "flags": flags,
        "effective_budget": budget,
        "note": note,
        "source": server["source"],
    }
