"""What the GPU's compiler makes of the kernels, on machines without a GPU: the checks themselves,
then the engine's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sarathi_kernels.compilation import Code, complaints_of, main, read, recording_to
from sarathi_kernels.elementwise.sampling import best_of_row_kernel, greedy
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.launch import Launch

TESTS = Path(__file__).parents[1] / "support"
KERNELS = TESTS.parents[1] / "kernels"
pytestmark = pytest.mark.timeout(900)  # a cold cache and two busy cores
DOTS = frozenset({("bf16", 64)})
CHECKED_BY_HAND = Code(128, 0, 65_536, 0, 128, frozenset({"wgmma"}), DOTS)


def run_compiler(*arguments: str, expected: int | None = 0) -> str:
    """Stdout of Python with `arguments`, in a process in which kernels are compiled rather than
    interpreted.

    It must exit with `expected`, unless that is None.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(KERNELS), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert expected in (None, done.returncode), done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(made_once: Callable[[str, Callable[[], Any]], Any]) -> dict[str, Any]:
    """What the compiler makes of the toy kernels, and a hot configuration of every kernel."""
    script = str(TESTS / "toy_kernels.py")
    return made_once("compiled", lambda: json.loads(run_compiler(script).splitlines()[-1]))


def test_a_triton_that_is_missing_or_fails_gives_one_line_with_its_cause(
    found: dict[str, Any],
) -> None:
    missing, failing = found["refusals"]
    assert missing.startswith("Triton can't compile and run a kernel on cpu (ModuleNotFoundError: ")
    assert failing.startswith("Triton can't compile and run a kernel on cpu (RuntimeError: ")
    assert "active drivers" in failing  # Triton's own words


def test_toy_kernels_are_passed_or_complained_of(found: dict[str, Any]) -> None:
    rows = found["rows"]
    instructions = {chip: line.split()[4] for chip, (line, _) in rows["product"].items()}
    by_chip = {"80": "mma", "89": "mma", "90": "wgmma", "100": "tcgen05", "120": "mma"}
    assert instructions == by_chip
    for name, capability in (
        ("product", "80"),
        ("product", "90"),
        ("product", "100"),
        ("product in fp32", "90"),
        ("much shared memory", "80"),
    ):
        assert rows[name][capability][1] is True
    for name, capability, complaint in (
        ("product", "120", "16 bytes of registers spill in a hot kernel"),
        ("spills", "90", "bytes of registers spill in a hot kernel"),
        ("much shared memory", "89", "a multiprocessor holds 0 programs at a time, not 1"),
        ("elementwise, tensor cores wanted", "90", "has no tl.dot"),
        ("does not compile", "90", "does not compile: CompilationError"),
    ):
        line, is_right = rows[name][capability]
        assert complaint in line
        assert not is_right


LAUNCHED = Launch(None, (1,), (), {}, is_hot=True, uses_tensor_cores=True, programs_per_sm=2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"instructions": frozenset()}, "no matrix instruction in the code"),
        ({"instructions": frozenset({"mma"})}, "no wgmma in the code"),
        ({"instructions": frozenset({"mma", "wgmma"})}, "a product is mma.sync instead of wgmma"),
        (
            {
                "instructions": frozenset({"mma", "wgmma"}),
                "dots": frozenset({("bf16", 16), ("bf16", 64)}),
            },
            None,
        ),
        ({"instructions": frozenset({"mma"}), "threads": 64}, None),  # half a warp group
        ({"instructions": frozenset(), "dots": frozenset({("f32", 64)})}, None),
        ({"dots": frozenset()}, "has no tl.dot"),
        ({"spill_bytes": 8}, "8 bytes of registers spill in a hot kernel"),
        ({"shared_memory": 232_449}, "a multiprocessor holds 0 programs at a time, not 2"),
        ({"shared_memory": 120_000}, "a multiprocessor holds 1 programs at a time, not 2"),
        ({"tensor_memory": 512}, "a multiprocessor holds 1 programs at a time, not 2"),
        ({"registers": 255, "threads": 256}, "a multiprocessor holds 1 programs at a time, not 2"),
        ({"registers": 255}, None),
    ],
)
def test_check_names_what_is_wrong_on_hopper(
    change: dict[str, object], complaint: str | None
) -> None:
    complaints = list(complaints_of(replace(CHECKED_BY_HAND, **change), LAUNCHED, CHIPS[90]))
    assert complaints == ([complaint] if complaint else [])


def test_kernels_compile_at_sizes_of_models_without_complaint(found: dict[str, Any]) -> None:
    assert [line for line, is_right in found["models"] if not is_right] == []
    assert found["is_what_a_launch_compiles"] is True, (
        "a launch would compile something else than what was checked"
    )
    defined = re.compile(r"@triton.jit[^@]*?\ndef (\w+_kernel)\(")
    files = [path for path in KERNELS.rglob("*.py") if "benchmarks" not in str(path)]
    kernels = {name for path in files for name in defined.findall(path.read_text())}
    assert {line.split()[1] for line, _ in found["models"]} == kernels


def test_no_number_of_tokens_compiles_anything_anew(found: dict[str, Any]) -> None:
    """Else serving would stop to compile whenever a batch is the first of 1 token, or of a multiple
    of 16.
    """
    of_48, of_18, of_529 = found["keys"]
    assert len(of_48) > 5
    assert of_48 == of_529
    assert set(of_18) < set(of_48)  # decodes alone


def test_launches_of_tests_are_done_and_written_to_be_compiled(tmp_path: Path) -> None:
    path, device = tmp_path / "80.jsonl", "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(2, 41, dtype=torch.float16, device=device)[:, 1:]
    with recording_to(path, 80):
        tokens = [greedy(logits), greedy(logits)]
    assert tokens[0].tolist() == tokens[1].tolist() == logits.argmax(1).tolist()
    launches = list(read(path))
    first, second, of_row = (each.kernel for each in launches)  # the last has no half to vary
    assert (first, of_row) == (second, best_of_row_kernel)
    halves = [(each.arguments[0].dtype, each.arguments[0].data_ptr() % 16) for each in launches[:2]]
    assert halves == [(torch.float16, 2), (torch.bfloat16, 2)]


@pytest.mark.gpu
def test_a_launch_on_a_gpu_finds_what_was_compiled_ahead() -> None:
    code = """
import torch, triton
from sarathi_kernels.runtime.chip import chip_of
from sarathi_kernels.compilation import compile_unit, unit_of
from sarathi_kernels.runtime.launch import recorded
from sarathi_kernels.elementwise.sampling import greedy
chip = chip_of(torch.device("cuda"))
with recorded(chip) as recording:
    greedy(torch.empty(3, 32000, dtype=torch.bfloat16, device="meta"))
for launch in recording.launches:
    compile_unit(unit_of(launch, chip))
found = []
triton.knobs.compilation.listener = lambda **event: found.append(event["cache_hit"])
greedy(torch.zeros(3, 32000, dtype=torch.bfloat16, device="cuda"))
print(found)
"""
    assert run_compiler("-c", code).splitlines()[-1] == "[True, True]"


def test_command_refuses_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "unset it" in capsys.readouterr().err
