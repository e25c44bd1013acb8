"""llama.cpp's server with a slot for every sequence, of a GGUF file that is made beside the
checkpoint and kept.

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
    """Iterations of `chunk` tokens, decodes before prompts, and no prompt remembered from the last
    run.
    """

    def load(self, settings: dict[str, Any]) -> str:
        """The export has the wanted precision."""
        model = exported(Path(settings["model_dir"]), settings["dtype"])
        context = settings["batch"] * PAGE * math.ceil((settings["longest"] + MARGIN) / PAGE)
        binary = shutil.which(
            "llama-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        start = partial(self._start, binary) if binary else self._embed
        return start(model, context, KV_TYPES[settings["dtype"]], settings)

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """All prompts are one message, so that they are there at the start; the most likely token
        needs no samplers.
        """
        wanted = {
            "prompt": prompts,
            "n_predict": output_len,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "response_fields": ["index", "tokens"],
        }
        found = self._ask("POST", "/completion", json.dumps(wanted))
        outputs = found if isinstance(found, list) else [found]
        return [
            output["tokens"] for output in sorted(outputs, key=lambda output: int(output["index"]))
        ]

    def _start(
        self, binary: str, model: Path, context: int, kv_type: str, settings: dict[str, Any]
    ) -> str:
        """Run `binary` on a free port until this process ends, and wait until it has loaded the
        model.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host, self.port = free.getsockname()
        given = {
            "--model": model,
            "--host": self.host,
            "--port": self.port,
            "--parallel": settings["batch"],
            "--ctx-size": context,
            "--batch-size": settings["chunk"],
            "--ubatch-size": settings["chunk"],
            "--threads": settings["threads"],
            "--threads-batch": settings["threads"],
            "--cache-type-k": kv_type,
            "--cache-type-v": kv_type,
            "--cache-ram": 0,
            "--flash-attn": "on" if FLASH_ATTENTION[settings["dtype"]] else "off",
        }
        command = [binary, *(str(word) for pair in given.items() for word in pair)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
        while not self._is_ready():
            if server.poll() is not None:
                raise RuntimeError(
                    f"{binary} ended while it started (exit code {server.returncode})"
                )
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
        params.cache_type_k = params.cache_type_v = getattr(
            xllamacpp.ggml_type, f"GGML_TYPE_{kv_type.upper()}"
        )
        params.cache_ram_mib = 0
        flash_attention = "ENABLED" if FLASH_ATTENTION[settings["dtype"]] else "DISABLED"
        params.flash_attn_type = getattr(
            xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash_attention}"
        )
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
        """The server's answer; RuntimeError if it refuses. No time limit: whoever started this
        worker has one.
        """
        connection = http.client.HTTPConnection(str(self.host), self.port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(
                f"{path} was answered with {response.status}: {answer['error']['message']}"
            )
        return answer


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(LlamaCpp())
