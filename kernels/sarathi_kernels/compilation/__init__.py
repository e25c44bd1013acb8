"""Every kernel configuration compiled for GPUs that need not be there, and the code checked."""
