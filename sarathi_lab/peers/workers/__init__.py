"""Scripts that run one engine each in any Python environment; started by path, so they import nothing of the lab."""
