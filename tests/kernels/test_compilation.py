"""What the GPU's compiler makes of the kernels, on machines without a GPU: the checks themselves,
then the engine's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_kernels.compilation.__main__ import main
from sarathi_kernels.compilation.compiled import Compiled, Dot, check
from sarathi_kernels.compilation.table import (
    TABLE_COMMAND,
    Unit,
    compile_units,
    read_table,
    source_hash,
)
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.launch import Launch

TESTS = Path(__file__).parents[1] / "support"
KERNELS = TESTS.parents[1] / "kernels"
TABLE = KERNELS / "compiled.csv"
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


class Toys:
    """What was said of the toy kernels."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def rows(self, name: str) -> dict[str, dict[str, object]]:
        """The rows of a toy kernel by capability."""
        return self.found["rows"][name]

    def complaints(self, name: str) -> dict[str, object]:
        return {capability: row["complaint"] for capability, row in self.rows(name).items()}


@pytest.fixture(scope="module")
def toys(made_once: Callable[[str, Callable[[], Any]], Any]) -> Toys:
    script = str(TESTS / "toy_kernels.py")
    return Toys(made_once("toys", lambda: json.loads(run_compiler(script).splitlines()[-1])))


def test_sound_kernels_raise_no_complaint_on_any_chip(toys: Toys) -> None:
    for name in (
        "elementwise",
        "product",
        "product of few rows",
        "product in fp32",
        "product of descriptors",
    ):
        assert set(toys.complaints(name).values()) == {""}, name


def test_products_become_each_chips_own_matrix_instructions(toys: Toys) -> None:
    found = {capability: row["instructions"] for capability, row in toys.rows("product").items()}
    assert found == {"80": "mma", "86": "mma", "90": "wgmma", "100": "tcgen05"}
    assert (
        toys.rows("product of few rows")["90"]["instructions"] == "mma"
    )  # 16 rows are too few for a warp group
    assert toys.rows("product in fp32")["90"]["instructions"] == ""


def test_descriptors_are_read_by_the_tensor_memory_accelerator(toys: Toys) -> None:
    assert {row["copies"] for row in toys.rows("product of descriptors").values()} == {"tma"}
    assert {row["copies"] for row in toys.rows("product").values()} == {"cp.async"}


def test_spills_are_complained_of_in_hot_kernels_only(toys: Toys) -> None:
    assert int(str(toys.rows("spills")["90"]["spill_bytes"])) > 100
    assert "spill in a hot kernel" in str(toys.complaints("spills")["90"])
    assert (
        toys.rows("spills, not hot")["90"]["spill_bytes"]
        == toys.rows("spills")["90"]["spill_bytes"]
    )
    assert toys.complaints("spills, not hot") == {"90": ""}


def test_more_shared_memory_than_the_chip_has_is_complained_of(toys: Toys) -> None:
    wrong = {
        capability: text
        for capability, text in toys.complaints("much shared memory").items()
        if text
    }
    assert wrong == {"86": "131072 bytes of shared memory, a block may use 101376"}
    assert toys.rows("much shared memory")["86"]["blocks_per_sm"] == 0
    assert toys.rows("much shared memory")["80"]["blocks_per_sm"] == 1


def test_missing_products_and_failing_compilations_are_complained_of(toys: Toys) -> None:
    assert toys.complaints("elementwise, tensor cores wanted") == {"90": "has no tl.dot"}
    assert (
        "does not compile: CompilationError: arange's range must be a power of 2"
        in toys.complaints("does not compile")["90"]
    )


def test_arguments_are_specialised_as_a_launch_does(toys: Toys) -> None:
    of_one, of_48, texts, distinct = toys.found["signatures"]
    assert (of_one["num_elements"], of_one["extra"], of_one["scale"]) == (
        "constexpr",
        "constexpr",
        "fp32",
    )
    assert (of_48["num_elements"], of_48["extra"], of_48["x"]) == ("i32", "*fp32", "*bf16")
    assert texts[0] == "bf16 num_elements=1 extra=None BLOCK=64 warps=4 stages=3"
    assert texts[1] == "bf16/fp32 x:unaligned BLOCK=64 warps=4 stages=3"
    assert distinct == 2  # the third launch repeats the first
    assert toys.found["same"] is True, "a launch would compile something else than what was checked"


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


def test_a_crash_of_the_compiler_costs_one_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_or_crash(source: Any) -> Compiled:
        if source.configuration == "crashes":
            os._exit(134)  # as an assertion of LLVM ends the process
        return CHECKED_BY_HAND

    monkeypatch.setattr("sarathi_kernels.compilation.table.compile_source", compile_or_crash)
    texts = ("sound", "crashes", "sound, too")
    sources: list[Any] = [
        SimpleNamespace(source=SimpleNamespace(name="toy"), configuration=text) for text in texts
    ]
    seen: list[str] = []
    rows = compile_units(
        [Unit(launched(), CHIPS[90], source) for source in sources],
        jobs=2,
        on_row=lambda row: seen.append(row.complaint),
    )
    assert [row.configuration for row in rows] == list(texts)
    assert [row.complaint for row in rows] == ["", "does not compile: the compiler crashed", ""]
    assert len(seen) == len(texts)


