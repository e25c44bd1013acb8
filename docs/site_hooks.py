"""What MkDocs does beyond the pages in docs/: pages from elsewhere, links, generated tables.

Pages are written to be read on a forge, so their links are paths of the repository. The site has
the pages of docs/ and `outer_pages`; a link to any other file leads to the
forge, if `repo_url` names one, else its text stays without a link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
# Groups whose files are settings, with what these are typed after. `requests` and `objective`
# are what options of `workload` and `slo` share. The other groups hold data, such as a GPU's.
GROUPS = {
    "policy": "policy.",
    "workload": "workload.",
    "requests": "workload.",
    "executor": "executor.",
    "cluster": "cluster.",
    "speculation": "speculation.",
    "slo": "slo.",
    "objective": "slo.",
    "tracking": "tracking.",
    "task": "",  # its files name `task` themselves
}
DATA_GROUPS = ("model", "hardware", "host", "experiment")
TEXT = r"[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*"  # of a link, maybe with a picture in it
LINK = re.compile(rf"(!?)\[({TEXT})\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
SETTING = re.compile(r"^(?P<indent> *)(?P<name>[\w.-]+):(?P<value>[^#]*)(?:# (?P<meaning>.*))?$")
UNLISTED = ("_target_", "defaults", "hydra")
GLOBAL = "# @package _global_\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that lie outside docs/, at their paths in the repository."""
    from mkdocs.structure.files import File

    for path in outer_pages():
        uri = path.relative_to(ROOT).as_posix()
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def outer_pages() -> Iterator[Path]:
    """Yield the pages outside docs/ that the site has, and their pictures."""
    yield ROOT / "CONTRIBUTING.md"
    yield ROOT / "sarathi_lab" / "README.md"
    for suffix in ("md", "png"):
        yield from sorted((ROOT / "experiments").rglob(f"*.{suffix}"))
    yield ROOT / "notebooks" / "schedules.png"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated tables, then turn the repository's links into the site's."""
    source = Path(page.file.abs_src_path)
    filled = fill_in(markdown)
    on_site = {file.src_uri for file in files}
    return relinked(filled, source.relative_to(ROOT).as_posix(), on_site, config.repo_url or "")


def fill_in(markdown: str) -> str:
    """Replace the marks of generated tables by the tables."""
    filled = markdown
    for mark, table in (("settings", settings_tables), ("policies", policy_table)):
        comment = f"<!-- generated: {mark} -->"
        if comment in filled:
            filled = filled.replace(comment, table())
    return filled


# Links


def relinked(markdown: str, page: str, on_site: set[str], repo_url: str) -> str:
    """Rewrite the links of `page`, a path in the repository, outside blocks of code."""
    site_folder = os.path.dirname(site_path(page))

    def rewrite(link: re.Match[str]) -> str:
        is_picture, text, path, anchor = link[1], link[2], link[3], link[4] or ""
        target = os.path.normpath(os.path.join(os.path.dirname(page), path))
        for candidate in (site_path(target), f"{site_path(target)}/README.md"):
            if candidate in on_site:
                relative = os.path.relpath(candidate, site_folder or ".")
                return f"{is_picture}[{text}]({relative}{anchor})"
        if repo_url:
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{target}{anchor})"
        return text

    lines = []
    is_code = False
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        lines.append(line if is_code else LINK.sub(rewrite, line))
    return "\n".join(lines)


def site_path(path: str) -> str:
    """Return where a file of the repository lies among the site's sources."""
    return path.removeprefix("docs/")


# Tables from conf/


@dataclass(frozen=True)
class Setting:
    """A setting with its default as written and its comment."""

    name: str
    default: str
    meaning: str


def settings_tables() -> str:
    """Write a table of settings for conf/config.yaml and for each option, from their comments."""
    sections = ["## Short names\n", settings_table(CONF / "config.yaml", ""), ""]
    for group, prefix in GROUPS.items():
        sections.append(f"## {group}\n")
        for path in options(group):
            sections += [f"### {group}={path.stem}\n", f"{summary(path)}\n"]
            sections += [settings_table(path, prefix), ""]
    for group in DATA_GROUPS:
        sections += [f"## {group}\n", "| option | what it is |", "| --- | --- |"]
        sections += [f"| `{path.stem}` | {in_cell(summary(path))} |" for path in options(group)]
        sections.append("")
    return "\n".join(sections)


def policy_table() -> str:
    """Write a row for each policy: its option, its rule and source, and its class."""
    rows = ["| `policy=` | rule and source | class |", "| --- | --- | --- |"]
    for path in options("policy"):
        target = re.search(r"^_target_: (\S+)$", path.read_text(), re.MULTILINE)
        class_name = target[1].rpartition(".")[2] if target else ""
        rows.append(f"| `{path.stem}` | {in_cell(summary(path))} | `{class_name}` |")
    return "\n".join(rows)


def options(group: str) -> list[Path]:
    """List the files of a group's options."""
    return sorted((CONF / group).glob("*.yaml"))


def summary(path: Path) -> str:
    """Return the comment that a file of conf/ begins with."""
    lines = path.read_text().removeprefix(GLOBAL).splitlines()
    comment = takewhile(lambda line: line.startswith("# "), lines)
    return " ".join(line.removeprefix("# ") for line in comment)


def settings_table(path: Path, prefix: str) -> str:
    """Write a table of a file's settings; empty if it has none."""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    settings = settings_of(path)
    for setting in settings:
        cells = (f"`{prefix}{setting.name}`", in_cell(setting.default), in_cell(setting.meaning))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) if settings else ""


def settings_of(path: Path) -> list[Setting]:
    """Read the settings of a file with their comments, nested ones by their dotted names."""
    settings = []
    outer: list[tuple[int, str]] = []  # indents and names of the settings around a line
    for line in path.read_text().splitlines():
        match = SETTING.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while outer and outer[-1][0] >= indent:
            outer.pop()
        outer.append((indent, match["name"]))
        names = [name for _, name in outer]
        value = match["value"].strip()
        default = f"`{value}`" if value else ""
        meaning = match["meaning"] or ""
        is_listed = not any(name in UNLISTED for name in names)
        if is_listed and (default or meaning):
            settings.append(Setting(".".join(names), default, meaning))
    return settings


def in_cell(text: str) -> str:
    """Escape what would end a table's cell."""
    return text.replace("|", "\\|")
