"""Decode throughput on a GPU: full KV, vLLM's native HiSparse and this plugin, with the same device memory for KV.

Each system runs in its own engine. All engines are loaded at the same time and take turns, case by case, so that a host
that is slower for a minute slows every system. A case submits all its requests at once. Only steps in which every
scheduled request decodes one token are counted, as on a decode instance: the speed of prefill does not matter.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.decode_models import LLAMA, make_dsa_model, make_llama_model
from benchmarks.models import ATTENTION

app = typer.Typer(add_completion=False)

Architecture = StrEnum("Architecture", ["dsa", "llama"])
SYSTEMS = ("full", "vllm_native", "ours")  # vLLM's native HiSparse serves DSA models only
DENSE_BACKENDS = tuple(name for name in ATTENTION if "MLA" not in name)
BASE_BACKEND = "FLASH_ATTN 3"  # the others are compared with it
COUNTERS = ("cache_hits", "cache_misses", "host_to_device_bytes")
PREFIX = "vllm:hisparse_"  # vLLM's native HiSparse and this plugin export the same names
VOCABULARY = range(3, 500)
TOKEN_BYTES = {  # bytes per token and layer; for a DSA model, main KV and indexer key
    ("dsa", "bfloat16"): 1152 + 132,
    ("dsa", "fp8"): 656 + 132,
    ("llama", "bfloat16"): 2 * LLAMA["num_key_value_heads"] * LLAMA["head_dim"] * 2,
    ("llama", "fp8"): 2 * LLAMA["num_key_value_heads"] * LLAMA["head_dim"],
}
CHUNK_TOKENS = 16384
WARM_UP = (512, 2)  # context, requests
DEVICE_SHARE = 0.9  # share of the device memory for all engines together
STOP_TIMEOUT_S = 60


@dataclass
class StepClock:
    """Measures steps in which every request decodes one token.

    Attributes:
        seconds: time from the previous step's output to this step's output.
        tokens: requests of the step.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def attach(self, scheduler: Any) -> None:
        """Start to measure a scheduler's steps."""
        last: dict[str, Any] = {"time": 0.0, "decodes": False}
        update = scheduler.update_from_output

        def timed(scheduler_output: Any, model_output: Any) -> Any:
            counts = scheduler_output.num_scheduled_tokens.values()
            now, decodes = time.perf_counter(), bool(counts) and max(counts) == 1
            if decodes and last["decodes"]:
                self.seconds.append(now - last["time"])
                self.tokens.append(len(counts))
            last.update(time=now, decodes=decodes)
            return update(scheduler_output, model_output)

        scheduler.update_from_output = timed

    def summary(self) -> dict[str, float | int | None]:
        """Throughput over all steps and over those with the most requests, inter-token latency over all tokens, and the
        largest number of requests in a step."""
        if not self.seconds:
            speeds = dict.fromkeys(("tokens_per_s", "tokens_per_s_full_batch", "itl_ms_p50", "itl_ms_p99"))
            return {**speeds, "running_max": 0, "steps": 0}
        seconds, tokens = np.array(self.seconds), np.array(self.tokens)
        is_full = tokens == tokens.max()
        p10, p50, p90, p99 = np.percentile(np.repeat(seconds * 1e3, tokens), (10, 50, 90, 99)).round(3).tolist()
        return {
            "tokens_per_s": round(float(tokens.sum() / seconds.sum()), 1),
            "tokens_per_s_full_batch": round(float(tokens[is_full].sum() / seconds[is_full].sum()), 1),
            "itl_ms_p10": p10,
            "itl_ms_p50": p50,
            "itl_ms_p90": p90,
            "itl_ms_p99": p99,
            "running_max": int(tokens.max()),
            "steps": len(seconds),
        }