def test_blocks_per_sm_follows_the_scarcest_resource() -> None:
    small = replace(CHECKED_BY_HAND, registers=32, shared_memory=0)
    assert small.blocks_per_sm(CHIPS[90]) == 16  # 64 warps
    assert small.blocks_per_sm(CHIPS[86]) == 12  # 48 warps
    assert (
        replace(small, registers=129).blocks_per_sm(CHIPS[90]) == 3
    )  # 136 registers a thread are given
    assert replace(small, shared_memory=100_000).blocks_per_sm(CHIPS[90]) == 2
    assert replace(small, tensor_memory=256).blocks_per_sm(CHIPS[100]) == 2
    assert replace(small, threads=32, registers=16).blocks_per_sm(CHIPS[80]) == 32


@pytest.fixture(scope="module")
def quick_rows(
    tmp_path_factory: pytest.TempPathFactory, made_once: Callable[[str, Callable[[], Any]], Any]
) -> list[dict[str, str]]:
    """A hot configuration of every kernel, compiled now (or found in Triton's cache) by the command
    that a user has.
    """

    def make() -> list[dict[str, str]]:
        path = tmp_path_factory.mktemp("compiled") / "quick.csv"
        command = ("-m", "sarathi_kernels.compilation", "--quick", "--write", str(path))
        run_compiler(*command, expected=None)
        return read_table(path)

    return made_once("compiled", make)


def complaints_of(rows: list[dict[str, str]]) -> list[str]:
    return [
        " ".join((f"sm_{r['capability']}", r["kernel"], r["complaint"], r["configuration"]))
        for r in rows
        if r["complaint"]
    ]


def test_hot_configurations_compile_without_complaint_on_every_chip(
    quick_rows: list[dict[str, str]],
) -> None:
    assert complaints_of(quick_rows) == []
    by_chip = {
        c: {row["kernel"] for row in quick_rows if row["capability"] == str(c)} for c in CHIPS
    }
    assert by_chip[90] == by_chip[100]
    assert (
        by_chip[80] == by_chip[86] == by_chip[90] - {"persistent_matmul_kernel"}
    )  # which needs descriptors


def test_recorded_table_is_of_these_sources() -> None:
    found = {row["sources"] for row in read_table(TABLE)} if TABLE.exists() else set()
    assert found == {source_hash()}, (
        f"{TABLE.name} is out of date; record it again: {TABLE_COMMAND}"
    )


def test_recorded_table_has_every_chip_and_no_complaint() -> None:
    rows = read_table(TABLE)
    assert complaints_of(rows) == []
    assert {int(row["capability"]) for row in rows} == set(CHIPS)


def test_quick_figures_are_the_recorded_ones(quick_rows: list[dict[str, str]]) -> None:
    recorded = read_table(TABLE)
    if quick_rows[0]["triton"] != recorded[0]["triton"]:
        pytest.skip("recorded with another Triton, which compiles to other figures")
    identity = ("kernel", "configuration", "capability")
    figures = {tuple(row[n] for n in identity): [row[n] for n in FIGURES] for row in recorded}
    for row in quick_rows:
        assert figures[tuple(row[n] for n in identity)] == [row[n] for n in FIGURES]


@pytest.fixture(scope="module")
def answers(made_once: Callable[[str, Callable[[], Any]], Any]) -> list[str]:
    """What is compiled for 48, 1 and 17 tokens, and the exit code for an unknown kernel."""
    code = """
import sys
from sarathi_kernels.compilation.__main__ import main
from sarathi_kernels.compilation.configurations import record
from sarathi_kernels.compilation.table import units_of
from sarathi_kernels.runtime.chip import CHIPS
for num_tokens in (48, 1, 17):
    launches = record(CHIPS[90], quick=True, num_tokens=num_tokens)
    print(sorted(unit.source.key for unit in units_of(launches, CHIPS[90])))
sys.argv[1:] = ["--quick", "--kernel", "no_such_kernel"]
print(main())
"""
    return made_once("answers", lambda: run_compiler("-c", code).splitlines())


def test_no_number_of_tokens_compiles_anything_anew(answers: list[str]) -> None:
    """Else serving would stop to compile whenever a batch is the first of 1 token, or of a multiple
    of 16.
    """
    of_48, of_1, of_17 = answers[:3]
    assert len(of_48) > 1000
    assert of_48 == of_1 == of_17


def test_command_refuses_an_unknown_kernel(answers: list[str]) -> None:
    assert answers[3] == "2"


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
