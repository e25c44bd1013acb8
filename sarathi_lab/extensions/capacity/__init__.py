"""Capacity: the highest rate of requests at which a policy meets an objective."""
