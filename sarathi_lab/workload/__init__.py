"""Seeded lists of requests: seed and parameters in, list out. Nothing here knows about time or
devices.
"""

from sarathi_lab.workload.base import LoadedRequests, Workload

__all__ = ["LoadedRequests", "Workload"]
