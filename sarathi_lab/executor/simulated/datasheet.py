"""A card by its datasheet: its own peaks, memory and links, and the kernels of a measured card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sarathi_lab.config.errors import UserError, require_int, require_number, require_text
from sarathi_lab.config.instantiate import build, option_files, read_option
from sarathi_lab.executor.simulated.hardware import EXPERTS, OF_DATASHEET, UNCERTAIN, Hardware

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
    stated = {
        "peak": _rate("peak", peak),
        "bandwidth": _rate("bandwidth", bandwidth),
        "memory": _rate("memory", memory),
        "link": _rate("link", link),
        "network": _rate("network", network),
        "fp8_peak": _rate("fp8_peak", fp8_peak),
        "fp4_peak": _rate("fp4_peak", fp4_peak),
        "int8_peak": _rate("int8_peak", int8_peak),
    }
    measured = _measured(base or BASE)
    settings = _own_figures(stated, has_base=base is not None)
    settings["name"] = name
    settings["is_datasheet"] = True
    settings["tables"] = None
    settings["num_sms"] = _multiprocessors(num_sms, peak, measured)
    if l2 is not None:
        settings["l2_bytes"] = _rate("l2", l2)
    own_maker = maker
    if maker is None and base is not None:
        own_maker = measured.maker
    settings["maker"] = own_maker
    assumed_error = ASSUMED_ERROR
    if own_maker not in (None, measured.maker):
        assumed_error = ERROR_OF_OTHER_MAKER
        settings |= {"kernels": {}, "kernel": None, "hybrid_call": None}
    if error is not None:
        advice = "use a share of the measured time such as 0.36"
        assumed_error = require_number("hardware.error", error, above=0, fix=advice)
    settings["uncertainty"] = dict.fromkeys((*UNCERTAIN, EXPERTS), assumed_error)
    of_latent = dict.fromkeys(UNCERTAIN, assumed_error)
    settings["latent"] = _uncertain(measured.latent, of_latent)
    settings["linear"] = _uncertain(measured.linear, assumed_error)
    return replace(measured, **settings)


def _own_figures(stated: Mapping[str, float | None], *, has_base: bool) -> dict[str, Any]:
    """Return the figures, by the names of `Hardware`, that a card has in place of the measured
    one's. Raises UserError where there is no base for what must be known.

    Args:
        stated: By their names in `datasheet`; None: not stated.
        has_base: Whether what is not stated is the base's; else it is unknown.
    """
    if not has_base:
        _require({name: stated[name] for name in ("peak", "bandwidth", "memory")})
    own = {name for name, figure in stated.items() if figure is not None or not has_base}
    # Not those of the base: the card may be of a generation without such products.
    if "peak" in own:
        own |= {"fp8_peak", "fp4_peak"}
    # Cards of a generation differ in it: a B300 has a thirtieth of a B200's.
    if "fp8_peak" in own:
        own.add("int8_peak")
    return {field: stated[name] for field, name in OF_DATASHEET.items() if name in own}


def _multiprocessors(stated: int | None, peak: float | None, measured: Hardware) -> int:
    """Return the stated number, or as many as reach the peak with those of the measured card."""
    if stated is not None:
        return require_int("hardware.num_sms", stated, 1, "use the number of multiprocessors")
    ratio = 1.0
    if peak is not None:
        ratio = peak / measured.flops_per_second
    return max(1, round(measured.num_sms * ratio))


def _require(figures: Mapping[str, float | None]) -> None:
    """Raise UserError for the first of `figures` that is not stated."""
    for name, value in figures.items():
        if value is None:
            needed = ", ".join(f"hardware.{figure}" for figure in figures)
            raise UserError(
                f"hardware.{name} is not stated, and there is no hardware.base to take it from; "
                f"state {needed}, or a measured card as hardware.base=h100"
            )


def _rate(name: str, value: float | None) -> float | None:
    """Return a stated figure. Raises UserError for one that no card has."""
    if value is None:
        return None
    unit = UNITS[name]
    advice = f"use the datasheet's number in {unit.name}, such as {unit.example}"
    number = require_number(f"hardware.{name}", value, above=0, fix=advice)
    if number < unit.least:
        raise UserError(f"hardware.{name}={value:g} is less than any card has; {advice}")
    return number


def _uncertain(figures: Mapping[str, object], error: object) -> Mapping[str, object]:
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
    hardware: Hardware = build(nodes[name], Hardware)
    return hardware
