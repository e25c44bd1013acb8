"""A page of HTML that needs no other file, from sections."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import DisplayTable


@dataclass(frozen=True)
class Section:
    """A part of the page: conclusions, facts of the run by name, tables, and PNGs by title."""

    title: str
    sentences: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[DisplayTable] = ()


def write_page(title: str, sections: Sequence[Section], page: Path) -> None:
    """Write the file `page`, all texts escaped."""
    environment = Environment(
        loader=PackageLoader("sarathi_lab.extensions.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: b64encode(content).decode()
    template = environment.get_template("page.html")
    page.write_text(template.render(title=title, sections=sections, made=provenance()), "utf-8")
