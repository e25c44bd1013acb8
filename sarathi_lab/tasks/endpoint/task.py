"""The task `endpoint`: a running server under the lab's workloads, recorded as the lab's runs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omegaconf import DictConfig

from sarathi_lab.config.checked import number, one_of, text, whole
from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.request import Request
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import summary_table
from sarathi_lab.results.result import ITERATIONS, REQUESTS, Result, Stopped, show, write_stopped
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.endpoint import protocol, record
from sarathi_lab.tasks.endpoint.protocol import Answer, Dialect, Texts, is_closed
from sarathi_lab.workload import LoadedRequests

if TYPE_CHECKING:
    from sarathi_lab.tasks.endpoint.client import Client, ServerInfo

FAILURES = "failures.parquet"
PROBE_PROMPT = list(range(3, 11))  # token ids of a first, small request
READ = ("workload", "batch", "seed", "pd_ratio", "seq_len")


@dataclass(frozen=True)
class Endpoint(Task):
    """Sends the workload to the server at `base_url`; its settings: `conf/task/endpoint.yaml`."""

    reads = READ
    has_runs = True
    base_url: str | None
    concurrency: int = whole(minimum=1, fix="use the number of requests in flight, such as 8")
    api: str = one_of("completions", valid=protocol.APIS)
    model: str | None = text(None, fix="use the model's name, or null for the first one listed")
    server: str | None = text(None, fix="use a name such as vllm, or null for what the server says")
    api_key_variable: str = "SARATHI_LAB_API_KEY"
    prompts: str = one_of("auto", valid=protocol.PROMPTS)
    vocab_size: int = whole(10000, minimum=16, fix="use at most the size of the model's vocabulary")
    timeout: float = number(600.0, above=0, fix="use seconds such as 600")
    retries: int = whole(5, minimum=0, fix="use a small number such as 5")
    body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.body, Mapping | None):
            raise UserError(f"task.body={self.body} holds no fields; use some such as {{top_k: 1}}")
        # A key that stands there by mistake is not said.
        if not re.fullmatch(r"[A-Za-z_]\w*", str(self.api_key_variable or "")):
            raise UserError(
                "task.api_key_variable is no variable's name; use one such as SARATHI_LAB_API_KEY"
            )
        if self.api == "chat" and self.prompts == "token_ids":
            raise UserError(
                "task.prompts=token_ids is not for task.api=chat, which takes text; use "
                "task.prompts=auto"
            )

    def check(self, cfg: DictConfig) -> None:
        """Refuse an address that is none and a workload without requests; asks no server."""
        if find_spec("httpx2") is None:
            raise UserError("package httpx2 is missing; run pip install 'sarathi-lab[endpoint]'")
        if "@" in str(self.base_url):  # and is not said, as the address is kept with the results
            raise UserError(
                "task.base_url has a user name or a password, which results would keep; leave it "
                f"out, and put 'Basic BASE64' into the variable {self.api_key_variable}"
            )
        if not _is_address(str(self.base_url)):
            raise UserError(
                f"task.base_url={self.base_url} is no address; name the server's, such as "
                "http://127.0.0.1:8000/v1"
            )
        key = self._key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the key in {self.api_key_variable} has characters that no request's header takes "
                "(a line's end, or no ASCII); correct the variable"
            )
        self._load(cfg, Texts())

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The answers of the server. Raises Stopped if no request was answered."""
        texts = Texts()
        load = self._load(cfg, texts)
        info, dialect = asyncio.run(self._meet(load))
        at_once = f"at most {self.concurrency} in flight"
        limit = at_once if is_closed(load.requests) else "sent as they arrive"
        name, out = _run_name(info.name, context), console()
        out.print(f"\n{name}", style="bold")
        out.print(f"  {info.model} on {info.name} at {self._url}", soft_wrap=True)
        out.print(f"  {dialect.describe()}", soft_wrap=True)
        out.print(f"  {load.describe()}, {limit}", soft_wrap=True)
        labels = {"name": name, **self._labels(cfg, load, info, dialect)}
        answers: list[Answer] = []
        try:
            asyncio.run(self._send(info.model, dialect, load.requests, texts, answers))
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
        if load.sessions:
            raise UserError(
                f"workload={load.name} is not driven by task=endpoint, which sends no answer back; "
                "use another workload"
            )
        if load.num_users is not None:
            raise UserError(
                "workload.arrivals=users is not driven by task=endpoint; use "
                f"workload.arrivals=closed with task.concurrency={load.num_users}, which is "
                f"{load.num_users} users who do not think"
            )
        return load

    @property
    def _key(self) -> str | None:
        return os.environ.get(self.api_key_variable, "").strip() or None

    def _client(self) -> Client:
        from sarathi_lab.tasks.endpoint.client import Client

        limits = (float(self.timeout), self.retries)
        return Client(self._url, self._key, *limits, self.model, self.body or {})

    async def _meet(self, load: LoadedRequests) -> tuple[ServerInfo, Dialect]:
        """The server and its dialect. Raises UserError if it is away, or can't take the load."""
        async with self._client().connected() as client:
            info = await client.info()
            longest = max(request.total_len for request in load.requests)
            if info.max_model_len is not None and longest > info.max_model_len:
                raise UserError(
                    f"the longest request has {longest} tokens, but {info.model} at {self._url} "
                    f"takes {info.max_model_len}; shorten it"
                )
            asked, text = protocol.dialects(self.api, self.prompts), protocol.words(PROBE_PROMPT)
            dialect = await client.choose(asked, info.model, PROBE_PROMPT, text)
        return info._replace(name=self.server or info.name), dialect

    async def _send(
        self,
        model: str,
        dialect: Dialect,
        requests: Sequence[Request],
        texts: Texts,
        answers: list[Answer],
    ) -> None:
        """Send all requests; `answers` grows as they come, and outlasts Ctrl-C."""
        from sarathi_lab.tasks.endpoint.client import drive

        async with self._client().connected() as client:
            contents = {}
            for request in requests:
                prompt = texts.prompt(request, as_token_ids=dialect.sends_token_ids)
                content = client.content(dialect, model, prompt, request.output_len)
                contents[request.request_id] = content
            with progress_of("serving", len(requests), "requests") as progress:

                def keep(answer: Answer) -> None:
                    answers.append(answer)
                    progress(1)

                limit = self.concurrency
                await drive(client, dialect.path, requests, contents, limit, keep)

    def _labels(
        self, cfg: DictConfig, load: LoadedRequests, info: ServerInfo, dialect: Dialect
    ) -> dict[str, Any]:
        """Those of the lab's own runs; None for what only the server knows."""
        workload = resolved(cfg)["workload"]
        return {
            "policy": info.name,
            "batch": self.concurrency if is_closed(load.requests) else None,
            "seed": workload.get("seed"),
            "chunk": None,
            **{key: workload.get(key) for key in ("pd_ratio", "seq_len")},
            "workload": load.name,
            "model": info.model.rstrip("/").rpartition("/")[2],
            "executor": "endpoint",
            "device": urlsplit(self._url).netloc,
            "threads": None,
            "dtype": "unknown dtype",
            "asked": dialect.describe(),
            **provenance(),
            "is_baseline": False,
            "baselines": {},
        }


