"""Time of an all-reduce between the devices of a node: the algorithm is chosen by size."""

from __future__ import annotations

from sarathi_lab.executor.simulated.hardware import Hardware


def all_reduce_time(num_bytes: float, num_devices: int, hardware: Hardware) -> float:
    """Seconds in which each of `num_devices` devices gets the sum of all their `num_bytes`; 0 for
    one. Raises UserError if the links are not known.

    Each sends its part to all others (one shot), or, after `two_shot_latency`, 2 (n - 1) times an
    n-th of it as in a ring; the faster of the two.
    """
    if num_devices == 1:
        return 0.0
    others = num_devices - 1
    further = num_devices - 2  # what a pair has not got
    rate = hardware.link_rate / (1 + hardware.link_sharing * further)
    one_shot = others * num_bytes / rate
    ring = hardware.two_shot_latency + 2 * others / num_devices * num_bytes / rate
    return hardware.link_latency + hardware.link_step * further + min(one_shot, ring)
