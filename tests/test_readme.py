"""Every command and link that the documents show works as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from sarathi_lab.config.command_line import read_command_line
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import CONF, EXPERIMENTS, REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "experiments").rglob("README.md"))]
COMMAND = re.compile(r"python -m sarathi_lab\.run ([^`\n#]+)")
COMMANDS = sorted(
    {match.strip() for path in DOCUMENTS for match in COMMAND.findall(path.read_text())}
)


def test_the_readme_starts_with_its_two_commands_and_the_documents_have_commands():
    text = (REPOSITORY / "README.md").read_text()
    assert 0 < text.index("make run") < text.index("make test") < 2500
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_passes_its_checks(command, monkeypatch):
    if any(
        word in command for word in ("DIRECTORY", "FILE", "--cfg", "hardware=mine", "=outputs/")
    ):
        pytest.skip("a placeholder, what another command makes, or nothing to plan")
    monkeypatch.chdir(REPOSITORY)
    command_line = read_command_line(shlex.split(command))
    for cfg in command_line.jobs:
        build(cfg.task).check(cfg)


def test_the_error_table_is_the_recorded_one():
    errors = pd.read_csv(EXPERIMENTS / "paper" / "results" / "errors.csv")
    rows = errors[~errors.verdict.isin(["given", "formula"])]
    for path, shown in (
        (REPOSITORY / "README.md", rows[rows.aim_mean.notna()]),
        (EXPERIMENTS / "paper" / "README.md", rows),
    ):
        lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
        for row in shown.to_dict("records"):
            found = f"{row['mean']:.2%} ({row['largest']:.1%})"
            found += " †" if row["verdict"].endswith("partly fitted") else ""
            cell = f"| **{found}** |" if row["verdict"].startswith("missed") else f"| {found} |"
            assert any(line.startswith(f"| {row['row']}") and cell in line for line in lines), (
                path,
                row,
            )


def test_every_make_target_exists():
    targets = set(
        re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    )
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), flags=re.MULTILINE))
        assert named <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(path: Path):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_page_of_policies_names_every_option_and_its_parameters():
    text = (EXPERIMENTS / "policies" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*`) \|$", text, flags=re.MULTILINE))
    options = {path.stem: OmegaConf.load(path) for path in (CONF / "policy").glob("*.yaml")}
    assert rows.keys() == options.keys()
    for name, option in options.items():
        assert rows[name].strip("`").split("` `") == [
            str(key) for key in option if key != "_target_"
        ], name
