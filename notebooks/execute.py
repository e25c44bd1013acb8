"""Execute notebooks in place, with pictures in a palette so that their files stay small:

python notebooks/execute.py figures after_sarathi
"""

from __future__ import annotations

import argparse
from base64 import b64decode, b64encode
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from sarathi_lab.results.plots.files import with_palette

NOTEBOOKS = Path(__file__).parent
PNG = "image/png"


def execute(path: Path) -> None:
    """Execute all cells in the notebook's folder, and write the notebook with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ each time
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PNG in data:
                picture = with_palette(b64decode(data[PNG]))
                data[PNG] = b64encode(picture).decode()
    nbformat.write(notebook, path)


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
