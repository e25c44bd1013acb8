"""Scheduling policies, one module per system; `conf/policy/` names these classes."""

from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.policy.ascend import Ascend, AscendV09
from sarathi_lab.policy.ascend_dynamic import AscendDynamic
from sarathi_lab.policy.lightllm import LightLLM
from sarathi_lab.policy.lmdeploy import LMDeploy, LMDeployPytorch
from sarathi_lab.policy.paper import Orca, RequestLevel, Sarathi
from sarathi_lab.policy.sarathi_serve import ChunkedOnly, SarathiServe, SarathiServeDynamic
from sarathi_lab.policy.servers import FastDeploy, LlamaCpp, OpenVINO, SplitFuse
from sarathi_lab.policy.sglang import SGLang
from sarathi_lab.policy.tgi import TGI
from sarathi_lab.policy.transformers import TransformersFIFO, TransformersPrefillFirst
from sarathi_lab.policy.trtllm import TensorRTLLM
from sarathi_lab.policy.vllm import NanoVllm, PrefillFirst, VllmV0Chunked, VllmV1
