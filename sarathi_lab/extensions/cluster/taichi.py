"""TaiChi (arXiv 2508.01989): instances that all chunk, with different budgets, and requests that
move between them by their slack.
"""

from __future__ import annotations

from collections.abc import Sequence

from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.cluster.cluster import Cluster, Instances
from sarathi_lab.extensions.cluster.routers import least_loaded

FEWEST_FREE = 0.05  # of an instance's blocks: with fewer it is crowded
MEMORY = 0.9  # of the older iterations in the mean time of a prompt's token


class TaiChi(Cluster):
    """The first `num_entries` instances are prefill-heavy, the others decode-heavy; any computes
    prompts and decodes. Objectives are `ttft` and `tpot` seconds.

    Reconstructed from the paper's abstract and summaries: instances of two budgets, requests that
    move by the slack of their objectives, prompts placed by their length. A prompt goes to the
    prefill-heavy instance that is expected to emit its first token first, unless that misses `ttft`
    and a decode-heavy one is faster. A decode without slack leaves a prefill-heavy instance, where
    prompts delay it, for a decode-heavy one with room (its first token leaves it none). A crowded
    decode-heavy instance, which lacks cache or places or takes longer than `tpot` for an iteration,
    gives the decode with the most slack to a prefill-heavy one. Slack is `tpot` for each token
    after the first, less the time that they took. A sequence without a place stays where it is.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        instances: Instances,
        num_entries: int,
        ttft: float,
        tpot: float,
    ) -> None:
        super().__init__(schedulers, instances, least_loaded, num_entries)
        self._ttft = ttft
        self._tpot = tpot
        self._token_time = [0.0] * len(schedulers)  # seconds of a token of a prompt

    def route(self, request: Request) -> int:
        everywhere = range(len(self.schedulers))
        expected = [self._expected(place, request) for place in everywhere]
        best = min(everywhere[: self.num_entries], key=expected.__getitem__)
        if expected[best][0] > self._ttft:
            best = min(everywhere, key=expected.__getitem__)
        return best

    def move_on(self, place: int, result: StepResult) -> None:
        batch, seconds = result.batch, result.end - result.start
        if batch.num_prefill_tokens:
            before, now = self._token_time[place], seconds / batch.num_prefill_tokens
            self._token_time[place] = MEMORY * before + (1 - MEMORY) * now if before else now
        idle = (one.sequence for one in batch.chunks if one.sequence.is_running)
        slack = {one: self._slack(one, result.end) for one in idle if one.is_decoding}
        places = range(len(self.schedulers))
        if place < self.num_entries:
            others, leaving = places[self.num_entries :], [one for one in slack if slack[one] <= 0]
        else:
            is_crowded = seconds > self._tpot or self._is_full(self.schedulers[place])
            spare = [one for one in slack if slack[one] > 0] if is_crowded else []
            others, leaving = places[: self.num_entries], sorted(spare, key=slack.__getitem__)[-1:]
        for sequence in leaving:
            if self.send(place, sequence, others):
                self.schedulers[place].running.leave(sequence)

    def _expected(self, place: int, request: Request) -> tuple[float, int]:
        """Seconds until the first token there, and the tokens to compute until then."""
        scheduler = self.schedulers[place]
        prompts = [*scheduler.waiting, *(one for one in scheduler.running if not one.is_decoding)]
        num_tokens = request.prompt_len + sum(one.num_pending for one in prompts)
        return num_tokens * self._token_time[place], num_tokens

    def _slack(self, sequence: SequenceState, now: float) -> float:
        due = self._tpot * (len(sequence.token_times) - 1)
        return due - (now - sequence.first_token_time)

    def _is_full(self, scheduler: Scheduler) -> bool:
        """Whether an instance lacks cache or places."""
        is_short = scheduler.blocks.num_free < FEWEST_FREE * scheduler.blocks.num_blocks
        return is_short or len(scheduler.running) >= scheduler.max_num_seqs
