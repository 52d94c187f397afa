"""Decode with the drafts of a trained model: full KV and this plugin, without drafts and with one to three per step.

`benchmarks.full_depth --drafts` has the sizes of a real model, and drafts that are accepted with a given probability.
Here a small trained model drafts for itself: it continues source files that it has not seen, and vLLM's rejection
sampler accepts or rejects the drafts. Acceptance and hit rates are therefore a model's own; but the model is so small
that its steps wait for the host.

Prompts are computed. All requests of an engine are submitted at once and never end: after some steps to settle, those
in which nobody prefills are timed. Each engine runs in a process of its own. All are loaded before the first one is
measured, because loading engines take the host's time; then they take turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from enum import StrEnum
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.decode import Engine, counters, moved
from benchmarks.full_depth import Clock

MODEL = Path(__file__).parent / "models" / "code-dsa"
NUM_HEADS = 64  # which vLLM's sparse kernels need at least
TEMPERATURE = 0.8
SIZES = ("drafts", "context", "requests", "kv_dtype", "device_kv_gib", "device_buffer_size", "settle")  # of a row

app = typer.Typer(add_completion=False)

System = StrEnum("System", ["full", "ours"])


def pad_heads(source: Path, target: Path, num_heads: int = NUM_HEADS) -> Path:
    """Copy a model with more attention and indexer heads, whose weights are 0: it computes the same.

    Args:
        source: directory of a DSA model.
        target: directory of the copy.
        num_heads: heads of both kinds that it has afterwards.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    axes = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1, "indexer.wq_b": 0, "indexer.weights_proj": 0}
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        kind = next((kind for kind in axes if name.endswith(f"{kind}.weight")), None)
        if kind is None:
            continue
        axis, old = axes[kind], config["index_n_heads" if kind.startswith("indexer") else "num_attention_heads"]
        shape = [size * num_heads // old if index == axis else size for index, size in enumerate(weight.shape)]
        weights[name] = torch.zeros(shape, dtype=weight.dtype)
        weights[name].narrow(axis, 0, weight.shape[axis]).copy_(weight)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "index_n_heads"), num_heads)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config | heads, indent=2))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("tokenizer*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


def make_prompts(model: Path, context: int, num_prompts: int) -> list[list[int]]:
    """Windows of `context` tokens of packages that the model was not trained on, at equal distances."""
    from tokenizers import Tokenizer

    from tools.demo.prompts import source_texts

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n".join(text for _, text in source_texts())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = [index * max(len(ids) - context, 0) // max(num_prompts - 1, 1) for index in range(num_prompts)]
    return [(ids[start:] + ids)[:context] for start in starts]


def engine_args(system: str, job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; systems differ only in where KV is stored."""
    args: dict[str, Any] = {
        "model": job["model"],
        "max_model_len": job["max_model_len"],
        "dtype": "bfloat16",
        "kv_cache_dtype": {"bfloat16": "auto", "fp8": "fp8"}[job["kv_dtype"]],
        "kv_cache_memory_bytes": int(job["device_kv_gib"] * 2**30),
        "gpu_memory_utilization": job["device_share"],
        "max_num_seqs": job["requests"],
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if job["drafts"]:
        args["speculative_config"] = {"method": "mtp", "num_speculative_tokens": job["drafts"]}
    if system == System.ours:
        options = {name: job[name] for name in ("host_pool_gib", "device_buffer_size")}
        args["kv_transfer_config"] = {
            "kv_connector": "HiSparseHostConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
    return args


def measure(llm: Any, prompts: list[list[int]], job: dict[str, Any]) -> dict[str, Any]:
    """Decode all prompts at once, and time steps in which nobody prefills."""
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    for index, prompt in enumerate(prompts):
        num_tokens = job["max_model_len"] - len(prompt) - 16
        sampling = {"temperature": TEMPERATURE, "seed": index, "ignore_eos": True, "detokenize": False}
        engine.add_request(f"{index}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=num_tokens, **sampling))
    clock, drafts, num_decodes = Clock(), job["drafts"], 0
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_decodes
        scheduled = schedule(*args, **kwargs)
        longest = max(scheduled.num_scheduled_tokens.values(), default=0)
        num_decodes = num_decodes + 1 if 0 < longest <= 1 + drafts else 0
        return scheduled

    scheduler.schedule = watched
    clock.attach(scheduler)
    while num_decodes < job["settle"]:
        engine.step()
    before, first = counters(), len(clock.ends)
    while len(clock.ends) < first + job["steps"]:
        engine.step()
    if num_decodes < job["steps"]:
        raise RuntimeError("a request prefilled while steps were timed")
    row = clock.summary(first) | moved(before, counters())
    scheduler.schedule, scheduler.update_from_output = schedule, update
    engine.abort_request([str(index) for index in range(len(prompts))])
    while engine.has_unfinished_requests():
        engine.step()
    return row | {"acceptance": round((row["tokens_per_step"] - 1) / drafts, 3) if drafts else None}


def serve(connection: Connection, system: str, job: dict[str, Any]) -> None:
    """Load one engine in this process, and measure whenever asked. It sends None when ready; None ends it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be measured
    from vllm import LLM

    llm = LLM(**engine_args(system, job))
    connection.send(None)
    for prompts in iter(connection.recv, None):
        described = {"system": system, "model": MODEL.name} | {name: job[name] for name in SIZES}
        connection.send(described | measure(llm, prompts, job))


def measure_all(
    job: dict[str, Any], drafts: list[int], prompts: list[list[int]], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield a row of each engine and repetition; an engine that fails yields no more rows."""
    engines = [Engine(str(system), job | {"drafts": number}, serve) for number, system in product(drafts, System)]
    try:
        for engine in engines:
            engine.wait()
        for _, engine in product(range(repeats), engines):
            if row := engine.measure(prompts):
                yield row
    finally:
        for engine in engines:
            engine.stop()


@app.command()
def run(
    ctx: typer.Context,
    drafts: Annotated[list[int], typer.Option(min=0, help="Drafts per step; repeatable.")] = [0, 1, 2, 3],  # noqa: B006
    context: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 16_000,
    requests: Annotated[int, typer.Option(min=1, help="Prompts.")] = 24,
    kv_dtype: Annotated[str, typer.Option(help="bfloat16 or fp8.")] = "fp8",
    device_kv_gib: Annotated[float, typer.Option(help="Device memory for KV.")] = 1.0,
    host_pool_gib: Annotated[float, typer.Option(help="Host memory for KV.")] = 4.0,
    device_buffer_size: Annotated[int, typer.Option(help="Hot rows per request and layer.")] = 1024,
    settle: Annotated[int, typer.Option(min=1, help="Steps of decoding before those that are timed.")] = 64,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each engine.")] = 3,
    model_dir: Annotated[Path, typer.Option(help="Where the model with more heads is written.")] = Path(
        "build/models/code-dsa-64-heads"
    ),
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "mtp_trained.json",
) -> None:
    """Measure the trained model with its own drafts."""
    job = {
        "model": str(pad_heads(MODEL, model_dir)),
        "context": context,
        "requests": requests,
        "kv_dtype": kv_dtype,
        "device_kv_gib": device_kv_gib,
        "host_pool_gib": host_pool_gib,
        "device_buffer_size": device_buffer_size,
        "device_share": 0.9 / (len(drafts) * len(System)),
        "settle": settle,
        "steps": steps,
        "max_model_len": context + 8 * (settle + steps),
    }
    hardware, rows = gpu_hardware() if torch.cuda.is_available() else None, []
    for row in measure_all(job, drafts, make_prompts(MODEL, context, requests), repeats):
        typer.echo(json.dumps(row), err=True)
        rows.append(row)
        write_result(output, ctx, "benchmarks.trained_drafts", rows, hardware)
    columns = ("system", "drafts", "acceptance", "tokens_per_s", "itl_ms_p50", "running_max", "hit_rate")
    show("Trained drafts", [{name: row[name] for name in columns} for row in rows])


if __name__ == "__main__":
    app()
