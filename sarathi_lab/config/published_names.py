"""Published names of models and cards, and the options of conf/ that they begin with."""

from __future__ import annotations

import re

from sarathi_lab.config.instantiate import option_files

MAKERS = re.compile(r"^[^a-z0-9]*((nvidia|geforce|tesla|amd|instinct|meta)[^a-z0-9]*)+")


def option_of(group: str, name: str) -> str:
    """Return the longest option of conf/`group` that `name` begins with; "": none."""
    fitting = [option for option in option_files(group) if begins_with(name, option)]
    return max(fitting, key=len, default="")


def stands_for(group: str, option: str, name: str) -> bool:
    """Return whether a name in a file begins with an option's, and with no longer one."""
    card_or_model = option.partition("_")[0]  # a100_2023 is an A100
    if not begins_with(name, card_or_model):
        return False
    longest = option_of(group, name)
    return len(longest) <= len(option)


def begins_with(name: str, option: str) -> bool:
    """Return whether a name begins with an option's letters and digits, and its last number is not
    part of a longer one: an L40 is no L4.
    """
    characters = re.sub(r"[^a-z0-9]", "", without_maker(option))
    if not characters:
        return False
    pattern = r"[^a-z0-9]*".join(characters)  # whatever stands between them
    last = characters[-1]
    if last.isdigit():
        pattern += r"(?!\d)"
    begins = re.match(pattern, without_maker(name))
    return begins is not None


def without_maker(name: str) -> str:
    """Return a name in small letters, without the maker's and the series' in front."""
    return MAKERS.sub("", name.lower())
