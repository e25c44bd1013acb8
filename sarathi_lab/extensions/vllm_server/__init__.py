"""A policy of the lab in vLLM's server (experiments/lab/vllm_server has the whole recipe):

    vllm serve MODEL --no-enable-prefix-caching \\
        --scheduler-cls sarathi_lab.extensions.vllm_server.AsyncScheduler \\
        --additional-config '{"sarathi_lab": {"policy": "sarathi", "chunk": 512}}'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from sarathi_lab.config import instantiate
from sarathi_lab.config.errors import UserError, unknown_name
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler as LabScheduler
from sarathi_lab.tasks.server_defaults import PAPER_CHUNK


def __getattr__(name: str) -> Any:
    if name not in ("Scheduler", "AsyncScheduler"):  # which need vLLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.schedulers"), name)


def policy_of(settings: Mapping[str, Any], batch_size: int, max_model_len: int) -> Policy:
    """Build the policy of the command line's settings, such as {"policy": "sarathi", "chunk": 512,
    "policy.max_prefills": 2}. Raises UserError for unknown ones, and for what no server has.
    """
    options, name = instantiate.option_files("policy", []), str(settings.get("policy"))
    if name not in options:
        raise unknown_name(name, list(options), 'a policy of "sarathi_lab" (--additional-config)')
    node = instantiate.read_option("policy", options[name])
    defaults = {**instantiate.top_level(), "chunk": PAPER_CHUNK}
    config = OmegaConf.create({**defaults, "policy": node})
    names = instantiate.parameter_names(node, "policy")
    for key in [one for one in settings if one != "policy"]:
        if key not in names:
            raise unknown_name(key, names, f"a setting of policy={name}")
        OmegaConf.update(config, key, settings[key])
    policy: Policy = instantiate.build(config.policy, Policy)

    def refuse() -> None:
        raise UserError(f"policy={name} needs what a server of vLLM lacks; use another")

    return policy.on_device(refuse, batch_size, max_model_len)  # it predicts no times


@dataclass(eq=False, repr=False, kw_only=True)
class Decider(LabScheduler):
    """Scheduler of the lab whose decisions vLLM's follows.

    Batches have at most `most_tokens` tokens, where prompts are cut by policies that cut any. What
    has all its tokens keeps its blocks until `drop`, as in vLLM. With `is_async` the last token of
    an evicted sequence may be on its way, so that it does not return in the same iteration.
    """

    most_tokens: int
    is_async: bool
    admits: bool = True  # false while the server pauses
    evicted: set[SequenceState] = field(default_factory=set)  # until vLLM has evicted them

    def __post_init__(self) -> None:
        super().__post_init__()
        policy, self.cuts = self.policy, self.policy.budget_field is not None
        beside = self.batch_size if policy.decodes_on_top or not self.cuts else 0
        needed = (policy.budget or self.max_model_len) + beside
        if needed > self.most_tokens:
            raise UserError(
                f"--max-num-batched-tokens={self.most_tokens} is below the {needed} tokens that a "
                f"batch of policy={policy.name} may have (max_model_len={self.max_model_len}, "
                f"{policy.budget_field}={policy.budget}); raise it, or lower these"
            )

    def enter(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> bool:
        is_barred = not self.admits or (self.is_async and sequence in self.evicted)
        if is_barred or self._room(batch) < (1 if self.cuts else num_tokens):
            return False
        return super().enter(batch, sequence, num_tokens)

    def put(self, batch: Batch, sequence: SequenceState, num_tokens: int) -> None:
        super().put(batch, sequence, min(num_tokens, self._room(batch) + 1))

    def _room(self, batch: Batch) -> int:
        """Tokens that `batch` has left beside one for each running sequence that may join it."""
        taken = 0 if self.policy.is_capped else batch.num_tokens + len(self.running) - len(batch)
        return self.most_tokens - taken

    def preempt(self, sequence: SequenceState) -> None:
        self.evicted.add(sequence)
        super().preempt(sequence)

    def leave(self, sequence: SequenceState) -> None:
        sequence.in_flight = True

    def drop(self, sequence: SequenceState) -> None:
        """Forget a sequence that is finished or aborted."""
        super().leave(sequence)
