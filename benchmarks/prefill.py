"""Prefill in a single instance on a GPU: the chunks of a long prompt, with full KV and with this plugin.

The plugin's engine copies a prompt's earlier KV from host memory for every chunk. The model is the one of
`benchmarks.full_depth`, with dummy weights and its own selections. Other requests may decode beside the prompt.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, gpu_hardware, show, spread, write_result
from benchmarks.full_depth import MODELS, ModelName, System, write_config
from benchmarks.full_depth import engine_args as decode_args
from benchmarks.host_profile import HostTimes, counting_waits, engine_methods
from benchmarks.kernel_profile import KernelProfile

DECODE_CONTEXT = 2000  # tokens of the prompts of requests that decode
NUM_NAMES = 20  # kernels of a profile
SYSTEMS = (System.full, System.ours)

app = typer.Typer(add_completion=False)


def engine_args(system: System, job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: those of the decode benchmark with connectors whose prompts are computed."""
    args = decode_args(system, job) | {"max_num_batched_tokens": job["chunk"]}
    if system == System.full:
        del args["kv_transfer_config"]
    else:
        del args["kv_transfer_config"]["kv_connector_module_path"]
    return args


class Prompts:
    """Adds prompts to an engine in this process, and times them.

    Args:
        llm: vLLM's `LLM`, whose engine runs in this process.
        is_profiled: True if further prompts of each case are profiled.
    """

    def __init__(self, llm: Any, is_profiled: bool = False):
        self.engine, self.is_profiled = llm.llm_engine, is_profiled
        self._num_added = 0

    def add(self, num_tokens: int, max_tokens: int) -> str:
        """Add a prompt of random tokens; returns the request's id."""
        from vllm import SamplingParams

        name, source = f"request-{self._num_added}", random.Random(self._num_added)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": source.choices(range(3, 500), k=num_tokens)}, params)
        self._num_added += 1
        return name

    def time_prompt(self, num_tokens: int) -> tuple[float, list[float]]:
        """Return the seconds until a prompt's first token, and the seconds of every step until then."""
        name, steps, start = self.add(num_tokens, 1), [], time.perf_counter()
        while True:
            before = time.perf_counter()
            outputs = self.engine.step()
            steps.append(time.perf_counter() - before)
            if any(output.request_id == name for output in outputs):
                return time.perf_counter() - start, steps

    def measure(self, context: int, decoding: int, repeats: int) -> dict[str, Any]:
        """Measure prompts of one length while `decoding` other requests decode; no request is left after it."""
        first = self._num_added
        for _ in range(decoding):
            self.add(DECODE_CONTEXT, 100_000)
        for _ in range(8 if decoding else 0):
            self.engine.step()
        self.time_prompt(context)  # kernels of these sizes are compiled
        timed = [self.time_prompt(context) for _ in range(repeats)]
        profile = self.profile(context) if self.is_profiled else {}
        self.engine.abort_request([f"request-{index}" for index in range(first, self._num_added)])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        speeds = spread(context / seconds for seconds, _ in timed)
        steps = spread(1e3 * step for _, steps in timed for step in steps)
        return {
            "prompt_tokens_per_s": speeds,
            "ttft_s": spread(seconds for seconds, _ in timed),
            "step_ms": steps,
            "num_steps": len(timed[0][1]),
            **profile,
        }

    def profile(self, context: int) -> dict[str, dict[str, float]]:
        """Profile three prompts, each in another way, because the ways disturb each other.

        Returns:
            Milliseconds or counts of a prompt: `host_ms` by method (`engine_methods`), `waits` by place in the code,
            `kernel_ms` by kind, and `kernel_names_ms` by name.
        """
        times, waits = HostTimes(engine_methods(self.engine.engine_core.engine_core)), Counter[str]()
        with times.running():
            self.time_prompt(context)
        with counting_waits(waits):
            self.time_prompt(context)
        kernels = KernelProfile()
        kernels.start_kernel_profile()
        self.time_prompt(context)
        kinds, names = kernels.stop_kernel_names(NUM_NAMES)
        host, counts = times.milliseconds(), dict(waits.most_common(NUM_NAMES))
        return {"host_ms": host, "waits": counts, "kernel_ms": kinds, "kernel_names_ms": names}


