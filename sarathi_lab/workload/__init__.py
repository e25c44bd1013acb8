"""Seeded lists of requests: seed and parameters in, list out; no time, no device."""

from sarathi_lab.workload.base import LoadedRequests, Workload

__all__ = ["LoadedRequests", "Workload"]
