"""What a plan's parts refuse of one another."""

from __future__ import annotations

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.loop import no_groups
from sarathi_lab.engine.speculation import Speculation
from sarathi_lab.engine.topology import Linked, Several, Topology
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy


def check_speculation(speculation: Speculation, backend: Backend) -> None:
    """Refuse drafts that the backend has no use for, or no time to judge."""
    ahead = ""
    if isinstance(backend, SimulatedBackend):
        ahead = "host=none" if backend.host.overlaps else ""
    elif getattr(backend, "uses_kernels", False) and getattr(backend, "overlap", False):
        ahead = "executor.overlap=false"
    speculation.check(computes_tokens=backend.computes_tokens, ahead=ahead)


def check_layers(policy: Policy, cluster: Topology, backend: Backend) -> None:
    """Refuse groups of layers on a backend none of whose executors has all layers."""
    is_apart = isinstance(cluster, Several) or backend.num_stages > 1
    if not isinstance(backend, SimulatedBackend):
        is_apart |= getattr(backend, "tensor_parallel", 1) > 1
    if policy.in_layers and is_apart:
        raise no_groups(policy.name)


def check_cluster(
    cluster: Topology, policy: Policy, backend: Backend, spec: ModelSpec, *, shares_prefixes: bool
) -> None:
    """Refuse a cluster that can't be simulated, and settings of one that nothing reads."""
    if not isinstance(cluster, Several):
        return
    named, fix = f"a cluster of {cluster.describe()}", "or use cluster=single"
    if not isinstance(backend, SimulatedBackend):
        raise UserError(f"{named} is simulated only; add executor=simulated, {fix}")
    if (stages := backend.num_stages) > 1:
        raise UserError(
            f"executor.pipeline_parallel={stages}: the instances of {named} are no pipelines; use "
            f"executor.tensor_parallel, {fix}"
        )
    if getattr(cluster, "router", "") == "prefix_aware" and not shares_prefixes:
        raise UserError(
            "cluster.router=prefix_aware has no effect as nothing is cached; add cache.prefix=true"
        )
    if not isinstance(cluster, Linked):
        return
    if backend.host.overlaps:
        raise UserError(
            f"host={backend.host.name} schedules ahead, but sequences leave an engine at their "
            "first token; use host=none or another one that does not"
        )
    for name in ("prefill_chunk", "decode_chunk"):
        if (budget := getattr(cluster, name)) is not None and policy.budget_field is None:
            raise UserError(
                f"cluster.{name}={budget} has no effect on policy {policy.name}, which never "
                "cuts prompts; drop it"
            )
    backend.link(spec, cluster)  # unknown, it is refused at once
