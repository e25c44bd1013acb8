"""Readers of benchmark clients' files, a module each."""
