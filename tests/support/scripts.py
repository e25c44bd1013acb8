"""Scripts of experiments/, which are in no package, as modules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_script(path: Path) -> ModuleType:
    """Import a script by its path, anew with each call; it finds its neighbours by name."""
    name = f"{path.parent.name}_{path.stem}_script"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up annotations
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
