"""Combinations of the values of a sweep's settings, without what only other combinations read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, product

from hydra.core.override_parser.types import Override

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import (
    CHOICES,
    name_of,
    read_by,
    settings_of,
    settings_without,
)
from sarathi_lab.config.jobs import MOST_JOBS, Job

Settings = tuple[str, ...]  # of one job, as they are typed


def combine(settings: Sequence[Override]) -> list[tuple[str, ...]]:
    """All combinations of the settings' values; of two settings of a name the last counts."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        key = setting.get_key_element()
        line = str(setting.input_line)
        values[key] = [line]
        if setting.is_discrete_sweep():
            first = islice(setting.sweep_string_iterator(), MOST_JOBS + 1)
            values[key] = [f"{key}={value}" for value in first]
        elif setting.is_sweep_override():
            raise UserError(f"{line} has no end of values; name them, as in {key}=1,2")
        num_jobs = math.prod(map(len, values.values()))
        if not 0 < num_jobs <= MOST_JOBS:
            raise UserError(
                f"{line} makes a sweep of 0, or of more than {MOST_JOBS} runs; name other values"
            )
    return list(product(*values.values()))


def without_unread(
    jobs: Sequence[Settings], swept: Sequence[str], compose: Callable[[Sequence[str]], Job]
) -> tuple[list[Settings], list[str]]:
    """Drop from each job what only other jobs' options read, and merge equal jobs.

    Args:
        jobs: All combinations.
        swept: The names of the settings with several values.
        compose: Composes the job of settings.

    Returns:
        The jobs that are left, and a note on each swept setting that some options do not read.
    """
    groups = {name.partition(".")[0] for name in swept}.intersection(CHOICES)
    if not groups:
        return list(dict.fromkeys(jobs)), []
    choosers = {*groups, *(f"{group}._target_" for group in groups)}
    readers: dict[Settings, Mapping[str, str]] = {}
    for job in jobs:
        options = tuple(settings_of(job, choosers))
        if options not in readers:
            readers[options] = _unread(settings_without(job, choosers), options, groups, compose)
    # What no option reads is a mistake, which is refused.
    unread_by_all = set.intersection(*map(set, readers.values()))
    notes = []
    for readers_of_others in readers.values():
        for name in swept:
            if name in readers_of_others and name not in unread_by_all:
                owner = readers_of_others[name]
                notes.append(f"{owner} does not read {name}: run once for all its values")
    merged: dict[Settings, None] = {}
    for job in jobs:
        options = tuple(settings_of(job, choosers))
        dropped = readers[options].keys() - unread_by_all
        merged[tuple(settings_without(job, dropped))] = None
    return list(merged), notes


def _unread(
    settings: Sequence[str],
    options: Settings,
    groups: Collection[str],
    compose: Callable[[Sequence[str]], Job],
) -> dict[str, str]:
    """Return which of `settings` a combination of `options` does not read, by name, with the
    classes of these options.
    """
    names = set(map(name_of, settings))
    fields = set()
    for name in names:
        group, dot, _ = name.partition(".")
        if dot and group in groups:
            fields.add(name)
    # A class that lacks the fields would refuse them.
    composition = compose([*options, *settings_without(settings, fields)]).composition
    unread = {}
    for name in fields | (names & read_by().keys()):
        if not composition.reads(name):
            unread[name] = composition.reader(name)
    return unread
