"""The task `endpoint`: a running server under the lab's workloads, recorded as the lab's runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from omegaconf import DictConfig

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import summary_table
from sarathi_lab.results.result import Result, Stopped, show, write_stopped
from sarathi_lab.tasks.endpoint import load as generator
from sarathi_lab.tasks.endpoint import record
from sarathi_lab.tasks.endpoint.load import is_closed
from sarathi_lab.tasks.endpoint.protocol import (
    APIS,
    PROMPTS,
    Answer,
    Dialect,
    Texts,
    dialects,
    words,
)
from sarathi_lab.workload import LoadedRequests

if TYPE_CHECKING:
    from sarathi_lab.tasks.endpoint.client import Client, ServerInfo

PROBE_PROMPT = list(range(3, 11))  # token ids of a first, small request
READ = ("workload", "batch", "seed", "pd_ratio", "seq_len")


@dataclass(frozen=True)
class Served:
    """A server that answers: its model and name, and the dialect it is asked in."""

    info: ServerInfo
    dialect: Dialect
    name: str


@dataclass(frozen=True)
class Endpoint:
    """Sends the workload to the server at `base_url`; `conf/task/endpoint.yaml` has the settings.

    Raises UserError for settings that name nothing.
    """

    reads: ClassVar[tuple[str, ...]] = READ
    has_runs: ClassVar[bool] = True
    base_url: str | None
    concurrency: int
    api: str = "completions"
    model: str | None = None
    server: str | None = None
    api_key_variable: str = "SARATHI_LAB_API_KEY"
    prompts: str = "auto"
    vocab_size: int = 10000
    timeout: float = 600.0
    retries: int = 5
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_one_of("task.api", self.api, APIS)
        require_one_of("task.prompts", self.prompts, PROMPTS)
        if self.api == "chat" and self.prompts == "token_ids":
            raise UserError(
                "task.prompts=token_ids is not for task.api=chat, which takes text; use "
                "task.prompts=auto"
            )
        in_flight = "use the number of requests in flight, such as 8"
        require_int("task.concurrency", self.concurrency, 1, in_flight)
        vocabulary = "use at most the size of the model's vocabulary"
        require_int("task.vocab_size", self.vocab_size, 16, vocabulary)
        require_number("task.timeout", self.timeout, above=0, fix="use seconds such as 600")
        require_int("task.retries", self.retries, 0, "use a small number such as 5")

    def check(self, cfg: DictConfig) -> None:
        """Refuse an address that is none and a workload without requests; asks no server."""
        if find_spec("httpx2") is None:
            raise UserError("package httpx2 is missing; run pip install 'sarathi-lab[endpoint]'")
        parts = urlsplit(str(self.base_url or ""))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"task.base_url={self.base_url} is no address; name the server's, such as "
                "http://127.0.0.1:8000/v1"
            )
        self._load(cfg, Texts())

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The answers of the server. Raises Stopped if no request was answered."""
        texts = Texts()
        load = self._load(cfg, texts)
        served = asyncio.run(self._meet(load))
        self._announce(served, load, context)
        labels = self._labels(cfg, context, load, served)
        answers: list[Answer] = []
        try:
            asyncio.run(self._send(served, load, texts, answers))
        except KeyboardInterrupt:
            if answers:
                result = _finished_part(answers, labels, cfg)
                write_stopped(result, context, "interrupted")
            raise
        return _result(answers, labels, cfg, context)

    @property
    def _url(self) -> str:
        return str(self.base_url).rstrip("/")

    def _load(self, cfg: DictConfig, texts: Texts) -> LoadedRequests:
        load = build(cfg.workload).generate(self.vocab_size, texts.encode)
        if load.num_users is not None:
            raise UserError(
                "workload.arrivals=users is not driven by task=endpoint; use "
                f"workload.arrivals=closed with task.concurrency={load.num_users}, which is "
                f"{load.num_users} users who do not think"
            )
        return load

    def _client(self) -> Client:
        from sarathi_lab.tasks.endpoint.client import Client

        key = os.environ.get(self.api_key_variable, "").strip() or None
        return Client(self._url, key, float(self.timeout), self.retries, self.model, self.body)

    async def _meet(self, load: LoadedRequests) -> Served:
        """The server and its dialect. Raises UserError if it is away, or can't take the load."""
        async with self._client() as client:
            info = await client.info()
            longest = max(request.total_len for request in load.requests)
            if info.max_model_len is not None and longest > info.max_model_len:
                raise UserError(
                    f"the longest request has {longest} tokens, but {info.model} at {self._url} "
                    f"takes {info.max_model_len}; shorten it"
                )
            asked = dialects(self.api, self.prompts)
            dialect = await client.choose(asked, info.model, PROBE_PROMPT, words(PROBE_PROMPT))
        return Served(info, dialect, self.server or info.name)

    async def _send(
        self, served: Served, load: LoadedRequests, texts: Texts, answers: list[Answer]
    ) -> None:
        """Send all requests; `answers` grows as they come, and outlasts Ctrl-C."""
        dialect, model, requests = served.dialect, served.info.model, load.requests
        async with self._client() as client:
            contents = {}
            for request in requests:
                prompt = texts.prompt(request, as_token_ids=dialect.sends_token_ids)
                content = client.content(dialect, model, prompt, request.output_len)
                contents[request.request_id] = content
            with console.progress_of("serving", len(requests), "requests") as progress:

                def keep(answer: Answer) -> None:
                    answers.append(answer)
                    progress(1)

                limit = self.concurrency
                await generator.drive(client, dialect.path, requests, contents, limit, keep)

    def _announce(self, served: Served, load: LoadedRequests, context: RunContext) -> None:
        at_once = f"at most {self.concurrency} in flight"
        limit = at_once if is_closed(load.requests) else "sent as they arrive"
        out = console.console()
        out.print(f"\n{_run_name(served.name, context)}", style="bold")
        out.print(f"  {served.info.model} on {served.name} at {self._url}", soft_wrap=True)
        out.print(f"  {served.dialect.describe()}", soft_wrap=True)
        out.print(f"  {load.describe()}, {limit}", soft_wrap=True)

    def _labels(
        self, cfg: DictConfig, context: RunContext, load: LoadedRequests, served: Served
    ) -> dict[str, Any]:
        """Those of the lab's own runs; None for what only the server knows."""
        workload = resolved(cfg)["workload"]
        return {
            "name": _run_name(served.name, context),
            "policy": served.name,
            "batch": self.concurrency if is_closed(load.requests) else None,
            "seed": workload.get("seed"),
            "chunk": None,
            "pd_ratio": workload.get("pd_ratio"),
            "seq_len": workload.get("seq_len"),
            "workload": load.name,
            "model": served.info.model.rstrip("/").rpartition("/")[2],
            "executor": "endpoint",
            "device": urlsplit(self._url).netloc.rpartition("@")[2],
            "threads": None,
            "dtype": "unknown dtype",
            "asked": served.dialect.describe(),
            **provenance(),
            "is_baseline": False,
            "baselines": {},
        }


