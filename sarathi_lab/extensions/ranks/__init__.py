"""Execution of one model by several processes, with tensor and pipeline parallelism."""
