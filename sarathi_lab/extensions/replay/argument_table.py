"""The table of arguments of serving systems: one for every file that states some.

`server_arguments.csv` has a row for each argument of vLLM's, SGLang's and TensorRT-LLM's servers:

- `short`: a flag that stands for it;
- `kind`: how its value is read where it is text (`inverse`: a flag that switches the setting off;
  `list`: one that has several words on a command line; numbers: those of `argument_values`);
- `setting`: what it is here, as typed on the lab's command line, or one of `OF_FILES`; several are
  separated by a space; "-": it has no effect on a simulation; empty: it is not simulated;
- `neutral`: values (separated by "|") by which an argument that is not simulated does nothing;
- `reason`: why it is not simulated, where that needs words.

A `*` in a name stands for any text; plain names go first.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

# What the lab's command line has no name for: the cache in tokens, as vLLM logs it, and in bytes of
# a device; whether replicas share experts; the server's version; the names that clients use.
LOGGED_CACHE = "cache.logged"
CACHE_BYTES = "cache.bytes"
SERVED_NAMES = "model.served"
OF_FILES = (
    *("cache.tokens", LOGGED_CACHE, CACHE_BYTES, "cluster.shares_experts", "version"),
    SERVED_NAMES,
)
NO_EFFECT = "-"
Arguments = Mapping[str, object]  # values by the server's names
FLAGS = ("flag", "inverse")  # kinds of arguments without a value
# How alike two names are where one is taken for a misspelling of the other.
MISSPELT = 0.85


class Argument(NamedTuple):
    """A row of the table."""

    system: str
    argument: str
    short: str
    kind: str
    setting: str
    neutral: str
    reason: str


@cache
def table(system: str) -> dict[str, Argument]:
    """Return the arguments of a system by name; those with a `*` last."""
    path = Path(__file__).with_name("server_arguments.csv")
    plain = dict[str, Argument]()
    patterns = dict[str, Argument]()
    with path.open(newline="") as file:
        for fields in csv.DictReader(file):
            row = Argument(**fields)
            if row.system != system:
                continue
            rows = patterns if "*" in row.argument else plain
            rows[row.argument] = row
    return {**plain, **patterns}


def find(system: str, name: str) -> Argument | None:
    """Return the row of an argument; None if the table has none."""
    rows = table(system)
    if name in rows:
        return rows[name]
    for pattern, row in rows.items():
        if fnmatch.fnmatchcase(name, pattern):
            return row
    return None


def misspelt(system: str, name: str) -> str | None:
    """Return the argument that `name` is a misspelling of; None if it is like none."""
    names = [argument for argument in table(system) if "*" not in argument]
    close = difflib.get_close_matches(name, names, n=1, cutoff=MISSPELT)
    return next(iter(close), None)
