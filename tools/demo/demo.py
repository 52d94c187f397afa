"""Prefill and decode instances behind a router, compared with full KV."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tools.demo.prompts import MAX_PROMPT_TOKENS, NoQuestionError, Question, make_questions
from tools.demo.report import Report, find_stats, kv_layout, make_result
from tools.demo.stages import Stages, Update
from tools.demo.table import answer_table, request_table, totals, verdict
from tools.harness.deployment import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    Deployment,
    MissingPackageError,
    hisparse_connector,
)
from tools.harness.openai_client import Completion, CompletionError, OpenAIClient
from tools.harness.processes import EngineProcess, ProcessError, ProcessGroup
from vllm_hisparse.connector.request_line import RequestLine

LOG_DIR = Path("build/logs")
MODEL_DIR = Path("benchmarks/models/code-dsa")  # of the repository
HOT_ROWS = 512  # twice the model's index_topk
HOST_POOL_GIB = 2
ELEMENT_BYTES = 4
HEALTH_TIMEOUT_S = 300.0
STATS_TIMEOUT_S = 30.0


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo."""

    num_requests: int
    max_tokens: int
    model_dir: Path
    seed: int
    decode_connector: Mapping[str, Any]


def demo_command(
    requests: Annotated[int, typer.Option(min=1, max=256, help="Concurrent requests.")] = 8,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_MODEL_LEN - MAX_PROMPT_TOKENS, help="Tokens to generate per request.")
    ] = 32,
    model_dir: Annotated[Path, typer.Option(help="DSA model to serve.")] = MODEL_DIR,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("build/demo.json"),
    seed: Annotated[int, typer.Option(help="Seed of the choice of questions.")] = 0,
    keep_logs: Annotated[bool, typer.Option("--keep-logs", help="Keep the logs of a successful run.")] = False,
) -> None:
    """Serve a small model of source code on separate prefill and decode instances.

    Every prompt is a long source file that the model has not seen, and the beginning of one of its functions, which the
    model continues. The tokens are compared with those of full KV.
    """
    console = Console(highlight=False)
    # Buffers have a fixed size, because growing ones would hold these few prompts as a whole, and nothing would be
    # swapped in.
    sizes = {"host_pool_gib": HOST_POOL_GIB, "device_buffer_size": HOT_ROWS, "elastic": False}
    connector = hisparse_connector(**sizes, log_request_stats=True)
    options = DemoOptions(requests, max_tokens, model_dir, seed, connector)
    try:
        report = run_demo(options, Stages(console))
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted: every process has been stopped.[/]")
        raise typer.Exit(130) from None
    except (ProcessError, DemoError, MissingPackageError) as error:
        details = error.details() if isinstance(error, ProcessError) else str(error)
        console.print(f"[bold red]Demo failed:[/] {escape(details)}", soft_wrap=True)
        raise typer.Exit(1) from None
    report.write(out)
    console.print(request_table(report), answer_table(report))
    console.print(verdict(report), totals(report), f"[dim]Figures: {out}[/]", sep="\n")
    if report.problems():
        console.print(f"[dim]Logs: {LOG_DIR}[/]")
        raise typer.Exit(1)
    if not keep_logs:
        shutil.rmtree(LOG_DIR)


