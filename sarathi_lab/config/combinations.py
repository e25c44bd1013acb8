"""Combinations of the values of a sweep's settings, without what only other combinations read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice, product

from hydra.core.override_parser.types import Override

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import (
    CHOICES,
    Settings,
    name_of,
    read_by,
    settings_of,
    settings_without,
)
from sarathi_lab.config.jobs import MOST_JOBS, Job

JobSettings = tuple[str, ...]  # of one job, all of them
Compose = Callable[[Settings], Job]


def combine(settings: Sequence[Override]) -> list[JobSettings]:
    """All combinations of the settings' values; of two settings of a name the last counts."""
    values = {}
    for setting in settings:
        key = setting.get_key_element()
        line = str(setting.input_line)
        values[key] = [line]
        if setting.is_discrete_sweep():
            texts = setting.sweep_string_iterator()
            # One more shows that there are too many; a range of 1e9 values is not listed.
            first_texts = islice(texts, MOST_JOBS + 1)
            values[key] = [f"{key}={text}" for text in first_texts]
        elif setting.is_sweep_override():
            raise UserError(f"{line} has no end of values; name them, as in {key}=1,2")
        num_values = map(len, values.values())
        num_jobs = math.prod(num_values)
        if not 0 < num_jobs <= MOST_JOBS:
            raise UserError(
                f"{line} makes a sweep of 0, or of more than {MOST_JOBS} runs; name other values"
            )
    return list(product(*values.values()))


def without_unread(
    jobs: Sequence[JobSettings], swept: Sequence[str], compose: Compose
) -> tuple[list[JobSettings], list[str]]:
    """Drop from each job what only other jobs' options read, and merge equal jobs.

    Args:
        jobs: All combinations.
        swept: The names of the settings with several values.
        compose: Composes the job of settings.

    Returns:
        The jobs that are left, and a note on each swept setting that some options do not read.
    """
    groups = set()
    for name in swept:
        group, _, _ = name.partition(".")
        if group in CHOICES:
            groups.add(group)
    if not groups:
        each_once = dict.fromkeys(jobs)
        return list(each_once), []
    classes = [f"{group}._target_" for group in groups]
    choosers = groups.union(classes)
    options_of_jobs = []
    unread: dict[JobSettings, Mapping[str, str]] = {}  # by the options of a job
    for job in jobs:
        options = tuple(settings_of(job, choosers))
        options_of_jobs.append(options)
        if options not in unread:
            others = settings_without(job, choosers)
            unread[options] = _unread(others, options, groups, compose)
    # What no option reads is a mistake, which is refused.
    unread_names = map(set, unread.values())
    unread_by_all = set.intersection(*unread_names)
    merged: dict[JobSettings, None] = {}
    for job, options in zip(jobs, options_of_jobs, strict=True):
        dropped = unread[options].keys() - unread_by_all
        settings = tuple(settings_without(job, dropped))
        merged[settings] = None
    return list(merged), _notes_on_unread(swept, unread_by_all, unread.values())


def _notes_on_unread(
    swept: Sequence[str], unread_by_all: Collection[str], unread: Iterable[Mapping[str, str]]
) -> list[str]:
    """Note each swept setting that some options do not read, with the class of these options."""
    names = [name for name in swept if name not in unread_by_all]
    notes = []
    for owners in unread:
        for name in names:
            if name in owners:
                owner = owners[name]
                notes.append(f"{owner} does not read {name}: run once for all its values")
    return notes


def _unread(
    settings: Settings, options: JobSettings, groups: Collection[str], compose: Compose
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
    without_fields = settings_without(settings, fields)
    job = compose([*options, *without_fields])
    short_names = names & read_by().keys()
    unread = {}
    composition = job.composition
    for name in fields | short_names:
        if not composition.reads(name):
            unread[name] = composition.reader(name)
    return unread
