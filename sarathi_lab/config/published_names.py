"""Published names of models and cards, and the options of conf/ that they begin with."""

from __future__ import annotations

import re

from sarathi_lab.config.instantiate import option_files

PUBLISHED = re.compile(r"[a-z].*\d")  # an option that is named as its maker does
MAKERS = re.compile(r"^[^a-z0-9]*((nvidia|geforce|tesla|amd|instinct|meta)[^a-z0-9]*)+")


def option_of(group: str, name: str) -> str:
    """Return the longest option of conf/`group` that stands for `name`; "": none."""
    fitting = [option for option in option_files(group) if _is_named(name, option)]
    return max(fitting, key=len, default="")


def stands_for(group: str, option: str, name: str) -> bool:
    """Return whether a name in a file begins with an option's, and with no longer one."""
    card_or_model = option.partition("_")[0]  # a100_2023 is an A100
    if not _is_named(name, card_or_model):
        return False
    longest = option_of(group, name)
    return len(longest) <= len(option)


def _is_named(name: str, option: str) -> bool:
    """Return whether a name begins with an option's, or is that of one of the lab's own shapes
    (`tiny`, `7b`), which have no published names: TinyLlama is no `tiny`.
    """
    if PUBLISHED.match(without_maker(option)) is None:
        return _characters(name) == _characters(option)
    return begins_with(name, option)


def begins_with(name: str, first: str) -> bool:
    """Return whether a name begins with the letters and digits of `first`, and the last word of
    these is not part of a longer one: an L40 is no L4.
    """
    characters = _characters(first)
    if not characters:
        return False
    pattern = r"[^a-z0-9]*".join(characters)  # whatever stands between them
    last = characters[-1]
    pattern += r"(?!\d)" if last.isdigit() else r"(?![a-z])"
    begins = re.match(pattern, without_maker(name))
    return begins is not None


def _characters(name: str) -> str:
    """Return a name's small letters and digits, without the maker's."""
    return re.sub(r"[^a-z0-9]", "", without_maker(name))


def without_maker(name: str) -> str:
    """Return a name in small letters, without the maker's and the series' in front."""
    return MAKERS.sub("", name.lower())
