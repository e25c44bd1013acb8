"""A research lab for chunked prefill: one engine, many schedulers, real and simulated devices."""

__version__ = "0.1.0"
