"""Several engines on one clock: routers, prefill and decode instances, TaiChi."""

from sarathi_lab.extensions.cluster.cluster import (
    Cluster,
    Handover,
    Instances,
    Link,
    Schedulers,
    least_loaded,
)
from sarathi_lab.extensions.cluster.topology import (
    Disaggregated,
    Linked,
    PrefillAndDecodeHeavy,
    Replicas,
    Routing,
    Several,
    round_robin,
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
    "Schedulers",
    "Several",
    "least_loaded",
    "round_robin",
]
