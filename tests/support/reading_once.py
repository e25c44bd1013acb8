"""Hydra reading each of the project's options once a process instead of once a composition: a third
of what a composition takes, and tests compose about a thousand times.
"""

from __future__ import annotations

import pickle

from hydra._internal.config_repository import ConfigRepository
from hydra.plugins.config_source import ConfigResult

from sarathi_lab.config.paths import CONF

NEVER_CHANGED = {"hydra.conf", str(CONF), ""}  # by tests; "" are Hydra's own schemas


def read_options_once() -> None:
    """Let every later composition of this process take a copy of what the first one read.

    One that also looks into another folder, such as a test's, reads all anew.
    """
    load = ConfigRepository.load_config
    read: dict[str, bytes] = {}

    def load_config(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
        if not {source.path for source in repository.sources} <= NEVER_CHANGED:
            return load(repository, config_path)
        if config_path not in read:
            read[config_path] = pickle.dumps(load(repository, config_path))
        return pickle.loads(read[config_path])

    ConfigRepository.load_config = load_config