def _is_address(url: str) -> bool:
    """Whether paths can be added to `url` and asked for over HTTP."""
    import httpx2

    try:
        parts, port = httpx2.URL(url), urlsplit(url).port
    except (ValueError, httpx2.InvalidURL):
        return False
    is_plain = not (parts.query or parts.fragment) and port != 0
    return parts.scheme in ("http", "https") and bool(parts.host) and is_plain


def _run_name(server: str, context: RunContext) -> str:
    """The server and the run's settings, its address only if that is swept."""
    named = {"task.base_url", "task.server", "task.model"} - set(context.swept)
    parts = context.name.split(" ")[1:]
    kept = [part for part in parts if part.partition("=")[0] not in {"task", *named}]
    return " ".join([server, *kept])


def _finished_part(answers: list[Answer], labels: Mapping[str, Any], cfg: DictConfig) -> Result:
    settings = resolved(cfg)
    finished = [answer for answer in answers if not answer.error]
    failed = [answer for answer in answers if answer.error]
    return Result(
        tables={
            REQUESTS: record.table_of(finished, record.FINISHED),
            FAILURES: record.table_of(failed, record.FAILED),
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
    reasons = part.tables[FAILURES].reason.value_counts()  # the commonest first
    total, requests = len(answers), part.tables[REQUESTS]
    lines = [f"  {count} of {total} requests failed: {why}" for why, count in reasons.items()]
    if requests.empty:
        show(lines)
        raise Stopped(
            f"all {total} requests failed, most of them with: {reasons.index[0]}; see "
            f"{FAILURES} in {context.run_dir}",
            part,
        )
    summary = record.summarise_answers(answers, requests)
    cautions = record.cautions(answers, summary)
    lines += [f"  {caution}" for caution in cautions]
    return replace(
        part,
        tables={**part.tables, ITERATIONS: record.intervals_table(answers)},
        summary=summary,
        shown=[*lines, *summary_table(labels["policy"], summary, is_whole=context.is_verbose)],
        labels={**labels, "cautions": cautions},
    )
