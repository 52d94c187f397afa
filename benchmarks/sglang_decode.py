"""Decode at full depth with SGLang: its full KV and its HiSparse, with the cases and rows of `benchmarks.full_depth`.

Run it in an environment with SGLang 0.5.23, which is not vLLM's:

    python -m benchmarks.sglang_decode --layers 4 --case 32768x8 --settle 8 --steps 8 --output smoke.json
    python -m benchmarks.sglang_decode --case 32768x56 --case 65536x28
    python -m benchmarks.sglang_decode --ratio 2 --case 500x400+16 --case 32768x16+560

The engine is a decode instance whose transfers come from SGLang's backend `fake`: prompts are neither computed nor
transferred. Full KV and the host pool are what was allocated, index keys are random, and the indexer runs before its
selection is overwritten (`benchmarks.sglang_scheduler`). Model, device memory for KV, contexts and selections are those
of the other systems. Differences: the router of experts has four groups, because SGLang would compile one for a single
group that no real model takes; index keys are counted for the whole logical space, as SGLang does; tables are not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.full_depth import (
    GRAPH_SIZES,
    MODELS,
    Case,
    ModelName,
    Selection,
    arrivals,
    check,
    describe,
    max_model_len,
    scaled_trace,
)
from benchmarks.sglang_scheduler import (
    CLOCK_VARIABLE,
    FORCES_VARIABLE,
    MISSES_VARIABLE,
    PAGE_SIZE,
    StepFile,
    run_patched_scheduler,
)

System = StrEnum("System", {"sglang_full": "sglang_full", "sglang": "sglang"})
ROW_BYTES = {"fp8": 656, "bfloat16": 1152}  # of one layer
KEY_BYTES = 132  # index key and scale of one layer
DRAFT_SCRATCH_ROWS = 1024  # hot rows that HiSparse keeps for drafts, at least
FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # SGLang's name for a transfer that needs no peer
SLACK_STEPS = 24  # that a request may take beyond those asked for
STEP_TIMEOUT_S = 240.0
PACKAGES = ("sglang", "sglang-kernel", "sgl-flash-mla", "sgl-deep-gemm", "flashinfer-python", "triton")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Memory:
    """Memory of an engine.

    Attributes:
        tokens: tokens of the device pool (`max_total_tokens`).
        logical_tokens: tokens that all requests may have together; with HiSparse, those of the host pool.
        host_gib: size of the host pool.
        seats: number of requests whose hot buffers fit.
    """

    tokens: int
    logical_tokens: int
    host_gib: float
    seats: int

    @classmethod
    def plan(cls, system: System, job: dict[str, Any]) -> Memory:
        """The memory that SGLang makes of the device memory for KV of a job."""
        ratio = job["ratio"] if system == System.sglang else 1
        layers, row, sharing = job["layers"], ROW_BYTES[job["kv_dtype"]], job["shared_indexers"]
        # With HiSparse, layers that share a selection have index keys all the same.
        is_shared = system == System.sglang_full
        key_layers = sum(not is_shared or max(layer - 1, 0) % sharing == 0 for layer in range(layers))
        draft = (row + KEY_BYTES) * ratio if job["drafts"] else 0
        token_bytes = row * layers + KEY_BYTES * key_layers * ratio + draft
        tokens = int(job["device_kv_gib"] * 2**30) // token_bytes // PAGE_SIZE * PAGE_SIZE
        if system == System.sglang_full:
            return cls(tokens, tokens, 0.0, 1 << 30)
        work = (1 + job["drafts"]) * MODELS[ModelName.deepseek]["index_topk"]
        scratch = min(work, max(DRAFT_SCRATCH_ROWS, work - job["device_buffer_size"])) if job["drafts"] else 0
        # A request has a page beyond its buffer, and the page of its next step must be free on the device, too.
        seats = tokens // (job["device_buffer_size"] + 2 * PAGE_SIZE + scratch)
        return cls(tokens, tokens * ratio, round((tokens * ratio + PAGE_SIZE) * row * layers / 2**30, 1), seats)

    def running(self, context: int) -> int:
        """Requests of a context that fit."""
        return min(self.seats, self.logical_tokens // (-(-context // PAGE_SIZE) * PAGE_SIZE))


def write_config(job: dict[str, Any]) -> Path:
    """Write the config.json of the other systems' model, but for the groups of its experts; returns its directory."""
    experts = job["experts"]
    sizes = {"n_routed_experts": experts, "num_experts_per_tok": min(experts, 8), "num_hidden_layers": job["layers"]}
    sizes |= {"moe_intermediate_size": job["expert_size"], "num_nextn_predict_layers": int(job["drafts"] > 0)}
    if experts >= 8 and experts % 4 == 0:
        sizes |= {"n_group": 4, "topk_group": 4}
    if job["shared_indexers"] > 1:
        sizes["index_topk_freq"] = job["shared_indexers"]
    path = Path(job["model_dir"])
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[ModelName(job["name"])] | sizes, indent=2))
    return path


