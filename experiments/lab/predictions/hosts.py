"""Hold measured times of mixtures on vLLM against both hosts that it may have, on every device.

    python experiments/lab/predictions/hosts.py

Takes the settings from the entries and the times from their results, so that it needs no other
file. Writes `hosts.csv`: errors by entry, card, number of devices and host, without the settings of
gpt-oss-120b with 512 users, which the page doubts; and `users.csv`: their mean, least and most by
the number of users, too. It is no prediction: the times are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TypedDict

import pandas as pd
import score
import served_mixtures
import yaml
from served_mixtures import ENTRIES

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Host, Parallel

HOSTS = ("vllm_0_19", "vllm_async")
SETTING = re.compile(r"(\d+) x (\w+), (\d+) \+ (\d+) tokens, (\d+) users")
DOUBTED = ("gpt_oss_120b", 512)  # an entry, and a number of users
GROUP = ["entry", "card", "devices", "host"]


class Row(TypedDict):
    """A measured time beside the one that a host gives, and what it was measured of."""

    entry: str
    card: str
    devices: int
    host: str
    users: int
    error: float


def main() -> None:
    rows: list[Row] = []
    for name, source in ENTRIES.items():
        if source.host == "vllm_0_19":
            rows.extend(errors_of(name))
    errors = pd.DataFrame(rows)
    table = summary(errors)
    table.to_csv(score.LEDGER / "hosts.csv", index=False, float_format="%.6f")
    of_users = by_users(errors)
    of_users.to_csv(score.LEDGER / "users.csv", index=False, float_format="%.6f")
    print(table.to_string(index=False))


def errors_of(name: str) -> Iterator[Row]:
    """Yield the relative error of each measured time by each host."""
    path = score.LEDGER / f"{name}.result.yaml"
    measured = yaml.safe_load(path.read_text())["measured"]
    for text, milliseconds in measured.items():
        match = SETTING.fullmatch(text)
        assert match, f"{path.name}: {text!r} is no setting"
        card = match[2]
        degree, prompt, answer, users = (int(match[group]) for group in (1, 3, 4, 5))
        if (name, users) == DOUBTED:
            continue
        for host_name in HOSTS:
            host, cost = _server(name, card, degree, host_name)
            setting = (card, float(degree), prompt, answer, float(users))
            simulated = 1e3 * served_mixtures.token_time(cost, host, setting)
            yield Row(
                entry=name,
                card=card,
                devices=degree,
                host=host_name,
                users=users,
                error=simulated / milliseconds - 1,
            )


@cache
def _server(name: str, card: str, degree: int, host_name: str) -> tuple[Host, CostModel]:
    """Load a host, and the cost model of `degree` devices that its kernels run on."""
    host: Host = load_option("host", host_name)
    hardware = load_option("hardware", card).with_kernel(host.attention_kernel)
    return host, make_cost_model("analytic", ENTRIES[name].spec, hardware, 2, Parallel(degree))


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return points, mean error, its mean with sign, and how many are too fast, by `GROUP`."""
    judged = rows.assign(absolute=rows.error.abs(), too_fast=rows.error < 0)
    return (
        judged.groupby(GROUP, sort=False)
        .agg(
            points=("error", "size"),
            mean_error=("absolute", "mean"),
            bias=("error", "mean"),
            too_fast=("too_fast", "sum"),
            lowest=("error", "min"),
            highest=("error", "max"),
        )
        .reset_index()
    )


def by_users(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean error with sign, the least and the most, by `GROUP` and number of users."""
    groups = rows.groupby([*GROUP, "users"]).error
    errors = groups.agg(points="size", value="mean", low="min", high="max")
    return errors.reset_index().assign(unit="share")


if __name__ == "__main__":
    main()
