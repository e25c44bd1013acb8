"""Copies of one system that share the requests of a run, such as the paper's 8 replicas of TP8 (section 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sarathi_lab.engine import run_engine
from sarathi_lab.errors import require_int
from sarathi_lab.executor import Executor
from sarathi_lab.ledger import Ledger
from sarathi_lab.request import Request
from sarathi_lab.scheduler import Scheduler


def serve_replicas(
    requests: Sequence[Request],
    num_replicas: int,
    make_scheduler: Callable[[], Scheduler],
    make_executor: Callable[[], Executor],
) -> list[Ledger]:
    """Serve `requests`, dealt out in turn, on `num_replicas` independent systems that all start at time zero.

    Returns the ledger of each. Raises UserError for less than one replica.
    """
    require_int("num_replicas", num_replicas, 1, "use the number of systems that share the requests, such as 8")
    ledgers = []
    for replica in range(num_replicas):
        ledger = Ledger()
        run_engine(requests[replica::num_replicas], make_scheduler(), make_executor(), ledger)
        ledgers.append(ledger)
    return ledgers
