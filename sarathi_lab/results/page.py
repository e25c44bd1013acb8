"""One page of HTML that needs no other file and no network: what was run, found and drawn."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import DisplayTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """A part of the page: `said` is its conclusion, `facts` say by name what was run, `tables` are
    shown and those `folded` away open by a click, `pictures` are PNG files by what they show.
    """

    title: str
    said: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[DisplayTable] = ()
    folded: Sequence[DisplayTable] = ()


def png(figure: Figure) -> bytes:
    """A picture as the file that a section takes."""
    figure.savefig(file := BytesIO(), format="png", dpi=150)
    return file.getvalue()


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page. Everything in it is text: what looks like HTML is shown, not obeyed."""
    environment = Environment(
        loader=PackageLoader("sarathi_lab.results", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: b64encode(content).decode()
    page = environment.get_template("page.html")
    path.write_text(page.render(title=title, sections=sections, made=provenance()), "utf-8")
