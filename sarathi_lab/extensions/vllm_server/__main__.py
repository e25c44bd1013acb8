"""Check that vLLM's server can run with a policy of the lab, then become that server.

vLLM makes its scheduler after it has loaded the model, so that the scheduler's refusals come late.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sarathi_lab.config.errors import exit_code
from sarathi_lab.extensions.vllm_server.limits import check_config, version_caution

SCHEDULERS = {True: "AsyncScheduler", False: "Scheduler"}  # by async scheduling
SERVER = "vllm.entrypoints.openai.api_server"


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a server with a policy of the lab.

    The scheduler class is the one for vLLM's choice of async scheduling, and prefix caching is off,
    unless `arguments` state them. Raises UserError for what a policy has no part in.
    """
    caution = version_caution(vllm.__version__)
    if caution is not None:
        print(f"warning: {caution}", file=sys.stderr)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
    stated, _ = parser.parse_known_args(list(arguments))  # the others are the server's
    engine = AsyncEngineArgs.from_cli_args(stated)
    added = []
    if engine.enable_prefix_caching is None:
        engine.enable_prefix_caching = False
        added.append("--no-enable-prefix-caching")
    config = engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
    is_async = bool(config.scheduler_config.async_scheduling)
    if engine.scheduler_cls is None:
        added += ["--scheduler-cls", f"{__package__}.{SCHEDULERS[is_async]}"]
    else:
        is_async = engine.scheduler_cls == f"{__package__}.{SCHEDULERS[True]}"
    check_config(config, is_async)
    return [*arguments, *added]


def main() -> int:
    arguments = server_arguments(sys.argv[1:])
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *arguments])


if __name__ == "__main__":
    sys.exit(exit_code(main, "the server has not started"))
