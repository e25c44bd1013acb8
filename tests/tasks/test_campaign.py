"""The campaign: its jobs, what they refuse, record and judge, and all of it on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
from omegaconf import OmegaConf

from sarathi_lab.config.archive import Archive
from sarathi_lab.config.command_line import read_command_line
from sarathi_lab.config.errors import RunError, no_room
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF, REPOSITORY
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch import profiling
from sarathi_lab.experiment import measured_cost
from sarathi_lab.results.provenance import parse_clocks, slug_of
from sarathi_lab.run import main
from sarathi_lab.tasks.gpu import gpu_tests
from sarathi_lab.tasks.gpu.part import Part
from sarathi_lab.tasks.gpu.targets import TARGETS, Tables, Target, Targets

PEAKS = ["experiment=campaign_dry", "task=peaks"]  # of all parts: each has the same settings
CPU = OmegaConf.create({"device": "cpu"})


# -- its jobs --------------------------------------------------------------------------------------


def test_the_campaign_is_a_sweep_over_its_parts_that_judges_last():
    jobs = [job.cfg for job in read_command_line(["experiment=campaign"]).jobs]
    homes = [job.task._target_.rpartition(".")[2] for job in jobs]
    assert homes == [
        "GpuTests",
        "DevicePeaks",
        "KernelBenchmarks",
        "GpuCalibration",
        *["GpuExperiments"] * 3,
        "Targets",
    ]
    assert {job.task.record for job in jobs} == {"experiments"}
    assert {job.task.setup for job in jobs} == {"paper"}
    assert sum(job.task.seconds for job in jobs) <= 540
    assert all(job.limit > 2 * job.task.seconds for job in jobs)


def test_one_part_can_be_chosen_and_a_dry_run_never_goes_into_the_records():
    (job,) = read_command_line(["experiment=campaign_dry", "task=peaks", "output=o"]).jobs
    assert (job.cfg.task.setup, job.cfg.task.record) == ("dry", "o/campaign-dry")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=campaign"], "no GPU found"),
        (["experiment=campaign", "device=cuda"], "finds no GPU"),
        (["task=peaks", "task.setup=dry", "task.record=experiments"], "not for task.setup=dry"),
        (["task=peaks", "task.setup=small"], "task.setup=small is unknown"),
        ([*PEAKS, "task.seconds=-3"], "task.seconds=-3 must be a finite"),
        (["task=targets", "task.setup=dry"], "task.record=null: task=targets judges"),
        (["task=gpu_kv_reread", "task.model=99b", "task.setup=dry"], "task.model=99b is unknown"),
        ([*PEAKS, "limit=0"], "limit=0 must be a finite number above 0"),
        ([*PEAKS, "chunk=64"], "chunk=64 has no effect"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*arguments, "tracking=none", f"output={tmp_path}/o"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("option", "dry"), [([], ""), (["--dry-run"], "_dry"), (["-n"], "_dry")])
def test_make_campaign_passes_the_dry_run_on(tmp_path, option, dry):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "ran: $@ interpreted=$TRITON_INTERPRET"\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    command_line = ["make", "campaign", f"VENV={tmp_path}", "ARGS=task=peaks", *option]
    done = subprocess.run(
        command_line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    interpreted = "1" if dry else ""
    ran = f"ran: -m sarathi_lab run experiment=campaign{dry} task=peaks interpreted={interpreted}\n"
    assert ran in done.stdout


# -- a part ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fake(Part):
    """Leaves a table, and then fails as it is told."""

    home: ClassVar[str] = "room/fake"
    failure: Exception | None = None
    name: str = "found"

    def measure(self, cfg, context, work):
        """As told."""
        work.keep(self.name, [{"value": 1.0}])
        work.keep("empty", [])
        if self.failure is not None:
            raise self.failure


def run_fake(root: Path, **settings):
    """The result of the part, and its record."""
    context = RunContext(root / "run", root, "fake", "group", task="fake")
    task = Fake(1.0, "dry", str(root / "records"), **settings)
    try:
        return task.run(CPU, context), record_of(root)
    except ZeroDivisionError:
        return None, record_of(root)


def record_of(root: Path):
    path = root / "records" / "room" / "fake" / "results" / "cpu" / "run.json"
    return json.loads(path.read_text())["parts"]["fake"]


def test_a_part_records_what_it_found_and_on_what(tmp_path):
    result, record = run_fake(tmp_path)
    assert set(result.tables) == {"found"}
    assert record["files"] == ["found.csv"]
    assert record["error"] is None
    wanted = {"device", "driver", "versions", "clocks", "git_commit", "started_at", "duration"}
    assert wanted | {"seconds_given", "is_dry"} <= set(record)


def test_what_a_failing_part_found_stays_and_its_last_results_do_not(tmp_path):
    run_fake(tmp_path, name="before")
    result, record = run_fake(tmp_path, failure=RunError("no room; use less"))
    assert str(result.error) == record["error"] == "no room; use less"
    folder = tmp_path / "records" / "room" / "fake" / "results" / "cpu"
    assert {path.name for path in folder.iterdir()} == {"found.csv", "run.json"}
    result, record = run_fake(tmp_path, failure=ZeroDivisionError("a mistake\nin two lines"))
    assert result is None
    assert record["error"] == "ZeroDivisionError: a mistake"
    assert record["files"] == ["found.csv"]


def test_a_part_that_is_ended_says_so(tmp_path):
    with pytest.raises(SystemExit):
        run_fake(tmp_path, failure=SystemExit())
    assert record_of(tmp_path)["error"] == "it was ended before it was done"


def test_a_part_whose_process_dies_ends_no_other_and_is_repeated_and_archived(tmp_path, capfd):
    campaign = OmegaConf.load(CONF / "experiment" / "campaign.yaml")
    archive = campaign.hydra.callbacks.archive["_target_"]
    scripted = ["task._target_=sweep_tasks.Scripted", "tracking=none", "executor=simulated", "-m"]
    scripted += ["chunk=2,3", "limit=60", "batch=1", f"output={tmp_path}"]
    scripted += [f"+hydra.callbacks.archive._target_={archive}"]
    scripted += [f"+hydra.callbacks.archive.path={tmp_path}/campaign.tar.gz"]
    scripted += [f"+hydra.callbacks.archive.folders=[{tmp_path}/records]"]
    (tmp_path / "kill-2").touch()
    (tmp_path / "records").mkdir()
    before, found = (tmp_path / "records" / name for name in ("before.csv", "found.csv"))
    before.touch()
    os.utime(before, (0, 0))
    found.touch()
    os.utime(found, (2e9, 2e9))
    assert main(scripted) == 2
    assert (tmp_path / "calls").read_text().split() == ["2", "3"]
    assert "its process was killed by signal 9" in capfd.readouterr().out
    kept = kept_in(tmp_path / "campaign.tar.gz")
    assert {"records/found.csv", "0/failed.json", "1/result.json", "1/finished.json"} <= kept
    assert not {"records/before.csv", "0/result.json"} & kept
    (tmp_path / "kill-2").unlink()
    assert main([*scripted, "resume=true"]) == 0
    assert (tmp_path / "calls").read_text().split() == ["2", "3", "2"]
    assert "0/result.json" in kept_in(tmp_path / "campaign.tar.gz")
    assert not list(tmp_path.glob(".campaign*"))


def kept_in(path: Path) -> set[str]:
    """The last two parts of the names in an archive."""
    with tarfile.open(path) as archive:
        return {"/".join(name.split("/")[-2:]) for name in archive.getnames()}


def test_without_room_an_archive_stays_as_it_was_and_a_part_says_so(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").touch()
    path = tmp_path / "campaign.tar.gz"
    cfg = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "sweep")}}})
    Archive(str(path)).on_job_end(cfg, None)
    before = path.read_bytes()
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to("/dev/full")
    Archive(str(path)).on_job_end(cfg, None)
    assert not path.is_symlink()  # to what has no end
    assert path.read_bytes() == before
    assert capsys.readouterr().out == f"  {path} can't be written (No space left on device)\n"
    folder = tmp_path / "records" / "room" / "fake" / "results" / "cpu"
    folder.mkdir(parents=True)
    (folder / "found.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        run_fake(tmp_path)
    assert "make room" in str(no_room(raised.value))
    assert "No space left" in record_of(tmp_path)["error"]


# -- the part that runs tests ----------------------------------------------------------------------

TESTS = """
import os, signal, pytest
seen = []