def counters() -> dict[str, float]:
    """Totals of the hot-buffer counters that the engine of this process exports."""
    from prometheus_client import REGISTRY

    totals = dict.fromkeys(COUNTERS, 0.0)
    for metric in REGISTRY.collect():
        name = metric.name.removeprefix(PREFIX)
        if metric.name.startswith(PREFIX) and name in totals:
            totals[name] += sum(s.value for s in metric.samples if s.name.endswith("_total"))
    return totals


def engine_args(system: str, job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; systems differ only in where the KV is stored."""
    args: dict[str, Any] = {
        "model": job["model"],
        "max_model_len": max(job["contexts"]) + job["max_tokens"] + 64,
        "hf_overrides": {"max_position_embeddings": 1 << 18, **class_override(job)},
        "dtype": "bfloat16",
        "kv_cache_dtype": {"bfloat16": "auto", "fp8": "fp8"}[job["kv_dtype"]],
        "kv_cache_memory_bytes": int(job["device_kv_gib"] * 2**30),
        "gpu_memory_utilization": job["device_share"],
        "max_num_seqs": max(job["max_num_seqs"], 1),
        "max_num_batched_tokens": job["chunk"],
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        "kernel_config": {"enable_flashinfer_autotune": False},  # no kernel that is compared needs it
        "attention_config": dict(ATTENTION[job["backend"]]) if job["backend"] else {},
    }
    if system == "vllm_native":
        args["kv_transfer_config"] = {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_pool_gib": job["host_pool_gib"]},
        }
        args["attention_config"] |= {"hisparse_config": {"device_buffer_size": job["device_buffer_size"]}}
    elif system == "ours":
        options = {name: job[name] for name in ("host_pool_gib", "device_buffer_size", "elastic")}
        if job["architecture"] == "llama":
            options |= {"algorithm": "quest", "top_k": job["top_k"], "full_kv_layers": []}
        args["kv_transfer_config"] = {
            "kv_connector": "HiSparseHostConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
    return args


def class_override(job: dict[str, Any]) -> dict[str, list[str]]:
    """Override that makes vLLM use another model class than the checkpoint's."""
    return {"architectures": [job["model_class"]]} if job["model_class"] else {}


def load_engine(system: str, job: dict[str, Any]) -> Any:
    """Load one system in this process; returns its `vllm.LLM`."""
    # Runs the engine in this process, so that its scheduler can be measured.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled for a minute, and tokens are greedy
    from vllm import LLM

    return LLM(**engine_args(system, job))


def run_case(llm: Any, watch: Callable[[Any], None], context: int, requests: int, max_tokens: int) -> None:
    """Complete random prompts, all submitted at once.

    Args:
        llm: from `load_engine`.
        watch: `attach` of a clock, which is detached at the end.
        context: tokens of a prompt.
        requests: prompts.
        max_tokens: tokens to generate for each prompt.
    """
    from vllm import SamplingParams

    source = random.Random(context)
    prompts = [{"prompt_token_ids": source.choices(VOCABULARY, k=context)} for _ in range(requests)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output
    watch(scheduler)
    llm.generate(prompts, params, use_tqdm=False)
    scheduler.update_from_output = update


def serve_cases(connection: Connection, system: str, job: dict[str, Any]) -> None:
    """Load one system in this process and measure the cases it receives. It sends None when ready; None ends it."""
    llm = load_engine(system, job)
    connection.send(None)
    for context, requests in iter(connection.recv, None):
        clock, before = StepClock(), counters()
        run_case(llm, clock.attach, context, requests, job["max_tokens"])
        connection.send(describe(system, job, context, requests) | clock.summary() | moved(before, counters()))


class Engine:
    """A system in a process of its own, which measures cases on request.

    Args:
        system, job: the system and its configuration.
        serve: `serve_cases` or a replacement.
    """

    def __init__(self, system: str, job: dict[str, Any], serve: Callable[..., None] = serve_cases):
        context = get_context("spawn")
        self.system, self.alive = system, True
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, system, job))
        self._process.start()
        other.close()

    def wait(self) -> dict[str, Any] | None:
        """The next message of the process; None if it has ended, which also clears `alive`."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self.alive = False
            self._process.join()
            typer.echo(f"{self.system} failed with exit code {self._process.exitcode}", err=True)
            return None

    def measure(self, case: Any) -> dict[str, Any] | None:
        """Measure a case, such as (context, requests); None if the process has ended."""
        if not self.alive:
            return None
        with suppress(OSError):
            self._connection.send(case)
        return self.wait()

    def stop(self) -> None:
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(STOP_TIMEOUT_S)
        self._process.kill()
        self._process.join()


def take_turns(engines: list[Engine], cases: list[tuple[int, int]], repeats: int) -> Iterator[dict[str, Any]]:
    """Results of all engines, case by case; an engine that fails yields no more results.

    Args:
        engines: started, possibly still loading.
        cases: (context, requests).
        repeats: number of measurements of a case with one request.
    """
    try:
        for engine in engines:
            engine.wait()
        for engine in engines:
            engine.measure(WARM_UP)
        for case in cases:
            for _ in range(repeats if case[1] == 1 else 1):
                for engine in engines:
                    row = engine.measure(case)
                    if row:
                        typer.echo(json.dumps(row), err=True)
                        yield row
    finally:
        for engine in engines:
            engine.stop()


def describe(system: str, job: dict[str, Any], context: int, requests: int) -> dict[str, Any]:
    names = ("backend", "model_class", "kv_dtype", "device_kv_gib", "device_buffer_size", "elastic", "max_tokens")
    return {"system": system, "model": job["model_name"], "context": context, "requests": requests} | {
        name: job[name] for name in names
    }


def moved(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Hit rate and bytes of one case; None if the system does not count them."""
    hits, misses, num_bytes = (after[name] - before[name] for name in COUNTERS)
    found = hits + misses
    return {
        "hit_rate": round(hits / found, 4) if found else None,
        "h2d_bytes": int(num_bytes) if found else None,
    }


