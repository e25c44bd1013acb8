"""Published names of models and cards, and the options of conf/ that they stand for.

A name is an option's, and what stands behind that: for a card its form and memory, for a model how
it was trained and how its weights are stored. Any other word names another card or model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from omegaconf import DictConfig

from sarathi_lab.config.instantiate import option_files, read_option

PUBLISHED = re.compile(r"[a-z].*\d")  # an option that is named as its maker does
MAKERS = re.compile(r"^[^a-z0-9]*((nvidia|geforce|tesla|amd|instinct|meta)[^a-z0-9]*)+")
WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
WEIGHTS_OF_WORDS: dict[str, str] = WORDS["weights_of_words"]
IN_16_BITS: list[str] = WORDS["in_16_bits"]
NUMBER_OR_WORD = re.compile(r"\d+\.\d+|\d+|[a-z]+")
# Of what stands behind an option's name; a version's dot and a size's space do not end a word.
WORD = re.compile(r"v\d+(?:\.\d+)+|\d+ gi?b?\b|[a-z0-9]+")
# What is part of the last word of an option's name: a letter, or a point and more digits.
GLUED = re.compile(r"[a-z0-9]+|\.\d[a-z0-9.]*")
LAST_WORD = re.compile(r"[a-z0-9.]*$")

DATE = re.compile(r"2\d(0[1-9]|1[0-2])|(0[1-9]|1[0-2])([0-2]\d|3[01])|20\d{6}")  # 2507, 0528
FIRST_VERSION = re.compile(r"v(0\.1|1|1\.0)")
CONTEXT_LENGTH = re.compile(r"(\d+)k")
OTHER_WEIGHTS = re.compile(r"w\d+a\w*\d+|u?int\d+|(mx|nv)?fp\d+|nf4|\d+bit|i?q\d\w*|gguf|bnb")
# Behind the type of weights how they were made, as in Q4_K_M, FP8-dynamic-v2 or 4bit-128g.
HOW_STORED = re.compile(
    r"v?\d|g?\d+g?|[ksml]|x?xs|xl|nl|dynamic|static|block|kv|per|tensor|channel|token|a?sym"
    r"|actorder|true|false"
)

MEMORY_SIZE = re.compile(r"(\d+) ?gi?b?")
MEMORY_WITHIN = 0.1  # of what is printed of a card: makers count in other units


class NearestOption(NamedTuple):
    """The longest option of conf/ that a name begins with.

    Attributes:
        option: Such as a100; "": none.
        differences: Words of the name that the option does not stand for, such as ["40gb"].
    """

    option: str
    differences: Sequence[str]


def option_of(group: str, name: str) -> str:
    """Return the option of conf/`group` ("model" or "hardware") that stands for `name`; "": none
    does.
    """
    option, differences = nearest_option(group, name)
    if differences:
        return ""
    return option


def positions_of(name: str) -> int | None:
    """Return the positions of the model of a published name, where its file in conf/model has those
    of one with another date; None: it has none of these names.
    """
    option = option_of("model", name)
    positions: dict[str, int] = WORDS["positions_by_date"].get(option, {})
    for word in words_of(name):
        if DATE.fullmatch(word) is not None:
            return positions.get(word)
    return positions.get("")  # of the model as it was first published


def stands_for(group: str, option: str, name: str) -> bool:
    """Return whether an option is that of a name in a file; a100_2023 is an A100."""
    card, _, _ = option.partition("_")
    return option_of(group, name) in (option, card)


def nearest_option(group: str, name: str) -> NearestOption:
    """Find the option of conf/`group` whose name, or further name, is the longest beginning of
    `name`, and what `name` has besides.
    """
    files = option_files(group)
    options = {option: option for option in files}
    options |= WORDS["further_names"][group]
    longest = ""
    for first in options:
        is_longer = len(first) > len(longest)
        if is_longer and _is_beginning(name, first):
            longest = first
    option = options.get(longest, "")
    if not option:
        return NearestOption("", [])
    behind = words_behind(name, longest) or []
    node = read_option(group, files[option])
    if group == "model":
        differences = _differences_of_model(behind, node)
    else:
        differences = []
        for word in behind:
            if not _is_of_card(word, node):
                differences.append(word)
    return NearestOption(option, differences)


def _is_beginning(name: str, option: str) -> bool:
    """Return whether a name begins with an option's, or is that of one of the lab's own shapes
    (`tiny`, `7b`), which have no published names: TinyLlama is no `tiny`.
    """
    behind = words_behind(name, option)
    if behind is None:
        return False
    published_name = without_maker(option)
    is_published = PUBLISHED.match(published_name) is not None
    return is_published or not behind


def begins_with(name: str, first: str) -> bool:
    """Return whether a name is `first`, or that with further words: an L40 is no L4, and GLM-4.5V
    no GLM-4.5.
    """
    match = _match(name, first)
    if match is None:
        return False
    text = without_maker(name)
    behind = text[match.end() :]
    return re.match(r"[a-z0-9]", behind) is None


def words_behind(name: str, first: str) -> list[str] | None:
    """Return the words of a name behind `first`, in small letters; None: it begins otherwise. What
    changes the last word of `first` is the first of them, with that: of GLM-4.5V 4.5v.
    """
    match = _match(name, first)
    if match is None:
        return None
    text = without_maker(name)
    end = match.end()
    glued = GLUED.match(text, end)
    if glued is None:
        return words_of(text[end:])
    last_word = LAST_WORD.search(text[:end])
    assert last_word is not None, "it may be empty"
    changed_word = last_word[0] + glued[0]
    rest = text[glued.end() :]
    return [changed_word, *words_of(rest)]


def words_of(name: str) -> list[str]:
    """Return the words of a name in small letters, such as ["llama", "8b", "v0.2"]."""
    return WORD.findall(name.lower())


def _match(name: str, first: str) -> re.Match[str] | None:
    """Match the letters and numbers of `first` at the beginning of a name, whatever stands between
    them: but two numbers are not one (Qwen2-57B is no Qwen2.5-7B), and no longer ones.
    """
    tokens = NUMBER_OR_WORD.findall(without_maker(first))
    if not tokens:
        return None
    pattern = ""
    last = ""
    for token in tokens:
        if last:
            are_numbers = last[-1].isdigit() and token[0].isdigit()
            if are_numbers:
                pattern += "[^a-z0-9]+"
            else:
                pattern += "[^a-z0-9]*"
        # A version's dot is written in three ways, or left out: 2.5, 2_5, 2-5, 25.
        pattern += token.replace(".", "[-_.]?")
        last = token
    if last[-1].isdigit():
        pattern += r"(?!\d)"
    else:
        pattern += r"(?![a-z])"
    return re.match(pattern, without_maker(name))


def without_maker(name: str) -> str:
    """Return a name in small letters, without the maker's and the series' in front."""
    return MAKERS.sub("", name.lower())


def tells_weights(word: str) -> bool:
    """Return whether a word of a model's name tells the type of its weights."""
    if word in WEIGHTS_OF_WORDS or word in IN_16_BITS:
        return True
    return OTHER_WEIGHTS.fullmatch(word) is not None


