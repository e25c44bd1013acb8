"""The time of a whole answer, by the cost model and mean values alone: no schedule, five seconds.

    python experiments/lab/silicon_points/answers.py POINTS.csv

While a user waits for an answer, each of the others' prompts is computed once and so is the user's
own, whoever rides with whom; the rest are iterations of decodes. So an answer takes its tokens but
one times the iteration of all users' decodes in mid-answer, and the prompt's time once for each
user. That holds as long as all users' tokens fit the cache; what a user waits before and what after
the first token is `simulate.py`'s.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
from report import FOLDER, LEVEL, SERIES, ratios
from simulate import BLOCK_SIZE, INFERENCE_MAX, SHORTEST, Point, chosen

from sarathi_lab.config.csv_files import write_csv
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.results.plots.files import save_figure

ANY = {"isl": 0, "osl": 0, "concurrency": 0, "real_ttft": 0.0, "real_tpot": 0.0, "version": ""}
MEAN_SHARE = (1 + SHORTEST) / 2  # of the nominal length, where lengths are drawn


@cache
def predictor_of(alike: Point) -> Predictor:
    """What predicts an iteration's seconds."""
    predictor = alike.device.predictor(alike.spec)
    assert predictor is not None, "a simulated device has one"
    return predictor


def answer(point: Point) -> dict[str, object]:
    """A decode iteration, a prompt and an answer, in ms; and the relative error of the last."""
    predict = predictor_of(replace(point, **ANY, id=point.id[: len(INFERENCE_MAX)]))
    num_users = point.concurrency
    cache_tokens = point.device.kv_blocks(point.spec, BLOCK_SIZE, point.setup) * BLOCK_SIZE
    mean_share = MEAN_SHARE if point.is_inference_max else 1.0
    prompt_len = int(mean_share * point.isl)
    output_len = int(mean_share * point.osl)
    decodes = make_batch(num_decodes=num_users, context=prompt_len + output_len // 2)
    decode_ms = 1e3 * predict(decodes)
    times = predict.operation_times(make_batch(prefill_tokens=prompt_len))
    # A prompt rides on iterations that pay the host.
    prompt_ms = 1e3 * (sum(times.values()) - times["overhead"])
    real_ms = point.real_ttft + (output_len - 1) * point.real_tpot
    predicted_ms = (output_len - 1) * decode_ms + num_users * prompt_ms
    return {
        **vars(point),
        "fits": num_users * (point.isl + point.osl) <= cache_tokens,
        "step": decode_ms,
        "prompt": prompt_ms,
        "real": real_ms,
        "told": predicted_ms,
        "error": predicted_ms / real_ms - 1,
    }


def errors(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Points, median and mean absolute error, median error (bias) and the 90th percentile."""
    groups = table.groupby(by).error
    return groups.agg(
        points="size",
        median=lambda error: error.abs().median(),
        mean=lambda error: error.abs().mean(),
        bias="median",
        p90=lambda error: error.abs().quantile(0.9),
    ).reset_index()


def main() -> None:
    with Path(sys.argv[1]).open(newline="") as file:
        points, reasons = chosen(csv.DictReader(file))
    rows = [answer(point) for point in points]
    for point in points:
        if point.weights == "auto":
            rows.append(answer(replace(point, cost_model="profiled")))
    table = pd.DataFrame(rows)
    FOLDER.mkdir(exist_ok=True)
    write_csv(FOLDER / "answers.csv", table.round(4).to_csv(index=False))
    for level, own in table[table.fits].groupby("cost_model"):
        error = own.error.abs()
        print(f"\n{level}, {len(own)} points: median {error.median():.1%}, mean {error.mean():.1%}")
        for by in (SERIES, ["concurrency"], ["tp"], ["isl"], ["osl"]):
            print("\n" + errors(own, by).to_string(index=False, float_format="{:.3f}".format))
    of_level = table[table.cost_model == LEVEL]
    print(f"\n{(~of_level.fits).sum():5} do not fit the cache")
    fitting = of_level[of_level.fits]
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}")
    shown = {"simulated / real": fitting.assign(ratio=fitting.told / fitting.real)}
    picture = ratios(shown, "Time of a whole answer, simulated over measured")
    save_figure(picture, FOLDER / "answers.png")


if __name__ == "__main__":
    main()