@pytest.mark.gpu
def test_first():
    seen.append(1)

@pytest.mark.gpu
def test_alone():
    assert not seen

@pytest.mark.gpu
def test_of_its_own():
    assert False

@pytest.mark.gpu
def test_that_ends_everything():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_gpu_tests(root: Path):
    """The rows that are recorded, and the error."""
    context = RunContext(root / "run", root, "gpu_tests", "group", task="gpu_tests")
    part = gpu_tests.GpuTests(60.0, "dry", str(root / "records"))
    try:
        error = part.run(CPU, context).error
    except SystemExit as ended:
        error = ended
    path = root / "records" / "gpu" / "gpu_tests" / "results" / "cpu" / "tests.csv"
    return pd.read_csv(path).fillna("").set_index("test"), error


def test_tests_that_are_cut_short_keep_their_rows_and_failed_ones_are_repeated_alone(
    tmp_path, monkeypatch
):
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(gpu_tests, "DRY_FILES", ["test_some.py"])
    monkeypatch.setattr(gpu_tests, "REPOSITORY", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take seconds to import
    rows, error = run_gpu_tests(tmp_path)
    assert rows.outcome.to_dict() == {
        "test_some.py::test_first": "passed",
        "test_some.py::test_alone": "failed",
        "test_some.py::test_of_its_own": "failed",
        "test_some.py::test_that_ends_everything": "unfinished",
    }
    assert rows.alone.tolist() == ["", "passed", "failed", ""]
    assert str(error).startswith("2 of 4 tests failed: ")
    assert "test_alone (alone: passed)" in str(error)


def test_rows_stay_where_the_time_is_over(tmp_path, monkeypatch):
    line = {"test": "a", "phase": "call", "outcome": "passed", "seconds": 1.5}

    def late(chosen, report, seconds):
        report.write_text(json.dumps(line) + '\n{"test": "half')
        if is_ended:
            raise SystemExit  # as SIGTERM does

    monkeypatch.setattr(gpu_tests, "run_tests", late)
    for is_ended in (False, True):
        rows, error = run_gpu_tests(tmp_path / str(is_ended))
        assert rows.loc["a", ["outcome", "value"]].tolist() == ["passed", 1.5]
        assert is_ended or "task.seconds=120" in str(error)


def test_only_files_with_tests_for_a_gpu_are_imported_for_them(pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "markexpr", "gpu")
    files = [*(REPOSITORY / "tests").rglob("test_*.py")]
    ignored = pytestconfig.hook.pytest_ignore_collect
    left = [one for one in files if not ignored(collection_path=one, config=pytestconfig)]
    assert {"test_attention_kernels", "test_nll", "test_compilation"} <= {one.stem for one in left}
    assert len(left) < len(files) / 4


# -- everything, on the CPU ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The folder that a dry run records in, and what the command says at the end of each piece.

    Two figures stand for all of them, which their own tests measure; peers and the part that runs
    tests have tests of their own.
    """
    folder = tmp_path_factory.mktemp("campaign")
    campaign = ["experiment=campaign_dry", "limit=null", f"output={folder}"]
    figures = "task.experiments=[table4,fig08]"
    parts = "peaks,kernels,gpu_calibration,gpu_kv_reread"
    pieces = [[f"task={parts}"], ["task=gpu_figures_13b", figures], ["task=targets"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "MAX_ROUNDS", 3)  # the fewest, whatever else the machine does
        patch.setattr(profiling, "TOKENS", (1, 2, 4, 8, 16, 32, 64))
        patch.setattr(profiling, "CHUNKS", (16, 64))
        patch.setattr(profiling, "VISIT", 0.003)
        patch.setattr("sarathi_kernels.benchmarks.measure.HOST_REPETITIONS", 1)
        for name in ("ENOUGH", "ALTERNATED", "REFERENCES"):  # what is timed is not looked at
            patch.setattr(measured_cost, name, 0)
        codes = [main([*campaign, *piece]) for piece in pieces]
    return codes, folder / "campaign-dry"


def table_of(dry, home, name) -> pd.DataFrame:
    return pd.read_csv(dry[1] / home / "results" / "cpu" / f"{name}.csv")


def test_the_dry_run_finishes_every_part(dry):
    codes, folder = dry
    assert codes[:2] == [0, 0]
    assert {"cpu/targets.csv", "cpu/run.json"} <= kept_in(folder.parent / "campaign.tar.gz")
    for path in folder.rglob("run.json"):
        for part in json.loads(path.read_text())["parts"].values():
            assert part["error"] is None or "judged without" in part["error"]


MEASURED = [
    ("gpu/peaks", "peaks", {"quantity", "case"}),
    (
        "gpu/kernels",
        "kernels",
        {"operation", "case", "implementation", "flops_per_second", "error"},
    ),
]


@pytest.mark.parametrize(("home", "name", "columns"), MEASURED)
def test_tables_have_values_with_units_quantiles_and_repetitions(dry, home, name, columns):
    table = table_of(dry, home, name)
    assert columns | {"value", "unit", "q20", "q80", "repetitions"} <= set(table)
    measured = table[table.value.notna()]
    assert len(measured) > 3
    assert (measured.value >= 0).all()
    assert measured.value.map(math.isfinite).all()
    assert (measured.q20.fillna(0) <= measured.q80.fillna(math.inf)).all()
    assert measured.unit.notna().all()
    assert (measured.repetitions >= 1).all()


def test_the_figures_are_recorded_as_task_measure_records_them(dry):
    for path in ("sarathi/table4", "sarathi/fig08", "sarathi/kv_reread"):
        name = path.rpartition("/")[2]
        table = table_of(dry, path, name)
        assert (table.figure == name).all()
        assert (table.y.notna() | table.reason.notna()).all()  # a noisy machine has no number


def test_every_target_is_judged_or_says_why_not(dry):
    table = table_of(dry, "gpu/gpu_targets", "targets")
    assert len(table) == len(TARGETS) >= 15
    assert set(table.met) <= {"yes", "no", "not measured"}
    assert (table.value.notna() == (table.met != "not measured")).all()
    assert table[table.met == "not measured"].reason.notna().all()
    assert (table.met == "no").eq(table.missed_by.notna()).all()
    assert "its part did not run or failed" in table.set_index("target").reason.iloc[-1]


def test_the_calibration_is_a_hardware_file_that_names_its_recorded_table(dry):
    (path,) = dry[1].glob("lab/calibration/results/cpu/hardware.yaml")
    hardware = OmegaConf.load(path)
    assert len(pd.read_csv(REPOSITORY / hardware.tables / "dense.csv")) > 20


# -- the pieces ------------------------------------------------------------------------------------


def test_folders_are_called_by_the_device():
    assert slug_of("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_clocks_are_read_from_lines_of_numbers_alone():
    lines = ["1980, 3201, 650.1, 45\n", "[N/A], 1, 2, 3\n", "1500, 3201, 700.0, 50\n", "broken\n"]
    seen = parse_clocks(lines)
    assert seen["sm_mhz"] == {"min": 1500.0, "median": 1740.0, "max": 1980.0}
    assert seen["samples"] == 2
    assert parse_clocks([]) == {}


def tables_with(tmp_path, contents) -> Tables:
    for (home, name), rows in contents.items():
        folder = tmp_path / home / "results" / "cpu"
        folder.mkdir(parents=True)
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return Tables(tmp_path, "cpu")


def peaks(flops: float, num_bytes: float):
    rows = [{"quantity": "matmul", "case": "8192x8192x8192", "value": flops, "unit": "TFLOP/s"}]
    rows += [
        {"quantity": "copy", "case": f"{mib} MiB", "value": v, "unit": "GB/s"}
        for mib, v in ((64, 9e9), (1024, num_bytes))
    ]
    return {("gpu/peaks", "peaks"): rows}


def row_of(tables: Tables, beginning: str):
    (target,) = [target for target in TARGETS if target.name.startswith(beginning)]
    return target.row(tables)


def test_iterations_are_judged_by_their_operations_and_by_all_at_once(tmp_path):
    """Bytes bound a batch of decodes, however it is summed; beside a chunk the sum is longer."""

    def row(prefill_tokens, decodes, value):
        kv_tokens = prefill_tokens + 1024 * decodes
        shape = {"prefill_tokens": prefill_tokens, "decodes": decodes, "kv_tokens": kv_tokens}
        return {"operation": "iteration", **shape, "unit": "ms", "value": value}

    compositions = [row(0, 8, 11.0), row(239, 17, 16.0), row(1024, 0, 80.0)]
    rows = {**peaks(500.0, 4000.0), ("gpu/gpu_targets", "gpu_targets-compositions"): compositions}
    tables = tables_with(tmp_path, rows)
    spec = load_option("model", "13b")
    bytes_read = spec.num_linear_params + 32_000 * 5120 + 8 * 1025 * 2 * 40 * 5120
    decode = row_of(tables, "decode-only, batch 8")
    assert decode["overlapped"] == pytest.approx(11.0 / (2 * bytes_read / 4e12 * 1e3))
    assert 0.98 * decode["overlapped"] < decode["value"] < decode["overlapped"]
    hybrid = row_of(tables, "hybrid of 256")
    assert 1.15 * hybrid["value"] < hybrid["overlapped"] < 1.5 * hybrid["value"]
    prefill = row_of(tables, "prefill of 1024")
    assert prefill["met"] == "no"
    assert prefill["missed_by"] == pytest.approx(prefill["value"] / 1.15 - 1)
    missing = row_of(tables, "decode-only, batch 1 ")
    assert (missing["value"], missing["met"]) == (None, "not measured")
    assert "were not timed" in str(missing["reason"])


def test_attention_targets_compare_implementations_case_by_case(tmp_path):
    def row(operation, case, implementation, value, rate=0.0):
        labels = {"operation": operation, "case": case, "implementation": implementation}
        return {**labels, "value": value, "unit": "us", "bytes_per_second": rate}

    kernels = [
        row("prefill_attention", "mha a", "paged", 10.0),
        row("prefill_attention", "mha a", "sdpa flash", 9.0),
        row("prefill_attention", "mha a", "sdpa efficient", 30.0),
        row("prefill_attention", "mha b", "paged", 10.0),
        row("prefill_attention", "mha b", "sdpa flash", 12.0),
        row("decode_attention", "mha 32 x 2048", "paged", 5.0, 3.8e12),
        row("decode_attention", "gqa 32 x 2048", "paged", 5.0, 3.6e12),
        row("decode_attention", "gqa 32 x 2048", "paged, unsplit", 9.0, 2.0e12),
        row("hybrid_attention", "mha 256 + 17 x 1024", "series", 12.0),
        row("hybrid_attention", "mha 256 + 17 x 1024", "fused", 10.0),
        row("hybrid_attention", "mha 256 + 9 x 2048", "series", 9.0),
        row("hybrid_attention", "mha 256 + 17 x 1024", "chunk alone", 4.0),
        row("hybrid_attention", "mha 256 + 17 x 1024", "decodes alone", 8.0),
        row("hybrid_attention", "mha 256 + 9 x 2048", "fused", None),
        row("hybrid_attention", "gqa 256 + 17 x 1024", "series", 9.0),
        row("hybrid_attention", "gqa 256 + 17 x 1024", "fused", 10.0),
    ]
    tables = tables_with(tmp_path, {**peaks(500.0, 4000.0), ("gpu/kernels", "kernels"): kernels})
    assert row_of(tables, "prefill-chunk attention")["value"] == pytest.approx(0.9)
    assert row_of(tables, "decode attention, 32")["value"] == pytest.approx(0.9)
    assert row_of(tables, "decode attention, 8 of")["met"] == "not measured"
    hybrid = "hybrid attention: speed over the two kernels in series, least of "
    assert row_of(tables, "hybrid attention: time of perfect")["value"] == pytest.approx(0.8)
    assert row_of(tables, f"{hybrid}all cases")["value"] == pytest.approx(0.9)
    flashinfer = row_of(tables, "prefill attention: speed over FlashInfer")
    assert (
        flashinfer["reason"]
        == "no case of prefill_attention has times of both: none of ^flashinfer"
    )


def test_served_loads_and_peers_are_judged(tmp_path):
    serving = {"quantity": "idle share", "policy": "sarathi", "unit": "ratio"}
    peers = {"peer": "transformers_generate", "ratio": 2.5, "error": ""}
    failed = {"peer": "transformers_cb", "ratio": None, "error": "no room"}
    rows = {
        ("sarathi/fig09", "fig09-serving"): [{**serving, "value": 0.01}],
        ("sarathi/fig11", "fig11-serving"): [{**serving, "value": 0.05}],
        ("lab/peers", "peers"): [peers, failed],
    }
    tables = tables_with(tmp_path, rows)
    idle = row_of(tables, "device idle")
    assert (idle["value"], idle["met"]) == (pytest.approx(0.03), "no")
    assert row_of(tables, "throughput over transformers generate")["met"] == "yes"
    assert (
        row_of(tables, "throughput over transformers cont")["reason"] == "transformers_cb: no room"
    )


def test_nothing_is_judged_without_tables(tmp_path, capsys):
    context = RunContext(tmp_path / "run", tmp_path, "targets", "group", task="targets")
    result = Targets(1.0, "dry", str(tmp_path)).run(CPU, context)
    assert (result.tables["targets"].met == "not measured").all()
    assert "judged without" in str(result.error)  # so that a resumed campaign judges again
    assert "did not run or failed" in capsys.readouterr().out
    assert Target("x", "<=", 1.0, lambda tables: 1.0).row(Tables(tmp_path, "cpu"))["met"] == "yes"
