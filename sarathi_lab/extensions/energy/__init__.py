"""Energy by a GPU's power model."""
