"""The exception that means "the user can fix this", which commands print as one line, exiting with
2; and the checks that raise it.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from errno import EDQUOT, EFBIG, ENOSPC
from functools import cache
from pathlib import Path

EXIT_FAILED = 1  # by what no user can mend
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell has it of a program that SIGPIPE ends
# Of any quantity but 0: what 64 bits hold, and no time overflows.
MOST = 2**63 - 1
LEAST = 1e-18
LAST_SECOND = 1e9  # of a run: later, doubles hold less than microseconds
SUCCESSORS = Path(__file__).with_name("successors.yaml")
FEWEST_LETTERS = 3  # of the beginning of a name, for a suggestion
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # of an address, which no message repeats


class UserError(Exception):
    """A mistake in the input: the message names the value, the reason and the fix, in one line."""

    exit_code = EXIT_USER_ERROR


class RunError(UserError):
    """Stops one run, not the sweep that it belongs to: what was recorded so far is kept."""


def require_bool(name: str, value: object, fix: str = "use one of them") -> bool:
    """Return `value` if it is true or false, else raise `UserError`."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value} is neither true nor false; {fix}")
    return value


def require_int(name: str, value: object, minimum: int, fix: str, maximum: int = MOST) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`, else raise `UserError`."""
    # To Python, true is the number 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}={value} is not a whole number; {fix}")
    bound = ""
    if value < minimum:
        bound = f"below {minimum}"
    if value > maximum:
        bound = f"above {maximum}"
    if bound:
        raise UserError(f"{name}={value} is {bound}; {fix}")
    return value


def require_number(
    name: str, value: object, *, fix: str, above: float | None = None, minimum: float | None = None
) -> float:
    """Return `value` as a float if it is finite, above `above`, from `minimum`, and 0 or of a size
    that quantities have (LEAST to MOST); else UserError.
    """
    setting = f"{name}={value}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{setting} is not a number; {fix}")
    bound = ""
    is_within = value <= sys.float_info.max  # math.isfinite fails for larger integers
    if above is not None:
        bound = f" above {above:g}"
        is_within &= value > above
    if minimum is not None:
        bound = f" from {minimum:g}"
        is_within &= value >= minimum
    if bound and not is_within:
        raise UserError(f"{setting} must be a finite number{bound}; {fix}")
    is_of_size = LEAST <= abs(value) <= MOST
    if value and not is_of_size:
        raise UserError(f"{setting} is not from {LEAST:g} to {MOST:.3g}; {fix}")
    return float(value)


def require_share(name: str, value: object, fix: str) -> None:
    """Raise `UserError` unless `value` is a number from 0 to 1."""
    share = require_number(name, value, minimum=0, fix=fix)
    if share > 1:
        raise UserError(f"{name}={value} is above 1; {fix}")


def require_text(name: str, value: object, fix: str) -> None:
    """Raise `UserError` unless `value` is text, not blank and without control characters."""
    is_text = False
    if isinstance(value, str):
        is_blank = not value.strip()
        is_text = value.isprintable() and not is_blank
    if not is_text:
        raise UserError(f"{name}={value!r} must be a non-empty string; {fix}")


def require_instance(name: str, value: object, kind: type, fix: str) -> None:
    """Raise `UserError` unless `value` is of a `kind`."""
    if isinstance(value, kind):
        return
    setting = f"{name}={value}"
    raise UserError(f"{setting} is no {kind.__name__}; {fix}")


def require_one_of(name: str, value: object, valid: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is one of `valid`."""
    options = tuple(valid)
    if value in options:
        return
    similar = suggestion(str(value), options)
    remedy = f"use one of {', '.join(options)}"
    raise UserError(f"{name}={value} is unknown{similar}; {remedy}")


@cache
def _successors() -> dict[str, str]:
    """Return what does here what settings of other names do elsewhere."""
    import yaml  # which a bare image lacks

    successors: dict[str, str] = {}
    text = SUCCESSORS.read_text()
    for entry in yaml.safe_load(text):
        of_names = dict.fromkeys(entry["names"], entry["here"])
        successors |= of_names
    return successors


def unknown_name(key: str, valid: Sequence[str], what: str) -> UserError:
    """For a key that is not `what`."""
    successors = _successors()
    if key in successors:
        return UserError(f"{key} is not {what}: {successors[key]}")
    # The group, which all of its names share, makes none of them more likely.
    group, dot, parameter = key.rpartition(".")
    prefix = group + dot
    full_names = {name.removeprefix(prefix): name for name in valid}
    nearest = nearest_name(parameter, list(full_names))
    similar = ""
    if nearest is not None:
        full_name = full_names[nearest]
        similar = f" (did you mean {full_name}?)"
    remedy = "it has none; drop it"
    if valid:
        in_order = sorted(valid)
        remedy = f"use one of {', '.join(in_order)}"
    return UserError(f"{key} is not {what}{similar}; {remedy}")


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return which of `names` may be meant, as a question; empty where none is like `name`."""
    nearest = nearest_name(name, names)
    if nearest is None:
        return ""
    return f" (did you mean {nearest}?)"


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Return which of `names` may be meant; None where none is like `name`."""
    # A beginning is typed of long names: qwen3-235b is nearer to qwen3-235b-a22b than to qwen3-32b.
    completions = []
    if len(name) >= FEWEST_LETTERS:
        for longer in names:
            if longer.startswith(name):
                completions.append(longer)
    # The shortest adds least to what was typed: qwen2.5-7b to qwen2.5-7, not qwen2.5-72b.
    if completions:
        return min(completions, key=len)
    similar = difflib.get_close_matches(name, names, n=1)
    return next(iter(similar), None)


def require_list(
    name: str,
    values: object,
    complaint: str,
    each: Callable[[str, object], object],
    *,
    twice: str = "",
    may_be_empty: bool = False,
) -> None:
    """Raise `UserError` unless `values` is a list, each value of which passes, none of them `twice`
    if there are words for that.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(f"{name}={values} {complaint}")
    if not values and not may_be_empty:
        raise UserError(f"{name}={values} {complaint}")
    for value in values:
        each(name, value)
    if not twice:
        return  # such values may be mappings, which no set holds
    num_different = len(set(values))
    if num_different < len(values):
        raise UserError(f"{name}={list(values)} {twice}")


def as_user_error(error: BaseException) -> UserError | None:
    """What the user can mend of an error: a mistake, a missing package, a full disk; else None."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return _missing_package(error)
    if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG):
        file = error.filename or "a file"
        reason = os.strerror(error.errno)
        return UserError(f"{file} can't be written ({reason}); make room for it")
    return None


def _missing_package(error: ModuleNotFoundError) -> UserError | None:
    """Name the package to install; None for a module of the lab, whose import is a bug."""
    module = error.name or ""
    package, _, _ = module.partition(".")
    if package in ("", "sarathi_lab"):
        return None
    return UserError(f"the package {package} is not installed; run make setup")


def exit_code(command: Callable[[], int], remains: str) -> int:
    """Return what `command` does; 2 for a user's mistake; 130 for Ctrl-C, naming what `remains`."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # by `| head`, which has what it wanted
        # Python flushes stdout once more at its end, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (UserError, OSError, ModuleNotFoundError) as error:
        return report(error)
    except KeyboardInterrupt as interrupt:  # which may carry the command that continues
        sentences = [f"interrupted: {remains}"]
        sentences += map(str, interrupt.args)
        message = "; ".join(sentences)
        print(message, file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends it, without a traceback
        return EXIT_INTERRUPTED


def report(error: Exception) -> int:
    """Print what the user can mend of an error, and return the exit code; raise any other."""
    reason = as_user_error(error)
    if reason is None:
        raise error
    message = CREDENTIALS.sub("//***@", str(reason))
    print(f"error: {message}", file=sys.stderr)
    return reason.exit_code
