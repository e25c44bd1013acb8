"""The worker's side of the talk: a JSON object a line in on stdin, one a line out where stdout was.

Needs nothing but the standard library, as it runs in every engine's own environment (Python 3.10 or
newer). {"op": "load", ...settings} is answered by {"version": ...}, {"op": "run", "prompts": [[id,
...], ...], "output_len": n} by {"seconds": ..., "tokens": [[id, ...], ...]}, and whatever goes
wrong by {"error": line}. The end of input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, Protocol


class Engine(Protocol):
    """What a worker script defines."""

    def load(self, settings: dict[str, Any]) -> str:
        """Load `model_dir` in `dtype` for `batch` sequences of `longest` tokens; the version."""

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """Exactly `output_len` greedy tokens for every prompt, in their order."""


def serve(engine: Engine) -> None:
    """Answer until the input ends. What the engine prints goes to stderr, no answer's place."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(_answer(engine, json.loads(line))) + "\n")
            answers.flush()
    os._exit(0)  # engines keep threads that would outlive the main one


def _answer(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if message.pop("op") == "load":
            return {"version": engine.load(message)}
        start = time.perf_counter()
        tokens = engine.generate(message["prompts"], message["output_len"])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}
    except Exception as error:  # whatever an engine raises is its answer
        traceback.print_exc()
        line = str(error).strip().partition("\n")[0]
        return {"error": f"{type(error).__name__}: {line}"[:300]}
