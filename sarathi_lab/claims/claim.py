"""A claim as `experiments/claims.yaml` states it, and how a measured value is judged by it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sarathi_lab.errors import UserError, require_number, require_one_of
from sarathi_lab.paths import EXPERIMENTS

CLAIMS = EXPERIMENTS / "claims.yaml"
Direction = Literal["at least", "at most", "near"]
Take = Literal["max", "min", "median", "x of max", "last / first"]
Verdict = Literal["holds", "partly", "fails", "not measured"]


@dataclass(frozen=True)
class Claim:
    """One claim. Its value is read from the rows of `experiment` that `where` (a pandas query) chooses.

    `take` makes one value of them: the "max", "min" or "median" of y, the x at which y is largest, or the y at the
    largest x over that at the smallest. The claim holds if the value is `direction` the `expected` one within the
    relative `tolerance`; `neutral` is the value of no effect at all, beyond which a claim that misses its number holds
    partly. `caveat` says what the number depends on.
    """

    id: str
    claim: str
    source: str
    experiment: str
    where: str
    expected: float
    direction: Direction
    tolerance: float
    caveat: str
    take: Take = "max"
    unit: str = "ratio"
    neutral: float | None = None

    def __post_init__(self) -> None:
        for name, valid in (("direction", get_args(Direction)), ("take", get_args(Take))):
            require_one_of(f"claims.yaml: {self.id}.{name}", getattr(self, name), valid)
        fix = "write the share of it, such as 0.1"
        require_number(f"claims.yaml: {self.id}.tolerance", self.tolerance, minimum=0, fix=fix)

    def judge(self, value: float, low: float, high: float) -> Verdict:
        """The verdict on a measured value with its interval.

        A claim holds only if "no effect" is outside of the interval, and one of "near" not where the interval is so
        wide (twice the tolerance) that it decides nothing.
        """
        if math.isnan(value):
            return "not measured"
        is_beyond = self._is_beyond_neutral(low, high)
        if self._is_met(value):
            return "partly" if is_beyond is False or self._is_vague(low, high) else "holds"
        if self.direction == "near" and self._is_met(low, high):
            return "partly"
        return "partly" if is_beyond else "fails"

    def _is_met(self, low: float, high: float | None = None) -> bool:
        """Whether some value of [low, high] is what is expected."""
        high = low if high is None else high
        slack = self.tolerance * abs(self.expected)
        if self.direction == "at least":
            return high >= self.expected - slack
        if self.direction == "at most":
            return low <= self.expected + slack
        return low <= self.expected + slack and high >= self.expected - slack

    def _is_vague(self, low: float, high: float) -> bool:
        slack = 2 * self.tolerance * abs(self.expected)
        return self.direction == "near" and (low < self.expected - slack or high > self.expected + slack)

    def _is_beyond_neutral(self, low: float, high: float) -> bool | None:
        """Whether the whole interval is on the claimed side of no effect; None if no such value is stated."""
        if self.neutral is None:
            return None
        is_upward = self.direction == "at least" or (self.direction == "near" and self.expected > self.neutral)
        return low > self.neutral if is_upward else high < self.neutral


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file. Raises UserError for one that is not written as `Claim` has it."""
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(path))
        return [_claim(entry) for entry in entries]
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} can't be read ({str(error).splitlines()[0]}); restore it from git") from None


def _claim(entry: dict[str, Any]) -> Claim:
    known = [field.name for field in fields(Claim)]
    for name in entry:
        require_one_of(f"claims.yaml: {entry.get('id')}", name, known)
    try:
        return Claim(**entry)
    except TypeError as error:
        raise UserError(f"claims.yaml: {entry.get('id')}: {str(error).partition(')')[2].strip()}; add it") from None
