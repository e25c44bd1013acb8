"""Every command that the documents show works as written."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest
from card_commands import commands_on_cards, composed, outcomes, recorded
from cards import CARDS
from documented import (
    COMMANDS,
    DOCUMENTS,
    KNOWN,
    PAGES,
    Parsed,
    find_commands,
    last_of_sweeps,
    other_commands,
)

from sarathi_lab.__main__ import main as lab
from sarathi_lab.config.paths import CONF, REPOSITORY
from sarathi_lab.results.load import load_runs
from sarathi_lab.run import main


def test_the_readme_starts_with_its_two_commands_and_the_documents_have_commands():
    text = (REPOSITORY / "README.md").read_text()
    assert 0 < text.index("make setup") < text.index("make run") < text.index("make test")
    assert len(COMMANDS) > 12


# One command for each set of settings; tests/config composes and checks all experiments.
NAMES = {frozenset(re.findall(r"[\w./]+(?==)", command)): command for command in KNOWN}
CHECKED = sorted(
    command
    for names, command in NAMES.items()
    if "experiment" not in names and "device=cuda" not in command
)
ON_CARDS = commands_on_cards()
FIRST_PAGES = (*(REPOSITORY / name for name in ("README.md", "Makefile")), *PAGES)
FIRST = find_commands(FIRST_PAGES)


@pytest.mark.parametrize("command", CHECKED)
def test_every_command_passes_its_checks(command, monkeypatch):
    """Of a sweep the last values of all settings."""
    if "hydra/launcher=ray" in command:
        pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    if re.search(r"executor=\S*vllm", command):
        pytest.importorskip("vllm", reason="make test-vllm")
    monkeypatch.chdir(REPOSITORY)
    composed(command).check()


@pytest.mark.parametrize("command", ON_CARDS)
def test_every_command_runs_on_each_card_or_is_refused_in_a_line(command, monkeypatch):
    """Those of the first pages on all cards, experiments on the one with the least memory;
    `tests/write_card_commands.py` checks all on all.
    """
    monkeypatch.chdir(REPOSITORY)
    cards = CARDS if command in FIRST else CARDS[-1:]
    cells = recorded().get(command, {})
    for outcome in outcomes(command, cards):
        assert "\n" not in outcome.refusal
        assert re.search(r"; (use|take|leave) ", outcome.refusal) or not outcome.refusal
        assert outcome.cell == cells.get(outcome.card), "write the table anew"


def test_the_table_of_cards_has_documented_commands_alone():
    assert recorded().keys() <= {*ON_CARDS}, "write the table anew"


def test_an_experiment_too_large_for_a_gpu_names_what_helps():
    (refused,) = outcomes("experiment=proposed_gains", CARDS[-1:])
    assert refused.refusal.endswith("; use task.setup=small, or take a smaller model")
    (runs,) = outcomes("experiment=proposed_gains task.setup=small", CARDS[-1:])
    assert runs.model == "llama3-8b"


def test_every_option_that_is_named_is_there():
    for command in KNOWN:
        for group, _, values in (arg.partition("=") for arg in shlex.split(command)):
            for option in values.split(",") if (CONF / group).is_dir() else ():
                assert (CONF / group / f"{option}.yaml").is_file(), command


def test_the_readme_s_example_against_chunking_gives_its_number(tmp_path):
    said = r"\((\S+) times request-level batching: `python -m sarathi_lab\.run (.+?)`"
    (shown,) = re.findall(said, (REPOSITORY / "README.md").read_text())
    assert main([*shown[1].split(), "baselines=[request_level]", f"output={tmp_path}"]) == 0
    runs = load_runs(tmp_path)
    assert f"{runs[~runs.is_baseline].throughput_vs_request_level.item():.2f}" == shown[0]


def test_the_page_of_settings_names_every_model():
    text = (REPOSITORY / "docs" / "reference" / "settings.md").read_text()
    assert not [one.stem for one in CONF.glob("model/*.yaml") if f"`{one.stem}`" not in text]


LEADERBOARDS = [command for command in other_commands() if command[0] == "leaderboard"]
OTHERS = [command for command in other_commands() if command not in LEADERBOARDS]


@pytest.mark.parametrize("command", OTHERS, ids=" ".join)
def test_every_other_command_takes_its_arguments(command, monkeypatch):
    """It ends when they are parsed."""

    def parse(parser, arguments):
        _, unknown = parser.parse_known_args(arguments)
        assert unknown == []
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    if command[0] == "completion":
        assert lab(command) == 0
        return
    with pytest.raises(Parsed):
        lab(command)


@pytest.mark.parametrize("command", LEADERBOARDS, ids=" ".join)
def test_every_leaderboard_takes_its_settings(command, monkeypatch, tmp_path):
    """It ends when they are composed, or when its folder is to be read."""

    def compose(settings):
        assert main([*last_of_sweeps(shlex.join(settings)), "--cfg", "job"]) == 0
        raise Parsed

    def publish(folder):
        assert folder.is_dir()
        raise Parsed

    monkeypatch.setattr("sarathi_lab.run.main", compose)
    monkeypatch.setattr("sarathi_lab.extensions.leaderboard.command.publish", publish)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "my_policy.py").write_text("from sarathi_lab.policy import Orca as HalfWhenBusy\n")
    (tmp_path / "my_module.py").write_text("from sarathi_lab.policy import Orca as MyPolicy\n")
    (tmp_path / "experiments").symlink_to(REPOSITORY / "experiments")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Parsed):
        lab(command)


SCRIPT = re.compile(r"python ((?:docs|experiments|notebooks|tests)/[\w/]+\.py)([^`\n#]*)")


def test_every_script_is_there_with_its_options():
    num_scripts = 0
    for path in DOCUMENTS:
        for script, options in SCRIPT.findall(path.read_text()):
            source = (REPOSITORY / script).read_text()
            num_scripts += 1
            for option in re.findall(r"--[a-z-]+", options):
                is_there = option in ("--help", "--dry-run") or f'"{option}"' in source
                assert is_there, f"{path}: {script} {option}"
    assert num_scripts > 10


def test_every_make_target_exists():
    targets = set(
        re.findall(r"^([a-z_-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    )
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:^|`)make ([a-z_-]+)", path.read_text(), flags=re.MULTILINE))
        assert named <= targets
