"""Work in a process of its own, which a time limit or a crash ends alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sarathi_lab.config.errors import RunError


def run_with_timeout(function: Callable[..., None], *args: Any, limit: float) -> None:
    """Call `function(*args)` in a fresh process. Raises what it raises, and RunError if the process
    dies, or is ended after `limit` seconds with all that it started.
    """
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    pool = ProcessPoolExecutor(max_workers=1)
    try:
        pool.submit(function, *args).result(timeout=limit)
    except TimeoutError:
        raise RunError(
            f"it took more than limit={limit:g} seconds and was ended; allow more"
        ) from None
    except TerminatedWorkerError as error:
        raise RunError(f"its process was killed ({str(error).splitlines()[0]})") from None
    finally:
        pool.shutdown(wait=True, kill_workers=True)
