"""The sweepers of the lab where Hydra looks for plugins: in packages of the name hydra_plugins."""

from sarathi_lab.config import sweep_search, sweeper


class LabSweeper(sweeper.LabSweeper):
    """hydra/sweeper=lab."""


class OptunaSearch(sweep_search.OptunaSearch):
    """hydra/sweeper=optuna_search."""
