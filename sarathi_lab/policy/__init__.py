"""Scheduling policies, one module per system; `base` says what a policy is."""

from sarathi_lab.policy.base import Policy, Reserve, with_budget
from sarathi_lab.policy.lightllm import LightLLM
from sarathi_lab.policy.llama_cpp import LlamaCpp
from sarathi_lab.policy.lmdeploy import LMDeploy, LMDeployPytorch
from sarathi_lab.policy.openvino import OpenVINO
from sarathi_lab.policy.paper import Orca, RequestLevel, Sarathi
from sarathi_lab.policy.sarathi_serve import SarathiServe
from sarathi_lab.policy.sglang import SGLang
from sarathi_lab.policy.tgi import TGI
from sarathi_lab.policy.transformers import TransformersFIFO, TransformersPrefillFirst
from sarathi_lab.policy.trtllm import TensorRTLLM
from sarathi_lab.policy.vllm import PrefillFirst

__all__ = [
    "TGI",
    "LMDeploy",
    "LMDeployPytorch",
    "LightLLM",
    "LlamaCpp",
    "OpenVINO",
    "Orca",
    "Policy",
    "PrefillFirst",
    "RequestLevel",
    "Reserve",
    "SGLang",
    "Sarathi",
    "SarathiServe",
    "TensorRTLLM",
    "TransformersFIFO",
    "TransformersPrefillFirst",
    "with_budget",
]
