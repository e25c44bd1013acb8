"""Hydra doing once in a process what each composition would do anew: reading the files that ship
with the lab and with Hydra, and joining those of the same options.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import wraps

from hydra._internal import config_loader_impl as hydra
from hydra._internal import defaults_list as lists
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource

from sarathi_lab.config.paths import CONF


def quicken() -> None:
    """Take copies of what was done before: nearly every test of a command composes, most of them
    of options that another one chose. Settings are put in anew.
    """
    for source in Plugins.instance().discover(ConfigSource):  # the classes that composing takes
        if source.__name__ in ("FileConfigSource", "ImportlibResourcesConfigSource"):
            _remember_files(source)
    ConfigStore.__deepcopy__ = lambda self, memo: self  # there is one, and nothing changes it
    _make_no_map_in_vain()
    _remember_lists()
    _remember_joined(hydra.ConfigLoaderImpl)


def _may_change(source) -> bool:
    """Whether it is a test's own folder."""
    return source.scheme() == "file" and source.path != str(CONF)


def _places(repo) -> tuple[str, ...] | None:
    """Where its files are; None with a test's own folder among them."""
    sources = repo.get_sources()
    return None if any(map(_may_change, sources)) else tuple(source.path for source in sources)


def _remember_files(source) -> None:
    load, known = source.load_config, {}

    def load_config(self, config_path):
        if _may_change(self):
            return load(self, config_path)
        key = self.path, self.provider, config_path
        if key not in known:
            known[key] = pickle.dumps(load(self, config_path))  # copied in an eighth of the time
        return pickle.loads(known[key])

    source.load_config = load_config


def _make_no_map_in_vain() -> None:
    """Of all choices, for each file: only `${...}` in its list of defaults reads it."""
    make = lists._create_interpolation_map

    @wraps(make)
    def make_map(overrides, defaults, self_added):
        is_read = any(one.is_interpolation() for one in defaults)
        return make(overrides, defaults, self_added) if is_read else None

    lists._create_interpolation_map = make_map


def _remember_lists() -> None:
    """Of the options that a command line names, those that they ask for included."""
    create, known = hydra.create_defaults_list, {}

    @wraps(create)
    def create_defaults_list(repo, config_name, overrides_list, **how):
        if (places := _places(repo)) is None:
            return create(repo, config_name, overrides_list, **how)
        own = lists.Overrides(repo, overrides_list).config_overrides
        chosen = (one.input_line for one in overrides_list if one not in own)
        key = (places, config_name, *chosen, *how.values())
        if key not in known:
            known[key] = create(repo, config_name, overrides_list, **how)
        return replace(known[key], config_overrides=own)

    hydra.create_defaults_list = create_defaults_list


def _remember_joined(loader) -> None:
    join, known = loader._compose_config_from_defaults_list, {}

    @wraps(join)
    def compose(self, defaults, repo):
        if (places := _places(repo)) is None:
            return join(self, defaults, repo)
        key = (places, *map(repr, defaults))
        if key not in known:
            known[key] = pickle.dumps(join(self, defaults, repo))
        return pickle.loads(known[key])

    loader._compose_config_from_defaults_list = compose
