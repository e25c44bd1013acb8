"""Scheduling policies, one module per system; `base` says what a policy is."""

from sarathi_lab.policy.base import Policy, Reserve, with_budget
from sarathi_lab.policy.paper import Orca, RequestLevel, Sarathi
from sarathi_lab.policy.sarathi_serve import SarathiServe
from sarathi_lab.policy.vllm import PrefillFirst

__all__ = ["Orca", "Policy", "PrefillFirst", "RequestLevel", "Reserve", "Sarathi", "SarathiServe", "with_budget"]
