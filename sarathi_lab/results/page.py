"""A self-contained page of HTML with runs, results and pictures."""

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
    """A part of the page: its conclusions (`said`), `facts` of the run by name, `tables`, those
    `folded` behind a click, and `pictures` (PNG) by title.
    """

    title: str
    said: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[DisplayTable] = ()
    folded: Sequence[DisplayTable] = ()


def png(figure: Figure) -> bytes:
    """Return a picture as a PNG file."""
    figure.savefig(file := BytesIO(), format="png", dpi=150)
    return file.getvalue()


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page; all texts are escaped."""
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
