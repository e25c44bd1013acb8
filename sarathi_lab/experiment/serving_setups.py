"""At which lengths, loads and budgets the experiments of serving run: Sarathi-Serve's own, and
smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydra.utils import instantiate
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.results.slo import Slo
from sarathi_lab.workload.lognormal import Lognormal

BLOCK_SIZE = 16  # tokens
PAPERS = (
    ("mistral-7b", "a100", 1),
    ("yi-34b", "a100", 2),
)  # model, hardware, devices that share a layer (Table 1)
LOAD = (
    0.7  # of the rate at which a device serves all that is there at once, where no rate is stated
)


@dataclass(frozen=True)
class ServingSetup:
    """Sizes of the experiments of serving, in tokens, sequences and requests.

    `rates` are requests a second by data set; one that is missing is served at `LOAD` of its
    saturation rate. `budget` is that of the ablation, `slo_budgets` those of a policy that cuts
    prompts under each of `slos`; `batches` are those of policies that differ from `batch`.
    """

    name: str
    datasets: Mapping[str, Lognormal]
    num_requests: int
    num_searched: int  # requests of a search for the capacity
    batch: int
    budget: int
    budgets: Sequence[int]
    slos: Mapping[str, Slo]
    slo_budgets: Mapping[str, int]
    precision: float
    searched: Sequence[str] = (
        "sarathi_serve",
        "prefill_first",
        "orca",
        "vllm_v1",
        "sglang",
    )  # policies of a search
    rates: Mapping[str, float] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(dataset.max_len for dataset in self.datasets.values())

    @property
    def kv_tokens(self) -> int:
        """Tokens of cache that a full batch of the longest requests takes, and a little more for
        watermarks.
        """
        return math.ceil(1.05 * self.batch * math.ceil(self.longest / BLOCK_SIZE)) * BLOCK_SIZE


def papers_setup(model: str) -> ServingSetup:
    """Sarathi-Serve's (arXiv 2403.02310, section 5, and the artifact's scripts): two data sets of
    up to 8K and 16K tokens, batch 128 (Orca 16), budgets 512 strict, 2,048 relaxed and 1,024 in the
    ablation, 128 requests at 1 and 0.5 a second for Yi-34B. Searches take 512 requests instead of
    2,048.
    """
    own = f"{model}-strict" if (CONF / "slo" / f"{model}-strict.yaml").is_file() else "strict"
    return ServingSetup(
        name="paper",
        datasets={name: _dataset(name) for name in ("openchat_sharegpt4", "arxiv_summarization")},
        num_requests=128,
        num_searched=512,
        batch=128,
        budget=1024,
        budgets=(128, 256, 512, 1024, 2048, 4096, 8192),
        slos={kind: _slo(own.replace("strict", kind)) for kind in ("strict", "relaxed")},
        slo_budgets={"strict": 512, "relaxed": 2048},
        precision=0.05,
        rates={"openchat_sharegpt4": 1.0, "arxiv_summarization": 0.5} if model == "yi-34b" else {},
        batches={"orca": 16},
    )


def small_setup(model: str) -> ServingSetup:
    """A tenth of the conversations' lengths, for two cores of a CPU and a model of 30M parameters;
    the median scheduling delay is bounded at a quarter of a second, as a run of a search takes some
    seconds only.
    """
    return ServingSetup(
        name="small",
        datasets={"a tenth of openchat_sharegpt4": _dataset("lognormal")},
        num_requests=24,
        num_searched=16,
        batch=8,
        budget=128,
        budgets=(32, 64, 128, 256, 512),
        slos={"strict": _relative(batch=8, context=512, scheduling_delay=0.25)["strict"]},
        slo_budgets={"strict": 64},
        precision=0.25,
        searched=("sarathi_serve", "prefill_first"),
    )


def dry_setup(model: str) -> ServingSetup:
    """Seconds in all with the tiny model: what is tried, not what is measured."""
    tiny = Lognormal(
        num_requests=1, seed=0, prompt_p50=20, prompt_p90=40, output_p50=4, output_p90=8, max_len=64
    )
    return ServingSetup(
        name="dry",
        datasets={"tiny": tiny},
        num_requests=8,
        num_searched=6,
        batch=4,
        budget=16,
        budgets=(8, 16, 64),
        slos=_relative(batch=4, context=32, scheduling_delay=1.0),
        slo_budgets={"strict": 8, "relaxed": 32},
        precision=1.0,
        rates={"tiny": 40.0},
    )


SETUPS = {"paper": papers_setup, "small": small_setup, "dry": dry_setup}


def _relative(*, batch: int, context: int, scheduling_delay: float) -> dict[str, Slo]:
    """The paper's objectives, relative to a decode iteration of this size."""
    size = {"decode_batch": batch, "decode_context": context}
    return {
        name: Slo(name=name, tbt_factor=factor, scheduling_delay=scheduling_delay, **size)
        for name, factor in (("strict", 5.0), ("relaxed", 25.0))
    }


def _dataset(name: str) -> Lognormal:
    return load_option("workload", name)


def _slo(name: str) -> Slo:
    return instantiate(_load("slo", name))


def _load(group: str, name: str) -> object:
    return OmegaConf.load(CONF / group / f"{name}.yaml")
