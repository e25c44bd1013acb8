"""Files of pictures. PNGs have a palette: a third of the bytes of true colour, alike to the eye."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

DPI = 150


def save_figure(figure: Figure, path: Path) -> None:
    """Save a picture in the format of its path's ending."""
    if path.suffix == ".png":
        path.write_bytes(as_png(figure))
    else:
        figure.savefig(path, dpi=DPI)


def as_png(figure: Figure) -> bytes:
    """Return a picture as an opaque PNG file in at most 256 colours of its own."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    file = BytesIO()
    with_palette(Image.open(drawn)).save(file, "PNG", optimize=True)
    return file.getvalue()


def with_palette(image: Image.Image) -> Image.Image:
    """Reduce an image to at most 256 colours of its own, without dithering.

    An octree keeps rare colours, such as a few red marks on a map; a median cut mixes them.
    """
    opaque = image.convert("RGB")
    return opaque.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