def make_cases(contexts: list[int], oversubscription: list[float], job: dict[str, Any]) -> list[tuple[int, int]]:
    """Cases (context, requests) in which full KV would need the given multiples of the device memory."""
    token_bytes = TOKEN_BYTES[job["architecture"], job["kv_dtype"]] * job["num_layers"]
    cases = []
    for context, factor in product(contexts, oversubscription):
        fit = job["device_kv_gib"] * 2**30 / (token_bytes * (context + job["max_tokens"]))
        cases.append((context, max(1, round(factor * fit))))
    return cases


@app.command()
def run(
    ctx: typer.Context,
    architecture: Annotated[
        Architecture, typer.Option(help="dsa: DeepSeek-V3.2's; llama: with Quest.")
    ] = Architecture.dsa,
    context: Annotated[list[int], typer.Option(min=1, help="Prompt tokens; repeatable.")] = [12000, 32000, 64000],  # noqa: B006
    oversubscription: Annotated[
        list[float], typer.Option(help="Full KV of all requests over the device memory for KV; repeatable.")
    ] = [1, 2, 4, 8],  # noqa: B006
    single: Annotated[list[int], typer.Option(min=1, help="Prompt tokens of a case with one request; repeatable.")] = [  # noqa: B006
        16000
    ],
    system: Annotated[list[str], typer.Option(help=f"{', '.join(SYSTEMS)}; repeatable.")] = list(SYSTEMS),  # noqa: B006
    kv_dtype: Annotated[str, typer.Option(help="bfloat16 or fp8.")] = "bfloat16",
    device_kv_gib: Annotated[float, typer.Option(help="Device memory for KV and for Quest's state.")] = 1.0,
    host_pool_gib: Annotated[float, typer.Option(help="Host memory for KV.")] = 24.0,
    top_k: Annotated[int, typer.Option(help="Budget of Quest; a DSA model's is 2048.")] = 2048,
    device_buffer_size: Annotated[int, typer.Option(help="Hot rows per request and layer.")] = 4096,
    elastic: Annotated[bool, typer.Option(help="Let hot buffers grow, and beyond their size.")] = True,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each case with one request.")] = 5,
    num_layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    query_noise: Annotated[
        float | None, typer.Option(help="Give queries locality, with this share of noise. Default: none.")
    ] = None,
    model_class: Annotated[
        str | None,
        typer.Option(help="vLLM's class of the model, e.g. DeepseekV3ForCausalLM. Default: the checkpoint's."),
    ] = None,
    model_dir: Annotated[Path, typer.Option(help="Where the model is made.")] = Path("build/models/bench"),
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "decode.json",
) -> None:
    """Measure decode throughput of several systems on the same model and prompts."""
    job: dict[str, Any] = {
        "architecture": architecture.value,
        "model": str(model_dir),
        "model_name": make_model_of(architecture, model_dir, num_layers, query_noise),
        "model_class": model_class,
        "backend": None,
        "chunk": CHUNK_TOKENS,
        "num_layers": num_layers,
        "kv_dtype": kv_dtype,
        "device_kv_gib": device_kv_gib,
        "host_pool_gib": host_pool_gib,
        "top_k": top_k,
        "device_buffer_size": device_buffer_size,
        "elastic": elastic,
        "max_tokens": max_tokens,
        "device_share": DEVICE_SHARE / len(system),
    }
    rows: list[dict[str, Any]] = []
    for own in make_jobs(job, context, single, oversubscription):
        for row in take_turns([Engine(name, own) for name in system], own["cases"], repeats):
            rows.append(row)
            write_result(output, ctx, "benchmarks.decode run", rows, gpu_hardware())
    columns = ("system", "context", "requests", "tokens_per_s", "itl_ms_p50", "itl_ms_p99", "running_max", "hit_rate")
    show("Decode", [{name: row.get(name) for name in columns} for row in rows])


