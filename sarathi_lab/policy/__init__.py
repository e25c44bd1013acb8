"""Scheduling policies, one module per system; `base` says what a policy is."""

from sarathi_lab.policy.ascend import Ascend, AscendDynamic, AscendV09
from sarathi_lab.policy.base import Policy, Reserve, with_budget
from sarathi_lab.policy.deepspeed import SplitFuse
from sarathi_lab.policy.fastdeploy import FastDeploy
from sarathi_lab.policy.nano_vllm import NanoVllm
from sarathi_lab.policy.paper import Orca, RequestLevel, Sarathi
from sarathi_lab.policy.sarathi_serve import ChunkedOnly, SarathiServe, SarathiServeDynamic
from sarathi_lab.policy.vllm import PPas, PrefillFirst, VllmV0Chunked, VllmV1

__all__ = [
    "Ascend",
    "AscendDynamic",
    "AscendV09",
    "ChunkedOnly",
    "FastDeploy",
    "NanoVllm",
    "Orca",
    "PPas",
    "Policy",
    "PrefillFirst",
    "RequestLevel",
    "Reserve",
    "Sarathi",
    "SarathiServe",
    "SarathiServeDynamic",
    "SplitFuse",
    "VllmV0Chunked",
    "VllmV1",
    "with_budget",
]
