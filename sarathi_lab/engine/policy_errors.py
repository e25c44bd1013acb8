"""What a policy of the user's own does wrong in a run, as one line with its remedy."""

from __future__ import annotations

import traceback
from pathlib import Path

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.queues import RunningSequences

FIND_A_SHORT_QUEUE = "sarathi_lab.check_policy(policy) finds a short queue that shows it"


class PolicyRaised(RunError):
    """The `fill` of a policy raised an exception, which is the cause of this one."""

    def __init__(self, policy: Policy, error: Exception) -> None:
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.name == "fill":
                last_frame = frame  # the user's line, not that of the move which it called
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        location = f"{Path(last_frame.filename).name}:{last_frame.lineno}"
        super().__init__(
            f"policy {policy.name}: its fill raised {what} ({location}); mend that line, "
            f"{FIND_A_SHORT_QUEUE}"
        )


class PolicyStalled(RunError):
    """The policy takes nothing although requests are there and nothing is on its way.

    Attributes:
        how: What gets no tokens.
    """

    def __init__(self, policy: Policy, running: RunningSequences, num_waiting: int) -> None:
        decodes, prompts = running.by_phase()
        if decodes:
            stuck = f"{_requests(len(decodes), 'decoding')} got no token"
            move = "add_decodes"
        elif prompts:
            stuck = f"{_requests(len(prompts), 'running')} got no prompt tokens"
            move = "continue_prefills"
        else:
            stuck = f"{_requests(num_waiting, 'waiting')} never entered"
            move = "admit"
        self.how = f"policy {policy.name} stalled: {stuck}"
        super().__init__(f"{self.how}: does its fill call scheduler.{move}? {FIND_A_SHORT_QUEUE}")


def _requests(number: int, state: str) -> str:
    plural = "" if number == 1 else "s"
    return f"{number} {state} request{plural}"


def is_own(policy: Policy) -> bool:
    """Return whether a policy is the user's, so that its errors are for them to mend."""
    package, _, _ = type(policy).__module__.partition(".")
    return package != "sarathi_lab"
