"""OpenVINO GenAI's continuous batching, of an export that is kept beside the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker_protocol import serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoGenAi:
    """`split` cuts prompts to share iterations of `chunk` tokens with decodes; without it prompts
    run whole, first. The KV cache has the precision that OpenVINO chooses.
    """

    def load(self, settings: dict[str, Any]) -> str:
        """The export is in float32, or its weights in int8; the precision of the products is a
        property of the pipeline, which OpenVINO chooses itself for weights in int8.
        """
        batch, whole = settings["batch"], settings["batch"] * settings["longest"]
        scheduler = genai.SchedulerConfig()
        scheduler.dynamic_split_fuse = settings["split"]
        scheduler.max_num_batched_tokens = settings["chunk"] if settings["split"] else whole
        scheduler.max_num_seqs = batch
        scheduler.enable_prefix_caching = False  # every run has the same prompts
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if (dtype := settings["dtype"]) != "int8":
            properties["INFERENCE_PRECISION_HINT"] = PRECISIONS[dtype]
        directory = str(_exported(Path(settings["model_dir"]), in_int8=dtype == "int8"))
        self.pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
        return f"openvino-genai {genai.__version__}"

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.do_sample = False
        config.ignore_eos = True
        # It refuses the model's own, none, even where it is ignored.
        config.set_eos_token_id(0)
        config.stop_token_ids = {0}
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        found = self.pipeline.generate(inputs, [config] * len(inputs))
        return [list(each.m_generation_ids[0]) for each in found]


def _exported(model_dir: Path, *, in_int8: bool) -> Path:
    target = model_dir / ("openvino-int8" if in_int8 else "openvino")
    if not target.is_dir():
        from optimum.intel import OVModelForCausalLM

        options = {"export": True, "load_in_8bit": in_int8, "compile": False}
        unfinished = target.with_suffix(".unfinished")
        OVModelForCausalLM.from_pretrained(model_dir, **options).save_pretrained(unfinished)
        unfinished.rename(target)
    return target


if __name__ == "__main__":
    serve(OpenVinoGenAi())