def is_of_training(word: str) -> bool:
    """Return whether a word of a model's name tells how or when it was trained."""
    if word in WORDS["trained"]:
        return True
    return DATE.fullmatch(word) is not None


def _differences_of_model(suffixes: Sequence[str], node: DictConfig) -> list[str]:
    """Return the words behind a model's name that make it another one than that of `node`."""
    differences = []
    is_type_told = False
    for word in suffixes:
        is_detail = is_type_told and HOW_STORED.fullmatch(word) is not None
        if not is_detail and not _is_of_model(word, node):
            differences.append(word)
        is_type_told = is_type_told or tells_weights(word)
    return differences


def _is_of_model(word: str, node: DictConfig) -> bool:
    """Return whether a word behind a model's name leaves its shapes and weights as in `node`."""
    if tells_weights(word):
        # A model that is published quantised has its own type of weights alone.
        quantisation = node.get("quantisation")
        if quantisation is None:
            return True
        weights = WEIGHTS_OF_WORDS.get(word)
        return bool(weights == quantisation.name)
    length = CONTEXT_LENGTH.fullmatch(word)
    if length is not None:
        positions = 1024 * int(length[1])
        return positions == int(node.max_position)
    if word in WORDS["quantised"] or is_of_training(word):
        return True
    return FIRST_VERSION.fullmatch(word) is not None


def _is_of_card(word: str, node: DictConfig) -> bool:
    """Return whether a word behind a card's name leaves it that of `node`."""
    size = MEMORY_SIZE.fullmatch(word)
    if size is None:
        return word in WORDS["forms_of_cards"]
    memory = node.get("memory_bytes") or node.get("memory") or 0.0
    printed_memory = 1e9 * int(size[1])
    difference = abs(printed_memory - memory)
    return bool(difference <= MEMORY_WITHIN * memory)


def datasheet_of_card(nearest: NearestOption) -> str:
    """Say how a card is described that differs from one with a file."""
    name = "-".join([nearest.option, *nearest.differences])
    memory = "BYTES"
    for difference in nearest.differences:
        size = MEMORY_SIZE.fullmatch(difference)
        if size is not None:
            memory = f"{size[1]}e9"
    return (
        f"hardware=datasheet hardware.base={nearest.option} hardware.name={name} "
        f"hardware.memory={memory} and what else its datasheet has otherwise"
    )