@app.command()
def backends(
    ctx: typer.Context,
    backend: Annotated[list[str], typer.Option(help="Repeatable.")] = list(DENSE_BACKENDS),  # noqa: B006
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 12000,
    requests: Annotated[list[int], typer.Option(min=1, help="Requests of a case; repeatable.")] = [1, 4, 16],  # noqa: B006
    model_dir: Annotated[Path, typer.Option(help="Where the model is made.")] = Path("build/models/backends"),
    output: Annotated[Path | None, typer.Option(help="Result file; default: by GPU.")] = None,
) -> None:
    """Compare the back ends of dense models, with full KV and with the plugin, in 8 layers of Llama-3.1-8B.

    Full KV has device memory for four requests. All engines are loaded at the same time, and need 65 GB.
    """
    if unknown := set(backend) - set(DENSE_BACKENDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; back ends are {', '.join(DENSE_BACKENDS)}")
    gpu = gpu_hardware()
    systems = [(system, name) for name in backend for system in ("full", "ours")]
    job: dict[str, Any] = {
        "architecture": Architecture.llama.value,
        "model": str(model_dir),
        "model_name": make_model_of(Architecture.llama, model_dir, num_layers=8, query_noise=0.3),
        "model_class": None,
        "chunk": 4096,  # smaller than that of other benchmarks, because many engines share the GPU
        "num_layers": 8,
        "kv_dtype": "bfloat16",
        "device_kv_gib": 1.5,
        "host_pool_gib": 0.42 * max(requests),
        "top_k": 1024,
        "device_buffer_size": 2048,
        "elastic": True,
        "max_tokens": 128,
        "device_share": DEVICE_SHARE / len(systems),
        "contexts": [context],
        "max_num_seqs": max(requests),
    }
    engines = [Engine(system, {**job, "backend": name}) for system, name in systems]
    rows: list[dict[str, Any]] = []
    for row in take_turns(engines, [(context, number) for number in requests], repeats=3):
        rows.append(row | {"of_base": of_base(row, rows)})
        path = output or RESULTS / str(gpu["gpu"]).split()[1].lower() / "backends.json"
        write_result(path, ctx, "benchmarks.decode backends", rows, gpu)
    if not rows:
        raise typer.Exit(1)
    columns = ("backend", "system", "requests", "tokens_per_s", "of_base", "itl_ms_p50", "running_max", "hit_rate")
    show("Back ends of dense models", [{name: row.get(name) for name in columns} for row in rows])


def of_base(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Tokens per second of a row over those of the latest row with the same case and system over `BASE_BACKEND`."""
    same = {"backend": BASE_BACKEND} | {name: row[name] for name in ("system", "context", "requests")}
    speeds = [each["tokens_per_s"] for each in (*rows, row) if same.items() <= each.items()]
    return round(row["tokens_per_s"] / speeds[-1], 3) if speeds and speeds[-1] and row["tokens_per_s"] else None


def make_model_of(architecture: Architecture, model_dir: Path, num_layers: int, query_noise: float | None) -> str:
    """Make the model; returns its description."""
    from vllm_hisparse.cli.tiny_model import make_model

    if architecture == Architecture.llama:
        make_llama_model(model_dir, num_layers, 1.0 if query_noise is None else query_noise)
        return f"llama, {num_layers} layers of Llama-3.1-8B, random weights, queries with noise {query_noise or 1.0}"
    name = f"deepseek_v32, {num_layers} layers, 64 heads, index_topk 2048, random weights"
    if query_noise is None:
        make_model("dsv32", model_dir, num_layers=num_layers, num_heads=64, index_n_heads=64, index_topk=2048)
        return name
    make_dsa_model(model_dir, num_layers, query_noise)
    return f"{name}, indexer queries with locality, noise {query_noise}"


def make_jobs(
    job: dict[str, Any], contexts: list[int], single: list[int], oversubscription: list[float]
) -> list[dict[str, Any]]:
    """Jobs of the engines. A dense model has one engine per context: Quest scores as many pages as the longest has."""
    cases = [(length, 1) for length in single] + make_cases(contexts, oversubscription, job)
    groups = [[case for case in cases if case[0] == length] for length in dict.fromkeys(length for length, _ in cases)]
    jobs = []
    for group in groups if job["architecture"] == "llama" else [cases]:
        sizes = {"contexts": [length for length, _ in group], "max_num_seqs": max(number for _, number in group)}
        jobs.append({**job, **sizes, "cases": group})
    return jobs


@app.command()
def plot(
    result: Annotated[list[Path], typer.Option(help="Result file of `run`; repeatable.")] = [  # noqa: B006
        RESULTS / "h200" / "decode.json"
    ],
    output: Annotated[Path, typer.Option(help="Picture.")] = Path("docs/figures/decode.png"),
) -> None:
    """Plot results: tokens per second by context and oversubscription."""
    import matplotlib.pyplot as plt

    rows = [row for path in result for row in json.loads(path.read_text())["rows"] if row["requests"] > 1]
    systems = [system for system in SYSTEMS if any(row["system"] == system for row in rows)]
    bars = [(row["system"], row["context"], row["requests"]) for row in rows]
    if len(set(bars)) < len(bars):
        raise typer.BadParameter("two rows have the same system, context and requests", param_hint="--result")
    contexts = sorted({row["context"] for row in rows})
    figure, axes = plt.subplots(1, len(contexts), figsize=(4 * len(contexts), 4), squeeze=False, layout="constrained")
    for axis, context in zip(axes[0], contexts, strict=True):
        requests = sorted({row["requests"] for row in rows if row["context"] == context})
        for index, system in enumerate(systems):
            own = [row for row in rows if (row["system"], row["context"]) == (system, context)]
            found = {row["requests"]: row["tokens_per_s"] for row in own}
            places = [place + 0.27 * (index - (len(systems) - 1) / 2) for place in range(len(requests))]
            axis.bar(places, [found.get(number, 0) for number in requests], width=0.25, label=system)
        axis.set(title=f"{context // 1000}K tokens", xlabel="requests")
        axis.set_xticks(range(len(requests)), requests)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("decoded tokens per second")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(systems))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    app()
