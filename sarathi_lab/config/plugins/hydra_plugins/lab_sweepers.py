"""The lab's sweeper where Hydra looks for plugins: in packages of the name hydra_plugins.

Hydra accepts the classes that a module of such a package defines, not those that it imports, so the
class below is a subclass without a body. `sarathi_lab` puts the folder above on `sys.path` before
`hydra.main` collects the plugins.
Its settings are those of conf/hydra/sweeper/lab.yaml.
"""

from __future__ import annotations

from sarathi_lab.config import sweeper


class LabSweeper(sweeper.LabSweeper):
    """All combinations of the settings' values (hydra/sweeper=lab)."""
