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
# Groups whose files are settings. The files of the others are data, such as a GPU's constants.
GROUPS = ("policy", "workload", "executor", "cluster", "speculation", "slo", "tracking", "task")
DATA_GROUPS = ("model", "hardware", "host", "experiment")
# Folders with what options of a group share; no user types their names.
SHARED = {"workload": "requests", "slo": "objective"}
TEXT = r"[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*"  # of a link, maybe with a picture in it
LINK = re.compile(rf"(!?)\[({TEXT})\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
SETTING = re.compile(r"^(?P<indent> *)(?P<name>[\w.-]+):(?P<value>[^#]*)(?:# (?P<meaning>.*))?$")
TARGET = re.compile(r"^_target_: (\S+)$", re.MULTILINE)
UNLISTED = frozenset({"_target_", "defaults", "hydra"})
INDENT = 2  # spaces of a level in conf/
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
    path = Path(page.file.abs_src_path).relative_to(ROOT)
    on_site = frozenset(file.src_uri for file in files)
    repo_url = (config.repo_url or "").rstrip("/")
    relinker = Relinker(path.as_posix(), on_site, repo_url)
    return relinker.text(fill_in(markdown))


def fill_in(markdown: str) -> str:
    """Replace the marks of generated tables by the tables."""
    filled = markdown
    for mark, table in (("settings", settings_tables), ("policies", policy_table)):
        comment = f"<!-- generated: {mark} -->"
        if comment in filled:
            filled = filled.replace(comment, table())
    return filled


# Links


@dataclass(frozen=True)
class Relinker:
    """Turns links of a page, written for the repository, into links of the site.

    `page` is the page's path in the repository, `on_site` the paths of all sources of the site.
    """

    page: str
    on_site: frozenset[str]
    repo_url: str

    def text(self, markdown: str) -> str:
        """Rewrite the links of a page outside its blocks of code."""
        lines = []
        is_code = False
        for line in markdown.split("\n"):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            if is_code:
                lines.append(line)
            else:
                lines.append(LINK.sub(self.link, line))
        return "\n".join(lines)

    def link(self, link: re.Match[str]) -> str:
        """Rewrite a link: to a page of the site, else to the forge, else to its bare text."""
        picture_mark, text, path, anchor = link.groups(default="")
        folder = os.path.dirname(self.page)
        target = os.path.normpath(os.path.join(folder, path))
        source = self.source(target)
        if source:
            site_folder = os.path.dirname(site_path(self.page))
            relative = os.path.relpath(source, site_folder or ".")
            return f"{picture_mark}[{text}]({relative}{anchor})"
        if self.repo_url:
            return f"[{text}]({self.repo_url}/blob/main/{target}{anchor})"
        return text

    def source(self, target: str) -> str | None:
        """Return the site's source for a file, or for a folder its page."""
        path = site_path(target)
        for candidate in (path, f"{path}/README.md"):
            if candidate in self.on_site:
                return candidate
        return None


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
    sections = ["## Short names", settings_table(CONF / "config.yaml", "")]
    for group in GROUPS:
        sections.append(f"## {group}")
        prefix = f"{group}."
        if group == "task":
            prefix = ""  # its files name `task` themselves
        for path in options(group):
            sections += [f"### {group}={path.stem}", summary(path), settings_table(path, prefix)]
        folder = SHARED.get(group)
        if folder:
            for path in options(folder):
                title = f"### {path.stem}, shared by options of {group}"
                sections += [title, summary(path), settings_table(path, prefix)]
    for group in DATA_GROUPS:
        sections += [f"## {group}", summary_table(group)]
    return "\n\n".join(sections)


def summary_table(group: str) -> str:
    """Write a row for each option of a group: what it is."""
    rows = ["| option | what it is |", "| --- | --- |"]
    for path in options(group):
        meaning = in_cell(summary(path))
        rows.append(f"| `{path.stem}` | {meaning} |")
    return "\n".join(rows)


def policy_table() -> str:
    """Write a row for each policy: its option, its rule and source, and its class."""
    rows = ["| `policy=` | rule and source | class |", "| --- | --- | --- |"]
    for path in options("policy"):
        target = TARGET.search(path.read_text())
        assert target is not None, f"{path} names no class"
        class_name = target[1].rpartition(".")[2]
        rule = in_cell(summary(path))
        rows.append(f"| `{path.stem}` | {rule} | `{class_name}` |")
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
    settings = settings_of(path)
    if not settings:
        return ""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for setting in settings:
        default = in_cell(setting.default)
        meaning = in_cell(setting.meaning)
        rows.append(f"| `{prefix}{setting.name}` | {default} | {meaning} |")
    return "\n".join(rows)


def settings_of(path: Path) -> list[Setting]:
    """Read the settings of a file with their comments, nested ones by their dotted names."""
    settings = []
    outer: list[str] = []  # names of the settings around a line
    for line in path.read_text().splitlines():
        match = SETTING.match(line)
        if match is None:
            continue
        depth = len(match["indent"]) // INDENT
        outer = [*outer[:depth], match["name"]]
        if not UNLISTED.isdisjoint(outer):
            continue
        value = match["value"].strip()
        default = ""
        if value:
            default = f"`{value}`"
        meaning = match["meaning"] or ""
        if default or meaning:
            settings.append(Setting(".".join(outer), default, meaning))
    return settings


def in_cell(text: str) -> str:
    """Escape what would end a table's cell."""
    return text.replace("|", "\\|")
