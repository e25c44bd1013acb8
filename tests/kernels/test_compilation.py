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

from sarathi_kernels.compilation.__main__ import main
from sarathi_kernels.compilation.compiled import Compiled, Dot, check
from sarathi_kernels.compilation.launched import read, recording_to
from sarathi_kernels.elementwise.sampling import best_of_row_kernel, greedy
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.launch import Launch

TESTS = Path(__file__).parents[1] / "support"
KERNELS = TESTS.parents[1] / "kernels"
pytestmark = pytest.mark.timeout(900)  # a cold cache and two busy cores
CHECKED_BY_HAND = Compiled(128, 0, 65_536, 0, 128, frozenset({"wgmma"}), (Dot(64, "bf16"),))


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


def test_toy_kernels_are_passed_or_complained_of(found: dict[str, Any]) -> None:
    rows = found["rows"]
    product = rows["product"]
    assert {chip: row["complaint"] for chip, row in product.items()} == dict.fromkeys(product, "")
    by_chip = {chip: row["instructions"] for chip, row in product.items()}
    assert by_chip == {"80": "mma", "86": "mma", "90": "wgmma", "100": "tcgen05"}
    in_fp32 = rows["product in fp32"]["90"]
    assert (in_fp32["instructions"], in_fp32["complaint"]) == ("", "")
    assert rows["spills"]["90"]["spill_bytes"] > 100
    assert "spill in a hot kernel" in rows["spills"]["90"]["complaint"]
    shared = rows["much shared memory"]
    assert shared["80"]["complaint"] == ""
    assert "131072 bytes of shared memory" in shared["86"]["complaint"]
    assert rows["elementwise, tensor cores wanted"]["90"]["complaint"] == "has no tl.dot"
    assert "does not compile: CompilationError" in rows["does not compile"]["90"]["complaint"]


def test_arguments_are_specialised_as_a_launch_does(found: dict[str, Any]) -> None:
    texts, distinct = found["signatures"]
    assert texts[0] == "bf16 num_elements=1 extra=None BLOCK=64 warps=4 stages=3"
    assert texts[1] == "bf16/fp32 x:unaligned BLOCK=64 warps=4 stages=3"
    assert distinct == 2  # the third launch repeats the first
    assert found["is_what_a_launch_compiles"] is True, (
        "a launch would compile something else than what was checked"
    )


def launched() -> Launch:
    return Launch(None, (1,), (), {}, is_hot=True, uses_tensor_cores=True, programs_per_sm=2)


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
                "dots": (Dot(16, "bf16"), Dot(64, "bf16")),
            },
            None,
        ),
        ({"instructions": frozenset({"mma"}), "threads": 64}, None),  # half a warp group
        ({"instructions": frozenset(), "dots": (Dot(64, "f32"),)}, None),
        ({"dots": ()}, "has no tl.dot"),
        ({"spill_bytes": 8}, "8 bytes of registers spill in a hot kernel"),
        ({"shared_memory": 232_449}, "232449 bytes of shared memory, a block may use 232448"),
        ({"tensor_memory": 1024}, "1024 columns of tensor memory, there are 512"),
        ({"shared_memory": 120_000}, "a multiprocessor holds 1 programs at a time, not 2"),
        ({"tensor_memory": 512}, "a multiprocessor holds 1 programs at a time, not 2"),
        ({"registers": 255, "threads": 256}, "a multiprocessor holds 1 programs at a time, not 2"),
        ({"registers": 255}, None),
    ],
)
def test_check_names_what_is_wrong_on_hopper(
    change: dict[str, object], complaint: str | None
) -> None:
    assert check(replace(CHECKED_BY_HAND, **change), launched(), CHIPS[90]) == (
        [complaint] if complaint else []
    )


def test_hot_configurations_compile_without_complaint(found: dict[str, Any]) -> None:
    rows = found["quick"]
    assert [row for row in rows if row["complaint"]] == []
    defined = re.compile(r"@triton.jit[^@]*?\ndef (\w+_kernel)\(")
    sources = (path.read_text() for path in KERNELS.rglob("*.py") if "benchmarks" not in str(path))
    kernels = {name for text in sources for name in defined.findall(text)}
    assert {row["kernel"] for row in rows} == kernels


def test_no_number_of_tokens_compiles_anything_anew(found: dict[str, Any]) -> None:
    """Else serving would stop to compile whenever a batch is the first of 1 token, or of a multiple
    of 16.
    """
    of_48, of_1, of_17 = found["keys"]
    assert len(of_48) > 5
    assert of_48 == of_1 == of_17


def test_launches_of_tests_are_done_and_written_to_be_compiled(tmp_path: Path) -> None:
    path, device = tmp_path / "launches.jsonl", "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(2, 41, dtype=torch.float16, device=device)[:, 1:]
    with recording_to(path, 80):
        tokens = [greedy(logits), greedy(logits)]
    assert tokens[0].tolist() == tokens[1].tolist() == logits.argmax(1).tolist()
    found = [(chip, each.kernel, each.arguments[0]) for chip, each in read(path)]
    first, second, of_row = (kernel for _, kernel, _ in found)  # the last has no half to vary
    assert (first, of_row) == (second, best_of_row_kernel)
    assert {chip for chip, _, _ in found} == {80}
    halves = [(x.dtype, x.data_ptr() % 16) for _, _, x in found[:2]]
    assert halves == [(torch.float16, 2), (torch.bfloat16, 2)]


def test_command_refuses_an_unknown_kernel(found: dict[str, Any]) -> None:
    assert found["exit_code_for_unknown_kernel"] == 2


@pytest.mark.gpu
def test_a_launch_on_a_gpu_finds_what_was_compiled_ahead() -> None:
    code = """
import torch, triton
from sarathi_kernels.runtime.chip import chip_of
from sarathi_kernels.compilation.compiled import compile_source, source_of
from sarathi_kernels.runtime.launch import recorded
from sarathi_kernels.elementwise.sampling import greedy
chip = chip_of(torch.device("cuda"))
with recorded(chip) as recording:
    greedy(torch.empty(3, 32000, dtype=torch.bfloat16, device="meta"))
for launch in recording.launches:
    compile_source(source_of(launch, chip.capability))
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
    monkeypatch.setattr("sys.argv", ["compilation"])
    assert main() == 2
    assert "unset it" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("sys.argv", ["compilation", "--launches", "/no/such.jsonl"])
    assert main() == 2
    assert "/no/such.jsonl can't be read" in capsys.readouterr().err
