"""Fits the two constants of `PowerModel` to Splitwise's measured power of Llama-2-70B on an A100,
and states the error there and on BLOOM-176B, which was held out.

`python experiments/after_sarathi/energy/fit_power.py` prints both; `splitwise_power.csv` beside it
holds medians of the repetitions (README.md names source and licence).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.extensions.energy import PowerModel
from sarathi_lab.model.spec import ModelSpec

FITTED, HELD_OUT = "llama2-70b", "bloom-176b"
SAMPLED = 150.0  # ms: the peak of a shorter prompt may be missed by who samples power
IDLE_SHARE = 0.3  # of the limit: an average below it is not of a GPU that serves


def specs() -> dict[str, ModelSpec]:
    like = load_option("model", "llama3.1-70b")
    bloom = {"num_layers": 70, "hidden_size": 14336, "num_heads": 112, "num_kv_heads": 112}
    bloom |= {"head_size": 128, "ffn_size": 57344, "vocab_size": 250880, "max_position": 8192}
    return {
        FITTED: replace(like, name=FITTED, vocab_size=32000),
        HELD_OUT: ModelSpec(HELD_OUT, gated_ffn=False, **bloom),
    }


def with_utilisation(rows: pd.DataFrame, hardware: object) -> pd.DataFrame:
    """The rows with `mfu` and `mbu` of the prompts and, with `_token`, of a token's iteration."""
    known, found = specs(), []
    for row in rows.itertuples():
        spec, batch, prompt = known[row.model], int(row.batch_size), int(row.prompt_size)
        whole = make_batch(prefill_tokens=prompt, num_prefills=batch, emits=True)
        token = make_batch(num_decodes=batch, context=prompt + int(row.token_size) // 2)
        own = {}
        for work, milliseconds, end in (
            (whole, row.prompt_time, ""),
            (token, row.token_time, "_token"),
        ):
            seconds = milliseconds / 1e3 * row.tensor_parallel
            own[f"mfu{end}"] = spec.flops(work) / (seconds * hardware.flops_per_second)
            own[f"mbu{end}"] = spec.min_bytes(work, 2) / (seconds * hardware.bytes_per_second)
        found.append(own)
    return rows.join(pd.DataFrame(found, index=rows.index))


def compared(power: PowerModel, rows: pd.DataFrame) -> pd.DataFrame:
    """Predicted and measured shares of the limit: of each row the peak, as that of the prompt, and
    the average, as that of the whole request.
    """
    prompt = power.watts(rows.mfu, rows.mbu) / power.limit_watts
    token = power.watts(rows.mfu_token, rows.mbu_token) / power.limit_watts
    decoding = (rows.token_size - 1) * rows.token_time
    mean = (rows.prompt_time * prompt + decoding * token) / (rows.prompt_time + decoding)
    is_seen = (rows.prompt_time >= SAMPLED).to_numpy()
    kept = rows.average_power >= IDLE_SHARE
    parts = [
        pd.DataFrame(
            {"what": "peak", "predicted": prompt[is_seen], "measured": rows.peak_power[is_seen]}
        ),
        pd.DataFrame(
            {"what": "average", "predicted": mean[kept], "measured": rows.average_power[kept]}
        ),
    ]
    table = pd.concat(parts)
    return table.assign(error=table.predicted / table.measured - 1)


def main() -> None:
    hardware = load_option("hardware", "a100")
    rows = pd.read_csv(Path(__file__).parent / "splitwise_power.csv")
    rows = with_utilisation(rows, hardware)
    fitted, held_out = (rows[rows.model == name] for name in (FITTED, HELD_OUT))

    def model(constants: np.ndarray) -> PowerModel:
        return replace(hardware.power, compute_weight=constants[0], exponent=constants[1])

    found = least_squares(
        lambda own: compared(model(own), fitted).error, [1.7, 0.7], loss="soft_l1"
    )
    print(f"compute_weight {found.x[0]:.3g}, exponent {found.x[1]:.3g}")
    for name, own in ((FITTED, fitted), (f"{HELD_OUT}, held out", held_out)):
        for what, errors in compared(model(found.x), own).groupby("what").error:
            off = errors.abs()
            print(f"{name}: {what} of {len(off)}: mean {off.mean():.1%}, largest {off.max():.1%}")


if __name__ == "__main__":
    main()
