"""Workers without a model that check what vLLM's would be sent."""

from __future__ import annotations

from types import SimpleNamespace

BLOCK = 4  # tokens


class Bookkeeper:
    """Workers that hold tokens and blocks by name, as vLLM's do, and refuse what does not follow.
    The token after a sequence is the sum of its tokens modulo 97.
    """

    times_operations = False

    def __init__(self, *, is_async: bool = False, num_stages: int = 1) -> None:
        self.is_async, self.num_stages = is_async, num_stages
        self.wants_newest_tokens = num_stages > 1
        self.block_size, self.num_blocks = BLOCK, 64
        self.held: dict[str, SimpleNamespace] = {}
        self.most_held = 0
        self.cache: dict[tuple[int, int], int] = {}  # token by block and place

    def forget(self, names):
        for name in names:
            self.held.pop(name)

    def run(self, step):
        self.forget(step.ended)
        for name, token_ids, block_ids, num_computed in step.new:
            assert name not in self.held
            assert -1 not in token_ids
            state = SimpleNamespace(tokens=list(token_ids), blocks=list(block_ids))
            self.held[name] = state
            state.computed = num_computed
            state.given = len(token_ids)
        lists = (step.names, step.new_blocks, step.num_computed, step.num_generated)
        for name, blocks, computed, generated in zip(*lists, strict=True):
            state = self.held[name]
            assert state.computed == computed
            assert generated == len(state.tokens) - state.given
            state.blocks += blocks or []
        self.most_held = max(self.most_held, len(self.held))
        found = {}
        for name, number in step.num_tokens.items():
            state = self.held[name]
            for place in range(state.computed, state.computed + number):
                self.cache[state.blocks[place // BLOCK], place % BLOCK] = state.tokens[place]
            state.computed += number
            if state.computed == len(state.tokens):
                places = range(state.computed)
                in_cache = [self.cache[state.blocks[i // BLOCK], i % BLOCK] for i in places]
                assert in_cache == state.tokens
                found[name] = sum(in_cache) % 97
                state.tokens.append(found[name])
        return SimpleNamespace(
            tokens=lambda names: [found[name] for name in names], graph_use=lambda: ("none", 0)
        )
