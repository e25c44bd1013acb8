"""A card by its datasheet: its own peaks, memory and links, and the kernels of a measured card."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any, NamedTuple

from sarathi_lab.config.errors import UserError, require_int, require_number, require_text
from sarathi_lab.config.instantiate import build, option_files, read_option
from sarathi_lab.executor.simulated.hardware import (
    EXPERTS,
    OF_DATASHEET,
    UNCERTAIN,
    Figures,
    Hardware,
)

# Mean relative error of kernels that were not measured. Seven measured cards that are described so
# are off by 0.05 to 0.354 each, and by up to 0.62 in one kind of kernel, an L40S's prompts
# (tests/executor/test_cost_fit.py).
ASSUMED_ERROR = 0.36
# All of these are NVIDIA's. Of another maker's more than that worst kind is assumed.
ERROR_OF_OTHER_MAKER = 0.65
BASE = "h100"  # whose kernels are assumed where none is named


class Unit(NamedTuple):
    """The unit of a figure, the least that a card has of it, and an example. Less is no card that
    serves models, but a figure in another unit, such as 500 for 500 TFLOP/s.
    """

    name: str
    least: float
    example: str


FLOPS = Unit("FLOP/s", 1e12, "989e12 for 989 TFLOP/s")
LINKS = Unit("bytes/s", 1e8, "450e9 for 450 GB/s")
UNITS = {
    **dict.fromkeys(("peak", "fp8_peak", "fp4_peak", "int8_peak"), FLOPS),
    **dict.fromkeys(("link", "network"), LINKS),
    "bandwidth": Unit("bytes/s", 1e10, "3.35e12 for 3.35 TB/s"),
    "memory": Unit("bytes", 1e9, "40e9 for 40 GB"),
    "l2": Unit("bytes", 1e6, "50e6 for 50 MB"),
}


def datasheet(
    name: str,
    base: str | None = None,
    peak: float | None = None,
    bandwidth: float | None = None,
    memory: float | None = None,
    link: float | None = None,
    network: float | None = None,
    fp8_peak: float | None = None,
    fp4_peak: float | None = None,
    int8_peak: float | None = None,
    num_sms: int | None = None,
    l2: float | None = None,
    error: float | None = None,
    maker: str | None = None,
) -> Hardware:
    """Make the `Hardware` of a card whose kernels were not measured: its own peaks, and the shares
    of them, launches and other figures of `base`, an option of hardware.

    With a `base` what is not stated is that card's; without one, `peak`, `bandwidth` and `memory`
    must be stated, links are unknown, and shares are those of the H100.

    Args:
        name: The card's.
        base: The measured card whose figures its kernels have; None: the H100's.
        peak: FLOP/s of dense products in 16 bits.
        bandwidth: Bytes/s of its memory.
        memory: Bytes, as torch.cuda's properties print them.
        link: Bytes/s to another device of its node, in one direction.
        network: Bytes/s to another node.
        fp8_peak: FLOP/s of dense products in 8 bits; None: that of `base`, or none where `peak` is
            the card's own, which may be of a generation without such products.
        fp4_peak: The same of products in 4 bits.
        int8_peak: The same of integers of 8 bits; None: also none where `fp8_peak` is its own.
        num_sms: Multiprocessors; None: as many as reach the peak with those of `base`.
        l2: Bytes of its L2 cache; None: those of `base`.
        error: The mean relative error of its kernels' times that is assumed; None: `ASSUMED_ERROR`,
            or `ERROR_OF_OTHER_MAKER`.
        maker: "nvidia" or "amd"; None: that of `base`, unknown without one. A card of another maker
            than the measured one has none of its attention backends.

    Raises:
        UserError: For a figure that is missing or impossible, or a `base` that is no measured card.
    """
    require_text("hardware.name", name, "name the card, such as hardware.name=h100-pcie")
    figures = {
        "peak": peak,
        "bandwidth": bandwidth,
        "memory": memory,
        "link": link,
        "network": network,
        "fp8_peak": fp8_peak,
        "fp4_peak": fp4_peak,
        "int8_peak": int8_peak,
        "l2": l2,
    }
    for figure, value in figures.items():
        if value is not None:
            _require_plausible(figure, value)
    stated = {figure for figure, value in figures.items() if value is not None}
    if num_sms is not None:
        require_int("hardware.num_sms", num_sms, 1, "use the number of multiprocessors")
    own = _own_figures(stated, has_base=base is not None)
    measured = _measured(base or BASE)
    settings: dict[str, Any] = {
        field: figures[figure] for field, figure in OF_DATASHEET.items() if figure in own
    }
    if num_sms is None:
        num_sms = measured.num_sms
        if peak is not None:
            num_sms = max(1, round(num_sms * (peak / measured.flops_per_second)))
    if maker is None and base is not None:
        maker = measured.maker
    assumed_error = ASSUMED_ERROR
    if maker not in (None, measured.maker):
        assumed_error = ERROR_OF_OTHER_MAKER
        settings |= {"kernels": {}, "kernel": None, "hybrid_call": None}
    if error is not None:
        advice = "use a share of the measured time such as 0.36"
        assumed_error = require_number("hardware.error", error, above=0, fix=advice)
    of_all = dict.fromkeys(UNCERTAIN, assumed_error)
    return replace(
        measured,
        name=name,
        is_datasheet=True,
        tables=None,
        num_sms=num_sms,
        l2_bytes=l2 or measured.l2_bytes,
        maker=maker,
        uncertainty={**of_all, EXPERTS: assumed_error},
        latent=_uncertain(measured.latent, of_all),
        linear=_uncertain(measured.linear, assumed_error),
        **settings,
    )


def _own_figures(stated: Set[str], *, has_base: bool) -> Set[str]:
    """Return the figures that a card has in place of the measured one's, or that are unknown.
    Raises UserError where there is no base for what must be known.
    """
    own = set(stated)
    if not has_base:
        needed = ("peak", "bandwidth", "memory")
        for figure in needed:
            if figure not in stated:
                raise UserError(
                    f"hardware.{figure} is not stated, and there is no hardware.base to take it "
                    f"from; state {', '.join(f'hardware.{each}' for each in needed)}, or a "
                    "measured card as hardware.base=h100"
                )
        own |= set(OF_DATASHEET.values())
    # Not those of the base: the card may be of a generation without such products.
    if "peak" in own:
        own |= {"fp8_peak", "fp4_peak"}
    # Cards of a generation differ in it: a B300 has a thirtieth of a B200's.
    if "fp8_peak" in own:
        own.add("int8_peak")
    return own


def _require_plausible(figure: str, value: object) -> None:
    """Raise UserError for a figure that no card has."""
    unit = UNITS[figure]
    advice = f"use the datasheet's number in {unit.name}, such as {unit.example}"
    number = require_number(f"hardware.{figure}", value, above=0, fix=advice)
    if number < unit.least:
        raise UserError(f"hardware.{figure}={value:g} is less than any card has; {advice}")


def _uncertain(figures: Figures, error: object) -> Figures:
    """Return the figures of a kind of attention, if there are such, with another error."""
    return {**figures, "uncertainty": error} if figures else figures


def _measured(name: str) -> Hardware:
    """Return the card whose kernels are taken. Raises UserError for one that was not measured."""
    target = f".{Hardware.__name__}"
    files = option_files("hardware")
    nodes = {option: read_option("hardware", path) for option, path in files.items()}
    measured = [option for option, node in nodes.items() if node["_target_"].endswith(target)]
    if name not in measured:
        raise UserError(
            f"hardware.base={name} is no card whose kernels were measured; use one of "
            f"{', '.join(measured)}, or leave it out"
        )
    return build(nodes[name], Hardware)
