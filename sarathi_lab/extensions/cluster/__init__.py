"""Several engines on one clock: routers, prefill and decode instances, TaiChi."""

from sarathi_lab.extensions.cluster.cluster import Cluster, Handover, Instances, Link
from sarathi_lab.extensions.cluster.routers import Routing, least_loaded, round_robin
from sarathi_lab.extensions.cluster.topology import (
    Disaggregated,
    Linked,
    PrefillAndDecodeHeavy,
    Replicas,
    Several,
)

__all__ = [
    "Cluster",
    "Disaggregated",
    "Handover",
    "Instances",
    "Link",
    "Linked",
    "PrefillAndDecodeHeavy",
    "Replicas",
    "Routing",
    "Several",
    "least_loaded",
    "round_robin",
]
