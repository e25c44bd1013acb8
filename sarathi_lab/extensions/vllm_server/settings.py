"""The policy that the settings of vLLM's command line name."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import OmegaConf

from sarathi_lab.config import instantiate
from sarathi_lab.config.errors import UserError, unknown_name
from sarathi_lab.engine.policy import Policy
from sarathi_lab.tasks.server_defaults import PAPER_CHUNK


def policy_of(settings: Mapping[str, object], batch_size: int, max_model_len: int) -> Policy:
    """Build the policy of the command line's settings, such as {"policy": "sarathi", "chunk": 512,
    "policy.max_prefills": 2}. Raises UserError for unknown ones, and for what no server has.
    """
    # Only the lab's: a server has no folder of its user's.
    options = instantiate.option_files("policy", [])
    name = str(settings.get("policy"))
    if name not in options:
        raise unknown_name(name, list(options), 'a policy of "sarathi_lab" (--additional-config)')
    node = instantiate.read_option("policy", options[name])
    names = instantiate.parameter_names(node, "policy")
    config = OmegaConf.create({**instantiate.top_level(), "chunk": PAPER_CHUNK, "policy": node})
    for key, value in settings.items():
        if key == "policy":
            continue
        if key not in names:
            raise unknown_name(key, names, f"a setting of policy={name}")
        OmegaConf.update(config, key, value)
    policy: Policy = instantiate.build(config.policy, Policy)

    def refuse() -> None:
        raise UserError(f"policy={name} needs what a server of vLLM lacks; use another")

    return policy.on_device(refuse, batch_size, max_model_len)  # it predicts no times
