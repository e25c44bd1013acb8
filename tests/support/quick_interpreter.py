"""Triton's interpreter without what it does for nothing, half of its time: it computes sums of whole
numbers once more in 64 bits for an assertion that it then leaves out, as it has no debug mode, and
looks through its whole language at every call of a function for what it has replaced before.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken_interpreter() -> None:
    """Let every later launch of this process compute the same in fewer steps."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(pkg: Any, builder: object, scope: Any) -> None:
    names = _builtins_of(pkg)
    if names and tl.core.is_builtin(getattr(pkg, names[0])):  # else this launch has replaced all
        for name in names:
            interpreter._patch_attr(pkg, name, getattr(pkg, name), builder, scope)


@cache
def _builtins_of(pkg: Any) -> list[str]:
    """Of a module or class, as found before the first launch replaces them."""
    return [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
