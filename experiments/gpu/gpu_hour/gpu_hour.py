"""Measure the lab on a rented GPU in an hour, and leave one file to send.

python experiments/gpu/gpu_hour/gpu_hour.py          # as make gpu-hour does; README.md explains
python experiments/gpu/gpu_hour/gpu_hour.py --dry    # the same steps at tiny sizes on a CPU

Needs Python alone, as it installs the rest. Each step has a time limit; one that fails or runs over
ends no other, and the archive is made again after each.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VLLM = "vllm==0.33.0"
# CUDA 13, which torch 2.14 of vLLM 0.33 is built for, needs such a driver
# (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
OLDEST_DRIVER = 580
OLDEST_PYTHON = (3, 11)
OLDEST_CAPABILITY = 8.0  # the first GPUs with bfloat16
LEAST_HOST_GB = 16.0
LEAST_DISK_GB = 40.0  # the environment, what its installation downloads, and compiled kernels
LEAST_DISK_OF_RESULTS_GB = 5.0
COMPILERS = ("cc", "gcc", "clang")
GB_PER_MIB = 2**20 / 1e9
MOST_TAKEN_GB = 1.0  # of the GPU's memory, by other processes
# Models of the paper's figures, and that of the load, by the GPU's memory, as model=auto chooses
# (sarathi_lab/executor/device.py). A run leaves out what does not fit beside its cache.
MODELS = {
    47.0: ("13b,33b", "llama3-8b"),
    20.0: ("llama3-8b", "llama3-8b"),
    10.0: ("llama3.2-3b", "llama3.2-3b"),
}
# By compute capability: the rates (requests a second) and the number of requests at which the
# simulator shows decodes that wait for whole prompts, while SARATHI keeps up (README.md).
LOADS = {10.0: ("4,8", 128), 9.0: ("2,4", 128), 8.0: ("2", 128)}
LOAD_OF_OTHERS = ("0.5", 64)
SECONDS_TO_END = 20.0  # from the request to end a step to the kill
PACKING_SECONDS = 60.0  # at the end of the time
ON_VLLM = "executor=vllm tracking=none"
ON_CPU = f"{ON_VLLM} executor.eager=true device=cpu"
SIMULATED = (
    "executor=simulated hardware=auto executor.cost_model=profiled cache.block_size=32 "
    "tracking=none"
)
SMOKE = "model=30m,120m seq_len=256 chunk=64,128 repeat=1"  # an engine a model, in one process
WHOLE = "task.experiment=gpu_targets,table2,fig08,table4,fig13,fig04,fig11,fig09"
# Times of operations are those of an engine without graphs and compilation.
BY_OPERATION = "task.experiment=fig03,fig07,fig10,kv_reread executor.eager=true"
DRY_FIGURES = "device=cpu executor.eager=true model=30m task.setup=dry task.seconds=0.1"
TABLE = "batch=64 seq_len=4096 task.seconds=360"
# Chunks beside decodes; the baseline has whole prompts there.
POLICIES = "policy=sarathi_serve baselines=[orca] workload.arrivals=poisson"
LOAD = (
    "workload=openchat_sharegpt4 batch=64 chunk=512 slo=strict cache.num_blocks=auto dtype=bfloat16"
)
DRY_LOAD = (
    "model=30m dtype=float32 workload=uniform workload.min_len=24 workload.max_len=48 pd_ratio=5 "
    "workload.rate=4 workload.num_requests=6 batch=2 chunk=32 slo=strict"
)
KERNELS = "kernels.csv"
# The most that each step may take.
SECONDS = {
    "smoke": 240,
    "figures": 1000,
    "operations": 300,
    "calibrate": 540,
    "load": 720,
    "kernels": 300,
}
DRY_SECONDS = {**SECONDS, "figures": 300, "calibrate": 240, "load": 240, "kernels": 240}
LOG_COLUMNS = 140
INSTALLED = ".installed"  # in an environment that is whole
DONE = "done"
STEPS = ("step", "seconds", "ended")


class Refusal(Exception):
    """Why the hour would be lost, in one line."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU, as nvidia-smi describes it; memory in GB."""

    name: str
    driver: str
    driver_release: int
    capability: float
    memory: float
    taken: float

    @property
    def models(self) -> tuple[str, str]:
        """The models of the figures, and of the load."""
        return next(names for least, names in MODELS.items() if self.memory >= least)


