"""Names of models and cards as sources write them, and what they tell: a file of conf/ and the type
of a model's weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sarathi_lab.config.instantiate import option_files
from sarathi_lab.config.published_names import without_maker
from sarathi_lab.extensions.replay.server_arguments import SERVED_NAMES

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CACHED_MODEL = re.compile(r"models--[^/]+--([^/]+)")  # a folder of the hub's cache
SEPARATORS = re.compile(r"[-_.:]")  # of a name's words; a colon before a file of a hub's GGUF
FAMILY = re.compile(r"[a-z]+")
SIZE = re.compile(r"(\d+x|[ae])?\d+[bm]")  # such as 8b, 8x7b, a3b
# Words of a model's name that tell the type of its weights; of a type that is none of these, and
# counts first, as GPTQ may have 8 bits.
WEIGHTS_OF_NAMES = {"fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
WEIGHTS_OF_NAMES |= {"w8a8": "w8a8"} | dict.fromkeys(("int8", "w8a16", "8bit"), "int8")
WEIGHTS_OF_NAMES |= dict.fromkeys(("int4", "w4a16", "4bit", "awq", "gptq"), "int4")
OTHER_WEIGHTS = re.compile(r"w\d+a\w*\d+|u?int\d+|(mx|nv)?fp\d|nf4|\d+bit|i?q\d\w*|gguf|bnb")
# Published in 8 bits without a word of it. Whole names: others that begin so were trained on these
# models' answers (DeepSeek-R1-0528-Qwen3-8B), or are copies in 16 bits. Each is in a public page:
# V3 in README_WEIGHTS.md of its repository, V3-Base and R1-Zero in the hub's, V3.1 in its card, R1
# and R1-0528 in vLLM's guides, the others in those of people who converted or measured them.
PUBLISHED_IN_FP8 = (
    *("deepseek-v3", "deepseek-v3-base", "deepseek-v3-0324"),
    *("deepseek-v3.1", "deepseek-v3.2-exp", "deepseek-v3.2"),
    *("deepseek-r1", "deepseek-r1-zero", "deepseek-r1-0528"),
)


class ModelName(NamedTuple):
    """A name that a server's model may have.

    Attributes:
        name: Such as Llama-3.1-8B.
        kind: As messages call it: "model's name", "served name" or "folder".
    """

    name: str
    kind: str = "model's name"


def names_of_model(settings: Mapping[str, object]) -> list[ModelName]:
    """Return the names that a server's model may have, the surest one first: that of its hub's id
    or the last part of its path, and those that clients call it by. Where none of these is one of a
    model, as of .../Llama-3.1-8B-ours/merged, folders above that are follow, the nearest first.
    """
    path = str(settings.get("model", ""))
    *folders, last = _parts_of_path(path)
    names = []
    if last:
        names.append(ModelName(last))
    served_names = settings.get(SERVED_NAMES) or ()
    assert isinstance(served_names, tuple), "as read_arguments makes them"
    for served_name in served_names:
        _, _, name = str(served_name).rpartition("/")
        names.append(ModelName(name, "served name"))
    if is_hub_id(path) or any(names_a_model(name) for name, _ in names):
        return names
    for folder in reversed(folders):
        if names_a_model(folder):
            names.append(ModelName(folder, "folder"))
    return names


def _parts_of_path(path: str) -> list[str]:
    """Return the folders of a path and its last part; of the hub's cache the model's name alone,
    as a hash of a snapshot stands behind it.
    """
    in_cache = CACHED_MODEL.search(path)
    if in_cache is not None:
        return [in_cache[1]]
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
    return any(SIZE.fullmatch(word) for word in SEPARATORS.split(name.lower()))


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
    for name, kind in names:
        weights, word = _weights_in_name(name)
        if word:
            return ToldWeights(weights, word, f"the {kind} {name}")
        if names_a_model(name):
            break
    return ToldWeights()


def _weights_in_name(name: str) -> tuple[str, str]:
    name_pieces = SEPARATORS.split(name.lower())
    for word in name_pieces:
        if word not in WEIGHTS_OF_NAMES and OTHER_WEIGHTS.fullmatch(word) is not None:
            return "", word
    for word, weights in WEIGHTS_OF_NAMES.items():
        if word in name_pieces:
            return weights, word
    if name.lower() in PUBLISHED_IN_FP8:
        return "fp8", name
    return "", ""
