"""What a plan's parts refuse of one another."""

from __future__ import annotations

from sarathi_lab.engine.config import Topology
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.loop import no_groups
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.policy import Policy


def check_layers(policy: Policy, cluster: Topology, backend: Backend) -> None:
    """Refuse groups of layers on a backend none of whose executors has all layers."""
    is_apart = not cluster.is_single or backend.num_stages > 1
    if not isinstance(backend, SimulatedBackend):
        is_apart |= getattr(backend, "tensor_parallel", 1) > 1
    if policy.in_layers and is_apart:
        raise no_groups(policy.name)
