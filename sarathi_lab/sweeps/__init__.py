"""Sweeps that people leave running: resumed where they stopped, spread over processes, or steered by optuna."""
