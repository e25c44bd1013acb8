"""The lab's sweepers where Hydra looks for plugins: in packages of the name hydra_plugins.

Hydra takes the classes that a module of such a package defines, not those that it imports, so each
sweeper is a subclass without a body. The folder above is put on `sys.path` by `sarathi_lab.config`,
before `hydra.main` collects the plugins.
"""

from sarathi_lab.config import sweep_search, sweeper


class LabSweeper(sweeper.LabSweeper):
    """All combinations of the settings' values (hydra/sweeper=lab)."""


class OptunaSearch(sweep_search.OptunaSearch):
    """Values that optuna proposes (hydra/sweeper=optuna_search)."""
