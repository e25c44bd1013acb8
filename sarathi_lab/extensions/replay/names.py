"""Names of models and cards as sources write them, and what they tell: a file of conf/ and the type
of a model's weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sarathi_lab.config.instantiate import option_files
from sarathi_lab.config.published_names import (
    IN_16_BITS,
    WEIGHTS_OF_WORDS,
    is_of_training,
    tells_weights,
    without_maker,
    words_behind,
    words_of,
)
from sarathi_lab.extensions.replay.argument_table import SERVED_NAMES

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CACHED_MODEL = re.compile(r"models--([^/]+)--([^/]+)")  # a folder of the hub's cache
FAMILY = re.compile(r"[a-z]+")
SIZE = re.compile(r"(\d+x|[ae])?\d+[bm]")  # such as 8b, 8x7b, a3b
# Published in 8 bits without a word of it; not those that were trained on these models' answers
# (DeepSeek-R1-0528-Qwen3-8B), and no copies in 16 bits. Each is in a public page: V3 in
# README_WEIGHTS.md of its repository, V3-Base and R1-Zero in the hub's, V3.1 in its card, R1 and
# R1-0528 in vLLM's guides, the others in those of people who converted or measured them.
PUBLISHED_IN_FP8 = ("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-r1")
NVIDIA = "nvidia"  # whose names have fp4 for nvfp4
FP4 = "fp4"


class ModelName(NamedTuple):
    """A name that a server's model may have.

    Attributes:
        name: Such as Llama-3.1-8B.
        kind: As messages call it: "model's name", "served name" or "folder".
        publisher: Of a hub's id, such as nvidia; "": of no hub's.
    """

    name: str
    kind: str = "model's name"
    publisher: str = ""


def names_of_model(settings: Mapping[str, object]) -> list[ModelName]:
    """Return the names that a server's model may have, the surest one first: that of its hub's id
    or the last part of its path, and those that clients call it by. Where none of these is one of a
    model, as of .../Llama-3.1-8B-ours/merged, folders above that are follow, the nearest first.
    """
    path = _hub_id_in_cache(str(settings.get("model", "")))
    *folders, last = _parts_of_path(path)
    names = []
    if last:
        publisher = folders[0].lower() if is_hub_id(path) else ""
        names.append(ModelName(last, publisher=publisher))
    served_names = settings.get(SERVED_NAMES) or ()
    assert isinstance(served_names, tuple), "as read_arguments makes them"
    for served_name in served_names:
        _, _, name = str(served_name).rpartition("/")
        names.append(ModelName(name, "served name"))
    if is_hub_id(path) or any(names_a_model(named.name) for named in names):
        return names
    for folder in reversed(folders):
        if names_a_model(folder):
            names.append(ModelName(folder, "folder"))
    return names


def _hub_id_in_cache(path: str) -> str:
    """Return the hub's id of a model in its cache, where a hash of a snapshot stands behind the
    name; of another path itself.
    """
    in_cache = CACHED_MODEL.search(path)
    return path if in_cache is None else f"{in_cache[1]}/{in_cache[2]}"


def _parts_of_path(path: str) -> list[str]:
    """Return the folders of a path and its last part."""
    components = [part for part in re.split(r"[/\\]+", path) if part]
    return components or [""]


def is_hub_id(path: str) -> bool:
    """Return whether a model's path is its hub's id, such as meta-llama/Llama-3.1-8B."""
    return HUB_ID.fullmatch(path) is not None


def names_a_model(name: str) -> bool:
    """Return whether a name is that of a model, and not of any folder: it has a size, such as 8B,
    or begins with the family of a file of conf/model, such as deepseek.
    """
    if has_size(name):
        return True
    family = FAMILY.match(without_maker(name))
    return family is not None and family[0] in _families()


def has_size(name: str) -> bool:
    """Return whether a word of a name is a model's size, such as 8B."""
    return any(SIZE.fullmatch(word) for word in words_of(name))


def _families() -> set[str]:
    """Return the letters that files of conf/model begin with, but of auto, tiny and the like."""
    families = set[str]()
    for option in option_files("model"):
        family = FAMILY.match(option)
        if family is not None and re.search(r"\d", option) is not None:
            families.add(family[0])
    return families


class ToldWeights(NamedTuple):
    """The type of a model's weights as its name tells it.

    Attributes:
        weights: The type; "": one that can't be simulated, or none is told.
        word: The word of the name that tells it; "": none does.
        told_by: The name, as messages call it.
    """

    weights: str = ""
    word: str = ""
    told_by: str = ""


def weights_in_names(names: Sequence[ModelName]) -> ToldWeights:
    """Find the type of a model's weights in its names (`names_of_model`), as in Qwen3-8B-AWQ: in
    the first that tells one, and in none behind one that is a model's without.
    """
    for named in names:
        weights, word = _weights_in_name(named)
        if word:
            return ToldWeights(weights, word, f"the {named.kind} {named.name}")
        if names_a_model(named.name):
            break
    return ToldWeights()


def _weights_in_name(named: ModelName) -> tuple[str, str]:
    """Return the type of weights that a name tells, if it can be simulated, and by which word."""
    name_words = words_of(named.name)
    if named.publisher == NVIDIA and FP4 in name_words:
        return "nvfp4", FP4
    for word in name_words:
        is_other = tells_weights(word) and word not in WEIGHTS_OF_WORDS
        if is_other and word not in IN_16_BITS:
            return "", word
    for word, weights in WEIGHTS_OF_WORDS.items():
        if word in name_words:
            return weights, word
    if _is_published_in_fp8(named.name):
        return "fp8", named.name
    return "", ""


def _is_published_in_fp8(name: str) -> bool:
    """Return whether a name is that of a model of `PUBLISHED_IN_FP8`, or of one that was trained
    further, as DeepSeek-V3.1-Terminus.
    """
    for model in PUBLISHED_IN_FP8:
        behind = words_behind(name, model)
        if behind is not None and all(map(is_of_training, behind)):
            return True
    return False
