"""The sweeper of `hydra/sweeper=optuna_search` where Hydra looks for plugins.

Hydra accepts the classes that a module of the namespace `hydra_plugins` defines, not those that it
imports, so the class below is a subclass without a body. `sarathi_lab.config` puts the folder above
on `sys.path`.
Its settings are those of conf/hydra/sweeper/optuna_search.yaml.
"""

from __future__ import annotations

from sarathi_lab.extensions import search


class OptunaSearch(search.OptunaSearch):
    """Values that optuna proposes."""