def _run_name(server: str, context: RunContext) -> str:
    """The server and the run's settings, its address only if that is swept."""
    named = {"task.base_url", "task.server", "task.model"} - set(context.swept)
    parts = context.name.split(" ")[1:]
    kept = [part for part in parts if part.partition("=")[0] not in {"task", *named}]
    return " ".join([server, *kept])


def _finished_part(answers: list[Answer], labels: Mapping[str, Any], cfg: DictConfig) -> Result:
    settings = resolved(cfg)
    return Result(
        tables={
            "requests.parquet": record.requests_table(answers),
            "failures.parquet": record.failures_table(answers),
        },
        labels=labels,
        tags=[str(labels[key]) for key in ("policy", "model", "device", "executor")],
        config={"task": "endpoint", **{name: settings[name] for name in READ}},
    )


def _result(
    answers: list[Answer], labels: Mapping[str, Any], cfg: DictConfig, context: RunContext
) -> Result:
    """All tables, the summary and the cautions. Raises Stopped if all failed."""
    part = _finished_part(answers, labels, cfg)
    reasons, total = record.reasons(part.tables["failures.parquet"]), len(answers)
    lines = [f"  {count} of {total} requests failed: {why}" for why, count in reasons.items()]
    if sum(reasons.values()) == total:
        show(lines)
        raise Stopped(
            f"all {total} requests failed, most of them with: {next(iter(reasons))}; see "
            f"failures.parquet in {context.run_dir}",
            part,
        )
    requests = part.tables["requests.parquet"]
    summary = record.summarise_answers(answers, requests)
    cautions = record.cautions(answers, summary)
    return replace(
        part,
        tables={**part.tables, "iterations.parquet": record.intervals_table(answers)},
        summary=summary,
        shown=[
            *lines,
            *(f"  {caution}" for caution in cautions),
            summary_table(labels["policy"], summary),
        ],
        labels={**labels, "cautions": cautions},
    )
