"""Hydra without work that it repeats for every command line of a process."""

from __future__ import annotations

import pickle
from dataclasses import replace

from hydra._internal import config_loader_impl as loader
from hydra._internal.defaults_list import Overrides
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource

from sarathi_lab.config.paths import CONF


def quicken() -> None:
    """Compose once what the same options make, of files that are read once.

    Composing is a third of all that the tests compute.
    """
    for source in Plugins.instance().discover(ConfigSource):  # the classes that composing takes
        if source.__name__ in ("FileConfigSource", "ImportlibResourcesConfigSource"):
            _remember_files(source)
    _remember_options()


def _remember_files(source) -> None:
    load, known = source.load_config, {}

    def load_config(self, config_path):
        if _is_own_folder(self):
            return load(self, config_path)
        key = self.path, self.provider, config_path
        if key not in known:
            known[key] = pickle.dumps(load(self, config_path))  # copied in an eighth of the time
        return pickle.loads(known[key])

    source.load_config = load_config


def _remember_options() -> None:
    """Take what a combination of options decides as it was, and set only the values anew."""
    create = loader.create_defaults_list
    compose = loader.ConfigLoaderImpl._compose_config_from_defaults_list
    lists, configs = {}, {}

    def create_defaults_list(repo, config_name, overrides_list, **settings):
        if any(map(_is_own_folder, repo.get_sources())):
            return create(repo, config_name, overrides_list, **settings)
        given = Overrides(repo, overrides_list)
        options = (given.override_choices, given.append_group_defaults, given.deletions)
        key = repr((config_name, options, settings))
        if key not in lists:
            lists[key] = create(repo, config_name, overrides_list, **settings)
            configs[id(lists[key].defaults)] = None
        return replace(lists[key], config_overrides=given.config_overrides)

    def compose_config(self, defaults, repo):
        key = id(defaults)
        if key not in configs:
            return compose(self, defaults, repo)
        if configs[key] is None:
            configs[key] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(configs[key])

    loader.create_defaults_list = create_defaults_list
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = compose_config


def _is_own_folder(source) -> bool:
    """Whether a source is a test's own folder, whose files may change."""
    return source.scheme() == "file" and source.path != str(CONF)
