"""llama.cpp's server, of a GGUF file that is kept beside the checkpoint.

The server is `llama-server` where the environment or the PATH has one, else the one inside the
package xllamacpp. That package is compiled for AVX2, so on a machine with AVX512 or AMX only a
`llama-server` that was compiled on it (cmake -DGGML_NATIVE=ON) shows what llama.cpp can do; the
version says which of the two it was.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llama_gguf import exported
from worker_protocol import serve

PAGE = 256  # tokens, to which llama.cpp rounds the context of a sequence
MARGIN = 2  # tokens below its end at which the server ends a sequence
POLL = 0.05  # seconds between two looks whether the server is ready
KV_TYPES = {"float32": "f32", "bfloat16": "f16"}  # the latter is llama.cpp's own choice
# Its flash attention moves logits by about a thousandth, also where all is float32.
FLASH_ATTENTION = {"float32": False, "bfloat16": True}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LlamaCpp:
    """A slot for every sequence, iterations of `chunk` tokens, decodes before prompts, and no
    prompt remembered from the last run.
    """

    def load(self, settings: dict[str, Any]) -> str:
        """The export has the wanted precision."""
        model = exported(Path(settings["model_dir"]), settings["dtype"])
        context = settings["batch"] * PAGE * math.ceil((settings["longest"] + MARGIN) / PAGE)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        binary = shutil.which("llama-server", path=path)
        start = partial(self._start, binary) if binary else self._embed
        return start(model, context, KV_TYPES[settings["dtype"]], settings)

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """All prompts are one message, so that they are there at the start."""
        wanted = {
            "prompt": prompts,
            "n_predict": output_len,
            "temperature": 0.0,
            "samplers": ["temperature"],  # the most likely token needs no others
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "response_fields": ["index", "tokens"],
        }
        found = self._ask("POST", "/completion", json.dumps(wanted))
        outputs = found if isinstance(found, list) else [found]
        return [each["tokens"] for each in sorted(outputs, key=lambda each: int(each["index"]))]

    def _start(
        self, binary: str, model: Path, context: int, kv_type: str, settings: dict[str, Any]
    ) -> str:
        """Run `binary` on a free port until this process ends; returns when the model is loaded."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host, self.port = free.getsockname()
        given = {
            "--model": model,
            "--host": self.host,
            "--port": self.port,
            "--parallel": settings["batch"],
            "--ctx-size": context,
            **dict.fromkeys(["--batch-size", "--ubatch-size"], settings["chunk"]),
            **dict.fromkeys(["--threads", "--threads-batch"], settings["threads"]),
            **dict.fromkeys(["--cache-type-k", "--cache-type-v"], kv_type),
            "--cache-ram": 0,
            "--flash-attn": "on" if FLASH_ATTENTION[settings["dtype"]] else "off",
        }
        command = [binary, *(str(word) for pair in given.items() for word in pair)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
        while not self._is_ready():
            if (code := server.poll()) is not None:
                raise RuntimeError(f"{binary} ended while it started (exit code {code})")
            time.sleep(POLL)
        return f"llama-server {self._ask('GET', '/props')['build_info']}"

    def _embed(self, model: Path, context: int, kv_type: str, settings: dict[str, Any]) -> str:
        """Run the server of xllamacpp, imported only here, in a thread of this process."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel = settings["batch"]
        params.n_ctx = context
        params.n_batch = params.n_ubatch = settings["chunk"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_type.upper()}")
        params.cache_type_k = params.cache_type_v = kind
        params.cache_ram_mib = 0
        attention = "ENABLED" if FLASH_ATTENTION[settings["dtype"]] else "DISABLED"
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{attention}")
        self.server = xllamacpp.Server(params)
        address = urlsplit(self.server.listening_address)
        self.host, self.port = address.hostname, address.port
        return f"xllamacpp {xllamacpp.__version__}"

    def _is_ready(self) -> bool:
        try:
            return bool(self._ask("GET", "/health"))
        except (OSError, RuntimeError):
            return False

    def _ask(self, method: str, path: str, body: str | None = None) -> Any:
        """The server's answer, without a time limit; RuntimeError if it refuses."""
        with closing(http.client.HTTPConnection(str(self.host), self.port)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != http.HTTPStatus.OK:
            message = answer["error"]["message"]
            raise RuntimeError(f"{path} was answered with {response.status}: {message}")
        return answer


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(LlamaCpp())
