"""The lab's engine and transformers on the same model shape, weights' type and requests; who else
is installed.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.torch.device import resolve_dtype
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment.loading import load
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import SarathiServe
from sarathi_lab.results.intervals import summary
from sarathi_lab.tasks.gpu.context import Context
from sarathi_lab.workload.base import random_prompt

LAB, GENERATE, CONTINUOUS = (
    "sarathi_lab",
    "transformers generate",
    "transformers continuous batching",
)
STD = 0.02  # of transformers' random weights, its own default
MOST_RUNS = 3
LAB_SHARE, GENERATE_SHARE = 0.3, 0.6  # of the time, by which each is to be done
OTHERS = (
    "flashinfer",
    "vllm",
)  # kernels of the first are timed in the part `kernels`, where it is installed


@dataclass(frozen=True)
class Task:
    """Equal requests, all there at the start: their number, prompt and output tokens, and the lab's
    chunk.
    """

    model: str
    num_requests: int
    prompt_len: int
    output_len: int
    chunk: int

    @property
    def num_tokens(self) -> int:
        return self.num_requests * (self.prompt_len + self.output_len)


FULL = Task("llama3-8b", num_requests=32, prompt_len=960, output_len=64, chunk=512)
DRY = Task("tiny", num_requests=2, prompt_len=24, output_len=4, chunk=16)


def measure(context: Context) -> None:
    """Write peers.csv: tokens per second of each system and the lab's ratio to it; systems that
    fail have an error.
    """
    task = DRY if context.is_dry else FULL
    spec = load_option("model", task.model)
    prompts = [
        random_prompt(i, task.prompt_len, spec.vocab_size, 0) for i in range(task.num_requests)
    ]
    inputs = [prompt.tolist() for prompt in prompts if prompt is not None]
    seconds: dict[str, list[float]] = {}
    errors: dict[str, str] = {name: _installed(name) for name in OTHERS}
    try:
        seconds[LAB] = _time_the_lab(context, task, spec, inputs)
        errors |= dict.fromkeys((GENERATE, CONTINUOUS), "ended before it was done")
        _time_transformers(context, task, spec, inputs, seconds, errors)
    finally:
        context.write("peers", "peers", rows_of(task, seconds, errors))


def rows_of(
    task: Task, seconds: dict[str, list[float]], errors: dict[str, str]
) -> list[dict[str, object]]:
    """Tokens per second of every system, the lab's over each other's, and a row for what has no
    time.
    """
    labels = {
        "model": task.model,
        "requests": task.num_requests,
        "prompt_len": task.prompt_len,
        "output_len": task.output_len,
    }
    rows: list[dict[str, object]] = []
    for system, runs in seconds.items():
        rates = [task.num_tokens / run for run in runs]
        rows.append(
            {
                **labels,
                "system": system,
                "quantity": "throughput",
                **summary(rates, "tokens/s"),
                "error": "",
            }
        )
        if system != LAB:
            # Best against best: the first runs of either may still compile.
            ratio = {
                "value": min(runs) / min(seconds[LAB]),
                "unit": "ratio",
                "repetitions": len(runs),
            }
            rows.append(
                {
                    **labels,
                    "system": system,
                    "quantity": "the lab's throughput / its",
                    **ratio,
                    "error": "",
                }
            )
    return rows + [{**labels, "system": name, "error": error} for name, error in errors.items()]


def _installed(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return f"installed, {version(package)}; not run here"
    except PackageNotFoundError:
        return "installed; not run here"


def _repeat(context: Context, work: Callable[[], object], until: float) -> list[float]:
    """Seconds of each run behind one that does not count, until `context.elapsed` is `until`; at
    least one.
    """
    work()
    runs: list[float] = []
    while not runs or (len(runs) < MOST_RUNS and context.elapsed < until):
        start = time.perf_counter()
        work()  # its tokens are on the host when it returns
        runs.append(time.perf_counter() - start)
    return runs


def _time_the_lab(
    context: Context, task: Task, spec: ModelSpec, inputs: list[list[int]]
) -> list[float]:
    longest = task.prompt_len + task.output_len
    kv_tokens = math.ceil(
        1.02 * task.num_requests * (longest + 16)
    )  # room for the policy's watermark
    _, executor = load(
        context, spec, kv_tokens=kv_tokens, batch_size=task.num_requests, longest=longest
    )
    executor.warm_up(
        batch_size=task.num_requests, chunk_tokens=task.chunk, longest=longest, is_fixed=True
    )
    runs = _repeat(context, lambda: _serve(executor, task, inputs), context.seconds * LAB_SHARE)
    context.say(f"{LAB}: {task.num_tokens / min(runs):.0f} tokens/s")
    return runs


def _serve(executor: TorchExecutor, task: Task, inputs: list[list[int]]) -> None:
    blocks = BlockManager(executor.num_blocks, executor.block_size)
    longest = task.prompt_len + task.output_len
    policy = SarathiServe(chunk=task.chunk)
    scheduler = Scheduler(policy, blocks, batch_size=task.num_requests, max_model_len=longest)
    requests = [Request(i, 0.0, len(ids), task.output_len, ids) for i, ids in enumerate(inputs)]
    run_engine(requests, scheduler, executor, Ledger())


def _time_transformers(
    context: Context,
    task: Task,
    spec: ModelSpec,
    inputs: list[list[int]],
    seconds: dict[str, list[float]],
    errors: dict[str, str],
) -> None:
    """Both of its ways to generate; one that fails leaves its reason in `errors`."""
    gc.collect()
    if context.device != "cpu":
        torch.cuda.empty_cache()
    try:
        model, config = _transformers_model(context, task, spec)
    except Exception as error:  # whatever the library raises, the lab's own times are kept
        errors |= dict.fromkeys((GENERATE, CONTINUOUS), _line(error))
        return
    ways = {
        GENERATE: (
            lambda: _generate(model, config, inputs, task),
            context.seconds * GENERATE_SHARE,
        ),
        CONTINUOUS: (lambda: _generate_continuously(model, config, inputs, task), context.seconds),
    }
    for name, (work, until) in ways.items():
        try:
            seconds[name] = _repeat(context, work, until)
            del errors[name]
            context.say(f"{name}: {task.num_tokens / min(seconds[name]):.0f} tokens/s")
        except Exception as error:
            errors[name] = _line(error)
            context.say(f"{name}: {errors[name]}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _transformers_model(context: Context, task: Task, spec: ModelSpec) -> tuple[Any, Any]:
    """A Llama of the same shape with random weights, made on the device, and how it is to
    generate.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    device = torch.device(context.device)
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        intermediate_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(resolve_dtype("auto", device)[1])
    try:
        with device:
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, STD)
    generation = GenerationConfig(
        max_new_tokens=task.output_len,
        do_sample=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model.generation_config = generation
    return model, generation


def _generate(model: Any, generation: Any, inputs: list[list[int]], task: Task) -> None:
    input_ids = torch.tensor(inputs, device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=generation
        )
    _check_length(out.shape[1] - task.prompt_len, task)
    out.cpu()


def _generate_continuously(
    model: Any, generation: Any, inputs: list[list[int]], task: Task
) -> None:
    """With a manager that is kept, where the version can: making one is no part of serving."""
    known = inspect.signature(model.generate_batch).parameters
    options: dict[str, Any] = {"persistent_manager": True} if "persistent_manager" in known else {}
    if model.device.type == "cpu" and "continuous_batching_config" in known:
        from transformers import ContinuousBatchingConfig

        # By itself it takes most of the memory, and seconds to do so.
        options["continuous_batching_config"] = ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64
        )
    found = model.generate_batch(inputs=inputs, generation_config=generation, **options)
    if len(found) != len(inputs):
        raise RuntimeError(f"{len(found)} of {len(inputs)} requests came back")
    for output in found.values():
        _check_length(len(output.generated_tokens), task)


def _check_length(num_tokens: int, task: Task) -> None:
    """The comparison is of equal work, or none."""
    if num_tokens != task.output_len:
        raise RuntimeError(f"{num_tokens} tokens came back, {task.output_len} were asked for")
