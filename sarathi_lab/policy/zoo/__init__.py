"""Rules that papers, threads and this lab propose, and that no server ships."""

from sarathi_lab.policy.zoo.budgets import Lprs, Niyama, SloBudget
from sarathi_lab.policy.zoo.prompts import DynamicChunks, PPas, Ranked
from sarathi_lab.policy.zoo.riding import RidingLimit
from sarathi_lab.policy.zoo.vllm_proposals import (
    CacheAware,
    InterPrefillBudget,
    MinPrefillChunk,
    PPasPlus,
)
