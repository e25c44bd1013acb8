"""The command `dashboard`: a workspace and a report that compare the runs of a W&B project."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.experiment.claims import verdicts
from sarathi_lab.results.tracking import TrackedRun, WandbTracker, require_login
from sarathi_lab.results.wandb_process import environment

CLAIMS = "claims"  # the table's name, which its panel looks for


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    return exit_code(lambda: _main(_parser().parse_args(args)), "what was written is kept")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab dashboard",
        description="Write a workspace and a report into a W&B project: chunk size, P:D, "
        "policies, KV re-read, claims.",
    )
    parser.add_argument(
        "--entity", default=os.environ.get("WANDB_ENTITY"), help="user or team (default: your own)"
    )
    parser.add_argument(
        "--project", default="sarathi-lab", help="as in tracking.project (default: %(default)s)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print both as JSON; needs no account and no network"
    )
    return parser


def _main(options: argparse.Namespace) -> int:
    try:
        from sarathi_lab.results import dashboard
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("wandb_workspaces"):
            raise
        raise UserError(
            "package wandb-workspaces is missing; run pip install 'sarathi-lab[dashboard]'"
        ) from None
    claims = verdicts()
    if options.dry_run:
        view = dashboard.workspace(options.entity or "", options.project)
        report = dashboard.report(options.entity or "", options.project, claims)
        shown = {"workspace": dashboard.plain(view), "report": dashboard.plain(report)}
        print(json.dumps(shown, indent=2))
        return 0
    with environment({"WANDB_SILENT": "true"}):
        return _write(options, claims)


def _write(options: argparse.Namespace, claims: pd.DataFrame) -> int:
    from sarathi_lab.results import dashboard

    require_login("a dashboard is written to W&B", "or use --dry-run")
    entity = dashboard.find_project(options.entity, options.project)
    _log_claims(claims, entity, options.project)
    _save(dashboard.workspace(entity, options.project))
    _save(dashboard.report(entity, options.project, claims))
    return 0


def _log_claims(claims: pd.DataFrame, entity: str, project: str) -> None:
    """Send the verdicts as a run, whose table the panel of claims shows."""
    with tempfile.TemporaryDirectory() as folder, environment({"WANDB_ENTITY": entity}):
        claims.to_csv(Path(folder) / f"{CLAIMS}.csv", index=False)
        tracker = WandbTracker(project=project, mode="online", dir="outputs")
        run = TrackedRun(
            CLAIMS, CLAIMS, CLAIMS, [CLAIMS], {"task": CLAIMS}, folder=Path(folder), artifact=CLAIMS
        )
        tracker.track(run)


def _save(what: Any) -> None:
    """Write a workspace or a report, and print its address."""
    try:
        what.save()
        print(what.url)
    except Exception as error:  # the package raises whatever its transport does
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"W&B refused the {type(what).__name__.lower()} ({reason}); check that you may write "
            f"to {what.entity}/{what.project}, or use --dry-run"
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
