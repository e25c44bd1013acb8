"""Triton's interpreter without work that changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter


def quicken() -> None:
    """Leave out half of a kernel's time.

    Sums and products are computed in 64 bits once more, for an assertion of overflow that only
    `debug` raises. And each call of a function in a kernel looks through all of `triton.language`
    for what is to be interpreted, which the launch of the kernel has done.
    """
    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    def patch_once(fn):
        if any(map(_is_untouched, _languages_of(fn))):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


@cache
def _languages_of(fn):
    """Those of `tl` and `tl.core` that a function's module imports."""
    known = list(fn.__globals__.values())
    return [language for language in (tl, tl.core) if any(one is language for one in known)]


def _is_untouched(language) -> bool:
    return is_builtin(language.program_id)
