"""`python -m sarathi_lab COMMAND ...`, also installed as `sarathi-lab`; without arguments: what
there is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from sarathi_lab import __version__
from sarathi_lab.config.console import typed
from sarathi_lab.config.errors import report, suggestion

# The module whose `main(args)` runs a command, and its line in the list of commands.
COMMANDS = {
    "run": ("sarathi_lab.run", "run an experiment, or a sweep with -m: run chunk=256,512,1024 -m"),
    "claims": ("sarathi_lab.tasks.claims", "which claims of the paper hold on which device"),
    "plot": (
        "sarathi_lab.tasks.plot",
        "draw a run, or a sweep by other axes: plot FOLDER x=chunk",
    ),
    "report": (
        "sarathi_lab.extensions.report",
        "a sweep, or all experiments, as one page: report FOLDER",
    ),
    "leaderboard": (
        "sarathi_lab.extensions.leaderboard",
        "yours among all policies: policy._target_=my_module.MyPolicy",
    ),
    "figures": ("sarathi_lab.tasks.figures", "the paper's figures from recorded results"),
    "dashboard": (
        "sarathi_lab.extensions.dashboard",
        "a W&B workspace that shows the lab's runs",
    ),
    "completion": ("sarathi_lab.__main__", "tab completion in bash and zsh: completion --help"),
}
# Hydra completes the settings of `run`; it wants a line that begins with the command's name, and of
# several values the last alone. Other commands' options are those of their help.
COMPLETION = """_sarathi_lab() {
    local word=${COMP_WORDS[COMP_CWORD]} line=${COMP_LINE#* run} found
    local name=${word%%%%=*}=
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "%s" -- "$word"))
        compopt +o nospace
    elif [[ ${COMP_WORDS[1]} == run ]]; then
        [[ $word == *=*,* ]] && line=${line%%"$word"}$name${word##*,}
        found=$(COMP_LINE="run $line" ${COMP_WORDS[0]} run -sc query=bash 2>/dev/null)
        [[ $word == *=*,* ]] && found=${found//$name/${word%%,*},}
        COMPREPLY=($(compgen -o default -W "$found" -- "$word"))
    elif [[ $word == -* ]]; then
        found=$(${COMP_WORDS[0]} ${COMP_WORDS[1]} --help 2>/dev/null)
        found=$(grep -oE -- "--[a-z-]+" <<< "$found" | sort -u)
        COMPREPLY=($(compgen -W "$found" -- "$word"))
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _sarathi_lab sarathi-lab"""

COMPLETION_HELP = """
Completes commands, options, settings and their values in bash by
  eval "$(sarathi-lab completion bash)"
and in zsh behind autoload -U bashcompinit && bashcompinit.
Where only python -m sarathi_lab is found, define sarathi-lab before:
  sarathi-lab() { python -m sarathi_lab "$@"; }"""


def main(args: Sequence[str] | None = None) -> int:
    """Hand the arguments to the command that the first one names; returns its exit code."""
    command, *rest = (sys.argv[1:] if args is None else args) or [""]
    if command == "completion":
        return print_completion(rest)
    if command in COMMANDS:
        module, _ = COMMANDS[command]
        handed = []
        try:
            if command in ("claims", "leaderboard"):  # which run commands
                handed.append(import_module("sarathi_lab.run").main)
            answer = import_module(module).main
        except ModuleNotFoundError as error:
            return report(error)
        return answer(rest, *handed)
    if command == "--version":
        print(f"sarathi-lab {__version__}")
        return 0
    print(f"usage: {typed('COMMAND')} [--help] ...\n")
    for name, (_, purpose) in COMMANDS.items():
        print(f"  {name:<12}{purpose}")
    if command in ("", "-h", "--help"):
        return 0
    similar = suggestion(command, list(COMMANDS))
    advice = f"use one of {', '.join(COMMANDS)}"
    print(f"\nerror: {command} is not a command{similar}; {advice}", file=sys.stderr)
    return 2


def print_completion(shell: Sequence[str]) -> int:
    """Print the script that a shell evaluates to complete the commands and the settings of run."""
    if shell == ["bash"]:
        print(COMPLETION % " ".join(COMMANDS))
        return 0
    if shell in (["-h"], ["--help"]):
        print(f"usage: {typed('completion')} bash\n{COMPLETION_HELP}")
        return 0
    named = " ".join(shell) or "no shell"
    advice = "use sarathi-lab completion bash, which --help explains, for zsh, too"
    print(f"error: {named} is not supported; {advice}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
