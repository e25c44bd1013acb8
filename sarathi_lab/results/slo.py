"""Service level objectives: bounds of latencies (config group `slo`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sarathi_lab.config.checked import check_fields, number, whole
from sarathi_lab.config.errors import UserError, require_int

BOUNDS = ("ttft", "tbt", "tpot", "scheduling_delay")
SECONDS = "use seconds, or null for no bound"
SHARE = "use a share of the tokens or requests, such as 0.99"


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Bounds in seconds, or None, of the `quantile` of time to first token (`ttft`), between tokens
    (`tbt`) and per output token (`tpot`), and of the median `scheduling_delay`.

    With a `tbt_factor` the `tbt` bound is that multiple of a decode-only iteration of
    `decode_batch` sequences at `decode_context` tokens on the device (Sarathi-Serve, section 5.1:
    5 strict, 25 relaxed, of 32 at 4K), fewer where the run's are. Raises UserError.
    """

    name: str
    ttft: float | None = number(None, above=0, fix=SECONDS)
    tbt: float | None = number(None, above=0, fix=SECONDS)
    tpot: float | None = number(None, above=0, fix=SECONDS)
    scheduling_delay: float | None = number(None, above=0, fix=SECONDS)
    quantile: float = number(0.99, above=0, fix=SHARE)
    tbt_factor: float | None = number(None, above=0, fix="use decode iterations such as 5")
    decode_batch: int = whole(32, minimum=1, fix="use a number of sequences such as 32")
    decode_context: int = whole(4096, minimum=2, fix="use a number of tokens such as 4096")

    def __post_init__(self) -> None:
        check_fields(self, "slo.")
        if self.quantile > 1:
            raise UserError(f"slo.quantile={self.quantile} exceeds 1; {SHARE}")
        if self.tbt_factor is not None and self.tbt is not None:
            raise UserError(f"slo.tbt={self.tbt} and slo.tbt_factor={self.tbt_factor}: drop one")

    @property
    def bounds(self) -> Mapping[str, float]:
        """Return the bounds that are set, by name."""
        return {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}

    @property
    def is_relative(self) -> bool:
        """Return whether a bound depends on the time of a decode iteration."""
        return self.tbt_factor is not None

    def resolved(self, decode_seconds: float | None) -> Slo:
        """Return the objective with its relative bound in seconds, if that is known."""
        if self.tbt_factor is None or decode_seconds is None:
            return self
        return replace(self, tbt=self.tbt_factor * decode_seconds, tbt_factor=None)

    def describe(self) -> str:
        """Describe it, such as "P99 TBT 100 ms, P50 scheduling delay 2000 ms"."""
        percent = f"P{100 * self.quantile:g}"
        words = {name: f"{percent} {name.upper()}" for name in ("ttft", "tbt", "tpot")}
        words["scheduling_delay"] = "P50 scheduling delay"
        parts = [f"{words[name]} {1e3 * bound:.4g} ms" for name, bound in self.bounds.items()]
        if self.tbt_factor is not None:
            parts.insert(0, f"{words['tbt']} {self.tbt_factor:g} decode iterations")
        return ", ".join(parts) or "no bounds"


@dataclass(frozen=True)
class Targets:
    """Targets of a run's latencies: the objective, the gap [s] that counts as a generation stall,
    and the prompt lengths [tokens] from which prompts are medium and long. Raises UserError.
    """

    slo: Slo = field(default_factory=lambda: Slo(name="none"))
    stall: float = number(0.2, above=0, fix="use seconds such as 0.2")
    prompt_classes: Sequence[int] = (512, 2048)

    def __post_init__(self) -> None:
        check_fields(self)
        fix = "use the tokens from which prompts are of medium length, and long, such as [512,2048]"
        bounds: Any = self.prompt_classes
        if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
            raise UserError(f"prompt_classes={bounds} are not two lengths; {fix}")
        for bound in bounds:
            require_int("prompt_classes", bound, 1, fix)
        if bounds[0] >= bounds[1]:
            raise UserError(f"prompt_classes={list(bounds)} do not ascend; {fix}")
