"""The command `dashboard`: a workspace and a report that compare the runs of a W&B project."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.experiment.claims import verdicts
from sarathi_lab.results.tracking import TrackedRun, WandbTracker, require_login
from sarathi_lab.results.wandb_process import environment

# What the runs are grouped by in `sarathi_lab.results.dashboard`, and may be filtered by.
WHERE = {"executor": "torch", "device": "'simulated h100'", "hostname": "my-laptop"}
CLAIMS = "claims"  # the table's name, which its panel looks for


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab dashboard",
        description="Write a workspace and a report into a W&B project: chunk size, P:D, "
        "policies, KV re-read, claims.",
    )
    entity = os.environ.get("WANDB_ENTITY")
    parser.add_argument("--entity", default=entity, help="user or team (default: your own)")
    text = "as in tracking.project (default: %(default)s)"
    parser.add_argument("--project", default="sarathi-lab", help=text)
    for name, example in WHERE.items():
        text = f"show only runs of this {name}, such as {example}; may be repeated"
        parser.add_argument(f"--{name}", action="append", default=[], help=text)
    text = "print both as JSON; needs no account and no network"
    parser.add_argument("--dry-run", action="store_true", help=text)
    options = parser.parse_args(args)
    return exit_code(lambda: _main(options), "what was written is kept")


def _main(options: argparse.Namespace) -> int:
    try:
        from sarathi_lab.results.dashboard import find_project, plain, report, workspace
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("wandb_workspaces"):
            raise
        raise UserError(
            "package wandb-workspaces is missing; run pip install 'sarathi-lab[dashboard]'"
        ) from None
    entity, project = options.entity or "", options.project
    chosen = {name: getattr(options, name) for name in WHERE}
    if options.dry_run:
        made = {
            "workspace": workspace(entity, project, chosen),
            "report": report(entity, project, verdicts(), chosen),
        }
        print(json.dumps({name: plain(what) for name, what in made.items()}, indent=2))
        return 0
    with environment({"WANDB_SILENT": "true"}):
        require_login("a dashboard is written to W&B", "or use --dry-run")
        entity, claims = find_project(options.entity, project), verdicts()
        log_claims(claims, entity, project)
        _save(workspace(entity, project, chosen))
        _save(report(entity, project, claims, chosen))
    return 0


def log_claims(claims: pd.DataFrame, entity: str, project: str) -> None:
    """Send the verdicts as a run, whose table the panel of claims shows."""
    with tempfile.TemporaryDirectory() as name, environment({"WANDB_ENTITY": entity}):
        folder, config = Path(name), {"task": CLAIMS}
        claims.to_csv(folder / f"{CLAIMS}.csv", index=False)
        names = (CLAIMS, CLAIMS, CLAIMS, [CLAIMS])
        run = TrackedRun(*names, config, folder=folder, artifact=CLAIMS)
        WandbTracker(project=project, mode="online", dir="outputs").track(run)


def _save(what: Any) -> None:
    try:
        what.save()
        print(what.url)
    except Exception as error:  # the package raises whatever its transport does
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"W&B refused the {type(what).__name__.lower()} ({reason}); check that you may write "
            f"to {what.entity}/{what.project}, or use --dry-run"
        ) from None
