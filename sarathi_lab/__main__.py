"""`python -m sarathi_lab COMMAND ...`, also installed as `sarathi-lab`; without arguments: what
there is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# The module whose `main(args)` answers, and what the list of commands says of it.
COMMANDS = {
    "run": ("sarathi_lab.run", "run an experiment, or a sweep with -m: run chunk=256,512,1024 -m"),
    "claims": ("sarathi_lab.tasks.claims", "which claims of the paper hold on which device"),
    "figures": ("sarathi_lab.tasks.figures", "the paper's figures from recorded results"),
    "dashboard": ("sarathi_lab.tasks.dashboard", "a W&B workspace that shows the lab's runs"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Hand the arguments to the command that the first one names; returns its exit code."""
    command, *rest = (sys.argv[1:] if args is None else args) or [""]
    if command in COMMANDS:
        return import_module(COMMANDS[command][0]).main(rest)
    print("usage: python -m sarathi_lab COMMAND [--help] ...\n")
    for name, (_, purpose) in COMMANDS.items():
        print(f"  {name:<10} {purpose}")
    if command in ("", "-h", "--help"):
        return 0
    print(f"\nerror: {command} is not a command; use one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
