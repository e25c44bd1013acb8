"""How tests run on this machine: offline, kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    import torch

os.environ.setdefault("WANDB_MODE", "offline")  # no test talks to a server
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Workers share the cores, which a thread of OpenMP that spins while it waits takes from another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The workers are one a core already; a simulation in processes of its own would start as many more.
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")
# Else every worker, and every process that a test starts, compiles all that it imports anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests read sentences whole, as in a file; a worker of pytest-xdist has COLUMNS=80.
os.environ.pop("COLUMNS", None)
# A check of IRIs that jsonschema, and so nbformat, takes if it is there: 7 s of grammars.
sys.modules.setdefault("rfc3987_syntax", None)

# What runs on the GPU where there is one, and in the interpreter elsewhere.
KERNEL_TESTS = {
    "test_activation_and_sampling_kernels",
    "test_attention_kernels",
    "test_fused_kernels",
    "test_hybrid_attention",
}

DEVICE_FIXTURE = "kernels_device"
MARKS = {"gpu": ("mark.gpu", DEVICE_FIXTURE), "vllm": ("mark.vllm",)}  # in files of such tests
# Of the device that does its work late, in tests of the engine where there is no GPU.
EARLINESS = (0.0, 0.3, 0.9)

# Modules that look at drawn pictures, and a sweep's from the command to its files.
DRAWN = {
    *("test_pictures", "test_sweep_pictures", "test_figures", "test_playground", "test_run"),
    *("test_paper", "test_capacity", "test_serving_experiments", "test_results_and_plots"),
}

SLOWEST = [  # first of all
    *("test_notebooks", "test_command_lines", "test_quality", "test_advise_task", "test_config"),
    *("test_sweeps", "test_readme", "test_recorded", "test_kernel_executor", "test_leaderboard"),
    *("test_session", "test_cuda_stub", "test_experiments", "test_steady", "test_wheel"),
    *("test_sweep_pictures", "test_claims", "test_serving_experiments", "test_vllm_backend"),
    *("test_server_arguments", "test_client_readers", "test_validate", "test_paper"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Launches of the GPU's tests, which `make gpu_launches` compiles."""
    parser.addoption("--launches", type=Path, metavar="FILE", help="write those of GPU tests")
    parser.addoption("--capability", type=int, default=90, help="of the GPU they are for")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process that runs tests: torch's threads, and Triton before it is imported."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if getattr(config.option, "numprocesses", None) and not is_worker:
        return  # its workers run them
    # Products of tests are too small for more, and waiting threads keep others from the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
        if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton"):
            import interpreted

            interpreted.quicken()
    if path := config.getoption("launches"):
        from sarathi_kernels.compilation import recording_to

        recording = ExitStack()
        recording.enter_context(recording_to(path, config.getoption("capability")))
        config.add_cleanup(recording.close)
    import quickened

    quickened.quicken()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` or `-m vllm`, of other environments, import only files with such tests."""
    wanted = config.option.markexpr
    if wanted not in MARKS or not collection_path.match("test_*.py"):
        return None
    text, is_kernel_test = collection_path.read_text(), collection_path.stem in KERNEL_TESTS
    has_some = any(mark in text for mark in MARKS[wanted])
    return None if has_some or (wanted == "gpu" and is_kernel_test) else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of the engine on kernels the GPU, or else the interpreter and the late device."""
    import torch

    if DEVICE_FIXTURE in metafunc.fixturenames:
        late = [f"late device, {earliness}" for earliness in EARLINESS]
        is_interpreted = metafunc.config.getoption("launches")
        devices = ["cpu"] if is_interpreted else ["cpu", *late]
        devices = ["cuda"] if torch.cuda.is_available() else devices
        metafunc.parametrize(DEVICE_FIXTURE, devices, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kernels_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Device on which the engine launches kernels; plain torch's in their place, where the device
    does its work late.
    """
    import torch
    from cuda_stub import stubbed
    from late_device import DEVICE, LateDevice
    from plain_kernels import plain_kernels

    kind, _, earliness = request.param.partition(", ")
    if not earliness:
        yield torch.device(kind)
        return
    with stubbed(LateDevice(seed=5, earliness=float(earliness))), plain_kernels():
        yield DEVICE


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what only a GPU can show, or vLLM; with a GPU, count all tests of kernels as such. The
    slowest modules come first, so that none of them is left to one worker in the end.
    """
    import torch

    for item in items if find_spec("vllm") is None else ():
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="needs vLLM (make test-vllm)"))

    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))

    has_gpu = torch.cuda.is_available()
    for item in items:
        takes_device = DEVICE_FIXTURE in getattr(item, "fixturenames", ())
        if item.get_closest_marker("gpu"):
            if not has_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif (has_gpu or config.getoption("launches")) and (
            takes_device or item.path.stem in KERNEL_TESTS
        ):
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish() -> None:
    """What tests make is little beside what has been imported."""
    import quickened

    quickened.collect_seldom()


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[], Any]], Any]:
    """`made_once(name, make)`: what `make()` returns (JSON), made by one of all workers."""
    folder: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the session's

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(make()))
        return json.loads(path.read_text())

    return made


@pytest.fixture(scope="module", autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Save pictures with nothing drawn on them where no test looks at them: every sweep has two, of
    half a second each.
    """
    if request.path.stem in DRAWN:
        yield
        return
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw", lambda figure, renderer: None)
        yield


@pytest.fixture(scope="module")
def vllm_executor() -> Iterator[Any]:
    """An executor of `vllm_engine.TINY` on vLLM's workers in this process, for tests marked vllm;
    `vllm_executor.workers` are the workers, of all tests of a module.
    """
    import vllm_engine

    executor = vllm_engine.backend_of().build(
        vllm_engine.TINY, vllm_engine.tiny_checkpoint(), vllm_engine.SIZES
    )
    yield executor
    executor.close()


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refused(*settings)`: the one line in which the command refuses them, before it writes."""
    from sarathi_lab.run import main

    def line_of(*settings: str) -> str:
        assert main([*settings, f"output={tmp_path}/out"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return error

    return line_of
