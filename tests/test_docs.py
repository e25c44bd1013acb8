"""The pages of docs/: reachable, linked, with tables that follow conf/ and recorded numbers.

`make docs` builds the site; here its parts are tried without MkDocs.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from documented import DOCUMENTS, PAGES
from site_hooks import GROUPS, fill_in, options, outer_pages, relinked, settings_of, site_path

from sarathi_lab.__main__ import main
from sarathi_lab.config.paths import CONF, REPOSITORY

DOCS = REPOSITORY / "docs"
NAV = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


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
    of_docs = [page for page in in_nav if (DOCS / page).is_file()]
    assert sorted(of_docs) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    outside = {name_of(path) for path in outer_pages()}
    assert set(in_nav) - set(of_docs) <= outside


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_anchor_is_a_heading(path: Path):
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", path.read_text()):
        page = (path.parent / target) if target else path
        if page.suffix == ".md":
            assert anchor in headings(page), f"{target}#{anchor}"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_its_python_is_python(path: Path):
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        ast.parse(block)


def test_links_of_the_repository_become_links_of_the_site():
    on_site = {"reference/metrics.md", "experiments/README.md", "experiments/a.png"}
    page = "docs/how-to/gpu.md"
    links = {
        "[m](../reference/metrics.md#ratios)": "[m](../reference/metrics.md#ratios)",
        "[e](../../experiments/README.md)": "[e](../experiments/README.md)",
        "[e](../../experiments)": "[e](../experiments/README.md)",
        "![a](../../experiments/a.png)": "![a](../experiments/a.png)",
        "[run](../../sarathi_lab/run.py)": "[run](https://forge/lab/blob/main/sarathi_lab/run.py)",
        "[web](https://example.org/x.md)": "[web](https://example.org/x.md)",
        "```\n[x](../y.md)\n```": "```\n[x](../y.md)\n```",
    }
    for written, expected in links.items():
        assert relinked(written, page, on_site, "https://forge/lab/") == expected
    assert relinked("see [run](../../sarathi_lab/run.py).", page, on_site, "") == "see run."
    outside = relinked("[m](../docs/reference/metrics.md)", "experiments/README.md", on_site, "")
    assert outside == "[m](../reference/metrics.md)"
    assert site_path("docs/index.md") == "index.md"


def test_the_page_of_settings_has_every_option_and_every_comment():
    page = fill_in((DOCS / "reference" / "options.md").read_text())
    for group in GROUPS:
        for path in options(group):
            assert f"### {group}={path.stem}\n" in page
    assert "| `cache.block_size` | `16` | tokens |" in page
    assert "| `policy.min_decodes` | `1` | fewest decodes" in page
    comments = [setting.meaning for setting in settings_of(CONF / "config.yaml")]
    assert len([comment for comment in comments if comment]) > 20
    assert "generated:" not in page


def test_the_page_of_policies_has_a_row_for_each():
    page = fill_in((DOCS / "reference" / "policies.md").read_text())
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \| `\w+` \|$", page, flags=re.MULTILINE))
    assert rows.keys() == {path.stem for path in options("policy")}
    assert "SARATHI, section 4.2" in rows["sarathi"]


def test_the_errors_of_the_cost_model_are_those_of_the_pages_that_it_links_to():
    page = DOCS / "explanation" / "cost-model.md"
    table = page.read_text().partition("## How wrong it is")[2].partition("\n\nThe last")[0]
    rows = [row for row in table.splitlines() if "](" in row]
    assert len(rows) == 5
    for row in rows:
        (link,) = re.findall(r"\]\(([^)]+)\)", row)
        source = (page.parent / link).resolve().read_text().replace("%", " %")
        for number in re.findall(r"\d[\d.,]* of [\d,]+|\d+\.\d+", row):
            assert number.rstrip(",") in source, number


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
    is_run = command.startswith("run ")
    settings = ["tracking=none", f"output={tmp_path}"] if is_run else []
    assert main([*shlex.split(command), *settings]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in shown.splitlines():
        assert line in printed


def test_the_tutorial_shows_what_most_of_its_commands_print():
    assert len(TUTORIAL) >= 6
