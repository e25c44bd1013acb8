"""Scheduling policies, one class per system; `conf/policy/` names these classes."""

from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.policy.alternating import TGI, LightLLM, LMDeploy, LMDeployPytorch
from sarathi_lab.policy.ascend import Ascend, AscendDynamic, AscendV09
from sarathi_lab.policy.paper import (
    ChunkedOnly,
    Orca,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SarathiServeDynamic,
)
from sarathi_lab.policy.servers import FastDeploy, LlamaCpp, OpenVINO, SplitFuse, TensorRTLLM
from sarathi_lab.policy.sglang import SGLang
from sarathi_lab.policy.transformers import TransformersFIFO, TransformersPrefillFirst
from sarathi_lab.policy.vllm import NanoVllm, PrefillFirst, VllmV0Chunked, VllmV1