@dataclass(frozen=True)
class Step:
    """Commands one after the other, for `seconds` together; the next begins where one succeeded,
    with `retries` where it failed. Steps before one with `is_reserved` leave it its time.
    """

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    retries: bool = False
    is_reserved: bool = False


@dataclass(frozen=True)
class Sizes:
    """What the steps measure, as settings of the lab, and the most seconds that each may take."""

    device: str
    smoke: str
    figures: str
    operations: str
    table: str
    load: str
    kernels: str  # arguments of their benchmarks
    machine: Sequence[Sequence[str]]  # commands that describe it, for the log
    seconds: Mapping[str, float]


DRY = Sizes(
    device=ON_CPU,
    smoke="model=30m dtype=float32,bfloat16 seq_len=64 chunk=32 batch=2 repeat=1",
    figures=f"{DRY_FIGURES} {WHOLE}",
    operations=f"{DRY_FIGURES} {BY_OPERATION}",
    table="model=30m batch=2 seq_len=64 task.seconds=1",
    load=DRY_LOAD,
    kernels="--quick --operation greedy",
    machine=(),
    seconds=DRY_SECONDS,
)


@dataclass(frozen=True)
class Workspace:
    """Where results go, and the Python that measures."""

    folder: Path
    python: Path

    @property
    def record(self) -> Path:
        """Tables of the paper's figures, laid out as experiments/."""
        return self.folder / "record"

    @property
    def archive(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tar.gz")

    @property
    def packages(self) -> list[str]:
        """List what is installed."""
        return [str(self.python), "-m", "pip", "list", "--disable-pip-version-check"]

    def lab(self, command: str, *settings: str) -> list[str]:
        return [str(self.python), "-m", "sarathi_lab", command, *settings]

    def sweep(self, name: str, text: str, *settings: str) -> list[str]:
        """Return the command of a sweep whose results go to the folder `name`."""
        where = [f"hydra.sweep.dir={self.folder / name}", f"output={self.folder}"]
        return self.lab("run", *text.split(), *settings, *where, "-m")

    def script(self, path: str, *arguments: str) -> list[str]:
        return [str(self.python), str(ROOT / "experiments" / path), *arguments]


def find_gpu() -> Gpu:
    """Ask nvidia-smi. Raises Refusal."""
    fields = "name,driver_version,compute_cap,memory.total,memory.used"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return parse_gpu(done.stdout)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        raise Refusal(f"nvidia-smi names no GPU ({error}); --dry tries it on a CPU") from None


def parse_gpu(text: str) -> Gpu:
    """Read the first row. Raises IndexError or ValueError for others than those of `find_gpu`."""
    first_row = text.splitlines()[0]
    name, driver, capability, total, used = first_row.split(", ")
    return Gpu(
        name,
        driver,
        driver_release=int(driver.partition(".")[0]),
        capability=float(capability),
        memory=float(total) * GB_PER_MIB,
        taken=float(used) * GB_PER_MIB,
    )


def check_gpu(gpu: Gpu) -> None:
    """Refuse a GPU on which nothing would run."""
    if gpu.driver_release < OLDEST_DRIVER:
        raise Refusal(
            f"the driver is {gpu.driver}, and CUDA 13, which {VLLM} is built for, needs "
            f"{OLDEST_DRIVER} or newer; rent a machine with a newer one"
        )
    if gpu.capability < OLDEST_CAPABILITY:
        raise Refusal(f"{gpu.name} has no bfloat16; rent an A100, H100 or newer")
    if gpu.taken > MOST_TAKEN_GB:
        raise Refusal(f"other processes hold {gpu.taken:.0f} GB of the GPU's memory; end them")
    least_memory = min(MODELS)
    if gpu.memory < least_memory:
        raise Refusal(f"{gpu.name} has {gpu.memory:.0f} GB, of which {least_memory:.0f} are needed")


def check_host(least_disk: float, *, installs: bool) -> None:
    """Refuse a machine that can't install, compile or hold what is measured."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, OLDEST_PYTHON))
        raise Refusal(f"Python {version} is needed; name one: make gpu-hour PYTHON=python{version}")
    if installs and find_spec("ensurepip") is None:
        raise Refusal("no ensurepip, which venv needs; apt-get install python3-venv")
    check_compiler()
    free_disk = shutil.disk_usage(ROOT).free / 1e9
    if free_disk < least_disk:
        raise Refusal(f"{free_disk:.0f} GB are free in {ROOT}, {least_disk:.0f} are needed")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if installs and memory < LEAST_HOST_GB:
        raise Refusal(f"the machine has {memory:.0f} GB of memory, {LEAST_HOST_GB:.0f} are needed")


def check_compiler() -> None:
    """Refuse a machine on which Triton and torch can't compile what launches a kernel."""
    if not any(map(shutil.which, COMPILERS)):
        raise Refusal("no C compiler, which Triton needs; apt-get install gcc")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Refusal(f"no Python.h, which Triton needs; apt-get install python{version}-dev")


def installation(workspace: Workspace) -> Step:
    """Make the environment, and mark it as whole. uv downloads packages side by side."""
    python = str(workspace.python)
    environment = workspace.python.parents[1]
    mark = f"import vllm, pathlib; pathlib.Path({str(environment / INSTALLED)!r}).touch()"
    commands = [
        [sys.executable, "-m", "venv", str(environment)],
        [python, "-m", "pip", "install", "--quiet", "uv"],
        [python, "-m", "uv", "pip", "install", "--python", python, "-e", f"{ROOT}[vllm]", VLLM],
        [python, "-c", mark],
    ]
    return Step("install", 600, commands)


def sizes_of(gpu: Gpu) -> Sizes:
    """Return what is measured on a GPU."""
    models, model = gpu.models
    rates, num_requests = LOADS.get(gpu.capability, LOAD_OF_OTHERS)
    return Sizes(
        device=ON_VLLM,
        smoke=SMOKE,
        figures=f"model={models} {WHOLE}",
        operations=f"model={models.partition(',')[0]} {BY_OPERATION}",
        table=f"model={model} {TABLE}",
        load=f"model={model} workload.rate={rates} workload.num_requests={num_requests} {LOAD}",
        kernels="",
        machine=(["nvidia-smi"],),
        seconds=SECONDS,
    )


def measurements(workspace: Workspace, sizes: Sizes) -> list[Step]:
    """List what is measured."""
    seconds = sizes.seconds
    smoke = workspace.sweep("smoke", f"{sizes.device} {sizes.smoke}")
    return [
        Step("smoke", seconds["smoke"], [*sizes.machine, workspace.packages, smoke]),
        campaign(workspace, "figures", seconds["figures"], sizes.figures),
        campaign(workspace, "operations", seconds["operations"], sizes.operations),
        calibration(workspace, seconds["calibrate"], f"{sizes.device} {sizes.table}"),
        loaded(workspace, seconds["load"], f"{sizes.device} {sizes.load}"),
        simulation(workspace, sizes.load),
        comparison(workspace),
        benchmarks(workspace, seconds["kernels"], sizes.kernels),
    ]


def campaign(workspace: Workspace, name: str, seconds: float, text: str) -> Step:
    """Measure figures of the paper, once more in a new process what the first one did not finish:
    after an error of CUDA nothing runs in its process.
    """
    record = f"task.record={workspace.record}"
    first = workspace.sweep(name, f"experiment=campaign {text}", record)
    again = workspace.lab("run", f"resume={workspace.folder / name}")
    return Step(name, seconds, [first, again], retries=True)


def calibration(workspace: Workspace, seconds: float, text: str) -> Step:
    """Measure the simulator's table of iterations."""
    command = workspace.sweep("calibrate", f"task=calibrate {text}")
    return Step("calibrate", seconds, [command])


def loaded(workspace: Workspace, seconds: float, text: str) -> Step:
    """Measure what requests wait that arrive over time."""
    command = workspace.sweep("load", f"{POLICIES} repeat=2 {text}")
    return Step("load", seconds, [command])


def simulation(workspace: Workspace, text: str) -> Step:
    """Simulate the same load by the calibration."""
    tables = f"hardware.tables={workspace.folder / 'calibrate' / '0'}"
    command = workspace.sweep("simulated", f"{POLICIES} {SIMULATED} {text}", tables)
    return Step("simulated", 120, [command])


def comparison(workspace: Workspace) -> Step:
    """Compare the load as simulated and as measured."""
    measured = str(workspace.folder / "load")
    simulated = str(workspace.folder / "simulated")
    out = str(workspace.folder / "compared")
    script = "lab/calibration/compare.py"
    return Step("compared", 60, [workspace.script(script, measured, simulated, "--out", out)])


def benchmarks(workspace: Workspace, seconds: float, text: str) -> Step:
    """Time the kernels of this repository."""
    table = str(workspace.folder / KERNELS)
    benchmark = [str(workspace.python), "-m", "sarathi_kernels.benchmarks", "--csv", table]
    return Step("kernels", seconds, [[*benchmark, *text.split()]])


def targets(workspace: Workspace) -> Step:
    """Judge the recorded iterations, and the kernels, by what they should reach."""
    root = f"--root={workspace.record}"
    kernels = f"--kernels={workspace.folder / KERNELS}"
    return Step("targets", 120, [workspace.script("gpu/gpu_targets/targets.py", root, kernels)])


def verdicts(workspace: Workspace) -> Step:
    """Judge the claims by the recorded figures, on a page with the results."""
    record = str(workspace.record)
    page = str(workspace.folder / "verdicts.html")
    claims = workspace.lab("claims", "--results", record)
    report = workspace.lab("report", record, "--out", page)
    return Step("verdicts", 120, [claims, report], is_reserved=True)


def run_step(step: Step, workspace: Workspace, seconds: float) -> str:
    """Run a step, its output to a log, for at most `seconds`; return how it ended."""
    if seconds <= 0:
        print(f"{step.name:<12}", end="")
        return "no time was there"
    log = workspace.folder / f"{step.name}.log"
    seconds = min(step.seconds, seconds)
    print(f"{step.name:<12}up to {seconds:.0f} s, {log}", end="", flush=True)
    end = time.monotonic() + seconds
    with log.open("w") as file:
        for command in step.commands:
            try:
                code = run_command(command, file.fileno(), end - time.monotonic())
            except OSError as error:
                return f"failed: {command[0]} can't be run ({error.strerror})"
            if code is None:
                return "its time was over"
            if (code == 0) == step.retries:
                break
    return DONE if code == 0 else f"failed with {code}: {last_line(log)}"


def last_line(log: Path) -> str:
    """Return what a command printed last, which is the lab's error of one line."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


def run_command(command: Sequence[str], output: int, seconds: float) -> int | None:
    """Return a command's exit code, or None if it was ended, with all that it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(LOG_COLUMNS)},
        start_new_session=True,
    )
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, which may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)


