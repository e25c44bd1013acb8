"""The task `endpoint`: a running server under the lab's workloads, recorded as the lab's own runs
are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config import console
from sarathi_lab.config.errors import (
    RunError,
    UserError,
    require_int,
    require_number,
    require_one_of,
)
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.results import report
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import show
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.endpoint.protocol import APIS, PROMPTS, Dialect, Texts, dialects, words
from sarathi_lab.workload import LoadedRequests

if TYPE_CHECKING:
    from sarathi_lab.tasks.endpoint.client import Answer, Client, ServerInfo, Settings

PROBE_PROMPT = list(range(3, 11))  # token ids of a first, small request
READ = ("workload", "batch", "seed", "pd_ratio", "seq_len")


@dataclass(frozen=True)
class Served:
    """A server that answers: what it says of itself, how it is asked, and what it is called."""

    info: ServerInfo
    dialect: Dialect
    name: str


@dataclass(frozen=True)
class Endpoint:
    """Sends the workload to the server at `base_url`; see `conf/task/endpoint.yaml` for the
    settings.

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
        require_int(
            "task.concurrency",
            self.concurrency,
            1,
            "use the number of requests in flight, such as 8",
        )
        require_int(
            "task.vocab_size", self.vocab_size, 16, "use at most the size of the model's vocabulary"
        )
        require_number("task.timeout", self.timeout, above=0, fix="use seconds such as 600")
        require_int("task.retries", self.retries, 0, "use a small number such as 5")

    def check(self, cfg: DictConfig) -> None:
        """Refuse an address that is none, and a workload that gives no requests; the server is not
        asked.
        """
        if find_spec("httpx2") is None:
            raise UserError("package httpx2 is missing; run pip install 'sarathi-lab[endpoint]'")
        parts = urlsplit(str(self.base_url or ""))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"task.base_url={self.base_url} is no address; name the server's, such as "
                "http://127.0.0.1:8000/v1"
            )
        self._load(cfg, Texts())

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Drive the server and leave the tables of a run. Raises RunError if no request was
        answered.
        """
        tracker: Tracker = build(cfg.tracking)
        texts = Texts()
        load = self._load(cfg, texts)
        answers: list[Answer] = []
        served: list[Served] = []
        try:
            asyncio.run(self._serve(load, texts, place, served, answers))
        except KeyboardInterrupt:
            if answers:
                labels = self._labels(cfg, place, load, served[0])
                _keep_finished_part(place.run_dir, answers, {**labels, "error": "interrupted"})
            raise
        labels = self._labels(cfg, place, load, served[0])
        settings = resolved(cfg)
        config = {"task": "endpoint", **{name: settings[name] for name in READ}}
        OmegaConf.save(OmegaConf.create(config), place.run_dir / "config.yaml")
        tags = [str(labels[key]) for key in ("policy", "model", "device", "executor")]
        with tracker.run(
            name=labels["name"],
            group=place.group,
            job_type=place.experiment or "endpoint",
            tags=tags,
            config={**labels, "settings": config},
        ) as tracked:
            iterations, summary, words_of_caution = _record(answers, place.run_dir, labels)
            tracked.log_iterations(iterations)
            tracked.log_summary(summary)
            tracked.log_tables(place.run_dir)
            # last: marks the folder as complete
            write_json(
                place.run_dir / "run.json",
                {**labels, "cautions": words_of_caution, "status": "finished"},
            )
        show([report.summary_table(labels["policy"], summary)])

    @property
    def _url(self) -> str:
        return str(self.base_url).rstrip("/")

    def _load(self, cfg: DictConfig, texts: Texts) -> LoadedRequests:
        load = build(cfg.workload).generate(self.vocab_size, texts.encode)
        if load.num_users is not None:
            raise UserError(
                "workload.arrivals=users is not driven by task=endpoint; use "
                "workload.arrivals=closed with "
                f"task.concurrency={load.num_users}, which is {load.num_users} users who do not "
                "think"
            )
        return load

    def _settings(self) -> Settings:
        from sarathi_lab.tasks.endpoint.client import Settings

        key = os.environ.get(self.api_key_variable, "").strip() or None
        return Settings(self._url, key, float(self.timeout), self.retries, self.model, self.body)

    async def _serve(
        self,
        load: LoadedRequests,
        texts: Texts,
        place: RunContext,
        served: list[Served],
        answers: list[Answer],
    ) -> None:
        """Find out how the server is asked, then ask; `served` and `answers` grow as it goes, and
        outlast Ctrl-C.
        """
        from sarathi_lab.tasks.endpoint.client import Client
        from sarathi_lab.tasks.endpoint.load import drive

        async with Client(self._settings()) as client:
            found = await self._meet(client, load)
            served.append(found)
            self._announce(found, load, place)
            contents = {
                request.request_id: client.content(
                    found.dialect,
                    found.info.model,
                    texts.prompt(request, as_token_ids=found.dialect.sends_token_ids),
                    request.output_len,
                )
                for request in load.requests
            }
            with console.progress_of("serving", len(load.requests), "requests") as advance:

                def keep(answer: Answer) -> None:
                    answers.append(answer)
                    advance(1)

                await drive(
                    client, found.dialect.path, load.requests, contents, self.concurrency, keep
                )

    async def _meet(self, client: Client, load: LoadedRequests) -> Served:
        """What the server is and takes. Raises UserError if it is not there, or can't take the
        workload.
        """
        info = await client.info()
        longest = max(request.total_len for request in load.requests)
        if info.max_model_len is not None and longest > info.max_model_len:
            raise UserError(
                f"the longest request has {longest} tokens, but {info.model} at {self._url} takes "
                f"{info.max_model_len}; shorten it"
            )
        asked = dialects(self.api, self.prompts)
        dialect = await client.choose(asked, info.model, PROBE_PROMPT, words(PROBE_PROMPT))
        return Served(info, dialect, self.server or info.name)

    def _announce(self, served: Served, load: LoadedRequests, place: RunContext) -> None:
        from sarathi_lab.tasks.endpoint.load import is_closed

        limit = (
            f"at most {self.concurrency} in flight"
            if is_closed(load.requests)
            else "sent as they arrive"
        )
        out = console.console()
        out.print(f"\n{_run_name(served.name, place)}", style="bold")
        out.print(f"  {served.info.model} on {served.name} at {self._url}", soft_wrap=True)
        out.print(f"  {served.dialect.describe()}", soft_wrap=True)
        out.print(f"  {load.describe()}, {limit}", soft_wrap=True)

    def _labels(
        self, cfg: DictConfig, place: RunContext, load: LoadedRequests, served: Served
    ) -> dict[str, Any]:
        """As `runner` labels the lab's runs; what is the server's own business is None."""
        from sarathi_lab.tasks.endpoint.load import is_closed

        workload = resolved(cfg)["workload"]
        return {
            "name": _run_name(served.name, place),
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


def _run_name(server: str, place: RunContext) -> str:
    """The server, and what sets the run apart but for the address, unless that is what is swept."""
    parts = place.name.split(" ")[1:]
    unnamed = (
        "task",
        *(
            name
            for name in ("task.base_url", "task.server", "task.model")
            if name not in place.swept
        ),
    )
    return " ".join([server, *(part for part in parts if part.partition("=")[0] not in unnamed)])


def _record(
    answers: Sequence[Answer], run_dir: Path, labels: Mapping[str, Any]
) -> tuple[pd.DataFrame, dict[str, float], list[str]]:
    """Write all tables; returns the intervals, the summary and the cautions. Raises RunError if all
    failed.
    """
    from sarathi_lab.tasks.endpoint import record

    failures = record.failures_table(answers)
    _print_failures(record.reasons(failures), len(answers))
    if len(failures) == len(answers):
        commonest = next(iter(record.reasons(failures)))
        error = (
            f"all {len(answers)} requests failed, most of them with: {commonest}; see "
            f"failures.parquet in {run_dir}"
        )
        _keep_finished_part(run_dir, answers, {**labels, "error": error})
        raise RunError(error)
    requests, iterations = record.requests_table(answers), record.intervals_table(answers)
    summary = record.summarise_answers(answers, requests)
    requests.to_parquet(run_dir / "requests.parquet")
    failures.to_parquet(run_dir / "failures.parquet")
    iterations.to_parquet(run_dir / "iterations.parquet")
    write_json(run_dir / "summary.json", summary)
    cautions = record.cautions(answers, summary)
    for caution in cautions:
        console.console().print(f"  {caution}", soft_wrap=True)
    return iterations, summary, cautions


def _print_failures(reasons: Mapping[str, int], total: int) -> None:
    for reason, count in reasons.items():
        console.console().print(f"  {count} of {total} requests failed: {reason}", soft_wrap=True)


def _keep_finished_part(
    run_dir: Path, answers: Sequence[Answer], labels: Mapping[str, Any]
) -> None:
    """Write what came before a run stopped; without `run.json`, so that nobody takes it for a whole
    one.
    """
    from sarathi_lab.tasks.endpoint import record

    run_dir.mkdir(parents=True, exist_ok=True)
    record.requests_table(answers).to_parquet(run_dir / "requests.parquet")
    record.failures_table(answers).to_parquet(run_dir / "failures.parquet")
    write_json(run_dir / "failed.json", labels)
