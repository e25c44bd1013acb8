"""Every command that the documents show works as written."""

from __future__ import annotations

import re
import shlex

import pytest
from card_commands import commands_on_cards, composed, outcomes, recorded
from cards import CARDS
from documented import COMMANDS, DOCUMENTS, KNOWN, PAGES, find_commands

from sarathi_lab.__main__ import COMMANDS as MAIN_COMMANDS
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


COMMAND = re.compile(r"(?:python -m sarathi_lab|sarathi-lab) ([a-z]+)([^`\n>]*)")
SCRIPT = re.compile(r"python ((?:docs|experiments|notebooks|tests)/[\w/]+\.py)([^`\n#]*)")


def test_every_command_and_script_is_there_with_its_options():
    sources: dict[str, str] = {}
    for path in DOCUMENTS:
        text = path.read_text()
        named = [(f"sarathi-lab {name}", options) for name, options in COMMAND.findall(text)]
        for command, options in [*named, *SCRIPT.findall(text)]:
            if command not in sources:
                sources[command] = source_of(command)
            for option in re.findall(r"--[a-z-]+", options):
                is_there = option in ("--help", "--dry-run") or f'"{option}"' in sources[command]
                assert is_there, f"{path}: {command} {option}"
    assert len(sources) > 20


def source_of(command: str) -> str:
    """The text of a script, or of the module of a command, with those beside it in a package."""
    path = REPOSITORY / command
    if command.startswith("sarathi-lab "):
        name = command.removeprefix("sarathi-lab ")
        if name in ("run", "completion"):
            return ""
        module, _ = MAIN_COMMANDS[name]
        path = (REPOSITORY / module.replace(".", "/")).with_suffix(".py")
    if not path.is_file():
        path = path.with_suffix("")
        assert path.is_dir(), command
        return "".join(file.read_text() for file in path.glob("*.py"))
    return path.read_text()


def test_every_make_target_exists():
    targets = set(
        re.findall(r"^([a-z_-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    )
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:^|`)make ([a-z_-]+)", path.read_text(), flags=re.MULTILINE))
        assert named <= targets
