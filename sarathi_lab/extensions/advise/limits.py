"""What no policy and chunk can do on a device, by its cost model, so that it need not be
simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sarathi_lab.config.console import amount
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import copied
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.hardware import WEIGHTS
from sarathi_lab.executor.tables import ATTENTION
from sarathi_lab.extensions.under_load.search import mean_rate, most_late
from sarathi_lab.model.roofline import TILE
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.tasks.plan import Plan, make_plan

MARGIN = 1.05  # by which a limit is to be passed, as sizes between those that are tried differ
EIGHT_BITS = "fp8"
# An iteration larger than any server's, in which a token and a sequence take least.
MOST_TOKENS = 131_072
MOST_DECODES = 4_096


@dataclass(frozen=True)
class Limits:
    """The least times that requests of a plan can have, under any policy and chunk."""

    plan: Plan

    @property
    def is_known(self) -> bool:
        """Whether there are any: tokens that are drafted or cached take less."""
        engine = self.plan.engine
        return not (engine.speculation.tokens or engine.shares_prefixes)

    @property
    def gap(self) -> float:
        """Seconds from a token to the next of a request that is alone, of the shortest prompt."""
        shortest = min(request.prompt_len for request in self.plan.load.requests)
        return self._seconds(make_batch(num_decodes=1, context=shortest + 1))

    def prompt_in_time(self, quantile: float) -> int:
        """Return the tokens of the longest prompt that must be in time for a quantile."""
        lengths = sorted(request.prompt_len for request in self.plan.load.requests)
        num_late = most_late(len(lengths), quantile)
        # The longest ones may be late, as many as the quantile allows.
        return lengths[-1 - num_late]

    def first_token(self, prompt_len: int, chunk: int) -> float:
        """Return the seconds to the first token of a prompt that is alone, in chunks."""
        seconds = 0.0
        for start in range(0, prompt_len, chunk):
            size = min(chunk, prompt_len - start)
            seconds += self._seconds(make_batch(prefill_tokens=size, start=start))
        # The stages of a pipeline may compute chunks of one prompt at a time.
        return seconds / self.plan.backend.num_stages

    @cached_property
    def rate(self) -> float:
        """The most requests a second that the devices compute: tokens in the iterations in which
        one takes least, and attention as of a whole prompt and a decode beside many others.
        """
        requests = self.plan.load.requests
        number = len(requests)
        mean_prompt = sum(request.prompt_len for request in requests) // number
        mean_output = sum(request.output_len for request in requests) // number
        # Seconds of a mean request: its tokens without attention, then the attention of its prompt
        # and of each decode.
        num_steps = mean_output - 1  # the first token comes with the prompt
        num_tokens = mean_prompt + num_steps
        of_tokens = num_tokens * self._least_linear_of_token

        prompt_len = max(1, mean_prompt)
        of_prompt = self._attention_of_prompt(prompt_len)
        # A request decodes from the end of its prompt to its last token: on average halfway.
        mean_context = prompt_len + mean_output // 2 + 1
        decodes = make_batch(num_decodes=MOST_DECODES, context=mean_context)
        of_step = self._attention(decodes) / MOST_DECODES

        seconds = of_tokens + of_prompt + num_steps * of_step
        num_engines = self.plan.engine.cluster.num_instances
        return self.plan.backend.num_stages * num_engines / seconds

    def _attention_of_prompt(self, prompt_len: int) -> float:
        """Return the seconds of attention of a whole prompt among many in an iteration."""
        num_prompts = math.ceil(MOST_TOKENS / prompt_len)
        prompts = make_batch(prefill_tokens=prompt_len, num_prefills=num_prompts)
        return self._attention(prompts) / num_prompts

    @property
    def _least_linear_of_token(self) -> float:
        """The least seconds of a token without its attention, over all sizes of iterations."""
        of_token = []
        for size in _iteration_sizes(MOST_TOKENS):
            of_token.append(self._linear(size) / size)
        return min(of_token)

    @cached_property
    def _predictor(self) -> Predictor:
        predictor = self.plan.backend.predictor(self.plan.spec)
        assert predictor is not None, "advice is simulated by a cost model"
        return predictor

    def _linear(self, num_tokens: int) -> float:
        batch = make_batch(prefill_tokens=num_tokens)
        return self._seconds(batch) - self._attention(batch)

    def _seconds(self, batch: Batch) -> float:
        batch.window = self.plan.spec.attention_window
        return self._predictor(batch)

    def _attention(self, batch: Batch) -> float:
        batch.window = self.plan.spec.attention_window
        times = self._predictor.operation_times(batch)
        seconds = 0.0
        for name in ATTENTION:
            seconds += times.get(name, 0.0)
        return seconds


def out_of_reach(plan: Plan, slo: Slo) -> list[str]:
    """Return why nothing meets an objective at any rate, a line each: bounds that not even a
    request which is alone is within. Empty where one may.
    """
    limits = Limits(plan)
    if not limits.is_known:
        return []
    lines = []
    gap = limits.gap
    for name in ("tbt", "tpot"):
        bound = slo.bounds.get(name)
        if bound is not None and gap > MARGIN * bound:
            lines.append(
                f"no rate meets slo.{name}={bound:g}: a decode takes {_ms(gap)} even alone"
                f"{_in_8_bits(plan)}"
            )
    ttft = slo.ttft
    if ttft is None:
        return lines
    prompt_len = limits.prompt_in_time(slo.quantile)
    sizes = _iteration_sizes(prompt_len)
    seconds = min(limits.first_token(prompt_len, chunk) for chunk in sizes)
    if seconds > MARGIN * ttft:
        lines.append(
            f"no rate meets slo.ttft={ttft:g}: a prompt of {prompt_len:,} tokens takes "
            f"{_ms(seconds)} even alone"
        )
    return lines


def _in_8_bits(plan: Plan) -> str:
    """State the time of a decode with weights in 8 bits, where a plan has more."""
    if plan.spec.stored is not None:
        return ""
    cfg = copied(plan.cfg)
    cfg.executor.weights = EIGHT_BITS
    try:
        gap = Limits(make_plan(cfg)).gap
    except UserError:  # such as of a device without such products
        return ""
    return f", with {WEIGHTS}={EIGHT_BITS} {_ms(gap)}"


def too_many(plan: Plan) -> list[str]:
    """Return why no policy keeps up with the requests, in a line; empty where one may."""
    limits = Limits(plan)
    if not (limits.is_known and plan.load.has_times):
        return []
    drawn = mean_rate(plan.load.requests)
    stated = plan.config["workload"].get("rate") or drawn
    highest = limits.rate
    # Few requests may have come faster than stated by chance, or slower.
    if min(drawn, stated) <= MARGIN * highest:
        return []
    return [
        f"no policy serves {amount(stated)} requests/s of these: the devices compute at "
        f"most {amount(highest)}, by their cost model"
    ]


def in_time_alone(plan: Plan, slo: Slo, chunk: int) -> bool:
    """Return whether a prompt that is alone may have its first token in time in such chunks."""
    limits = Limits(plan)
    if slo.ttft is None or not limits.is_known:
        return True
    prompt_len = limits.prompt_in_time(slo.quantile)
    seconds = limits.first_token(prompt_len, chunk)
    return seconds <= MARGIN * slo.ttft


def _ms(seconds: float) -> str:
    return f"{amount(1e3 * seconds)} ms"


def _iteration_sizes(most_tokens: int) -> Iterator[int]:
    """List tokens of iterations: tiles, doubled up to one that has `most_tokens`."""
    size = TILE
    while size < most_tokens:
        yield size
        size *= 2
    yield size
