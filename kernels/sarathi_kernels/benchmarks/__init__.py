"""Times of the kernels and of what they replace."""
