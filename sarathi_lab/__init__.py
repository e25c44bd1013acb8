"""A research lab for chunked prefill: one engine, many schedulers, real and simulated devices.

The names below are imported when they are first used, so that a command which needs none is quick.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sarathi_lab.api.playground import Playground
    from sarathi_lab.api.recorded import (
        errors,
        figure,
        later_claims,
        policy_figures,
        verdict,
        verdicts,
    )
    from sarathi_lab.api.results import Results, load
    from sarathi_lab.api.session import serve, sweep
    from sarathi_lab.config.errors import UserError
    from sarathi_lab.config.instantiate import load_option
    from sarathi_lab.engine.policy import Policy
    from sarathi_lab.engine.request import Request
    from sarathi_lab.extensions.check_policy import check_policy
    from sarathi_lab.model.spec import ModelSpec
    from sarathi_lab.results.load import find_sweeps, load_runs

__version__ = "0.1.0"
_PACKAGE = Path(__file__).parent
_KERNELS = _PACKAGE.parent / "kernels"  # of a checkout, which need not be installed
if (_KERNELS / "sarathi_kernels").is_dir():
    sys.path.append(str(_KERNELS))
_HOMES = {
    "ModelSpec": "model.spec",
    "Playground": "api.playground",
    "Policy": "engine.policy",
    "Request": "engine.request",
    "Results": "api.results",
    "UserError": "config.errors",
    "check_policy": "extensions.check_policy",
    "errors": "api.recorded",
    "figure": "api.recorded",
    "find_sweeps": "results.load",
    "later_claims": "api.recorded",
    "load": "api.results",
    "load_option": "config.instantiate",
    "load_runs": "results.load",
    "policy_figures": "api.recorded",
    "serve": "api.session",
    "sweep": "api.session",
    "verdict": "api.recorded",
    "verdicts": "api.recorded",
}
__all__ = [
    "ModelSpec",
    "Playground",
    "Policy",
    "Request",
    "Results",
    "UserError",
    "check_policy",
    "errors",
    "figure",
    "find_sweeps",
    "later_claims",
    "load",
    "load_option",
    "load_runs",
    "policy_figures",
    "serve",
    "sweep",
    "verdict",
    "verdicts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
