"""What the GPU's compiler makes of the kernels, on machines without a GPU: the checks themselves,
then the engine's.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sarathi_kernels.compilation import table
from sarathi_kernels.compilation.__main__ import main
from sarathi_kernels.compilation.compiled import Compiled, Dot, check
from sarathi_kernels.compilation.table import (
    TABLE_COMMAND,
    read_table,
    source_hash,
)
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.launch import Launch

TESTS = Path(__file__).parents[1] / "support"
KERNELS = TESTS.parents[1] / "kernels"
TABLE = KERNELS / "compiled.csv"
TRITONS = {"3.6.0", "3.7.1"}  # the oldest that is supported and the newest
FIGURES = (
    "registers",
    "spill_bytes",
    "shared_memory",
    "instructions",
    "copies",
    "blocks_per_sm",
    "complaint",
)
pytestmark = pytest.mark.timeout(900)  # a cold cache and two busy cores
CHECKED_BY_HAND = Compiled(
    128, 0, 65_536, 0, 128, frozenset({"wgmma"}), frozenset(), (Dot(64, "bf16"),)
)


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
    assert {row["copies"] for row in product.values()} == {"cp.async"}
    in_fp32 = rows["product in fp32"]["90"]
    assert (in_fp32["instructions"], in_fp32["complaint"]) == ("", "")
    assert rows["spills"]["90"]["spill_bytes"] > 100
    assert "spill in a hot kernel" in rows["spills"]["90"]["complaint"]
    shared = rows["much shared memory"]
    assert [shared[chip]["blocks_per_sm"] for chip in ("80", "86")] == [1, 0]
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


def launched(**flags: bool) -> Launch:
    return Launch(None, (1,), (), {}, **{"is_hot": True, "uses_tensor_cores": True, **flags})


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
    ],
)
def test_check_names_what_is_wrong_on_hopper(
    change: dict[str, object], complaint: str | None
) -> None:
    assert check(replace(CHECKED_BY_HAND, **change), launched(), CHIPS[90]) == (
        [complaint] if complaint else []
    )


def complaints_of(rows: list[dict[str, str]]) -> list[str]:
    return [
        " ".join((f"sm_{r['capability']}", r["kernel"], r["complaint"], r["configuration"]))
        for r in rows
        if r["complaint"]
    ]


def test_hot_configurations_compile_without_complaint(
    found: dict[str, Any],
) -> None:
    quick_rows = found["quick"]
    assert complaints_of(quick_rows) == []
    rarely = {"fused_kernel"}  # launched where a batch fills waves of it, and in the recorded table
    recorded = {row["kernel"] for row in read_table(TABLE) if row["capability"] == "90"}
    assert {row["kernel"] for row in quick_rows} | rarely == recorded


def test_recorded_table_is_of_these_sources() -> None:
    stale = {
        row["kernel"] for row in read_table(TABLE) if row["sources"] != source_hash(row["kernel"])
    }
    assert not stale, f"{TABLE.name} is out of date; record it again: {TABLE_COMMAND}"


def test_recorded_table_has_what_batches_launch_with_the_oldest_and_the_newest_triton() -> None:
    rows = [row for row in read_table(TABLE) if row["batch"]]
    launched = {
        triton: {
            (row["kernel"], row["capability"], row["batch"])
            for row in rows
            if row["triton"] == triton
        }
        for triton in TRITONS
    }
    assert len({frozenset(found) for found in launched.values()}) == 1
    assert {capability for found in launched.values() for _, capability, _ in found} == set(
        map(str, CHIPS)
    )


def test_a_change_makes_only_the_rows_of_kernels_that_use_it_out_of_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = ("decode_kernel", "rotate_and_store_kernel", "add_norm_kernel", "order_kernel")
    before = {kernel: source_hash.__wrapped__(kernel) for kernel in kernels}
    changed = table.modules() | {"sarathi_kernels.attention.eight_bit": ast.parse("x = 1")}
    monkeypatch.setattr(table, "modules", lambda: changed)
    changes = {kernel for kernel in kernels if source_hash.__wrapped__(kernel) != before[kernel]}
    assert changes == {"decode_kernel", "rotate_and_store_kernel"}


def test_recorded_table_has_every_chip_and_no_complaint() -> None:
    rows = read_table(TABLE)
    assert complaints_of(rows) == []
    by_chip = [{row["kernel"] for row in rows if row["capability"] == str(c)} for c in CHIPS]
    assert all(kernels == by_chip[0] for kernels in by_chip)


def test_quick_figures_are_the_recorded_ones(found: dict[str, Any]) -> None:
    quick_rows = found["quick"]
    recorded = [row for row in read_table(TABLE) if row["triton"] == quick_rows[0]["triton"]]
    if not recorded:
        pytest.skip("recorded with other Tritons, which compile to other figures")
    for row in quick_rows:
        identity = ("kernel", "configuration", "capability", *(["batch"] if row["batch"] else []))
        same = [other for other in recorded if all(other[n] == row[n] for n in identity)]
        assert [other[n] for n in FIGURES for other in same[:1]] == [row[n] for n in FIGURES]


def test_no_number_of_tokens_compiles_anything_anew(found: dict[str, Any]) -> None:
    """Else serving would stop to compile whenever a batch is the first of 1 token, or of a multiple
    of 16.
    """
    of_48, of_1, of_17 = found["keys"]
    assert len(of_48) > 5
    assert of_48 == of_1 == of_17


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