def engine_args(system: System, job: dict[str, Any], memory: Memory, cases: list[Case]) -> dict[str, Any]:
    """Arguments of `sglang.Engine`; the systems differ only in HiSparse and the number of tokens."""
    numbers = {min(case.requests, memory.running(case.context)) for case in cases if case.context}
    numbers |= {case.requests for case in cases if case.context}
    args: dict[str, Any] = {
        "model_path": str(write_config(job)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "quantization": job["quantization"],
        "kv_cache_dtype": {"fp8": "fp8_e4m3", "bfloat16": "bfloat16"}[job["kv_dtype"]],
        "context_length": job["max_model_len"],
        "max_running_requests": job["max_num_seqs"],
        "max_total_tokens": memory.tokens,
        "mem_fraction_static": 0.85,
        "disable_radix_cache": True,
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "fake",
        "disaggregation_decode_extra_slots": 0,
        "disaggregation_decode_retraction_backup": "none",
        "num_reserved_decode_tokens": job["reserved"],
        "cuda_graph_bs_decode": sorted(size for size in {*GRAPH_SIZES, *numbers} if size <= job["max_num_seqs"]),
        "disable_prefill_cuda_graph": True,
        "disable_flashinfer_autotune": True,
        "disable_custom_all_reduce": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "moe_runner_backend": "triton",
        "tp_size": 1,
        "random_seed": 0,
        "stream_interval": 64,
        "decode_log_interval": 64,
        "watchdog_timeout": 1800,
        "log_level": "info",
    }
    if system == System.sglang:
        options = {"top_k": MODELS[ModelName(job["name"])]["index_topk"], "host_to_device_ratio": job["ratio"]}
        options["device_buffer_size"] = job["device_buffer_size"]
        args |= {"enable_hisparse": True, "hisparse_config": json.dumps(options)}
    if job["kv_dtype"] == "bfloat16":  # full KV's default is fetched from a hub
        args |= {"dsa_decode_backend": "flashmla_sparse", "dsa_prefill_backend": "flashmla_sparse"}
    if job["drafts"]:
        args |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": job["drafts"],
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": job["drafts"] + 1,
            "speculative_draft_load_format": "dummy",
        }
    return args


def set_environment(job: dict[str, Any], steps: Path) -> None:
    """Set variables that SGLang reads when it is imported."""
    nvcc = shutil.which("nvcc")
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SGLANG_NUMA_BIND_V2": "0",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
        "SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK": "1",  # a Triton router instead of one that FlashInfer compiles
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "TORCH_CUDA_ARCH_LIST": "9.0a",
        "CUDA_HOME": str(Path(nvcc).resolve().parents[1]) if nvcc else "/usr/local/cuda",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if job["drafts"]:  # NOTE: one draw per step for the whole batch, unlike vLLM's
        accepted = 1 + sum(job["acceptance"] ** index for index in range(1, job["drafts"] + 1))
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(accepted)
    os.environ[CLOCK_VARIABLE] = str(steps)
    os.environ[FORCES_VARIABLE] = str(int(job["forces_selections"]))
    os.environ[MISSES_VARIABLE] = str(int(job["counts_misses"]))