def pack(workspace: Workspace) -> None:
    """Replace the archive, whole at any moment."""
    part = workspace.archive.with_suffix(".part")
    try:
        with tarfile.open(part, "w:gz") as archive:
            archive.add(workspace.folder, arcname=workspace.folder.name)
        part.replace(workspace.archive)
    except OSError as error:
        print(f"{workspace.archive} can't be made ({error})", file=sys.stderr)


def run_all(steps: Sequence[Step], workspace: Workspace, seconds: float) -> int:
    """Run the steps within `seconds`, and return how many did not come to their end."""
    end = time.monotonic() + seconds - PACKING_SECONDS
    num_failed = 0
    with (workspace.folder / "steps.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(STEPS)
        for number, step in enumerate(steps):
            reserved = sum(later.seconds for later in steps[number + 1 :] if later.is_reserved)
            start = time.monotonic()
            ended = run_step(step, workspace, end - reserved - start)
            took = f"{time.monotonic() - start:.0f}"
            table.writerow([step.name, took, ended])
            file.flush()
            print(f"{took:>5} s  {ended}", flush=True)
            pack(workspace)
            num_failed += ended != DONE
            if step.name == "install" and ended != DONE:
                break  # nothing runs without it
    return num_failed


def prepare(options: argparse.Namespace) -> tuple[list[Step], Workspace]:
    """Check the machine and list the steps. Raises Refusal."""
    environment = ROOT / (".venv-vllm" if options.dry else ".venv-vllm-gpu")
    python = options.python or environment / "bin" / "python"
    needs_python = options.dry or options.python
    if needs_python and not python.is_file():
        raise Refusal(f"there is no {python}; make test-vllm makes one for --dry")
    installs = not (needs_python or (environment / INSTALLED).is_file())
    name = f"gpu-hour-{datetime.now():%Y%m%d-%H%M%S}"
    folder = options.out or ROOT / "outputs" / name
    workspace = Workspace(folder.absolute(), python.absolute())
    if options.dry:
        check_host(LEAST_DISK_OF_RESULTS_GB, installs=False)
        sizes = DRY
    else:
        gpu = find_gpu()
        check_gpu(gpu)
        least_disk = LEAST_DISK_GB if installs else LEAST_DISK_OF_RESULTS_GB
        check_host(least_disk, installs=installs)
        sizes = sizes_of(gpu)
    steps = [*measurements(workspace, sizes), targets(workspace), verdicts(workspace)]
    steps = chosen(steps, options.only)
    if installs:
        steps.insert(0, installation(workspace))
    return steps, workspace


def chosen(steps: list[Step], names: Sequence[str] | None) -> list[Step]:
    """Return the steps of these names, all for None. Raises Refusal for others."""
    if names is None:
        return steps
    known_names = [step.name for step in steps]
    for name in names:
        if name not in known_names:
            raise Refusal(f"--only {name} is no step; use {', '.join(known_names)}")
    return [step for step in steps if step.name in names]


def print_verdicts(workspace: Workspace) -> None:
    with suppress(OSError):
        print((workspace.folder / "verdicts.log").read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 if a step did not come to its end, 2 if the machine is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add: Callable[..., object] = parser.add_argument
    add("--dry", action="store_true", help="tiny sizes on a CPU, whose numbers mean nothing")
    add("--python", type=Path, help="of an environment that has the lab and vLLM, to install none")
    add("--only", action="append", metavar="STEP", help="such as figures; may be repeated")
    add("--minutes", type=float, default=58.0, help="of all steps (default: 58)")
    add("--out", type=Path, help="folder of the results (default: outputs/gpu-hour-DATE)")
    options = parser.parse_args(arguments)
    try:
        steps, workspace = prepare(options)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    workspace.folder.mkdir(parents=True, exist_ok=True)
    try:
        num_failed = run_all(steps, workspace, 60 * options.minutes)
    except KeyboardInterrupt:
        pack(workspace)
        print(f"\nended; what was measured is in {workspace.archive}", file=sys.stderr)
        return 130
    print_verdicts(workspace)
    if options.dry:
        print("a dry run: none of these times and verdicts means anything")
    print(f"one file to send: {workspace.archive}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
