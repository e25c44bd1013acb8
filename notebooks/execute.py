"""Execute notebooks in place, with pictures of few colours so that their files stay small:

python notebooks/execute.py figures after_sarathi
"""

from __future__ import annotations

import argparse
import json
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path

import nbformat
import numpy as np
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

NOTEBOOKS = Path(__file__).parent
REPOSITORY = NOTEBOOKS.parent.resolve()
PNG = "image/png"
PALETTES = (32, 64, 128, 256)  # colours of a picture, the fewest that are near enough
# Visitors see the figures here; those of the other notebook stand larger on the pages it links to.
DOTS_PER_INCH = {"figures": 76, "after_sarathi": 62, "compare_runs": 100}
MOST_WIDTH = 1200  # pixels: a picture that a run has drawn, at 150 dots an inch, is wider
NEAR = 24  # of 255: a colour may be off by, in all but a thousandth of the pixels


def execute(path: Path) -> None:
    """Execute all cells in the notebook's folder, and write the notebook with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    options = {"bbox_inches": "tight", "dpi": DOTS_PER_INCH.get(path.stem, 72)}
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(path.parent)}},
        # Not in a cell of its own, which the kernel would count.
        extra_arguments=[f"--InlineBackend.print_figure_kwargs={options}"],
        store_widget_state=False,  # it is long, and its names differ each time
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ each time
        if "outputs" in cell:
            cell.outputs = from_notebooks(cell.outputs)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PNG in data:
                data[PNG] = b64encode(with_few_colours(b64decode(data[PNG]))).decode()
    nbformat.write(notebook, path)


def from_notebooks(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return outputs with the repository's path as `..`: a reader's clone is elsewhere."""
    text = json.dumps(outputs)
    path = json.dumps(str(REPOSITORY)).strip('"')
    relative: list[NotebookNode] = nbformat.from_dict(json.loads(text.replace(path, "..")))
    return relative


def with_few_colours(png: bytes) -> bytes:
    """Return a picture as PNG, at most `MOST_WIDTH` wide, with the smallest of `PALETTES` that
    keeps its colours.
    """
    picture = Image.open(BytesIO(png)).convert("RGB")
    picture.thumbnail((MOST_WIDTH, picture.height))
    reduced = picture
    for number in PALETTES:
        reduced = picture.quantize(number, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        if largest_error(picture, reduced) <= NEAR:
            break
    file = BytesIO()
    reduced.save(file, "PNG", optimize=True)
    return file.getvalue()


def largest_error(picture: Image.Image, reduced: Image.Image) -> float:
    """Return how far colours are off, at the worst but for a thousandth of the pixels."""
    before = np.asarray(picture, dtype=int)
    after = np.asarray(reduced.convert("RGB"), dtype=int)
    errors = np.abs(before - after).max(axis=2)
    return float(np.quantile(errors, 0.999))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    for name in parser.parse_args().names:
        path = NOTEBOOKS / f"{name}.ipynb"
        execute(path)
        print(f"{path}: {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
