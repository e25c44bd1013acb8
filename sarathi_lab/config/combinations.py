"""Combinations of the values of a sweep's settings, without what only other combinations read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
    values: dict[str, list[str]] = {}
    for setting in settings:
        key = setting.get_key_element()
        line = str(setting.input_line)
        values[key] = [line]
        if setting.is_discrete_sweep():
            texts = islice(setting.sweep_string_iterator(), MOST_JOBS + 1)
            values[key] = [f"{key}={text}" for text in texts]
        elif setting.is_sweep_override():
            raise UserError(f"{line} has no end of values; name them, as in {key}=1,2")
        num_jobs = math.prod(map(len, values.values()))
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
    groups = {name.partition(".")[0] for name in swept}.intersection(CHOICES)
    if not groups:
        return list(dict.fromkeys(jobs)), []
    choosers = {*groups, *(f"{group}._target_" for group in groups)}
    options_of_jobs = []
    unread: dict[JobSettings, Mapping[str, str]] = {}  # by the options of a job
    for job in jobs:
        options = tuple(settings_of(job, choosers))
        options_of_jobs.append(options)
        if options not in unread:
            others = settings_without(job, choosers)
            unread[options] = _unread(others, options, groups, compose)
    # What no option reads is a mistake, which is refused.
    unread_by_all = set.intersection(*map(set, unread.values()))
    merged: dict[JobSettings, None] = {}
    for job, options in zip(jobs, options_of_jobs, strict=True):
        dropped = unread[options].keys() - unread_by_all
        settings = tuple(settings_without(job, dropped))
        merged[settings] = None
    names = [name for name in swept if name not in unread_by_all]
    notes = []
    for owners in unread.values():
        for name in names:
            if name in owners:
                owner = owners[name]
                notes.append(f"{owner} does not read {name}: run once for all its values")
    return list(merged), notes


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
    job = compose([*options, *settings_without(settings, fields)])
    short_names = names & read_by().keys()
    unread = {}
    for name in fields | short_names:
        if not job.composition.reads(name):
            unread[name] = job.composition.reader(name)
    return unread
