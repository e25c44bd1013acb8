"""`python -m sarathi_lab leaderboard`: a sweep, or the pages of one that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sarathi_lab.config.console import typed
from sarathi_lab.config.errors import exit_code
from sarathi_lab.extensions.leaderboard.task import publish

HELP = """
Serves a policy on four workloads and two simulated GPUs (A100, H100), and says
of each which of the recorded policies are better, worse, or not distinguished.

  name a policy   policy._target_=my_module.MyPolicy (a class of yours), or
                  policy=vllm_v1 chunk=1024; without one all are run again
  it takes        11 to 17 seconds a workload and GPU on two cores with 8 seeds;
                  all policies take hours
  it prints       by workload, GPU and objective the group of your policy and
                  its goodput, such as "group 2: 0.66 against 0.74" (the best);
                  then the folder with the tables and a page, leaderboard.html
  fewer runs      task.seeds=1 (decides nothing, fewer than 6 never do),
                  task.budgets=[] (the default budget alone),
                  experiment/leaderboard/workload=sharegpt (or azure_code,
                  azure_conversations, agentic),
                  experiment/leaderboard/server=a100 (or h100)
  only a list     --dry-run
  a setting       --help task, or another setting's name
  write again     FOLDER, with the runs.csv.gz of a sweep"""


def main(args: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the sweep by the command `run`, or write the pages of the folder that `args` name.

    Returns:
        The exit code.
    """
    if list(args) in (["--help"], ["-h"]):
        print(f"usage: {typed('leaderboard')} [policy=NAME] [NAME=VALUE ...] | FOLDER\n{HELP}")
        return 0
    if len(args) == 1 and "=" not in args[0]:
        folder = Path(args[0])
        if folder.is_dir():
            return exit_code(lambda: publish(folder), "no page was written")
    if _names_sweep_alone(args):
        return run(args)  # its record has the experiment and all settings
    return run(["experiment=leaderboard", *args])


def _names_sweep_alone(args: Sequence[str]) -> bool:
    """Return whether `args` are `resume=FOLDER`, which may have another launcher beside it."""
    folders: list[str] = []
    for arg in args:
        name, _, value = arg.partition("=")
        if name == "resume" and value.lower() not in ("true", "false"):
            folders.append(value)
        elif not name.startswith(("hydra/launcher", "hydra.launcher.")):
            return False
    return bool(folders)