def run_demo(options: DemoOptions, stages: Stages) -> Report:
    """Start everything, run the requests twice and stop everything.

    Raises:
        ProcessError: a process ended or did not become healthy.
        DemoError: a request failed, or its statistics are missing.
    """
    model_config = read_model_config(options.model_dir)
    with stages.stage(f"choose {options.num_requests} functions of installed packages"):
        questions = ask(options)
    prompts = [question.prompt for question in questions]
    deployment = Deployment.create(options.model_dir, LOG_DIR, options.decode_connector)
    with ProcessGroup() as group:
        start(group, deployment, stages)
        with stages.stage(f"{len(prompts)} requests through prefill and decode") as update:
            completions = run_requests(group, deployment.router_url, prompts, options.max_tokens, update)
        with stages.stage("the same requests with full KV, one after the other") as update:
            references = run_requests(group, deployment.prefill_url, prompts, options.max_tokens, update)
        with stages.stage("collect statistics"):
            stats = collect_stats(deployment.decode, completions, prompts)
            metrics = asyncio.run(read_metrics(deployment.decode_url))
        with stages.stage("stop the processes"):
            group.stop()
    layout = kv_layout(model_config, ELEMENT_BYTES)
    served = zip(questions, completions, references, stats, strict=True)
    results = [make_result(number, *parts, layout, HOT_ROWS) for number, parts in enumerate(served)]
    return Report(results, metrics, stages.seconds)


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """Return the model's config.json.

    Raises:
        DemoError: there is no such file.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise DemoError(
            f"--model-dir: got {model_dir}, expected the directory of a DSA model. Run the demo in a checkout of the "
            f"repository, which has {MODEL_DIR}, or make a model with random weights: vllm-hisparse make-model dsv32 "
            "--out build/models/dsv32"
        )
    return json.loads(path.read_text())


def ask(options: DemoOptions) -> list[Question]:
    """Make a question for each request.

    Raises:
        DemoError: there are too few questions.
    """
    try:
        return make_questions(options.model_dir, options.num_requests, options.max_tokens, options.seed)
    except NoQuestionError as error:
        raise DemoError(f"--requests: {error}. Lower --requests or --max-tokens.") from error


def start(group: ProcessGroup, deployment: Deployment, stages: Stages) -> None:
    """Start both engines and, once they are healthy, the router."""
    engines, router = (deployment.prefill, deployment.decode), deployment.router
    for title, processes in {"start the engines": engines, "start the router": (router,)}.items():
        with stages.stage(title) as update:
            for process in processes:
                group.start(process)
            group.wait_healthy(HEALTH_TIMEOUT_S, lambda waiting: update(f"{waiting.name}: {waiting.last_log_line()}"))
    for engine in engines:
        engine.calm_polling_threads()


def run_requests(
    group: ProcessGroup, base_url: str, prompts: Sequence[Sequence[int]], max_tokens: int, update: Update
) -> list[Completion]:
    """Send all prompts at once and wait for their tokens while checking that every process runs.

    Raises:
        ProcessError: a process has ended.
        DemoError: a request failed.
    """
    try:
        return asyncio.run(watched(group, complete_all(base_url, prompts, max_tokens, update)))
    except CompletionError as error:
        group.check(within_s=5)
        ends = (f"{process.log_path}: {process.last_log_line()}" for process in group.processes)
        raise DemoError("\n".join([str(error), "last lines of the logs:", *ends])) from error


async def complete_all(
    base_url: str, prompts: Sequence[Sequence[int]], max_tokens: int, update: Update
) -> list[Completion]:
    """Send all prompts at once, and return their completions in the order of the prompts."""
    received = [0] * len(prompts)

    def show() -> None:
        num_waiting = received.count(0)
        waits = f"{num_waiting} of {len(prompts)} prompts are being read, " if num_waiting else ""
        update(f"{waits}{sum(received)} of {len(prompts) * max_tokens} tokens are here")

    def on_tokens(number: int, num_tokens: int) -> None:
        received[number] += num_tokens
        show()

    show()
    async with OpenAIClient(MODEL_NAME) as client:
        requests = (
            client.complete(base_url, prompt, max_tokens, on_tokens=partial(on_tokens, number))
            for number, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*requests)


async def watched(group: ProcessGroup, work: Coroutine[Any, Any, list[Completion]]) -> list[Completion]:
    """Await `work`; raise as soon as a process has ended."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=0.5)
            group.check()
        return task.result()
    finally:
        task.cancel()


async def read_metrics(base_url: str) -> dict[str, float]:
    """Return the connector's Prometheus samples."""
    async with OpenAIClient(MODEL_NAME) as client:
        samples = await client.metrics(base_url)
    return {name: samples[name] for name in samples if name.startswith("vllm:hisparse_") and "_created" not in name}


def collect_stats(
    decode: EngineProcess, completions: Sequence[Completion], prompts: Sequence[Sequence[int]]
) -> list[RequestLine]:
    """Return the decode engine's statistics of every request, in order. It logs them shortly after a request has ended.

    Raises:
        DemoError: the statistics of a request did not come in time.
    """
    deadline = time.monotonic() + STATS_TIMEOUT_S
    while True:
        logged = RequestLine.find_all(decode.log_path.read_text(errors="replace"))
        ids = (completion.response_id for completion in completions)
        stats = [find_stats(logged, *request) for request in zip(ids, map(len, prompts), strict=True)]
        found = [line for line in stats if line is not None]
        if len(found) == len(stats):
            return found
        if time.monotonic() > deadline:
            missing = stats.index(None)
            raise DemoError(f"{decode.log_path} has no statistics of request {missing} after {STATS_TIMEOUT_S:g} s")
        time.sleep(0.5)
