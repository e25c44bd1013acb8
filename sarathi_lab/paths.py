"""Where the repository keeps what the code reads: the configuration and the experiments."""

from __future__ import annotations

import os
from pathlib import Path

from sarathi_lab.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
CONF = REPOSITORY / "conf"
EXPERIMENTS = REPOSITORY / "experiments"


def make_folder(folder: Path, setting: str) -> None:
    """Make `folder`, which `setting` names, unless it is there. Raises UserError if it can't be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{setting}={folder} can't be written ({error.strerror}); choose another folder") from None
