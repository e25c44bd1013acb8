"""Hydra reading each of the files that ship with the lab and with Hydra once."""

from __future__ import annotations

import pickle

from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource

from sarathi_lab.config.paths import CONF


def quicken() -> None:
    """Take copies of what was read before: parsing YAML is a third of composing, and nearly every
    test of a command composes.
    """
    for source in Plugins.instance().discover(ConfigSource):  # the classes that composing takes
        if source.__name__ in ("FileConfigSource", "ImportlibResourcesConfigSource"):
            _remember(source)


def _remember(source) -> None:
    load, known = source.load_config, {}

    def load_config(self, config_path):
        if self.scheme() == "file" and self.path != str(CONF):
            return load(self, config_path)  # a test's own folder, which may change
        key = self.path, self.provider, config_path
        if key not in known:
            known[key] = pickle.dumps(load(self, config_path))  # copied in an eighth of the time
        return pickle.loads(known[key])

    source.load_config = load_config
