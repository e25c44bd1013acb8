"""A JupyterLab of its own and a headless browser, in which notebooks are opened and run as a person
would.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from helpers import drawing_once
from playwright.sync_api import Page, sync_playwright

from sarathi_lab.config.paths import REPOSITORY

SECONDS = 300  # for a notebook's cells
# As `python -m jupyterlab`, without seconds of a grammar of IRIs, as conftest leaves it out.
LAB = "import sys; sys.modules['rfc3987_syntax'] = None; from jupyterlab.labapp import main; main()"
START = 90  # seconds, for JupyterLab and its page
# Every cell has its number, or one failed and no other waits (a star).
HAS_RUN = """() => {
    const all = [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')]
        .map(prompt => prompt.innerText.replace(/[\\[\\]:\\s]/g, ''));
    const shown = [...document.querySelectorAll('.jp-OutputArea-output')];
    const failed = shown.some(output => output.innerText.includes('Traceback (most recent'));
    return all.length && (all.every(text => /^\\d+$/.test(text)) || (failed && !all.includes('*')));
}"""


class LabPage(NamedTuple):
    """What was on the page after all cells ran; pictures by width and height on the screen, in
    pixels; seconds from opening it to the last cell's end.
    """

    num_code_cells: int
    num_executed: int
    pictures: list[tuple[float, float]]
    text: str
    errors: list[str]
    seconds: float


Visit = Callable[[Page], Any]
Run = Callable[..., LabPage]


@contextmanager
def lab_in_browser(
    browser: str, folder: Path, environment: Mapping[str, str], replaced: Mapping[str, str]
) -> Iterator[Run]:
    """Yields `run(notebook, visit=...)`, which opens a notebook without its outputs, runs it by the
    menu with a kernel of its own, looks, and lets `visit` go on with the page. Texts in cells are
    `replaced`; screenshots stay in `folder`.
    """
    with _lab(folder, environment) as url, sync_playwright() as playwright:
        options: dict[str, Any] = {"args": ["--no-sandbox", "--disable-gpu"]}
        chromium = playwright.chromium.launch(executable_path=browser, **options)
        context = chromium.new_context(viewport={"width": 1400, "height": 1000})

        def run(notebook: Path, visit: Visit = lambda page: None) -> LabPage:
            (own := folder / f"{notebook.stem}-{time.monotonic_ns()}").mkdir()
            _without_outputs(notebook, own / notebook.name, replaced)
            start, page = time.monotonic(), context.new_page()
            page.goto(f"{url}/lab/tree/{own.name}/{notebook.name}?reset", timeout=START * 1000)
            _run_all(page)
            seconds = time.monotonic() - start
            found = _look(page, own, seconds)
            visit(page)
            page.screenshot(path=own / "page.png")
            page.close()
            return found

        yield run
        chromium.close()


def _without_outputs(notebook: Path, copy: Path, replaced: Mapping[str, str]) -> None:
    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:
        for given, other in replaced.items():
            cell.source = cell.source.replace(given, other)
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    nbformat.write(content, copy)


@contextmanager
def _lab(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """A JupyterLab over `folder` without a token, on a free port of this machine alone; yields its
    address.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "port": port,
        "token": "",
        "root_dir": folder,
        "open_browser": False,
        "allow_root": True,
    }
    command = [
        *(sys.executable, "-c", LAB),
        *(f"--ServerApp.{key}={value}" for key, value in settings.items()),
    ]
    command += ["--IdentityProvider.token=", "--LabApp.collaborative=False"]
    # Cells out of sight stay on the page, where their numbers can be read.
    tracker = (
        folder / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    )
    tracker.parent.mkdir(parents=True)
    tracker.write_text('{"windowingMode": "none"}')
    paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
    own = {
        name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    whole = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    whole |= drawing_once(folder / "ipythondir")
    whole["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=whole, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder / "jupyter_runtime_dir", ignore_errors=True)


def _wait_until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(10 * START):
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}; see lab.log")
        try:
            urllib.request.urlopen(f"{url}/api", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab is not up after {START} s; see lab.log")


def _run_all(page: Page) -> None:
    """As a person would: the menu Run, its entry Run All Cells, and wait until no cell is
    waiting.
    """
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=START * 1000)
    # The status bar says so when the kernel is there; run before, JupyterLab would ask which to
    # take.
    page.locator(".jp-StatusBar-TextItem", has_text="| Idle").wait_for(timeout=START * 1000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator("[data-command='runmenu:run-all']").click()
    page.wait_for_function(HAS_RUN, polling=200, timeout=SECONDS * 1000)


def _look(page: Page, folder: Path, seconds: float) -> LabPage:
    """Scroll through the cells, so that each is drawn, with a screenshot of every picture."""
    pictures = page.locator(".jp-OutputArea-output img")
    sizes = []
    for i in range(pictures.count()):
        picture = pictures.nth(i)
        picture.scroll_into_view_if_needed()
        box = picture.bounding_box()
        assert box is not None
        assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
        picture.screenshot(path=folder / f"picture-{i:02}.png")
        sizes.append((box["width"], box["height"]))
    prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt").all_inner_texts()
    texts = page.locator(".jp-OutputArea-output").all_inner_texts()
    errors = [text for text in texts if "Traceback (most recent" in text]
    executed = sum(bool(re.fullmatch(r"\[\d+\]:?", prompt.strip())) for prompt in prompts)
    return LabPage(len(prompts), executed, sizes, "\n".join(texts), errors, seconds)
