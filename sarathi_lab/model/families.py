"""Architectures of published models, and what their config.json leaves to their code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from sarathi_lab.config.paths import stated_beside
from sarathi_lab.model.config_facts import Config
from sarathi_lab.model.layers import Rule
from sarathi_lab.model.spec import StoredDtype

ARCHITECTURES = "architectures.yaml"


@dataclass(frozen=True)
class Family:
    """What config.json leaves to the code of an architecture.

    Attributes:
        gated: Whether an FFN has a gate.
        tied: Whether the output head is the embedding, where the file does not say.
        ffn_multiple: The width of an FFN by the hidden state's, where the file does not say it.
        every_full: Of how many layers the last sees the whole context, where a window is set and no
            layer is named; 0: none does.
        has_window_switch: Whether a window counts only with `use_sliding_window`.
        has_shared_gate: Whether a shared expert's output passes a gate.
        has_output_gate: Whether attention's output passes a gate.
        states: The rule of layers that keep a state instead of a context.
        states_layers: Whether the file has to say what each layer has.
        has_both: Whether every layer has attention of both kinds.
        float_states: Whether vLLM keeps the states in float32 though the file does not say so.
        renamed: Fields that have the meaning of others here, by the others' names.
        defaults: Fields that published files leave out.
        counted: Fields of parts that only this architecture's formulas have.
        usual_weights: How its authors store the weights, where they have not 16 bits.
    """

    gated: bool = True
    tied: bool = False
    ffn_multiple: int = 0
    every_full: int = 0
    has_window_switch: bool = False
    has_shared_gate: bool = False
    has_output_gate: bool = False
    states: Rule | None = None
    states_layers: bool = False
    has_both: bool = False
    float_states: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    counted: Sequence[str] = ()
    usual_weights: StoredDtype = "auto"


@cache
def families() -> Mapping[str, Family]:
    """Return the families of architectures.yaml by `model_type`."""
    by_type = dict[str, Family]()
    for group in stated_beside(__file__, ARCHITECTURES)["families"]:
        settings = dict(group)
        model_types = settings.pop("model_types")
        by_type |= dict.fromkeys(model_types, Family(**settings))
    return by_type
