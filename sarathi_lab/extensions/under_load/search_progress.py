"""How far a search of the capacity is: which runs are left follows from the outcomes of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sarathi_lab.engine.request import Request
from sarathi_lab.extensions.under_load.search import SearchWatch

# Runs until a rate passes and another fails, and their bracket is bisected, before any outcome.
FIRST_RUNS = 5
# The rate that shorter runs gave, and the one beside it: more where the longer runs disagree.
CONFIRMING_RUNS = 2


class SearchProgress(SearchWatch):
    """Counts the tokens that a search has served, and estimates how many it will have.

    The first length of runs is searched, the next one confirms what it gave, and the longest does
    so once more. Where it does not, the estimate grows.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        lengths: Sequence[int],
        advance: Callable[[int, int], None],
    ) -> None:
        """Make the progress of a search that has served nothing.

        Args:
            requests: All requests, of which runs serve the first ones.
            lengths: The requests per run, ascending.
            advance: Called with the tokens of each iteration, and those expected of the search.
        """
        self._tokens: dict[int, int] = {}  # of a run, by its number of requests
        for number in lengths:
            self._tokens[number] = sum(request.total_len - 1 for request in requests[:number])
        self._lengths = list(lengths)
        self._advance = advance
        self._done = 0
        shortest = self._tokens[self._lengths[0]]
        # One more serves the requests all at once.
        self._expected = (1 + FIRST_RUNS) * shortest + self._after(self._lengths[0])
        self._number = 0  # requests of the last runs
        self._passed: list[int] = []  # steps, of runs of that number
        self._failed: list[int] = []

    def on_iteration(self, num_tokens: int) -> None:
        """Count the tokens of an iteration."""
        self._done += num_tokens
        self._advance(num_tokens, max(self._expected, self._done))

    def begins(self, number: int) -> None:
        if number != self._number:
            self._number = number
            self._passed = []
            self._failed = []
        num_left = max(1, self._num_left())
        self._expected = self._done + num_left * self._tokens[number] + self._after(number)

    def ends(self, step: int, *, is_passing: bool) -> None:
        outcomes = self._passed if is_passing else self._failed
        outcomes.append(step)

    def _num_left(self) -> int:
        """Return about how many more runs of this length decide the rate."""
        if self._passed and self._failed:
            bracket = min(self._failed) - max(self._passed)
            return (bracket - 1).bit_length()
        if self._number == self._lengths[0]:
            # Each step outwards is twice the one before, and is bisected in as many more.
            num_tried = len(self._passed) + len(self._failed)
            return max(FIRST_RUNS - num_tried, num_tried)
        is_last_of_several = self._number == self._lengths[-1] and len(self._lengths) > 2
        if is_last_of_several:
            return 1
        return CONFIRMING_RUNS

    def _after(self, number: int) -> int:
        """Return the tokens of the runs that are longer than those of so many requests."""
        later = self._lengths[self._lengths.index(number) + 1 :]
        if not later:
            return 0
        tokens = self._tokens[later[-1]]
        is_searched = number == self._lengths[0]
        if is_searched and len(later) > 1:
            tokens += CONFIRMING_RUNS * self._tokens[later[0]]
        elif is_searched:
            tokens *= CONFIRMING_RUNS
        return tokens
