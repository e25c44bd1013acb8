"""Shared pieces of the tests: scripted clocks and short ways to make requests and schedulers."""

from __future__ import annotations

import os

os.environ.setdefault("WANDB_MODE", "offline")  # no test talks to a server
os.environ.setdefault("HF_HUB_OFFLINE", "1")
