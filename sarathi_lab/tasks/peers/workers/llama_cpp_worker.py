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
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from worker_protocol import serve

PAGE = 256  # tokens, to which llama.cpp rounds the context of a sequence
MARGIN = 2  # tokens below its end at which the server ends a sequence
POLL = 0.05  # seconds between two looks whether the server is ready
KV_TYPES = {"float32": "f32", "bfloat16": "f16", "int8": "f16"}  # f16 is llama.cpp's own choice
# Its flash attention moves logits by about a thousandth, also where all is float32.
FLASH_ATTENTION = {"float32": False, "bfloat16": True, "int8": True}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
QUERY, KEY = "self_attn.q_proj", "self_attn.k_proj"
OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    QUERY: "attn_q",
    KEY: "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NEWLINE = 10  # a token that the vocabulary must have


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


# -- a Llama checkpoint of transformers as the GGUF file that llama.cpp reads ----------------------


def exported(model_dir: Path, dtype: str) -> Path:
    """The model in `dtype` (int8: Q8_0) below its folder, made unless it is there."""
    target = model_dir / "llama_cpp" / f"{dtype}.gguf"
    if target.is_file():
        return target
    import gguf
    from safetensors.numpy import load_file

    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(unfinished, "llama")
    _describe(writer, config)
    kinds = gguf.GGMLQuantizationType
    matrices = {"float32": kinds.F32, "bfloat16": kinds.BF16, "int8": kinds.Q8_0}[dtype]
    for name, weight in renamed(load_file(model_dir / "model.safetensors"), config):
        kind = matrices if weight.ndim == 2 else kinds.F32
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads x head size, hidden] for rotary pairs (0, 1), (2,
    3), ... of a head.

    transformers rotates the pairs (0, n/2), (1, n/2 + 1), ... of its n rows. Products of queries
    and keys don't change.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def renamed(
    weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names and layouts. Raises ValueError for a weight that it has no name for."""
    heads = {QUERY: config["num_attention_heads"], KEY: config["num_key_value_heads"]}
    for name, weight in weights.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if name in OUTSIDE_LAYERS:
            yield OUTSIDE_LAYERS[name], weight
        elif layer is None or layer[2] not in IN_A_LAYER:
            raise ValueError(f"llama.cpp's Llama has no weight {name}")
        else:
            laid_out = interleaved(weight, heads[layer[2]]) if layer[2] in heads else weight
            yield f"blk.{layer[1]}.{IN_A_LAYER[layer[2]]}.weight", laid_out


def _describe(writer: Any, config: Mapping[str, Any]) -> None:
    """The shape; a vocabulary of RWKV's kind, as others' end of sequence is never answered."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([r"\n" if i == NEWLINE else f"{i}," for i in range(config["vocab_size"])])


if __name__ == "__main__":
    serve(LlamaCpp())
