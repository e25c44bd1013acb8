"""The lab's own calibration: operation times and a hardware file, for executor=simulated."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.run import main
from sarathi_lab.tasks.gpu.context import Context

FULL = ("model=13b", "batch=18", "seq_len=3072")
DRY = ("model=tiny", "batch=2", "seq_len=64")
LOADING = 0.4  # of the part's time: the model, kernels compiled at first use, the fit behind
FEWEST_SECONDS, FEWEST_SECONDS_DRY = 15.0, 5.0


def measure(context: Context) -> None:
    """Run task=calibrate; keep its table and its hardware file, which names the table where it will
    be recorded.
    """
    output = context.work / "calibrate"
    name = context.slug
    least = FEWEST_SECONDS_DRY if context.is_dry else FEWEST_SECONDS
    seconds = max(least, (1 - LOADING) * context.seconds)
    arguments = [
        "task=calibrate",
        *(DRY if context.is_dry else FULL),
        f"device={context.device}",
        f"task.seconds={seconds:.0f}",
        f"task.name={name}",
        "tracking=none",
        f"output={output}",
    ]
    context.say(f"python -m sarathi_lab.run {' '.join(arguments)}")
    if main(arguments) != 0:
        raise UserError("task=calibrate failed; its message is in the log")
    made = max(output.rglob(f"{name}.yaml"), key=lambda path: path.stat().st_mtime)
    _keep(context, made, name)


def _keep(context: Context, made: Path, name: str) -> None:
    """Copy both files; the path of the table becomes the one in the repository."""
    profile = context.path("calibration", "profile.csv")
    profile.write_bytes((made.parent / "profile.csv").read_bytes())
    recorded = EXPERIMENTS / "lab" / "calibration" / "results" / name / "profile.csv"
    hardware = OmegaConf.load(made)
    hardware.profiles = {
        model: str(recorded.relative_to(REPOSITORY)) for model in hardware.profiles
    }
    title = "".join(
        line for line in made.read_text().splitlines(keepends=True) if line.startswith("#")
    )
    context.path("calibration", "hardware.yaml").write_text(title + OmegaConf.to_yaml(hardware))
