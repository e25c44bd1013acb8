"""The pages of docs/: reachable, linked, with tables that follow conf/ and recorded numbers.

`make docs` builds the site; here its parts are tried without MkDocs.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from documented import DOCUMENTS, PAGES, untimed
from site_hooks import GROUPS, SHARED, Relinker, fill_in, options, outer_pages, settings_of

from sarathi_lab.__main__ import main
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import CONF, REPOSITORY
from sarathi_lab.config.sweeper import compose
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.executor.simulated.hardware import Hardware, Host
from sarathi_lab.extensions.check_policy import check_policy
from sarathi_lab.policy import Policy

DOCS = REPOSITORY / "docs"
NAV = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)\s]+))?\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d.,]* of [\d,]+|\d+\.\d+")


def states(text: str, number: str) -> bool:
    """Whether `text` has `number` and not merely digits of a longer one."""
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text) is not None


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def headings(path: Path) -> set[str]:
    """The anchors of a page, as forges and the site make them of its headings."""
    text = re.sub(r"```.*?```", "", fill_in(path.read_text()), flags=re.DOTALL)
    anchors = set()
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", title.lower())
        anchors.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return anchors


def test_the_navigation_has_every_page_once():
    in_nav = re.findall(r"(\S+\.md)$", NAV, flags=re.MULTILINE)
    of_docs = [str(page.relative_to(DOCS)) for page in PAGES]
    of_others = {name_of(path) for path in outer_pages()}
    assert sorted(set(in_nav) - of_others) == sorted(of_docs)
    assert len(in_nav) == len(set(in_nav))


def test_every_link_leads_to_a_file_and_a_heading():
    broken = []
    for path in DOCUMENTS:
        for target, anchor in LINK.findall(path.read_text()):
            page = path
            if target:
                page = path.parent / target
            is_whole = page.exists()
            if is_whole and anchor and page.suffix == ".md":
                is_whole = anchor in headings(page)
            if not is_whole:
                broken.append(f"{name_of(path)}: {target}#{anchor}")
    assert broken == []


def test_long_commands_say_how_long_they_take():
    pages = [REPOSITORY / "README.md", *PAGES]
    assert {name_of(page): untimed(page) for page in pages if untimed(page)} == {}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_its_python_is_python(path: Path):
    for block in PYTHON.findall(path.read_text()):
        ast.parse(block)


def test_the_policy_to_write_breaks_no_rule_and_becomes_an_option(tmp_path, monkeypatch):
    page = (DOCS / "how-to" / "own-policy.md").read_text()
    (tmp_path / "my_policy.py").write_text(PYTHON.findall(page)[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    policy = import_module("my_policy").HalfWhenBusy
    check_policy(policy, num_queues=20)
    (option,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text(option)
    of_folder = ["policy=mine", "policy.busy=2", "--config-dir", str(tmp_path)]
    for settings in (of_folder, ["policy._target_=my_policy.HalfWhenBusy", "+policy.busy=2"]):
        (job,) = compose([*settings, "chunk=128"]).jobs
        built = build(job.cfg.policy, Policy)
        assert (type(built).__name__, built.busy, built.budget) == ("HalfWhenBusy", 2, 128)


def test_the_parts_serve_requests_without_the_command():
    blocks = PYTHON.findall((DOCS / "how-to" / "python.md").read_text())
    names = {}
    exec(compile(blocks[-1], "python.md", "exec"), names)
    assert len(names["ledger"].requests()) == len(names["requests"])


SITE = frozenset({"reference/metrics.md", "experiments/README.md", "experiments/a.png"})
FORGE = "https://forge/lab"
LINKS = {
    "[m](../reference/metrics.md#ratios)": "[m](../reference/metrics.md#ratios)",
    "[e](../../experiments/README.md)": "[e](../experiments/README.md)",
    "[e](../../experiments)": "[e](../experiments/README.md)",
    "![a](../../experiments/a.png)": "![a](../experiments/a.png)",
    "[run](../../sarathi_lab/run.py)": f"[run]({FORGE}/blob/main/sarathi_lab/run.py)",
    "[web](https://example.org/x.md)": "[web](https://example.org/x.md)",
    "```\n[x](../y.md)\n```": "```\n[x](../y.md)\n```",
}


@pytest.mark.parametrize(("written", "expected"), LINKS.items())
def test_a_link_of_the_repository_becomes_one_of_the_site(written, expected):
    assert Relinker("docs/how-to/gpu.md", SITE, FORGE).text(written) == expected


def test_a_link_to_code_is_its_text_where_no_forge_is_named():
    relinker = Relinker("docs/how-to/gpu.md", SITE, "")
    assert relinker.text("see [run](../../sarathi_lab/run.py).") == "see run."


def test_a_page_outside_docs_links_into_it():
    relinker = Relinker("experiments/README.md", SITE, "")
    assert relinker.text("[m](../docs/reference/metrics.md)") == "[m](../reference/metrics.md)"


def test_the_page_of_settings_has_every_option_and_every_comment():
    page = fill_in((DOCS / "reference" / "options.md").read_text())
    for group in GROUPS:
        for path in options(group):
            assert f"### {group}={path.stem}\n" in page
    assert "| `cache.block_size` | `16` | tokens |" in page
    assert "| `policy.min_decodes` | `1` | fewest decodes" in page
    for setting in settings_of(CONF / "config.yaml"):
        assert f"| `{setting.name}` |" in page
    assert "generated:" not in page


def test_every_setting_is_explained_by_a_comment_or_is_another_ones_value():
    explained = set()
    unexplained = set()
    for group in GROUPS:
        for folder in (group, SHARED.get(group, group)):
            for path in options(folder):
                for setting in settings_of(path):
                    name = f"{group}.{setting.name}".removeprefix(f"{group}.{group}.")
                    is_name = name.endswith(".name")
                    if setting.meaning or setting.default.startswith("`${") or is_name:
                        explained.add(name)
                    else:
                        unexplained.add(name)
    assert len(explained) > 100
    assert unexplained <= explained


@pytest.mark.parametrize("kind", [Hardware, Host, CudaGraphs])
def test_every_figure_of_a_device_and_its_host_is_explained(kind):
    explained = re.findall(r"^ {8}(\w+): ", kind.__doc__, flags=re.MULTILINE)
    assert explained == [field.name for field in fields(kind)]


def test_the_page_of_policies_has_a_row_for_each():
    page = fill_in((DOCS / "reference" / "policies.md").read_text())
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \| `\w+` \|$", page, flags=re.MULTILINE))
    assert rows.keys() == {path.stem for path in options("policy")}
    assert "SARATHI, section 4.2" in rows["sarathi"]


def test_a_number_is_not_found_within_another():
    assert states("errors of 0.4, of 1.7 %", "0.4")
    assert not any(states(longer, "0.4") for longer in ("10.45", "0.45", "10.4", "1,0.4"))


def test_the_errors_of_the_cost_model_are_those_of_the_pages_that_it_links_to():
    page = DOCS / "explanation" / "cost-model.md"
    table = page.read_text().partition("## How wrong it is")[2].partition("\n\nThe last")[0]
    rows = [row for row in table.splitlines() if "](" in row]
    assert len(rows) == 7
    for row in rows:
        (link,) = re.findall(r"\]\(([^)]+)\)", row)
        source = (page.parent / link).resolve().read_text().replace("%", " %")
        for number in NUMBER.findall(row):
            assert states(source, number.rstrip(",")), number


SHOWN = re.compile(r"^```\n\$ python -m sarathi_lab[. ](.+)\n((?:.+\n)+)```$", re.MULTILINE)
TUTORIAL = SHOWN.findall((DOCS / "tutorial.md").read_text())


@pytest.mark.oracle
@pytest.mark.parametrize(("command", "shown"), TUTORIAL, ids=lambda text: text.split("\n")[0][:60])
def test_the_tutorial_shows_what_its_commands_print(
    command, shown, capsys, tmp_path, monkeypatch, request
):
    if "oracle" not in request.config.option.markexpr:
        pytest.skip("takes two minutes: python -m pytest -m oracle tests/test_docs.py")
    monkeypatch.chdir(REPOSITORY)
    arguments = shlex.split(command)
    if arguments[0] == "run":
        arguments += ["tracking=none", f"output={tmp_path}"]
    assert main(arguments) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in shown.splitlines():
        assert line in printed


def test_the_tutorial_shows_what_most_of_its_commands_print():
    assert len(TUTORIAL) >= 6
