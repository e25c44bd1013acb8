"""Configuration: command lines, sweeps, fields and files."""
