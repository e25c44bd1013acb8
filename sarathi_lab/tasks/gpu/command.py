"""The command line of a campaign."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from sarathi_lab.config.errors import UserError, exit_code, require_number
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.executor.torch.device import device_description, resolve_device
from sarathi_lab.results.provenance import provenance
from sarathi_lab.tasks.gpu.campaign import Campaign
from sarathi_lab.tasks.gpu.parts import NAMES, PARTS, Part
from sarathi_lab.tasks.gpu.publish import slug_of

LEAST_TIME = 0.25  # of the usual: below it, loading the models takes most of it


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 1 if parts failed, 2 for a mistake of the user's, 130 for
    Ctrl-C.
    """
    options = _parser().parse_args(args)
    return exit_code(
        lambda: _campaign(options).run(), "finished parts are kept, and skipped the next time"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab campaign",
        description="Measure everything on one GPU. Finished parts of the same commit and "
        "device are skipped.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="try every part on the CPU with a tiny model"
    )
    parser.add_argument(
        "--only", action="append", choices=NAMES, metavar="PART", help=f"one of {', '.join(NAMES)}"
    )
    parser.add_argument("--fresh", action="store_true", help="repeat finished parts, too")
    parser.add_argument(
        "--seconds", type=float, help="for all parts; a slower card than an H200 wants more"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cuda:1")
    parser.add_argument("--results", type=Path, help="where tables go instead of experiments/")
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / "outputs" / "campaign", help="state and logs"
    )
    return parser


def _campaign(options: argparse.Namespace) -> Campaign:
    is_dry: bool = options.dry_run
    device = torch.device("cpu") if is_dry else _gpu(options.device)
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    name = device_description(device)
    return Campaign(
        parts=parts,
        device=str(device),
        device_name=name,
        commit=provenance()["git_commit"],
        is_dry=is_dry,
        seconds=_seconds(options.seconds, parts, is_dry=is_dry),
        work=Path(options.work).absolute() / f"{'dry-' if is_dry else ''}{slug_of(name)}",
        # What a dry run measures is worth nothing: it goes where it is told, never into the
        # records.
        results=_results(options.results, is_dry=is_dry),
        is_fresh=options.fresh,
    )


def _gpu(name: str) -> torch.device:
    device = resolve_device(name)
    if device.type != "cuda":
        raise UserError(
            f"no GPU found (device={name}, torch {torch.__version__}); try everything with "
            "--dry-run"
        )
    return device


def _results(folder: Path | None, *, is_dry: bool) -> Path | None:
    if folder is None:
        return None if is_dry else EXPERIMENTS
    return folder.absolute()


def _seconds(asked: float | None, parts: Sequence[Part], *, is_dry: bool) -> float:
    usual = sum(part.weight(is_dry=is_dry) for part in parts)
    if asked is None:
        return usual
    require_number("--seconds", asked, above=0, fix=f"use {usual:g}, what is planned for an H200")
    least = LEAST_TIME * usual
    if asked < least:
        raise UserError(
            f"--seconds={asked:g} is too short for {len(parts)} parts; use at least "
            f"{least:.0f}, or --only for one part"
        )
    return asked
