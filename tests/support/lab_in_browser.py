"""Opens a notebook in a JupyterLab of its own, in a headless browser, and runs all its cells
there.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import nbformat
from helpers import drawing_once
from playwright.sync_api import Page, sync_playwright

from sarathi_lab.config.paths import REPOSITORY

SECONDS = 300  # for the notebook's cells
START = 90  # seconds, for JupyterLab and its page


class LabPage(NamedTuple):
    """What was on the page after all cells ran; pictures by width and height on the screen, in
    pixels.
    """

    num_code_cells: int
    num_executed: int
    pictures: list[tuple[float, float]]
    text: str
    errors: list[str]


def run_in_lab(notebook: Path, browser: str, folder: Path) -> LabPage:
    """Copy the notebook to `folder` without its outputs, run it there by the menu, and look;
    screenshots stay there.
    """
    copy = folder / notebook.name
    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    nbformat.write(content, copy)
    with _lab(folder) as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser, args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(f"{url}/lab/tree/{copy.name}?reset", timeout=START * 1000)
        _run_all(page)
        found = _look(page, folder)
        chromium.close()
    return found


@contextmanager
def _lab(folder: Path) -> Iterator[str]:
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
        sys.executable,
        "-m",
        "jupyterlab",
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
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= drawing_once(folder / "ipythondir")
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
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
    # An executed cell has its number in the prompt, a waiting one a star.
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        prompts = _prompts(page)
        if prompts and all(prompt.strip("[]: ").isdigit() for prompt in prompts):
            return
        time.sleep(0.5)
    raise RuntimeError(f"cells still run after {SECONDS} s: {_prompts(page)}")


def _prompts(page: Page) -> list[str]:
    return page.locator(".jp-CodeCell .jp-InputArea-prompt").all_inner_texts()


def _look(page: Page, folder: Path) -> LabPage:
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
    page.screenshot(path=folder / "page.png")
    prompts = _prompts(page)
    errors = page.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
    text = "\n".join(page.locator(".jp-OutputArea-output").all_inner_texts())
    return LabPage(
        len(prompts), sum(prompt.strip("[]: ").isdigit() for prompt in prompts), sizes, text, errors
    )
