"""Hydra reading each file once, and composing each configuration once."""

from __future__ import annotations

import os
import pickle
from functools import lru_cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode

from sarathi_lab.config.paths import CONF

# Configurations of 100 kB each; a command composes its own again within a few others.
NUM_CONFIGURATIONS = 32
SEVERAL_VALUES = (",", "(", "*")  # in overrides that sweep, among others


def quicken() -> None:
    """Take copies of what was read or composed before: parsing YAML is a third of composing, nearly
    every test of a command composes, and a command composes its own configuration several times.
    """
    for source in Plugins.instance().discover(ConfigSource):  # the classes that composing takes
        if source.__name__ in ("FileConfigSource", "ImportlibResourcesConfigSource"):
            _remember(source)
    _remember_compositions()


def _remember(source) -> None:
    load = source.load_config
    contents = {}

    def load_config(self, config_path):
        if self.scheme() == "file" and self.path != str(CONF):
            return load(self, config_path)  # a test's own folder, which may change
        key = self.path, self.provider, config_path
        if key not in contents:
            contents[key] = pickle.dumps(load(self, config_path))  # copied in an eighth of the time
        return pickle.loads(contents[key])

    source.load_config = load_config


def _remember_compositions() -> None:
    compose = ConfigLoaderImpl.load_configuration
    loaders = {}

    @lru_cache(NUM_CONFIGURATIONS)
    def composed(folder, name, overrides, *options):
        return pickle.dumps(compose(loaders[overrides], name, list(overrides), *options))

    def load_configuration(
        self, config_name, overrides, run_mode, from_shell=True, validate_sweep_overrides=True
    ):
        options = run_mode, from_shell, validate_sweep_overrides
        overrides = tuple(overrides)
        if not _is_shipped(self.config_search_path) or _has_any(overrides, "hydra.searchpath"):
            return compose(self, config_name, list(overrides), *options)
        if not _has_any(overrides, *SEVERAL_VALUES):
            options = RunMode.RUN, True, True  # the modes differ in what they refuse of these
        loaders[overrides] = self
        try:
            return pickle.loads(composed(os.getcwd(), config_name, overrides, *options))
        finally:
            loaders.clear()

    ConfigLoaderImpl.load_configuration = load_configuration


def _is_shipped(search_path) -> bool:
    """Whether all that it leads to ships with the lab and with Hydra."""
    paths = [entry.path.removeprefix("file://") for entry in search_path.get_path()]
    return all(path == str(CONF) for path in paths if path.startswith("/"))


def _has_any(overrides, *texts) -> bool:
    return any(text in override for override in overrides for text in texts)
