"""Files of pictures. PNGs have a palette: a third of the bytes of true colour, alike to the eye."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

DPI = 150
TALLEST = 20  # inches: a taller picture, of many maps, has fewer dots
DPI_OF_TALL = 100


def save_figure(figure: Figure, path: Path) -> None:
    """Save a picture in the format of its path's ending."""
    if path.suffix == ".png":
        path.write_bytes(as_png(figure))
    else:
        figure.savefig(path, dpi=DPI)


def as_png(figure: Figure) -> bytes:
    """Return a picture as an opaque PNG file in at most 256 colours of its own."""
    drawn = BytesIO()
    dpi = DPI
    if figure.get_figheight() > TALLEST:
        dpi = DPI_OF_TALL
    figure.savefig(drawn, format="png", dpi=dpi)
    return with_palette(drawn.getvalue())


def with_palette(png: bytes) -> bytes:
    """Return a PNG file with at most 256 colours of its own, without dithering.

    An octree keeps rare colours, such as a few red marks on a map; a median cut mixes them.
    """
    opaque = Image.open(BytesIO(png)).convert("RGB")
    reduced = opaque.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    file = BytesIO()
    reduced.save(file, "PNG", optimize=True)
    return file.getvalue()