def serve(connection: Connection, system: System, job: dict[str, Any], repeats: int) -> None:
    """Load a system in this process, and measure the cases (context, decoding) that it receives; None ends it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled for a minute, and tokens are greedy
    from vllm import LLM

    prompts = Prompts(LLM(**engine_args(system, job)), job["is_profiled"])
    for context, decoding in iter(connection.recv, None):
        connection.send(prompts.measure(context, decoding, repeats))


def measure_all(system: System, job: dict[str, Any], cases: list[tuple[int, int]], repeats: int) -> Iterator[dict]:
    """Yield the rows of one system, which runs in a process of its own and ends with the first case that fails."""
    connection, other = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(other, system, job, repeats))
    process.start()
    other.close()
    try:
        for context, decoding in cases:
            connection.send((context, decoding))
            row = {"system": str(system), "context": context, "decoding": decoding, "layers": job["layers"]}
            row |= {"chunk": job["chunk"], "kv_dtype": job["kv_dtype"], **connection.recv()}
            typer.echo(json.dumps(row), err=True)
            yield row
        connection.send(None)
    except (EOFError, OSError):
        typer.echo(f"the engine of {system} has ended", err=True)
    finally:
        process.join(60)
        process.kill()
        process.join()  # the next system needs its memory


@app.command()
def run(
    ctx: typer.Context,
    context: Annotated[list[int], typer.Option(help="tokens of a prompt; repeatable")] = [8192, 32768, 131072],  # noqa: B006
    decoding: Annotated[list[int], typer.Option(help="requests that decode beside it; repeatable")] = [0],  # noqa: B006
    chunk: Annotated[int, typer.Option(help="tokens of a step")] = 8192,
    layers: Annotated[int, typer.Option(min=1, help="layers")] = 61,
    experts: Annotated[int, typer.Option(min=1, help="experts of a layer")] = 8,
    expert_size: Annotated[int, typer.Option(min=1, help="hidden size of an expert")] = 1024,
    kv_dtype: Annotated[str, typer.Option(help="bfloat16 or fp8")] = "fp8",
    device_kv_gib: Annotated[float, typer.Option(help="device memory for KV in GiB")] = 24.0,
    host_pool_gib: Annotated[float, typer.Option(help="host memory for KV in GiB")] = 24.0,
    device_buffer_size: Annotated[int, typer.Option(help="hot rows per request and layer")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="prompts of each case")] = 3,
    profile: Annotated[
        bool, typer.Option(help="profile three further prompts of each case: host, waits for the device, kernels")
    ] = False,
    model_dir: Annotated[Path, typer.Option(help="where the model's configuration is written")] = Path(
        "build/models/prefill"
    ),
    output: Annotated[Path, typer.Option(help="result file")] = RESULTS / "h200" / "prefill.json",
) -> None:
    """Measure prompts of every length with either system."""
    model = write_config(model_dir, ModelName.deepseek, layers, experts, expert_size, 1, has_drafts=False)
    sizes = {"layers": layers, "kv_dtype": kv_dtype, "device_kv_gib": device_kv_gib, "host_pool_gib": host_pool_gib}
    parallel = {"tensor_parallel": 1, "data_parallel": 1, "drafts": 0, "quantization": None}
    numbers = sorted({1, *(1 + each for each in decoding)})
    num_prompts = 1 + repeats + 3 * profile
    longest = max(*context, DECODE_CONTEXT + 8 * num_prompts * max(context) // chunk)
    job = {"model": str(model), "name": MODELS[ModelName.deepseek]["model_type"], **sizes, **parallel}
    job |= {"max_model_len": -(-(longest + 64) // 64) * 64, "max_num_seqs": numbers[-1], "graph_sizes": numbers}
    job |= {"chunk": chunk, "device_buffer_size": device_buffer_size, "elastic": True, "admission": "off"}
    job |= {"indexer_key_dtype": "auto", "row_shares": None, "host_pool_memory": "auto"}
    job["forces_selections"], job["is_profiled"] = False, profile
    rows: list[dict[str, Any]] = []
    for system in SYSTEMS:
        for row in measure_all(system, job, [(each, other) for other in decoding for each in context], repeats):
            rows.append(row)
            write_result(output, ctx, "benchmarks.prefill", rows, gpu_hardware())
    show("Prefill", [summary(row) for row in rows])


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the medians of its spreads, without profiles."""
    values = {name: value.get("median") if isinstance(value, dict) else value for name, value in row.items()}
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    app()