class Loaded:
    """A running engine, which measures cases.

    Args:
        engine: SGLang's `Engine`.
        steps: steps of its scheduler.
        job: sizes and numbers of steps.
        folder: directory of files that the scheduler's process reads and writes.
    """

    def __init__(self, engine: Any, steps: StepFile, job: dict[str, Any], folder: Path):
        self.engine, self.steps, self.job, self.folder = engine, steps, job, folder
        self.query_len, self._num_added = 1 + job["drafts"], 0
        self._tasks: list[asyncio.Future] = []

    def measure(self, case: Case) -> dict[str, Any]:
        """Measure one case; no request is left after it."""
        return self.engine.loop.run_until_complete(self._measure(case))

    def state(self) -> dict[str, Any]:
        """Return the sizes of memory that the scheduler reports."""
        path = self.folder / "state.json"
        self.engine.collective_rpc("bench_state", path=str(path))
        return json.loads(path.read_text())

    async def _measure(self, case: Case) -> dict[str, Any]:
        if case.selection == Selection.independent:
            self.engine.collective_rpc("bench_independent", overlap=case.overlap)
        elif case.selection == Selection.trace:
            path = self.folder / f"trace-{case.context}.npy"
            np.save(path, scaled_trace(case.context))
            self.engine.collective_rpc("bench_trace", path=str(path), context=case.context)
        self._tasks = []
        try:
            return await (self._steady(case) if case.context else self._mixed(case))
        finally:
            await self._drain()

    def _add(self, context: int, max_tokens: int) -> None:
        source = random.Random(self._num_added)
        work = self.engine.async_generate(
            input_ids=source.choices(range(3, 500), k=context),
            sampling_params={"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True},
            rid=f"request-{self._num_added}",
            bootstrap_host=FAKE_BOOTSTRAP_HOST,
        )
        self._num_added += 1
        self._tasks.append(asyncio.ensure_future(work))

    async def _steady(self, case: Case) -> dict[str, Any]:
        job = self.job
        settle = job["settle"] if case.settle is None else case.settle
        start = len(self.steps)
        for _ in range(case.requests):
            self._add(case.context, (settle + job["steps"] + job["profiled"] + SLACK_STEPS) * self.query_len)
            await asyncio.sleep(0)
        await self._until(start + 1)
        # Requests are admitted over some steps; a case is steady when their number has not changed for a while.
        calm = min(settle, 16)
        while True:
            sizes = self.steps.rows(start)[:, 1]
            is_calm = len(sizes) >= settle and len(set(sizes[-calm:])) == 1
            if is_calm or len(sizes) > settle + SLACK_STEPS:
                break
            await asyncio.sleep(0.005)
        before, first = self._counts(), len(self.steps)
        last = first + job["steps"]
        await self._until(last)
        row = self.steps.clock(last).summary(first) | {"running_min": int(self.steps.rows(first, last)[:, 1].min())}
        row["waiting_at_end"] = int(self.steps.rows(last - 1, last)[0, 3])
        return row | self._misses(before) | await self._profile()

    async def _mixed(self, case: Case) -> dict[str, Any]:
        """Requests arrive as in `full_depth.Loaded`; the second half of the time counts."""
        longest, seconds = self.job["max_model_len"] - 256 - 8, self.job["mixed_s"]
        source = arrivals(case.requests / 60, 0)
        start, first, before, arrival = time.perf_counter(), None, self._counts(), next(source)
        while (now := time.perf_counter() - start) < seconds:
            while arrival.seconds <= now:
                self._add(min(arrival.prompt, longest), arrival.answer)
                arrival = next(source)
            if first is None and now >= seconds / 2:
                first, before = len(self.steps), self._counts()
            await asyncio.sleep(0.002)
        last = len(self.steps)
        waiting = int(self.steps.rows(last - 1, last)[0, 3])
        return self.steps.clock(last).summary(first or 0) | {"waiting_at_end": waiting} | self._misses(before)

    async def _profile(self) -> dict[str, Any]:
        if not self.job["profiled"]:
            return {}
        path = self.folder / "profile.json"
        self.engine.collective_rpc("bench_profile_start")
        await self._until(len(self.steps) + self.job["profiled"])
        self.engine.collective_rpc("bench_profile_stop", path=str(path))
        return {"kernel_ms": json.loads(path.read_text())}

    def _counts(self) -> dict[str, Any]:
        return self.state() if self.job["counts_misses"] else {}  # the call stops the loop for a moment

    def _misses(self, before: dict[str, Any]) -> dict[str, Any]:
        after = self._counts()
        if "missed" not in after:
            return {"hit_rate": None, "h2d_bytes": None}
        looked_up, missed = (after[name] - before.get(name, 0) for name in ("looked_up", "missed"))
        rate = round(1 - missed / looked_up, 4) if looked_up else None
        return {"hit_rate": rate, "h2d_bytes": missed * ROW_BYTES[self.job["kv_dtype"]]}

    async def _until(self, num_steps: int) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while len(self.steps) < num_steps:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{num_steps - len(self.steps)} steps are missing after {STEP_TIMEOUT_S:.0f} s")
            if self._tasks and all(task.done() for task in self._tasks):
                error = next((task.exception() for task in self._tasks if task.exception()), None)
                raise RuntimeError(f"all requests have ended before {num_steps} steps: {error}")
            await asyncio.sleep(0.005)

    async def _drain(self) -> None:
        self.engine.tokenizer_manager.abort_request(abort_all=True)
        if self._tasks:
            done, left = await asyncio.wait(self._tasks, timeout=60)
            for task in done:
                task.exception()  # of requests that were aborted before they ran
            if left:
                typer.echo(f"{len(left)} requests did not end", err=True)
        await asyncio.sleep(0.5)


def serve(connection: Connection, system: System, job: dict[str, Any], cases: list[Case]) -> None:
    """Load a system in this process and send the results of its cases, one by one."""
    memory = Memory.plan(system, job)
    folder = Path(tempfile.mkdtemp(prefix="sglang-decode-"))
    steps = StepFile(folder / "steps", create=True)
    set_environment(job, folder / "steps")
    from sglang.srt.entrypoints.engine import Engine

    class PatchedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_patched_scheduler)

    start = time.perf_counter()
    engine = PatchedEngine(**engine_args(system, job, memory, cases))
    try:
        loaded = Loaded(engine, steps, job, folder)
        typer.echo(f"{system}: loaded in {time.perf_counter() - start:.0f} s", err=True)
        engine.collective_rpc("bench_fill_keys")
        state = loaded.state()
        typer.echo(f"{system}: {json.dumps(state)}", err=True)
        for case in cases:
            found = loaded.measure(case) | {"kv_pool_gib": state["kv_pool_gib"], "device_tokens": memory.tokens}
            found |= {"host_to_device_ratio": job["ratio"] if system == System.sglang else None}
            connection.send(found | {"host_pool_gib": memory.host_gib})
    finally:
        engine.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def sglang_versions() -> dict[str, str]:
    """Versions of the packages under test."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@app.command()
def run(
    ctx: typer.Context,
    case: Annotated[list[str], typer.Option(help="as of `benchmarks.full_depth`; repeatable")] = [  # noqa: B006
        "32768x56",
        "65536x28",
    ],
    system: Annotated[list[System], typer.Option(help="repeatable")] = list(System),  # noqa: B006
    model: Annotated[ModelName, typer.Option(help="model that gives the sizes")] = ModelName.deepseek,
    layers: Annotated[int | None, typer.Option(min=1, help="layers; default: the model's")] = None,
    experts: Annotated[int, typer.Option(min=1, help="experts of a layer")] = 8,
    expert_size: Annotated[int, typer.Option(min=1, help="hidden size of an expert")] = 1024,
    shared_indexers: Annotated[int, typer.Option(min=1, help="layers that share an indexer")] = 1,
    quantization: Annotated[str | None, typer.Option(help="of the weights; default: bfloat16")] = None,
    kv_dtype: Annotated[str, typer.Option(help="fp8 or bfloat16")] = "fp8",
    device_kv_gib: Annotated[float, typer.Option(help="device memory for KV")] = 24.0,
    device_buffer_size: Annotated[int, typer.Option(help="hot rows per request and layer")] = 4096,
    ratio: Annotated[int, typer.Option(min=1, help="SGLang's host_to_device_ratio")] = 8,
    reserved: Annotated[int, typer.Option(help="SGLang's num_reserved_decode_tokens; its default is 512")] = 32,
    drafts: Annotated[int, typer.Option(min=0, max=3, help="drafts of a step, by a draft layer")] = 0,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="probability of each, if those before it are")] = 0.8,
    settle: Annotated[int, typer.Option(min=1, help="steps before those that are timed")] = 48,
    steps: Annotated[int, typer.Option(min=2, help="steps that are timed")] = 48,
    mixed_s: Annotated[float, typer.Option(help="seconds of a mixed case; its second half is timed")] = 20.0,
    profile_steps: Annotated[int, typer.Option(min=0, help="steps after those whose kernels are profiled")] = 0,
    count_misses: Annotated[bool, typer.Option(help="hit rates; times of such a run do not count")] = False,
    plan: Annotated[bool, typer.Option(help="print the memory of each system and stop; needs no GPU")] = False,
    model_dir: Annotated[Path, typer.Option(help="directory of the model's configuration")] = Path(
        "build/models/sglang-full-depth"
    ),
    output: Annotated[Path, typer.Option(help="result file")] = RESULTS / "h200" / "full_depth_peers.json",
) -> None:
    """Measure the cases with SGLang's full KV and its HiSparse."""
    cases = [Case.parse(text) for text in case]
    check(cases, 1)
    longest = max(65_536 if each.context == 0 else each.context for each in cases)
    num_steps = max(settle, *(each.settle or 0 for each in cases)) + steps + profile_steps + SLACK_STEPS
    job: dict[str, Any] = {
        "name": str(model),
        "model_dir": str(model_dir),
        "layers": layers or MODELS[model]["num_hidden_layers"],
        "experts": experts,
        "expert_size": expert_size,
        "shared_indexers": shared_indexers,
        "quantization": quantization,
        "kv_dtype": kv_dtype,
        "device_kv_gib": device_kv_gib,
        "device_buffer_size": device_buffer_size,
        "ratio": ratio,
        "reserved": reserved,
        "drafts": drafts,
        "acceptance": acceptance if drafts else None,
        "settle": settle,
        "steps": steps,
        "mixed_s": mixed_s,
        "profiled": profile_steps,
        "counts_misses": count_misses,
        "forces_selections": any(each.selection != Selection.model for each in cases),
        "max_model_len": max_model_len(longest, num_steps, drafts),
        "max_num_seqs": max(256 if each.context == 0 else each.requests for each in cases),
        "elastic": False,
        "admission": None,
        "tensor_parallel": 1,
        "data_parallel": 1,
    }
    if plan:
        for name in system:
            memory = Memory.plan(name, job)
            fits = {text: memory.running(each.context) for text, each in zip(case, cases, strict=True) if each.context}
            typer.echo(json.dumps({"system": str(name), **vars(memory), "running": fits}))
        return
    rows: list[dict[str, Any]] = []
    for name in system:  # each in a process of its own, also when the one before it has died
        receiver, sender = get_context("spawn").Pipe(duplex=False)
        process = get_context("spawn").Process(target=serve, args=(sender, name, job, cases))
        process.start()
        sender.close()
        try:
            for each in cases:
                rows.append(describe(name, job, each) | receiver.recv())
                typer.echo(json.dumps(rows[-1]), err=True)
                write_result(output, ctx, "benchmarks.sglang_decode", rows, gpu_hardware() | sglang_versions())
        except EOFError:
            typer.echo(f"the engine of {name} has ended", err=True)
        process.join(60)
        process.kill()
        process.join()  # the next system needs its memory
    if not rows:
        sys.exit(1)
    columns = ("system", "context", "requests", "selection", "overlap", "tokens_per_s", "itl_ms_p50", "running_max")
    show("Full depth, SGLang", [{name: row[name] for name in columns} for row in rows])


if __name__ == "__main__":
    app()
