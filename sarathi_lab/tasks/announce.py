"""What a run prints before it begins: model, device, workload and cache, and the advised chunk."""

from __future__ import annotations

from sarathi_lab.config.console import console
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.advisor import Advice
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.report import cell, print_device
from sarathi_lab.results.result import Shown, show
from sarathi_lab.tasks.plan import Plan

ADVICE_COLUMNS = {
    "throughput": "tokens/s",
    "throughput_vs_request_level": "x request_level",
    "throughput_vs_orca": "x orca",
    "kv_reread_factor": "KV re-read",
    "tbt_p50": "TBT P50 [ms]",
    "tbt_p99": "TBT P99 [ms]",
}


def announce(plan: Plan, context: RunContext, peaks: Peaks, predicted_roofline: float) -> None:
    """Print the plan, and the least seconds that it can take."""
    print_plan(plan, context)
    console().print(f"  predicted roofline {predicted_roofline:.2f} s (peaks {peaks.describe()})")
    if plan.advice is not None:
        print_advice(plan.advice)


def print_plan(plan: Plan, context: RunContext) -> None:
    """Print model, device, policy, workload and cache."""
    print_device(context, plan.spec, plan.backend, str(plan.policy))
    cache = f"cache {plan.num_blocks} x {plan.block_size} tokens"
    console().print(f"  {plan.load.describe()}, batch {plan.batch_size}, {cache}")


def print_advice(advice: Advice) -> None:
    """Print the chunk that chunk=auto stands for, and the predictions it was chosen by."""
    columns = [name for name in ADVICE_COLUMNS if name in advice.table]
    rows = [
        {
            "chunk": f"{row['chunk']} {'*' if row['is_as_good'] else ' '}",
            **{ADVICE_COLUMNS[name]: cell(name, row[name]) for name in columns},
        }
        for row in advice.table.to_dict("records")
    ]
    title = (
        f"  chunk=auto is {advice.chunk}, by these predictions (* within 1 % of the most tokens/s)"
    )
    show([title, Shown(rows)])
