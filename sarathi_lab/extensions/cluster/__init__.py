"""Several simulated engines on one clock (config group `cluster`)."""

from sarathi_lab.extensions.cluster.topologies import Disaggregated, Replicas, Several

__all__ = ["Disaggregated", "Replicas", "Several"]
