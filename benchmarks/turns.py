"""Many turns in one instance: this plugin, full KV with vLLM's OffloadingConnector, and vLLM's native HiSparse.

    python -m benchmarks.turns

Conversations of 13 turns: a first prompt of tens of thousands of tokens, then answers of 220 tokens and questions. Each
client has one conversation, and asks its next question when it has the answer to the last one. All systems are loaded
first, on one GPU, and are measured one after the other. Each has the same device and host memory. Before a case, each
has shorter conversations, because the first system that needs a kernel would compile it for all.

Compare systems by `turn_ms`, the time from a later question to the last token of its answer, or by tokens/s. The more
questions share a step, the longer is the time to the first token, and the shorter the time per output token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.full_depth import System
from benchmarks.serving import (
    Attempts,
    Device,
    Gauges,
    Sizes,
    force_selections,
    kv_bytes,
    log_directory,
    make_model,
    server,
    wait_healthy,
)
from tools.harness.deployment import MODEL_NAME
from tools.harness.openai_client import Completion, OpenAIClient
from tools.harness.processes import ProcessGroup

START_TIMEOUT_S, CASE_TIMEOUT_S = 500.0, 300.0
VOCABULARY = range(3, 500)
WARM_UP_TOKENS, WARM_UP_ANSWER, WARM_UP_SEED = 4000, 24, 500

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Shape:
    """Lengths of a conversation.

    Attributes:
        first: tokens of the first prompt.
        question: tokens of each later question.
        answer: tokens of each answer.
        turns: number of questions.
    """

    first: int
    question: int
    answer: int
    turns: int

    def warm_up(self) -> Shape:
        """Conversations whose steps have the same numbers of requests and of a question's tokens, in a short time."""
        return replace(self, first=min(self.first, WARM_UP_TOKENS), answer=min(self.answer, WARM_UP_ANSWER), turns=3)

    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.first + (self.turns - 1) * self.question + self.turns * self.answer


def connector(system: System, sizes: Sizes) -> dict[str, Any] | None:
    """Return the `--kv-transfer-config` of a system; None: no KV connector, full KV on the CPU platform."""
    if system == System.ours:
        name, options = "HiSparseHostConnector", {"device_buffer_size": sizes.device_buffer_size, "admission": "off"}
        options["host_pool_gib"] = sizes.host_pool_gib
    elif system == System.vllm_native:
        name, options = "HiSparseConnector", {"host_pool_gib": sizes.host_pool_gib}
    elif sizes.device == Device.cpu:
        return None
    else:
        # NOTE: vLLM stores prompts alone unless it is told to store answers, which later prompts begin with.
        name, options = "OffloadingConnector", {"cpu_bytes_to_use": int(sizes.host_pool_gib * 2**30)}
        options["offload_prompt_only"] = False
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": options}


async def converse(client: OpenAIClient, url: str, shape: Shape, seed: int) -> list[Completion]:
    """One conversation; returns its answers."""
    source, tokens, answers = random.Random(seed), [], []
    for turn in range(shape.turns):
        tokens += source.choices(VOCABULARY, k=shape.question if turn else shape.first)
        answers.append(await client.complete(url, tokens, shape.answer))
        tokens = tokens + answers[-1].token_ids
    return answers


async def converse_all(
    url: str, shape: Shape, concurrency: int, timeout_s: float, seed: int = 0
) -> list[list[Completion]]:
    """All conversations of a case at once; another seed gives other prompts.

    Raises:
        TimeoutError: they are not finished in time.
    """
    async with OpenAIClient(MODEL_NAME, timeout_s=timeout_s + 1, num_logprobs=0) as client:
        seeds = range(1000 * concurrency + seed, 1000 * concurrency + seed + concurrency)
        all_of_them = asyncio.gather(*(converse(client, url, shape, seed) for seed in seeds))
        return await asyncio.wait_for(all_of_them, timeout_s)


