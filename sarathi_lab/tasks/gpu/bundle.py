"""`python -m sarathi_lab bundle`: the campaign as one file, for a machine with a GPU, its own torch
and Triton, and no internet.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from sarathi_lab.config.console import print_place
from sarathi_lab.config.errors import RunError, UserError, exit_code
from sarathi_lab.config.paths import IS_CHECKOUT, OUTPUTS, REPOSITORY, make_folder

OF_THE_MACHINE = ("torch", "triton", "wandb")  # W&B is not needed: the campaign tracks nothing
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
VERSIONS = (
    "import platform as p, torch, triton as t; "
    "print(p.python_version(), torch.__version__, t.__version__)"
)
FOUND = re.compile(r"(?P<python>(?P<minor>\d+\.\d+)\.\S+) (?P<torch>\S+) (?P<triton>\S+)")
SCRIPT = """#!/bin/sh
# The campaign, with what lies beside this file and the machine's own torch and Triton:
#     sh campaign.sh [SETTINGS, such as task=peaks,kernels or resume=true]
# Kernels were compiled for compute capability {capabilities} by Triton {triton} of Python {minor};
# another Triton compiles them again. Results so far: checkout/outputs/campaign.tar.gz
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
"$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{minor}")' || {{
    echo "error: $python is not Python {minor}, for which this was packed; PYTHON=... names it" >&2
    exit 2
}}
export PYTHONPATH="$here/checkout:$here/checkout/kernels:$here/site" TRITON_CACHE_DIR="$here/triton"
cd "$here/checkout" && exec "$python" -m sarathi_lab run experiment=campaign "$@"
"""


def main(args: Sequence[str]) -> int:
    """Returns 0, 1 if pip or git failed, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab bundle",
        description="Pack this commit, the packages that it needs and kernels compiled ahead into "
        "one file. Unpack it on the machine: sh campaign/campaign.sh",
    )
    text = "of the machine's version, with its torch and Triton (default: this one, %(default)s)"
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON", help=text)
    text = "of the GPU: 80, 86, 89, 90 (default) or 100; may be repeated"
    parser.add_argument("--capability", type=int, action="append", metavar="N", help=text)
    text = "the file (default: %(default)s)"
    default = OUTPUTS / "campaign-bundle.tar.gz"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=text)
    own = parser.parse_args(list(args))
    what = (own.python, own.capability or [90], own.out)
    return exit_code(lambda: _bundle(*what), "nothing was written")


def _bundle(python: str, capabilities: Sequence[int], out: Path) -> int:
    if not IS_CHECKOUT:
        raise UserError("bundle packs a checkout, this is a wheel; clone the repository")
    make_folder(out.parent, "--out")
    script = SCRIPT.format(**_versions(python), capabilities=", ".join(map(str, capabilities)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _do("git", "clone", "--quiet", "--depth=1", REPOSITORY.as_uri(), folder / "checkout")
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--target"]
        _do(*pip, folder / "site", "-c", REPOSITORY / "constraints.txt", *requirements())
        _compile(python, capabilities, folder)
        (folder / "campaign.sh").write_text(script)
        with tarfile.open(out, "w:gz", compresslevel=6) as archive:
            archive.add(folder, "campaign")
    print_place("bundle", out)
    return 0


def _versions(python: str) -> dict[str, str]:
    """Of Python (`minor`: its first two numbers alone), torch and Triton."""
    try:
        done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
        told = done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        told = ""
    if (found := FOUND.fullmatch(told)) is None:
        raise UserError(
            f"--python={python} has no torch and Triton, for which kernels are compiled; make one "
            "with the machine's versions: python3.12 -m venv V && V/bin/pip install torch==2.11.0 "
            "triton==3.6.0"
        )
    return found.groupdict()


def requirements() -> list[str]:
    """What the lab and its tests need beside what the machine has, as pip takes it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *FOR_TESTS]
    return [one for one in needed if re.split(r"[<>=;\[ ]", one)[0] not in OF_THE_MACHINE]


def _compile(python: str, capabilities: Sequence[int], folder: Path) -> None:
    """Leave compiled kernels in folder/triton, under the keys that a launch on the GPU looks for.
    Its code 1 is for kernels that could be better.
    """
    checkout = folder / "checkout"
    path = os.pathsep.join(map(str, (checkout, checkout / "kernels", folder / "site")))
    own = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "triton")}
    chosen = [f"--capability={one}" for one in capabilities]
    environment = {**os.environ, **own, "TRITON_INTERPRET": "0"}
    _do(python, "-m", "sarathi_kernels.compilation", *chosen, codes=(0, 1), env=environment)


def _do(*command: str | Path, codes: Sequence[int] = (0,), **options: object) -> None:
    """Run a command whose output goes to the terminal; RunError if it ends with other `codes`."""
    code = subprocess.run(command, check=False, **options).returncode  # type: ignore[call-overload]
    if code not in codes:
        words = " ".join(map(str, command[:4]))
        raise RunError(f"{words} ... ended with code {code}; see its output")
