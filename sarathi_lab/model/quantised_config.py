"""How a checkpoint stores the weights of its layers' products, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.ignored_modules import quantised_part
from sarathi_lab.model.quantisation import (
    BITS_OF_BYTE,
    FP8,
    NVFP4_BITS,
    SCALE_BITS,
    STORED,
    Quantisation,
    Quantised,
)
from sarathi_lab.model.spec import ModelSpec

Settings = Mapping[str, object]
FIELD = "quantization_config"
AGAIN = "fetch config.json again"
# Fields of modules that stay as they were, by the methods' names for them.
IGNORING = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")
MOST_BITS = 16
PER_COLUMN = -1  # a group's size, for one scale of a whole column


def read_quantisation(config: Settings, spec: ModelSpec) -> Quantisation | None:
    """Read `quantization_config` of the config.json of `spec`; None: the model's type. Raises
    UserError, naming the field, for a method or a part of the products whose bytes are not known.
    """
    settings = _settings(config)
    if not settings:
        return None
    quantisation = _read_method(settings)
    if quantisation.of == "experts" and not spec.num_experts:
        raise UserError(
            f"{FIELD}.quant_method={quantisation.name} is of experts, which model {spec.name} has "
            f"not; {AGAIN}"
        )
    if quantisation.of == "layers":
        return replace(quantisation, of=_part(settings, spec))
    return quantisation


def unused_fields(config: Settings) -> tuple[str, ...]:
    """Return the fields of `quantization_config` that say how the cache is stored, which a run
    states by `cache.dtype`.
    """
    settings = _settings(config)
    stated = [name for name in CACHE_FIELDS if settings.get(name)]
    return tuple(f"{FIELD}.{name} (the cache is stored by cache.dtype)" for name in stated)


def _settings(config: Settings) -> Settings:
    settings = config.get(FIELD)
    return _object(FIELD, settings) if settings else {}


def _read_method(settings: Settings) -> Quantisation:
    """Return how weights are stored, as if all of the layers' products were."""
    method = str(settings.get("quant_method"))
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    if method == "mxfp4":
        # gpt-oss keeps all but its experts in 16 bits, by `modules_to_not_convert`.
        return STORED[method]
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        return _integers(method, settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method == "modelopt":
        return _modelopt(settings)
    raise UserError(
        f"{FIELD}.quant_method={method} has no formula of its bytes; take fp8, awq, gptq, mxfp4, "
        "modelopt or compressed-tensors, or the unquantised model"
    )


def _integers(method: str, settings: Settings) -> Quantisation:
    """Integers of `bits`, with a scale and a zero for each group along the inner dimension."""
    if settings.get("dynamic"):
        raise UserError(
            f"{FIELD}.dynamic={settings['dynamic']!r} gives modules bits of their own, which have "
            "no formula; take the unquantised model"
        )
    bits = _bits("bits", settings)
    of_group = _share_of_group(SCALE_BITS + bits, settings)
    return Quantisation(method, (bits + of_group) / BITS_OF_BYTE)


def _compressed_tensors(settings: Settings) -> Quantisation:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UserError(
            f"{FIELD}.config_groups={groups!r} is not one group of weights, which the bytes would "
            "follow from; take another quantisation of the model"
        )
    name, value = next(iter(groups.items()))
    group = _object(f"{FIELD}.config_groups.{name}", value)
    targets = group.get("targets") or ["Linear"]
    if targets != ["Linear"]:
        raise UserError(
            f"{FIELD}.config_groups.{name}.targets={targets!r} is not all of the products, "
            "['Linear'], which the bytes are counted of; take the unquantised model"
        )
    weights = _object(f"{FIELD}.config_groups.{name}.weights", group.get("weights"))
    activations = group.get("input_activations")
    bits = _bits("num_bits", weights)
    of_group = 0.0
    if weights.get("strategy") == "group":
        of_group = _share_of_group(SCALE_BITS, weights)
    if weights.get("strategy") == "tensor_group":
        of_group = _share_of_group(BITS_OF_BYTE, weights)
    return Quantisation(
        "compressed-tensors",
        (bits + of_group) / BITS_OF_BYTE,
        has_fp8_products=bits == BITS_OF_BYTE and activations is not None,
    )


def _modelopt(settings: Settings) -> Quantisation:
    algorithm = str(settings.get("quant_algo"))
    if algorithm == "FP8":
        return Quantisation("modelopt fp8", 1.0, has_fp8_products=True)
    if algorithm == "NVFP4":
        return Quantisation("modelopt nvfp4", NVFP4_BITS / BITS_OF_BYTE)
    raise UserError(
        f"{FIELD}.quant_algo={algorithm} has no formula of its bytes; take FP8 or NVFP4"
    )


def _part(settings: Settings, spec: ModelSpec) -> Quantised:
    """Return the part of the products that the modules which are ignored leave quantised."""
    for field in IGNORING:
        names = settings.get(field)
        if not names:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{FIELD}.{field}={names!r} is no list of names; {AGAIN}")
        return quantised_part(field, names, spec)
    return "layers"


def _object(name: str, value: object) -> Settings:
    if not isinstance(value, Mapping):
        raise UserError(f"{name}={value!r} is no object; {AGAIN}")
    return value


def _bits(name: str, settings: Settings) -> int:
    bits = _whole(name, settings)
    if not 0 < bits <= MOST_BITS:
        raise UserError(f"{FIELD}: {name}={bits} is not from 1 to {MOST_BITS} bits; {AGAIN}")
    return bits


def _share_of_group(bits: int, settings: Settings) -> float:
    """Return a weight's share of the `bits` that a group has in common."""
    size = _whole("group_size", settings)
    if size < 1 and size != PER_COLUMN:
        raise UserError(
            f"{FIELD}: group_size={size} is no number of weights, nor {PER_COLUMN} for a column; "
            f"{AGAIN}"
        )
    return 0.0 if size == PER_COLUMN else bits / size


def _whole(name: str, settings: Settings) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{FIELD}: {name}={value!r} is no whole number; {AGAIN}")
    return value