def percentiles(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, as columns of a row."""
    p50, p99 = np.percentile([1e3 * each for each in seconds], (50, 99)).round(2).tolist()
    return {f"{name}_ms_p50": p50, f"{name}_ms_p99": p99}


def measure(system: System, url: str, shape: Shape, concurrency: int, timeout_s: float) -> dict[str, Any]:
    """Let clients talk to a server; returns the columns of a row.

    Raises:
        TimeoutError: the conversations, or those before them, are not finished in time; the message says how far they
            came.
    """
    warm_up = shape.warm_up()
    try:
        asyncio.run(converse_all(url, warm_up, concurrency, timeout_s, WARM_UP_SEED))
    except TimeoutError:
        raise TimeoutError(
            f"warm-up of {concurrency} conversations, {warm_up.turns} turns each: not finished after {timeout_s:g} s. "
            "Raise --case-timeout-s, or lower --concurrency. The log in --logs shows whether the engine hangs."
        ) from None
    start = time.perf_counter()
    with Gauges(url) as gauges:
        try:
            conversations = asyncio.run(converse_all(url, shape, concurrency, timeout_s))
        except TimeoutError:
            names = ("generation_tokens", "prompt_tokens", "prefix_cache_hits", "num_preemptions")
            grown = ", ".join(f"{name} {gauges.growth(f'{name}_total')}" for name in names)
            expected = concurrency * shape.turns * shape.answer
            raise TimeoutError(f"not finished after {timeout_s:g} s, expected {expected} tokens, got {grown}") from None
    seconds = time.perf_counter() - start
    first = [answers[0] for answers in conversations]
    later = [answer for answers in conversations for answer in answers[1:]]
    prompts = sum(shape.first + turn * (shape.question + shape.answer) for turn in range(1, shape.turns))
    cached = sum(answer.num_cached_tokens or 0 for answer in later)
    num_tokens = sum(len(answer.token_ids) for answers in conversations for answer in answers)
    tpot = ((each.total_s - each.first_token_s) / (shape.answer - 1) for each in (*first, *later))
    return {
        "tokens_per_s": round(num_tokens / seconds, 1),
        **percentiles("first_ttft", (each.first_token_s for each in first)),
        **percentiles("ttft", (each.first_token_s for each in later)),
        **percentiles("tpot", tpot),
        **percentiles("turn", (each.total_s for each in later)),
        "queue_ms_mean": gauges.mean_ms("request_queue_time"),
        "prefill_ms_mean": gauges.mean_ms("request_prefill_time"),
        "prefix_hit_rate": round(cached / (prompts * concurrency), 4),
        "running_max": gauges.peak("num_requests_running"),
        "preempted": gauges.growth("num_preemptions_total"),
        "host_blocks_max": gauges.peak("hisparse_host_blocks_used") if system == System.ours else None,
        "seconds": round(seconds, 1),
    }


@app.command()
def run(
    ctx: typer.Context,
    system: Annotated[list[System], typer.Option(help="repeatable")] = list(System),  # noqa: B006
    concurrency: Annotated[list[int], typer.Option(help="conversations at a time; repeatable")] = [1, 8, 32],  # noqa: B006
    first: Annotated[int, typer.Option(help="tokens of the first prompt")] = 30_000,
    question: Annotated[int, typer.Option(help="tokens of a later question")] = 200,
    answer: Annotated[int, typer.Option(min=2, help="tokens of an answer")] = 220,
    num_turns: Annotated[int, typer.Option(min=2, help="turns of a conversation")] = 13,
    device: Annotated[Device, typer.Option(help="cpu: tiny models")] = Device.gpu,
    layers: Annotated[int, typer.Option(help="layers of DeepSeek-V3.2's size")] = 10,
    experts: Annotated[int, typer.Option(help="experts of a layer")] = 8,
    expert_size: Annotated[int, typer.Option(help="hidden size of an expert")] = 1024,
    device_kv_gib: Annotated[float, typer.Option(help="device memory for KV")] = 2.5,
    host_pool_gib: Annotated[float, typer.Option(help="host memory for KV")] = 14.0,
    device_buffer_size: Annotated[int, typer.Option(help="hot rows per request and layer")] = 4096,
    overlap: Annotated[float, typer.Option(help="probability that a position stays selected")] = 0.87,
    case_timeout_s: Annotated[float, typer.Option(help="seconds after which a case has failed")] = CASE_TIMEOUT_S,
    max_s: Annotated[float, typer.Option(help="seconds after which no further case starts")] = 450.0,
    logs: Annotated[Path | None, typer.Option(help="directory that gets all logs")] = None,
    model_dir: Annotated[Path, typer.Option(help="directory of the model")] = Path("build/models/turns"),
    output: Annotated[Path | None, typer.Option(help="result file; default: results/<cpu or h100>/turns.json")] = None,
) -> None:
    """Measure every system with every number of conversations; the result file is written after every case.

    The exit code is 1 if an engine did not start or has ended, or a case failed.
    """
    start = time.monotonic()
    output = output or RESULTS / ("h100" if device == Device.gpu else "cpu") / "turns.json"
    shape = Shape(first, question, answer, num_turns)
    longest = -(-(shape.longest() + 64) // 64) * 64
    sizes = Sizes(
        device, layers, experts, expert_size, longest, max(concurrency), device_kv_gib, host_pool_gib,
        device_buffer_size, overlap,
    )  # fmt: skip
    model = make_model(model_dir, sizes)
    hardware = gpu_hardware() if device == Device.gpu else None
    rows: list[dict[str, Any]] = []
    attempts = Attempts()
    with ExitStack() as stack:
        log_dir = log_directory(stack, logs)
        group = stack.enter_context(ProcessGroup())
        servers = {}
        for name in system:
            args = [*kv_bytes(device_kv_gib), "--max-num-batched-tokens", "8192"] if device == Device.gpu else []
            if name == System.vllm_native:
                buffers = {"hisparse_config": {"device_buffer_size": device_buffer_size}}
                args += ["--attention-config", json.dumps(buffers)]
            process, url = server(str(name), model, sizes, log_dir, 0, connector(name, sizes), args)
            servers[name] = group.start(process), url
        for name, (process, url) in servers.items():
            attempts.run(f"start of {name}", lambda process=process: wait_healthy(process, START_TIMEOUT_S))
            attempts.run(f"selections of {name}", lambda url=url: force_selections(url, sizes))
            typer.echo(f"{name} is ready after {time.monotonic() - start:.0f} s", err=True)
        for num in concurrency:
            for name, (process, url) in servers.items():
                if time.monotonic() - start > max_s:
                    continue
                row = {"system": str(name), "concurrency": num, **vars(shape)}
                work = attempts.run(
                    f"{name}, {num} conversations",
                    lambda name=name, url=url, num=num: measure(name, url, shape, num, case_timeout_s),
                    [process],
                )
                if work is not None:
                    rows.append(row | work | sizes.described())
                    typer.echo(json.dumps(rows[-1]), err=True)
                    write_result(output, ctx, "benchmarks.turns", rows, hardware)
    names = (
        "system",
        "concurrency",
        "tokens_per_s",
        "first_ttft_ms_p50",
        "ttft_ms_p50",
        "tpot_ms_p50",
        "turn_ms_p50",
        "prefix_hit_rate",
    )
    if rows:
        show("Turns", [{name: row[name] for name in names} for row in rows])
    attempts.end()


if __name__ == "__main__":
    app()
