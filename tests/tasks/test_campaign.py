"""The campaign: how it runs its parts, what it refuses, and all of it end to end on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pandas as pd
import pytest
from campaign_parts import part

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.torch.backend import Sizes, TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment.bench import Bench, Estimate, Point
from sarathi_lab.experiment.figures import COLUMNS
from sarathi_lab.experiment.gpu_figures import timed_points
from sarathi_lab.experiment.gpu_serving import Load, serve
from sarathi_lab.experiment.measured_clock import MeasuredCostModel, composition, describe
from sarathi_lab.experiment.served_figures import Server, dry_scale, gains
from sarathi_lab.experiment.steady_state import lengths
from sarathi_lab.experiment.timed_figures import Unit, in_fair_turns
from sarathi_lab.results.device_record import parse_clocks
from sarathi_lab.results.intervals import coarse_to_fine, spread, summary
from sarathi_lab.results.metrics import device_idle_fraction
from sarathi_lab.tasks.gpu import campaign as campaign_module
from sarathi_lab.tasks.gpu import command, process
from sarathi_lab.tasks.gpu.campaign import Campaign
from sarathi_lab.tasks.gpu.child import Job
from sarathi_lab.tasks.gpu.context import Context
from sarathi_lab.tasks.gpu.gpu_tests import read_report
from sarathi_lab.tasks.gpu.parts import NAMES, PARTS, share
from sarathi_lab.tasks.gpu.state import State
from sarathi_lab.tasks.gpu.targets import Tables, Target, judge, targets

SLUG = "some-gpu"


@pytest.fixture(autouse=True)
def test_parts_can_be_imported(monkeypatch):
    """By the processes of the parts, which know no pytest."""
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))


def campaign_of(tmp_path, *names, commit="abc", is_fresh=False, seconds=20.0) -> Campaign:
    return Campaign(
        parts=[part(name, is_always_run=name == "last") for name in names],
        device="cpu",
        device_name="Some GPU",
        commit=commit,
        is_dry=True,
        seconds=seconds,
        work=tmp_path / "work",
        results=tmp_path / "results",
        is_fresh=is_fresh,
    )


def state_of(tmp_path):
    return json.loads((tmp_path / "work" / "state.json").read_text())


# -- running parts ---------------------------------------------------------------------------------


def test_a_failing_part_does_not_lose_the_others(tmp_path, capfd):
    assert campaign_of(tmp_path, "raises", "dies", "good", "last").run() == 1
    state = state_of(tmp_path)
    assert {name: entry["status"] for name, entry in state.items()} == {
        "raises": "failed",
        "dies": "failed",
        "good": "finished",
        "last": "finished",
    }
    assert state["raises"]["error"] == "ZeroDivisionError: a mistake"
    assert "signal 9" in state["dies"]["error"]
    assert "ZeroDivisionError" in (tmp_path / "work" / "raises.log").read_text()
    printed = capfd.readouterr().out
    assert "[3/4 good] finished" in printed
    assert "s gone, about" in printed
    assert printed.count("failed:  ") == 2
    folder = tmp_path / "results" / "question" / "results" / SLUG
    assert {path.name for path in folder.iterdir()} == {
        "good.csv",
        "half.csv",
        "last.csv",
        "run.json",
    }
    record = json.loads((folder / "run.json").read_text())["parts"]
    assert record["raises"]["error"] == "ZeroDivisionError: a mistake"
    assert record["good"]["error"] is None
    assert {
        "device",
        "driver",
        "versions",
        "clocks",
        "git_commit",
        "started_at",
        "duration",
    } <= set(record["good"])


def test_finished_parts_are_skipped_and_failed_ones_repeated(tmp_path, capfd):
    assert campaign_of(tmp_path, "refuses", "good").run() == 1
    assert campaign_of(tmp_path, "refuses", "good", commit="abc-dirty").run() == 1
    printed = capfd.readouterr().out
    assert printed.count("[1/2 refuses] FAILED: value=7 is too large; use 6") == 2
    assert printed.count("[2/2 good] finished after") == 1
    assert printed.count("[2/2 good] finished before at this commit: skipped") == 1
    assert campaign_of(tmp_path, "good", is_fresh=True).run() == 0
    assert "skipped" not in capfd.readouterr().out


def test_a_part_is_finished_on_one_commit_and_device(tmp_path):
    state = State(tmp_path / "state.json")
    state.save("good", {"status": "finished", "commit": "abc", "device": "Some GPU"})
    again = State(tmp_path / "state.json")
    assert again.is_finished("good", "abc-dirty", "Some GPU")
    assert not again.is_finished("good", "def", "Some GPU")
    assert not again.is_finished("good", "abc", "Other GPU")
    assert not again.is_finished("better", "abc", "Some GPU")
    again.path.write_text("{")
    with pytest.raises(UserError, match="can't be read as JSON; delete it, or use --fresh"):
        State(again.path)


def test_what_is_judged_is_judged_anew_each_time():
    assert [part.name for part in PARTS if part.is_always_run] == ["targets"]
    assert PARTS[-1].name == "targets"


def test_a_part_that_hangs_is_ended_and_its_signs_of_life_are_shown(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(campaign_module, "LIMIT_FACTOR", 0.0)
    monkeypatch.setattr(campaign_module, "LIMIT_EXTRA", 3.0)
    monkeypatch.setattr(process, "HEARTBEAT", 1.0)
    assert campaign_of(tmp_path, "hangs").run() == 1
    printed = capfd.readouterr().out
    assert "it took more than 3 s and was ended" in printed
    assert "[1/1 hangs] 2 s; " in printed


def test_a_part_that_is_ended_writes_what_it_has(tmp_path):
    tables = tmp_path / "tables"
    job = Job("hangs", "campaign_parts:hangs", "cpu", True, 1.0, str(tmp_path), str(tables), SLUG)
    command_line = [sys.executable, "-m", "sarathi_lab.tasks.gpu.child", job.as_json()]
    with subprocess.Popen(command_line, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "about to hang\n"
        child.terminate()
        assert child.wait(timeout=30) == 1
    assert (tables / "hangs" / "question" / "before.csv").is_file()
    assert json.loads(job.record.read_text())["error"] == "it was ended before it was done"


def test_time_is_shared_by_weight_and_what_is_saved_goes_to_the_rest(tmp_path):
    parts = [part("a", 30), part("b", 10), part("c", 20)]
    assert share(parts, 120, is_dry=False) == 60
    assert share(parts[1:], 120, is_dry=False) == 40
    assert share(parts, -5, is_dry=False) == 0
    assert sum(p.seconds for p in PARTS) <= 540


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no GPU found"),
        (["--device", "cuda"], "finds no GPU"),
        (["--dry-run", "--seconds", "1"], "--seconds=1 is too short for 9 parts; use at least"),
        (["--dry-run", "--seconds", "-3"], "--seconds=-3.0 must be a finite number above 0"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "--dry-run" in error or "use" in error


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--dry-run", "--only", "everything"])
    assert stopped.value.code == 2
    assert "kernels" in capsys.readouterr().err


def test_a_dry_run_never_goes_into_the_records(tmp_path):
    options = command._parser().parse_args(["--dry-run", "--work", str(tmp_path)])
    assert command._campaign(options).results is None
    assert command._results(None, is_dry=False) == EXPERIMENTS


@pytest.mark.parametrize(
    ("option", "expected"), [([], ""), (["--dry-run"], " --dry-run"), (["-n"], " --dry-run")]
)
def test_make_campaign_passes_the_dry_run_on(tmp_path, option, expected):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "ran: $@"\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    command_line = ["make", "campaign", f"VENV={tmp_path}", "ARGS=--only peers", *option]
    done = subprocess.run(command_line, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"ran: -m sarathi_lab campaign{expected} --only peers\n" in done.stdout


# -- everything, on the CPU ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The dry run as a user starts it: (exit code, printed text, folder of the results)."""
    folder = tmp_path_factory.mktemp("campaign")
    arguments = ["--dry-run", "--work", str(folder / "work"), "--results", str(folder / "results")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
        done = subprocess.run(
            [sys.executable, "-m", "sarathi_lab", "campaign", *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
    return done.returncode, done.stdout + done.stderr, folder / "results"


def table_of(dry, question, name) -> pd.DataFrame:
    (path,) = dry[2].glob(f"{question}/results/*/{name}.csv")
    return pd.read_csv(path)


def test_the_dry_run_finishes_every_part(dry):
    code, printed, _ = dry
    assert code == 0, printed
    assert all(f"{name}] finished after" in printed for name in NAMES)


MEASURED = [
    ("peaks", "peaks", {"quantity", "case"}),
    (
        "kernels",
        "kernels",
        {"operation", "case", "implementation", "flops_per_second", "bytes_per_second", "error"},
    ),
    ("kv_reread", "kv_reread", {"prompt_len", "chunk", "kv_bytes", "quantity"}),
    ("paper", "13b-serving", {"policy", "chunk", "quantity"}),
    ("peers", "peers", {"system", "quantity", "error"}),
]


@pytest.mark.parametrize(("question", "name", "columns"), MEASURED)
def test_tables_have_values_with_units_quantiles_and_repetitions(dry, question, name, columns):
    table = table_of(dry, question, name)
    assert columns | {"value", "unit", "q20", "q80", "repetitions"} <= set(table)
    measured = table[table.value.notna()]
    assert len(measured) > 3
    assert (measured.value >= 0).all()
    assert measured.value.map(math.isfinite).all()
    assert (measured.q20.fillna(0) <= measured.q80.fillna(math.inf)).all()
    assert measured.unit.notna().all()
    assert (measured.repetitions >= 1).all()


def test_the_figures_are_there_in_the_columns_of_the_simulated_ones(dry):
    for model in ("13b", "33b"):
        points = table_of(dry, "paper", f"{model}-points")
        assert list(points.columns) == COLUMNS
        assert {"fig03", "fig04", "fig07", "fig10", "fig11", "fig13", "table2", "table4"} <= set(
            points.figure
        )
        assert (points.source == "measured").all()
        assert points.device.str.startswith("dry run").all()
        assert points.unit.notna().all()
        assert (points.y > 0).all()
        assert points.y.map(math.isfinite).all()
    parts = (
        table_of(dry, "paper", "13b-compositions")
        .set_index("operation")
        .query("composition == '1024 at 0'")
    )
    whole = parts.value["iteration"]
    assert parts.drop("iteration").value.sum() == pytest.approx(whole, rel=1e-3)
    assert list((dry[2] / "paper").glob("results/*/13b-*.png"))


def test_rereading_is_counted_and_compared_with_the_whole_prompt(dry):
    table = table_of(dry, "kv_reread", "kv_reread").query(
        "prompt_len == 128 and quantity == 'time / whole'"
    )
    assert dict(zip(table.chunk, table.reread_factor, strict=True)) == {128: 1.0, 16: 4.5, 32: 2.5}
    assert table.set_index("chunk").value[128] == 1


def test_peers_did_the_same_work_and_have_a_ratio(dry):
    table = table_of(dry, "peers", "peers")
    generate = table[table.system == "transformers generate"].set_index("quantity").value
    assert generate["throughput"] > 0
    assert generate["the lab's throughput / its"] > 0
    assert table[table.system == "flashinfer"].error.notna().all()


def test_every_target_is_judged_or_says_why_not(dry):
    table = table_of(dry, "gpu_targets", "targets")
    assert len(table) >= 15
    assert set(table.met) <= {"yes", "no", "not measured"}
    assert (table.value.notna() == (table.met != "not measured")).all()
    assert table[table.met == "not measured"].reason.notna().all()
    assert (table.met == "no").eq(table.missed_by.notna()).all()
    assert table[table.target.str.contains("13b")].value.notna().all()


def test_the_calibration_is_a_hardware_file_that_names_its_recorded_table(dry):
    (path,) = dry[2].glob("calibration/results/*/hardware.yaml")
    relative = f"experiments/lab/calibration/results/{path.parent.name}/profile.csv"
    assert relative in path.read_text()
    assert len(pd.read_csv(path.parent / "profile.csv")) > 20


# -- the pieces ------------------------------------------------------------------------------------


def test_a_steady_window_takes_as_long_as_the_simulator_counts():
    """Real requests through the engine's loop, on a virtual clock, against the difference of two
    longer runs.
    """
    spec, hardware = load_option("model", "13b"), load_option("hardware", "h200")
    bench = Bench(make_cost_model("analytic", spec, hardware, 2), hardware)
    for policy, chunk, pd_ratio in (
        ("sarathi", 256, 28.4),
        ("orca_best", 256, 28.4),
        ("sarathi", 512, 50.0),
    ):
        prompt_len, num_decodes = lengths(2048, pd_ratio, chunk - 9)
        load = Load(policy, prompt_len, num_decodes, 10, chunk)
        executor = SimulatedExecutor(bench.cost.iteration_time)
        served = serve(executor, load, num_blocks=10_000, block_size=16, vocab_size=100)
        assert served is not None
        expected = bench.seconds(
            bench.steady(load.make_policy(), prompt_len, num_decodes, 10)
        ).value
        assert served.seconds_per_request == pytest.approx(expected, rel=0.02)
        assert served.idle_share == 0


def test_a_load_that_the_cache_cannot_hold_is_not_served():
    load = Load("request_level", 100, 10, 4)
    assert (
        serve(
            SimulatedExecutor(lambda batch: 1.0), load, num_blocks=27, block_size=16, vocab_size=9
        )
        is None
    )
    assert (
        serve(
            SimulatedExecutor(lambda batch: 1.0), load, num_blocks=28, block_size=16, vocab_size=9
        )
        is not None
    )


def test_a_load_that_the_device_has_no_memory_for_is_left_out(tmp_path, cost, monkeypatch):
    context = context_with(tmp_path, {})
    server = Server(cost.executor, context)
    points = gains("13b", dry_scale("13b"))[:2]
    submit = TorchExecutor.submit

    def refuse_orca(executor, batch):
        if batch.num_decode_tokens and batch.num_prefills:
            raise RunError("out of memory")
        submit(executor, batch)

    monkeypatch.setattr(TorchExecutor, "submit", refuse_orca)
    server.measure(points[:1], until=math.inf)
    assert server.gain(points[0]) is None
    monkeypatch.undo()
    server.measure(points[1:], until=math.inf)
    gain = server.gain(points[1])
    assert gain is not None
    assert gain[0] > 0
    assert cost.executor.num_in_flight == 0


def test_idle_share_is_that_of_the_gaps():
    iterations = pd.DataFrame(
        {"start": [0.0, 1.5, 2.0], "end": [1.0, 2.0, 4.0], "num_running": 1, "num_waiting": 0}
    )
    iterations["busy"] = iterations.end - iterations.start
    assert device_idle_fraction(iterations) == pytest.approx(0.5 / 4.0)
    assert device_idle_fraction(iterations[:1]) == 0
    assert (
        device_idle_fraction(iterations.assign(num_running=0)) == 0
    )  # nobody had asked for anything


@pytest.fixture(scope="module")
def cost():
    backend = TorchBackend(device="cpu", dtype="float32")
    return MeasuredCostModel(
        backend.build(load_option("model", "tiny"), None, Sizes(12, 16, batch_size=4))
    )


def test_a_composition_is_measured_once_and_its_operations_sum_to_the_iteration(cost):
    batch = make_batch(prefill_tokens=24, start=16, num_decodes=2, context=20)
    first = cost.operation_times(batch)
    again = make_batch(prefill_tokens=24, start=16, num_decodes=2, context=20)
    assert cost.operation_times(again) is first
    found = cost.measurements[composition(batch)]
    assert sum(first.values()) == pytest.approx(pd.Series(found.seconds).median())
    assert {"qkv_proj", "out_proj", "ffn", "prefill_attention", "others"} <= set(first)
    assert describe(batch) == "2 decodes at 20 + 24 at 16"
    assert cost.uncertainty["matmul"] >= 0


def test_a_batch_that_does_not_fit_has_no_time_and_gives_no_point(cost):
    too_large = make_batch(prefill_tokens=193)
    assert math.isnan(sum(cost.operation_times(too_large).values()))
    assert composition(too_large) not in cost.measurements
    estimates = [Estimate(math.nan, 0.1), Estimate(-1.0, 0.1), Estimate(2.0, 0.1)]
    points = timed_points(
        {"fig08": [Point("", "1K", x, y) for x, y in enumerate(estimates)]}, "GPU, 13b"
    )
    assert list(points.x) == [2.0]
    assert list(points.unit) == ["ratio"]


def test_placed_sequences_hold_blocks_of_their_own_and_random_tokens(cost):
    placed = cost.placed(make_batch(prefill_tokens=24, start=16, num_decodes=2, context=20))
    blocks = [block for chunk in placed.chunks for block in chunk.sequence.block_ids]
    assert len(blocks) == len(set(blocks)) == 2 + 2 + 3
    assert len({tuple(chunk.sequence.request.prompt_token_ids) for chunk in placed.chunks}) == 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 30])
def test_coarse_to_fine_keeps_all_and_begins_with_the_ends(count):
    order = coarse_to_fine(list(range(count)))
    assert sorted(order) == list(range(count))
    if count > 4:
        assert set(order[:2]) == {0, count - 1}
        assert (
            max(b - a for a, b in zip(sorted(order[:6]), sorted(order[:6])[1:], strict=False))
            <= count / 2
        )


def test_figures_share_the_time_so_that_cheap_ones_come_to_their_end():
    seen: list[str] = []
    figures = [[Unit(name, lambda bench: ()) for _ in range(6)] for name in ("cheap", "dear")]
    seconds = {"cheap": 1.0, "dear": 4.0}
    for unit in in_fair_turns(figures, lambda: sum(seconds[name] for name in seen)):
        seen.append(unit.figure)
    assert seen[:8] == ["cheap", "dear", "cheap", "cheap", "cheap", "cheap", "dear", "cheap"]
    assert seen.count("cheap") == seen.count("dear") == 6


def test_summaries_have_a_median_and_quantiles_and_one_sample_shows_no_spread():
    assert summary([3.0, 1.0, 2.0], "ms") | {} == {
        "value": 2.0,
        "unit": "ms",
        "q20": pytest.approx(1.4),
        "q80": pytest.approx(2.6),
        "repetitions": 3,
    }
    assert spread([1.0, 3.0]) == 0.5
    assert math.isnan(spread([1.0]))


def test_clocks_are_read_from_lines_of_numbers_alone():
    lines = ["1980, 3201, 650.1, 45\n", "[N/A], 1, 2, 3\n", "1500, 3201, 700.0, 50\n", "broken\n"]
    seen = parse_clocks(lines)
    assert seen["sm_mhz"] == {"min": 1500.0, "median": 1740.0, "max": 1980.0}
    assert seen["samples"] == 2
    assert parse_clocks([]) == {}


def test_junit_reports_become_rows(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x" time="0.5"/>'
        '<testcase classname="a" name="y" time="1"><failure message="no"/></testcase>'
        '<testcase classname="a" name="z" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    assert [(row["test"], row["outcome"]) for row in read_report(path)] == [
        ("a::x", "passed"),
        ("a::y", "failed"),
        ("a::z", "skipped"),
    ]


def context_with(tmp_path, tables) -> Context:
    for (part_name, question, name), rows in tables.items():
        Context(part_name, "cpu", True, 1, tmp_path, tmp_path / "tables").write(
            question, name, rows
        )
    return Context("targets", "cpu", True, 1, tmp_path, tmp_path / "tables")


def peaks(flops: float, num_bytes: float):
    rows = [{"quantity": "matmul", "case": "8192x8192x8192", "value": flops, "unit": "TFLOP/s"}]
    rows += [
        {"quantity": "copy", "case": f"{mib} MiB", "value": v, "unit": "GB/s"}
        for mib, v in ((64, 9e9), (1024, num_bytes))
    ]
    return {("peaks", "peaks", "peaks"): rows}


def row_of(context: Context, beginning: str):
    (target,) = [target for target in targets(Tables(context)) if target.name.startswith(beginning)]
    return target.row()


def test_targets_are_judged_by_the_measured_peaks(tmp_path):
    iteration = {
        "operation": "iteration",
        "prefill_tokens": 0,
        "decodes": 8,
        "kv_tokens": 8192,
        "unit": "ms",
    }
    compositions = [
        {**iteration, "flops": 1e9, "bytes": 40e9, "value": 11.0},
        {
            **iteration,
            "prefill_tokens": 1024,
            "decodes": 0,
            "kv_tokens": 1024,
            "flops": 8e12,
            "bytes": 1,
            "value": 20,
        },
        {
            **iteration,
            "prefill_tokens": 239,
            "decodes": 17,
            "kv_tokens": 17647,
            "flops": 6e12,
            "bytes": 4e9,
            "value": 12,
        },
    ]
    tables = {**peaks(500.0, 4000.0), ("figures-13b", "paper", "13b-compositions"): compositions}
    context = context_with(tmp_path, tables)
    decode = row_of(context, "decode-only, 13b, batch 8")
    assert (decode["value"], decode["met"]) == (
        pytest.approx(1.1),
        "yes",
    )  # 40 GB at 4,000 GB/s take 10 ms
    prefill = row_of(context, "prefill of 1024")
    assert (prefill["value"], prefill["met"]) == (pytest.approx(0.8), "no")
    assert prefill["missed_by"] == pytest.approx(1 - 0.8 / 0.85)
    assert row_of(context, "hybrid of 256")["value"] == pytest.approx(
        1.0
    )  # 6 TFLOP at 500 TFLOP/s take 12 ms
    missing = row_of(context, "decode-only, 13b, batch 1 ")
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
        row("hybrid_attention", "mha 256 + 9 x 2048", "fused", None),
        row("hybrid_attention", "gqa 256 + 17 x 1024", "series", 9.0),
        row("hybrid_attention", "gqa 256 + 17 x 1024", "fused", 10.0),
    ]
    context = context_with(
        tmp_path, {**peaks(500.0, 4000.0), ("kernels", "kernels", "kernels"): kernels}
    )
    assert row_of(context, "prefill-chunk attention")["value"] == pytest.approx(0.9)
    assert row_of(context, "decode attention, 32")["value"] == pytest.approx(0.9)
    assert row_of(context, "decode attention, 8 of")["met"] == "not measured"
    hybrid = "hybrid attention: speed over the two kernels in series, least of "
    assert row_of(context, f"{hybrid}the paper's grid")["value"] == pytest.approx(1.2)
    assert row_of(context, f"{hybrid}all cases")["value"] == pytest.approx(0.9)
    flashinfer = row_of(context, "prefill attention: speed over FlashInfer")
    assert (
        flashinfer["reason"]
        == "no case of prefill_attention has times of both: none of ^flashinfer"
    )


def test_nothing_is_judged_without_tables(tmp_path, capsys):
    judge(context_with(tmp_path, {}))
    table = pd.read_csv(tmp_path / "tables" / "targets" / "gpu_targets" / "targets.csv")
    assert (table.met == "not measured").all()
    assert "did not run or failed" in capsys.readouterr().out
    assert Target("x", "<=", 1.0, "ratio", lambda: 1.0).row()["met"] == "yes"
