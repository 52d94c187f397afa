"""How accurate is retrieval with each algorithm and budget? Real engines, models of `train_retrieval`, exact answers.

    python -m benchmarks.accuracy --model benchmarks/models/retrieval-llama

One engine per model, algorithm and budget answers the same prompts greedily: passkey, key-value recall and multi-needle
at each context length. An answer is right if every token of it is right. "full" is stock vLLM without the connector.
Each algorithm also runs with a budget that covers all tokens, which must answer as "full" does. Writes the results with
95% confidence intervals (Wilson) and a plot.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, track, write_result
from benchmarks.retrieval_tasks import TASKS, examples

CONTEXTS = [1024, 4096, 16384]
BUDGETS = [32, 64, 128, 256, 512, 1024]
ALGORITHMS = ["oracle", "quest", "cluster_kv", "streaming_llm", "pq_cache"]
FULL_KV_LAYERS = [0]  # the same for all: a lookup needs a layer before it, so that it always meets the algorithm
FULL = "full"
MAX_TOKEN_BUDGET = 4096  # largest budget of an algorithm that selects tokens, by the limit of the CUDA kernels
Z_95 = 1.959964

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Job:
    """The work of one engine.

    Attributes:
        engine: arguments of `vllm.LLM`.
        contexts, num_examples, seed: lengths in tokens, number and seed of the prompts.
        tasks: tasks of `retrieval_tasks`.
    """

    engine: dict[str, Any]
    contexts: list[int]
    num_examples: int
    seed: int
    tasks: list[str] = field(default_factory=lambda: list(TASKS))


def options_of(algorithm: str, budget: int) -> dict[str, Any]:
    """The papers' options, scaled down if the tokens that are always selected would fill the budget."""
    quarter = budget // 4
    if algorithm == "cluster_kv":
        interval = min(320, quarter)
        clusters = max(interval // 80, 1)
        return {"sink_tokens": min(16, quarter), "update_interval": interval, "clusters_per_update": clusters}
    if algorithm == "pq_cache":
        return {"sink_tokens": min(32, quarter), "window_tokens": min(32, quarter)}
    return {}


def connector_of(
    algorithm: str, budget: int, full_kv_layers: list[int], host_pool_gib: float, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`kv_transfer_config` of a single instance; `options` add to or replace the scaled options."""
    extra = {
        "algorithm": algorithm,
        "algorithm_options": options_of(algorithm, budget) | (options or {}),
        "top_k": budget,
        "full_kv_layers": full_kv_layers,
        "host_pool_gib": host_pool_gib,
    }
    return {"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def everything(algorithm: str, contexts: list[int]) -> int:
    """The budget that covers the longest context; for an algorithm that selects tokens, the longest that can fit."""
    from vllm_hisparse.algorithms.registry import find_algorithm

    selector = find_algorithm(algorithm)
    is_token = selector.unit_tokens(selector.Options()) == 1
    return max(context for context in contexts if not is_token or context <= MAX_TOKEN_BUDGET)


def run_job(job: Job) -> list[dict[str, Any]]:
    """Answer all prompts with one engine; runs in a process of its own."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    llm = LLM(**job.engine)
    rows = []
    for context in job.contexts:
        for task in job.tasks:
            cases = examples(task, context, job.num_examples, job.seed)
            sampling = SamplingParams(temperature=0, max_tokens=len(cases[0].answer), ignore_eos=True, detokenize=False)
            prompts = [{"prompt_token_ids": case.prompt} for case in cases]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            correct = sum(answer == case.answer for answer, case in zip(answers, cases, strict=True))
            rows.append({"task": task, "context": context, "correct": correct, "total": len(cases)})
    return rows


def run_jobs(jobs: list[Job], num_processes: int) -> Iterator[list[dict[str, Any]]]:
    """Results of all jobs in order; every engine has a process of its own, and `num_processes` run at a time.

    NOTE: processes are forked from one that has imported vLLM and nothing else.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["vllm", "vllm.v1.engine.llm_engine"])
    with ProcessPoolExecutor(num_processes, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(run_job, jobs)


def wilson(correct: int, total: int) -> tuple[float, float]:
    """95% confidence interval (Wilson) of the share `correct / total`."""
    share, z2 = correct / total, Z_95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return round(max(middle - half, 0.0), 4), round(min(middle + half, 1.0), 4)


def with_interval(row: dict[str, Any], model: str, algorithm: str, budget: int | None) -> dict[str, Any]:
    low, high = wilson(row["correct"], row["total"])
    names = {"model": model, "task": row["task"], "context": row["context"], "budget": budget, "algorithm": algorithm}
    return {**names, "correct": row["correct"], "total": row["total"], "low": low, "high": high}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the share of right answers by budget: one row of panels per task, one panel per context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks, contexts = list(dict.fromkeys(r["task"] for r in rows)), sorted({r["context"] for r in rows})
    figure, axes = plt.subplots(len(tasks), len(contexts), squeeze=False, sharex=True, sharey=True, figsize=(11, 8))
    for task, line in zip(tasks, axes, strict=True):
        for context, panel in zip(contexts, line, strict=True):
            here = [r for r in rows if (r["task"], r["context"]) == (task, context)]
            draw_panel(panel, here)
            panel.set_title(f"{task}, {context} tokens", fontsize=9)
    axes[0][0].legend(fontsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("budget (tokens)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["algorithm"] == FULL:
            panel.axhline(row["correct"] / row["total"], color="black", linewidth=0.8, label=FULL)
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows if row["algorithm"] != FULL):
        line = sorted((r for r in rows if r["algorithm"] == algorithm and r["budget"] <= max(BUDGETS)), key=_budget)
        shares = [r["correct"] / r["total"] for r in line]
        errors = [
            [share - r["low"] for share, r in zip(shares, line, strict=True)],
            [r["high"] - share for share, r in zip(shares, line, strict=True)],
        ]
        panel.errorbar([r["budget"] for r in line], shares, errors, marker=".", capsize=2, label=algorithm)
    panel.set_xscale("log", base=2)
    panel.set_ylim(-0.03, 1.03)


def _budget(row: dict[str, Any]) -> int:
    return row["budget"]


def _run_of(row: dict[str, Any]) -> tuple[str, str, int | None]:
    """The engine that a result belongs to."""
    return row["model"], row["algorithm"], row["budget"]


@app.command()
def main(
    ctx: typer.Context,
    model: Annotated[list[Path], typer.Option(help="Directories written by benchmarks.train_retrieval; repeatable.")],
    context: Annotated[list[int], typer.Option(min=64)] = CONTEXTS,
    budget: Annotated[list[int], typer.Option(min=32)] = BUDGETS,
    algorithm: Annotated[list[str], typer.Option()] = ALGORITHMS,
    full_kv_layer: Annotated[list[int], typer.Option(help="Full-KV layers of every algorithm.")] = FULL_KV_LAYERS,
    algorithm_option: Annotated[
        list[str], typer.Option(metavar="NAME=NUMBER", help="Option of every algorithm; repeatable.")
    ] = [],  # noqa: B006
    num_examples: Annotated[int, typer.Option(min=1, help="Prompts per task and context.")] = 100,
    device_kv_gib: Annotated[float, typer.Option(min=0.001, help="Device memory for KV of each engine.")] = 1.0,
    host_pool_gib: Annotated[float, typer.Option(min=0.001)] = 2.0,
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 16,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    num_processes: Annotated[int, typer.Option(min=1, help="Engines at a time.")] = 1,
    seed: Annotated[int, typer.Option()] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run what the output file lacks, with equal options.")
    ] = False,
    output: Annotated[Path, typer.Option()] = RESULTS / "accuracy.json",
) -> None:
    """Measure every combination of model, algorithm and budget."""
    engine = {
        "dtype": dtype,
        "max_model_len": max(context),
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": int(device_kv_gib * 2**30),
        "gpu_memory_utilization": 0.02,  # NOTE: sets no size here; vLLM only checks that so much is free
        "skip_tokenizer_init": True,
        "block_size": 64,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    runs: list[tuple[Path, str, int | None]] = []
    for path in model:
        sizes = {name: tuple(dict.fromkeys((*budget, everything(name, context)))) for name in algorithm}
        runs += [(path, FULL, None), *((path, name, size) for name in algorithm for size in sizes[name])]
    options = {name: int(number) for name, _, number in (option.partition("=") for option in algorithm_option)}
    order = {(path.name, name, size): index for index, (path, name, size) in enumerate(runs)}
    rows = json.loads(output.read_text())["rows"] if resume else []
    done = {_run_of(row) for row in rows}
    if not done <= order.keys():
        raise typer.BadParameter(f"{output.name} has rows of other options: {next(iter(done - order.keys()))}")
    runs = [(path, name, size) for path, name, size in runs if (path.name, name, size) not in done]
    jobs = []
    for path, name, size in runs:
        transfer = (
            {"kv_transfer_config": connector_of(name, size, full_kv_layer, host_pool_gib, options)} if size else {}
        )
        jobs.append(Job({**engine, "model": str(path), **transfer}, context, num_examples, seed))
    hardware = gpu_hardware() if torch.cuda.is_available() else None
    results = run_jobs(jobs, num_processes)
    for index in track(len(runs), "engines"):
        path, name, size = runs[index]
        rows += [with_interval(row, path.name, name, size) for row in next(results)]
        rows.sort(key=lambda row: order[_run_of(row)])
        write_result(output, ctx, "benchmarks.accuracy", rows, hardware)
    show("Right answers", rows)
    for path in model:
        own = [row for row in rows if row["model"] == path.name]
        plot(own, output.with_name(f"{output.stem}_{path.name}.png"))


if __name__ == "__main__":
    app()
