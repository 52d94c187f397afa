"""Decode at full depth on GPUs: full KV, vLLM's native HiSparse and this plugin, with the same device memory for KV.

The model has the layers of DeepSeek-V3.2, but only 8 experts of half the size, which stand for one rank's share in a
wide expert-parallel deployment. Its weights are dummies. Prompts are not computed: vLLM's `DecodeBenchConnector` fills
full KV; the other systems act as if KV were in host memory (`benchmarks.prefilled_connectors`). The indexer runs, and
its selection is then overwritten (`benchmarks.forced_selections`), either by a random process or by a recorded trace.

Systems are measured one after the other on the same machine, each in processes of its own. A case submits its requests
at once and never lets them end: after some steps to settle, steps are timed. In the mixed case, requests arrive and
end. With drafts, the model has a draft layer, and vLLM accepts any draft with a given probability.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.decode import counters, moved
from vllm_hisparse.cli.plan.models import PRESETS
from vllm_hisparse.cli.replay import WARM_UP_STEPS
from vllm_hisparse.cli.replay_layers import LayerMisses

PLOTTED = ("full_depth.json", "full_depth_shared.json")

app = typer.Typer(add_completion=False)

System = StrEnum("System", ["full", "vllm_native", "ours"])
Selection = StrEnum("Selection", ["independent", "trace", "model"])
Admission = StrEnum("Admission", ["auto", "off"])
ModelName = StrEnum("ModelName", {"deepseek": "DeepSeek-V3.2", "glm": "GLM-5"})

# Parts of a preset that the benchmark leaves out or sets itself.
NOT_FROM_PRESET = (
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_nextn_predict_layers",
    "quantization_config",
)


def model_config(preset: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a real model, but for its experts, its draft layer and its quantization.

    Args:
        preset: name of the model among the presets of `vllm-hisparse plan`.
        changes: entries that the preset lacks or that differ.
    """
    sizes = {name: value for name, value in PRESETS[preset].items() if name not in NOT_FROM_PRESET}
    return sizes | COMMON | changes


COMMON = {
    "dtype": "bfloat16",
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1 << 18,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
V32 = model_config("DeepSeek-V3.2")
GLM5 = model_config(
    "GLM-5",
    rms_norm_eps=1e-5,
    indexer_rope_interleave=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
MODELS = {ModelName.deepseek: V32, ModelName.glm: GLM5}
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256)
MAX_BATCHED_TOKENS = 1024  # prompts are not computed
TRACES = Path(__file__).parent / "traces"
TRACE_FILES = {35_064: "code-dsa-4096.trace", 67_832: "code-dsa-8192.trace"}  # context -> trace, see `scaled_trace`
EQUAL_ROWS = "equal"  # all layers have the same number of hot rows
STOP_TIMEOUT_S = 60


@dataclass(frozen=True)
class Case:
    """The requests that an engine gets.

    Attributes:
        context: tokens of a prompt; 0: the mixed case.
        requests: prompts; in the mixed case, requests per minute.
        selection: source of the selected positions.
        overlap: probability that a position stays in an independent selection for a step.
        settle: steps before those that are timed; None: the job's.
    """

    context: int
    requests: int
    selection: Selection
    overlap: float | None = None
    settle: int | None = None

    @classmethod
    def parse(cls, text: str) -> Case:
        """From `<context>x<requests>`, or `mixed` for the context, with `+<settle>` and then `:<overlap>`, `:trace` or
        `:model` behind."""
        sizes, _, selection = text.partition(":")
        sizes, _, settle = sizes.partition("+")
        context, _, requests = sizes.rpartition("x")
        try:
            size = 0 if context == "mixed" else int(context), int(requests)
            steps = int(settle) if settle else None
            if selection == Selection.trace and size[0] not in TRACE_FILES:
                raise ValueError("no trace of this context")
            if selection in (Selection.trace, Selection.model):
                return cls(*size, Selection(selection), None, steps)
            return cls(*size, Selection.independent, float(selection or 0.87), steps)
        except ValueError:
            expected = "<context>x<requests> or mixedx<requests per minute>, and [+<settle>][:<overlap>|:trace|:model]"
            expected += f"; traces have contexts of {' and '.join(map(str, TRACE_FILES))}"
            raise typer.BadParameter(f"got {text!r}, expected {expected}", param_hint="--case") from None


class Arrival(NamedTuple):
    """A request of the mixed case: seconds after the start, tokens of its prompt and of its answer."""

    seconds: float
    prompt: int
    answer: int


def arrivals(requests_per_s: float, seed: int) -> Iterator[Arrival]:
    """Yield requests that arrive at random times, without end: 70% have prompts of 500 to 2,000 tokens, 30% of 32K to
    64K, each with 64 to 256 tokens to generate."""
    source, seconds = random.Random(seed), 0.0
    while True:
        low, high = (500, 2000) if source.random() < 0.7 else (32_768, 65_536)
        yield Arrival(seconds, source.randint(low, high), source.randint(64, 256))
        seconds += source.expovariate(requests_per_s)


@dataclass
class Clock:
    """Times the steps of an engine. Unlike in `benchmarks.decode`, time in which nothing is computed counts.

    Attributes:
        ends: time of each step's output, its number of requests and of new tokens, rejected drafts not counted.
    """

    ends: list[tuple[float, int, int]] = field(default_factory=list)

    def attach(self, scheduler: Any) -> None:
        """Replace a method of the scheduler by one that also notes the time."""
        update = scheduler.update_from_output

        def timed(scheduler_output: Any, model_output: Any) -> Any:
            num_tokens = sum(map(len, model_output.sampled_token_ids))
            self.ends.append((time.perf_counter(), len(scheduler_output.num_scheduled_tokens), num_tokens))
            return update(scheduler_output, model_output)

        scheduler.update_from_output = timed

    def summary(self, first: int) -> dict[str, float | int | None]:
        """Throughput and inter-token latency over the steps from `first` on."""
        times, requests, tokens = (np.array(part) for part in zip(*self.ends[max(first - 1, 0) :], strict=True))
        seconds, requests, tokens = np.diff(times), requests[1:], tokens[1:]
        has_tokens = tokens > 0
        if not has_tokens.any():
            empty = dict.fromkeys(("tokens_per_s", "itl_ms_p50", "itl_ms_p99", "tokens_per_step"))
            return {**empty, "running_max": 0, "steps": 0}
        latencies = seconds[has_tokens] * 1e3 * requests[has_tokens] / tokens[has_tokens]
        p50, p99 = np.percentile(np.repeat(latencies, tokens[has_tokens]), (50, 99)).round(3).tolist()
        return {
            "tokens_per_s": round(float(tokens.sum() / seconds.sum()), 1),
            "itl_ms_p50": p50,
            "itl_ms_p99": p99,
            "tokens_per_step": round(float(tokens.sum() / requests.sum()), 3),
            "running_max": int(requests.max()),
            "steps": int(has_tokens.sum()),
        }


def write_config(
    path: Path,
    model: ModelName,
    num_layers: int,
    num_experts: int,
    expert_size: int,
    shared_indexers: int,
    has_drafts: bool,
) -> Path:
    """Write a model's config.json; returns its directory.

    Args:
        path: the directory.
        model: model that gives all other sizes.
        num_layers: layers.
        num_experts: experts of a layer; every token goes to up to 8 of them.
        expert_size: hidden size of an expert.
        shared_indexers: layers that share an indexer.
        has_drafts: True if there is a draft layer.
    """
    experts = {"n_routed_experts": num_experts, "num_experts_per_tok": min(num_experts, 8)}
    sharing = {"index_topk_freq": shared_indexers} if shared_indexers > 1 else {}
    sizes = {"num_hidden_layers": num_layers, "moe_intermediate_size": expert_size}
    sizes["num_nextn_predict_layers"] = int(has_drafts)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model] | experts | sharing | sizes, indent=2))
    return path


def engine_args(system: System, job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; systems differ only in where KV is stored."""
    batches = sorted({*(size for size in GRAPH_SIZES if size <= job["max_num_seqs"]), *job["graph_sizes"]})
    query_len = 1 + job["drafts"]
    args: dict[str, Any] = {
        "model": job["model"],
        "load_format": "dummy",
        "quantization": job["quantization"],
        "skip_tokenizer_init": True,
        "max_model_len": job["max_model_len"],
        "dtype": "bfloat16",
        "kv_cache_dtype": {"bfloat16": "auto", "fp8": "fp8"}[job["kv_dtype"]],
        "kv_cache_memory_bytes": int(job["device_kv_gib"] * 2**30),
        "gpu_memory_utilization": 0.95,
        "max_num_seqs": job["max_num_seqs"],
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, job["max_num_seqs"] * query_len),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        "tensor_parallel_size": job["tensor_parallel"],
        "enable_expert_parallel": job["data_parallel"] > 1,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [batch * query_len for batch in batches],
        },
    }
    if job["drafts"]:
        args["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": job["drafts"],
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [job["acceptance"] ** (1 + index) for index in range(job["drafts"])],
        }
    if job["forces_selections"]:
        args["worker_extension_cls"] = "benchmarks.forced_selections.ForcedSelectionsExtension"
    connector = {"kv_role": "kv_both", "kv_connector_module_path": "benchmarks.prefilled_connectors"}
    if system == System.full:
        args["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"startup_fill": True},  # not in a step that is timed
        }
    elif system == System.vllm_native:
        options = {"host_pool_gib": job["host_pool_gib"]}
        args["kv_transfer_config"] = connector | {
            "kv_connector": "HiSparseConnector",
            "kv_connector_extra_config": options,
        }
        args["attention_config"] = {"hisparse_config": {"device_buffer_size": job["device_buffer_size"]}}
    else:
        names = "host_pool_gib", "host_pool_memory", "device_buffer_size", "elastic", "admission", "indexer_key_dtype"
        options = {name: job[name] for name in names}
        if job["row_shares"] is not None:
            options["rows_by_layer"] = job["row_shares"]
        args["kv_transfer_config"] = connector | {
            "kv_connector": "HiSparseHostConnector",
            "kv_connector_extra_config": options,
        }
    return args


class Loaded:
    """An engine in this process, which measures cases.

    Args:
        llm: vLLM's `LLM`, whose engine runs in this process.
        settle: steps before those that are timed.
        steps: steps that are timed.
        mixed_s: seconds of a mixed case, of which the second half is timed.
        profiled: steps after those that are timed whose kernels are profiled.
        rank: data parallel rank, whose requests arrive at times of their own.

    Attributes:
        host_memory: kinds of memory of the ranks' host pools: `managed`, `pinned`, or `ordinary` (CPU platform); None:
            another system than the plugin.
    """

    def __init__(self, llm: Any, settle: int, steps: int, mixed_s: float, profiled: int, rank: int = 0):
        self.llm, self.engine, self.settle, self.steps = llm, llm.llm_engine, settle, steps
        self.mixed_s, self.profiled, self.rank = mixed_s, profiled, rank
        self.query_len = 1 + self.engine.vllm_config.num_speculative_tokens
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.host_memory = joined(llm.collective_rpc(host_memory))
        self._num_added = 0

    def measure(self, case: Case) -> dict[str, Any]:
        """Measure one case; no request is left after it."""
        self._select(case)
        clock, update = Clock(), self.scheduler.update_from_output
        clock.attach(self.scheduler)
        try:
            return self._run_mixed(case, clock) if case.context == 0 else self._run_steady(case, clock)
        finally:
            self.scheduler.update_from_output = update
            self._drain()

    def _select(self, case: Case) -> None:
        if case.selection == Selection.independent:
            self.llm.collective_rpc("use_independent", args=(case.overlap,))
        elif case.selection == Selection.trace:
            self.llm.collective_rpc("use_trace", args=(scaled_trace(case.context), case.context))

    def _add(self, context: int, max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        source = random.Random(self._num_added)
        prompt = {"prompt_token_ids": source.choices(range(3, 500), k=context)}
        self.engine.add_request(f"request-{self._num_added}", prompt, params)
        self._num_added += 1

    def _run_steady(self, case: Case, clock: Clock) -> dict[str, Any]:
        settle = self.settle if case.settle is None else case.settle
        for _ in range(case.requests):
            self._add(case.context, (settle + self.steps + self.profiled) * self.query_len + 16)
        self._step_until(clock, settle)
        before, first = counters(), len(clock.ends)
        self._step_until(clock, first + self.steps)
        return clock.summary(first) | moved(before, counters()) | self._profile(clock)

    def _profile(self, clock: Clock) -> dict[str, Any]:
        """Milliseconds per step of each kind of kernel, and without any, of the worker's first rank."""
        if not self.profiled:
            return {}
        self.llm.collective_rpc("start_kernel_profile")
        self._step_until(clock, len(clock.ends) + self.profiled)
        return {"kernel_ms": self.llm.collective_rpc("stop_kernel_profile", args=(self.profiled,))[0]}

    def _run_mixed(self, case: Case, clock: Clock) -> dict[str, Any]:
        """Measure requests that come and go (`arrivals`), with prompts as long as the engine takes at most."""
        source = arrivals(case.requests / 60, self.rank)
        longest = self.scheduler.max_model_len - 256
        start, first, before = time.perf_counter(), None, counters()
        arrival = next(source)
        while (now := time.perf_counter() - start) < self.mixed_s:
            while arrival.seconds <= now:
                self._add(min(arrival.prompt, longest), arrival.answer)
                arrival = next(source)
            if first is None and now >= self.mixed_s / 2:
                first, before = len(clock.ends), counters()
            if self.engine.has_unfinished_requests():
                self.engine.step()
            else:
                time.sleep(0.001)
        waiting = len(self.scheduler.waiting)
        return clock.summary(first or 0) | moved(before, counters()) | {"waiting_at_end": waiting}

    def _step_until(self, clock: Clock, num_steps: int) -> None:
        while len(clock.ends) < num_steps:
            self.engine.step()

    def _drain(self) -> None:
        self.engine.abort_request([f"request-{index}" for index in range(self._num_added)])
        while self.engine.has_unfinished_requests():
            self.engine.step()


def host_memory(_worker: Any) -> str | None:
    """Return the kind of memory that the host pool of a worker's process has, as in `Loaded`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.platforms import current_platform

    from vllm_hisparse.connector.connector import HiSparseHostConnector

    connector = get_kv_transfer_group()
    if not isinstance(connector, HiSparseHostConnector):
        return None
    if connector.worker.store.is_managed:
        return "managed"
    return "pinned" if current_platform.is_cuda() else "ordinary"


def joined(kinds: list[str | None]) -> str | None:
    """Return the kinds of memory of all ranks in one text; None if they have none."""
    return " and ".join(sorted({kind for kind in kinds if kind is not None})) or None


def scaled_trace(context: int) -> np.ndarray:
    """The trace for a context, [requests, layers, steps, top-k] int32: a position of it stands for eight neighbouring
    ones, so that its top-k of 256 becomes one of 2048, and 4,383 positions become 35,064."""
    from vllm_hisparse.trace import Trace

    trace = Trace.read(TRACES / TRACE_FILES[context])
    num_steps = min(request.num_steps for request in trace.requests)
    return np.stack([request.positions[:, :num_steps, : trace.top_k] for request in trace.requests])


def learned_shares(rows_by_layer: str, num_layers: int) -> list[float] | None:
    """Shares of the layers in hot rows: the best division of a trace that is forced upon the layers.

    Args:
        rows_by_layer: `equal` (None is returned), or `<trace>:<top-k rows of a mean layer>`.
        num_layers: layers of the model, each with an indexer.
    """
    if rows_by_layer == EQUAL_ROWS:
        return None
    from benchmarks.selection_kernel import TRACE_LAYERS
    from vllm_hisparse.trace import Trace

    name, _, size = rows_by_layer.partition(":")
    try:
        misses = LayerMisses.of(Trace.read(TRACES / f"{name}.trace"))
        if len(misses.layers) != TRACE_LAYERS or not 1 <= float(size) <= misses.sizes[-1]:
            raise ValueError("not the layers that are forced, or no size of a hot buffer")
    except (OSError, ValueError):
        expected = f"{EQUAL_ROWS} or <trace>:<top-k rows of a mean layer>, a trace of {TRACE_LAYERS} layers in {TRACES}"
        raise typer.BadParameter(f"got {rows_by_layer!r}, expected {expected}", param_hint="--rows-by-layer") from None
    misses = misses.of_layers([layer % TRACE_LAYERS for layer in range(num_layers)])
    shares = np.array(misses.rows_by_layer(float(size), WARM_UP_STEPS))
    same = [shares[layer % TRACE_LAYERS :: TRACE_LAYERS] for layer in range(num_layers)]  # the same trace's layer
    return [round(float(each.mean()), 2) for each in same]


def serve(connection: Connection, system: System, job: dict[str, Any], rank: int) -> None:
    """Load one rank of a system in this process and measure the cases that it receives. It sends `Loaded.host_memory`
    when ready; None ends it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be measured
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled for a minute, and tokens are greedy
    if job["data_parallel"] > 1:
        names = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": job["data_parallel"], "MASTER_IP": "127.0.0.1"}
        os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in (names | {"MASTER_PORT": job["port"]}).items()}
    from vllm import LLM

    loaded = Loaded(LLM(**engine_args(system, job)), job["settle"], job["steps"], job["mixed_s"], job["profiled"], rank)
    connection.send(loaded.host_memory)
    for case in iter(connection.recv, None):
        connection.send(loaded.measure(case))


class Ranks:
    """The data parallel ranks of a system, each in a process of its own."""

    def __init__(self, system: System, job: dict[str, Any]):
        context = get_context("spawn")
        self.system, self._connections, self._processes = system, [], []
        for rank in range(job["data_parallel"]):
            connection, other = context.Pipe()
            process = context.Process(target=serve, args=(other, system, job, rank))
            process.start()
            other.close()
            self._connections.append(connection)
            self._processes.append(process)

    def wait(self) -> list[Any]:
        """The next message of every rank.

        Raises:
            RuntimeError: one has ended.
        """
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._connections):  # whichever comes first: ranks wait for one that has ended
            for connection in wait([each for each in self._connections if each not in answers]):
                try:
                    answers[connection] = connection.recv()
                except EOFError:
                    raise RuntimeError(f"an engine of {self.system} has ended") from None
        return [answers[connection] for connection in self._connections]

    def measure(self, case: Case) -> dict[str, Any]:
        """Measure a case, whose requests are divided among the ranks."""
        share = replace(case, requests=case.requests // len(self._connections))
        for connection in self._connections:
            connection.send(share)
        return merged(self.wait())

    def stop(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                with suppress(OSError):
                    connection.send(None)
        for process in self._processes:
            process.join(STOP_TIMEOUT_S)
            process.kill()
            process.join()


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks' results: sums of what adds up, means of the rest."""
    sums = {"tokens_per_s", "running_max", "h2d_bytes", "waiting_at_end"}
    merged = {}
    for name in results[0]:
        values = [result[name] for result in results]
        if isinstance(values[0], dict):
            merged[name] = {
                kind: round(sum(each.get(kind, 0) for each in values) / len(values), 3) for kind in values[0]
            }
        elif None in values:
            merged[name] = None
        else:
            merged[name] = sum(values) if name in sums else round(sum(values) / len(values), 4)
    return merged


def measure_all(system: System, job: dict[str, Any], cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Rows of one system; it ends with the first case that fails."""
    ranks = Ranks(system, job)
    start = time.perf_counter()
    try:
        memory = joined(ranks.wait())
        typer.echo(f"{system}: loaded in {time.perf_counter() - start:.0f} s", err=True)
        for case in cases:
            row = describe(system, job, case) | {"host_memory": memory} | ranks.measure(case)
            typer.echo(json.dumps(row), err=True)
            yield row
    except RuntimeError as error:
        typer.echo(str(error), err=True)
    finally:
        ranks.stop()


def describe(system: System, job: dict[str, Any], case: Case) -> dict[str, Any]:
    names = (
        "layers",
        "quantization",
        "kv_dtype",
        "device_kv_gib",
        "device_buffer_size",
        "elastic",
        "admission",
        "shared_indexers",
        "experts",
    )
    parallel = ("tensor_parallel", "data_parallel", "drafts", "acceptance")
    context = case.context or "mixed"
    described = {"system": str(system), "model": job["name"], "context": context, "requests": case.requests}
    described |= {"selection": str(case.selection), "overlap": case.overlap}
    if case.context:
        described["settle"] = job["settle"] if case.settle is None else case.settle
    # Options that other systems lack.
    own = {"indexer_key_dtype": "auto", "rows_by_layer": EQUAL_ROWS, "host_pool_memory": None}
    if system == System.ours:
        own = {name: job[name] for name in own}
    return described | {name: job[name] for name in (*names, *parallel)} | own


@app.command()
def run(
    ctx: typer.Context,
    case: Annotated[
        list[str],
        typer.Option(help="<context>x<requests>[+<settle>][:<overlap>|:trace|:model], mixedx<per minute>; repeatable."),
    ] = ["500x400", "32768x16+560", "32768x56", "65536x28", "35064x56:trace", "67832x28:trace", "mixedx900"],  # noqa: B006
    system: Annotated[list[System], typer.Option(help="Repeatable.")] = list(System),  # noqa: B006
    model: Annotated[ModelName, typer.Option(help="Whose sizes the model has.")] = ModelName.deepseek,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers. Default: the model's.")] = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a layer.")] = 8,
    expert_size: Annotated[int, typer.Option(min=1, help="Hidden size of an expert.")] = 1024,
    shared_indexers: Annotated[int, typer.Option(min=1, help="Layers that share an indexer.")] = 1,
    quantization: Annotated[str | None, typer.Option(help="Of the weights, as in vLLM. Default: bfloat16.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="bfloat16 or fp8.")] = "fp8",
    device_kv_gib: Annotated[float, typer.Option(help="Device memory for KV, per GPU.")] = 24.0,
    host_pool_gib: Annotated[float, typer.Option(help="Host memory for KV, per data parallel rank.")] = 88.0,
    host_pool_memory: Annotated[str, typer.Option(help="auto, managed or pinned, of the plugin.")] = "auto",
    device_buffer_size: Annotated[int, typer.Option(help="Hot rows per request and layer.")] = 4096,
    elastic: Annotated[bool, typer.Option(help="Let hot buffers grow, and beyond their size.")] = True,
    admission: Annotated[
        Admission, typer.Option(help="Of the plugin: limit running requests, or not.")
    ] = Admission.off,
    indexer_key_dtype: Annotated[str, typer.Option(help="auto or fp4, of the plugin.")] = "auto",
    rows_by_layer: Annotated[
        str,
        typer.Option(help="Of the plugin: equal, or <trace>:<top-k rows of a mean layer> whose best division it has."),
    ] = EQUAL_ROWS,
    drafts: Annotated[int, typer.Option(min=0, help="Drafts of a step, by a draft layer.")] = 0,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Probability of each, if those before it are.")] = 0.8,
    settle: Annotated[int, typer.Option(min=1, help="Steps before those that are timed.")] = 128,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed.")] = 128,
    mixed_s: Annotated[float, typer.Option(help="Seconds of a mixed case; its second half is timed.")] = 20.0,
    profile_steps: Annotated[int, typer.Option(min=0, help="Steps after those whose kernels are profiled.")] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="With expert parallelism.")] = 1,
    port: Annotated[int, typer.Option(help="Where data parallel ranks meet.")] = 29601,
    model_dir: Annotated[Path, typer.Option(help="Where the model's configuration is written.")] = Path(
        "build/models/full-depth"
    ),
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "full_depth.json",
) -> None:
    """Measure the cases with each system."""
    cases = [Case.parse(text) for text in case]
    check(cases, data_parallel_size)
    if shared_indexers > 1 and rows_by_layer != EQUAL_ROWS:
        message = f"got {rows_by_layer!r}, expected {EQUAL_ROWS} with shared indexers: traces have one for each layer"
        raise typer.BadParameter(message, param_hint="--rows-by-layer")
    longest = max(65_536 if each.context == 0 else each.context for each in cases)
    numbers = [each.requests // data_parallel_size for each in cases if each.context]
    num_layers = layers or MODELS[model]["num_hidden_layers"]
    job = {
        "model": str(write_config(model_dir, model, num_layers, experts, expert_size, shared_indexers, drafts > 0)),
        "name": str(model),
        "layers": num_layers,
        "quantization": quantization,
        "experts": experts,
        "shared_indexers": shared_indexers,
        "kv_dtype": kv_dtype,
        "device_kv_gib": device_kv_gib,
        "host_pool_gib": host_pool_gib,
        "host_pool_memory": host_pool_memory,
        "device_buffer_size": device_buffer_size,
        "elastic": elastic,
        "admission": str(admission),
        "indexer_key_dtype": indexer_key_dtype,
        "rows_by_layer": rows_by_layer,
        "row_shares": learned_shares(rows_by_layer, num_layers),
        "settle": settle,
        "steps": steps,
        "mixed_s": mixed_s,
        "profiled": profile_steps,
        "drafts": drafts,
        "acceptance": acceptance if drafts else None,
        "tensor_parallel": tensor_parallel_size,
        "data_parallel": data_parallel_size,
        "port": port,
        "max_model_len": max_model_len(
            longest, max(settle, *(each.settle or 0 for each in cases)) + steps + profile_steps, drafts
        ),
        "max_num_seqs": max([*numbers, 256 if any(each.context == 0 for each in cases) else 1]),
        "graph_sizes": numbers,
        "forces_selections": any(each.selection != Selection.model for each in cases),
    }
    rows: list[dict[str, Any]] = []
    for name in system:
        for row in measure_all(name, job, cases):
            rows.append(row)
            write_result(output, ctx, "benchmarks.full_depth run", rows, gpu_hardware())
    columns = (
        "system",
        "admission",
        "indexer_key_dtype",
        "rows_by_layer",
        "host_memory",
        "drafts",
        "context",
        "requests",
        "selection",
        "overlap",
        "tokens_per_s",
        "itl_ms_p50",
    )
    show("Full depth", [{name: row.get(name) for name in (*columns, "running_max", "hit_rate")} for row in rows])


def max_model_len(longest: int, num_steps: int, drafts: int) -> int:
    """Return the tokens of the longest prompt and of everything generated in so many steps."""
    return -(-(longest + num_steps * (1 + drafts) + 320) // 64) * 64


def check(cases: list[Case], num_ranks: int) -> None:
    """Refuse cases that cannot be measured together, or not by so many data parallel ranks.

    Raises:
        BadParameter: with what to do.
    """
    if len({case.selection == Selection.model for case in cases}) > 1:
        raise typer.BadParameter(
            "got cases with the model's own selections beside others, expected one kind: run them apart",
            param_hint="--case",
        )
    for case in cases:
        if case.requests % num_ranks or not case.requests:
            raise typer.BadParameter(
                f"got {case.requests} requests, expected a multiple of the {num_ranks} data parallel ranks",
                param_hint="--case",
            )


@app.command()
def plot(
    result: Annotated[
        list[Path],
        typer.Option(help="Result file of `run`; repeatable. A row of a later one replaces an earlier one's."),
    ] = [RESULTS / "h200" / name for name in PLOTTED],  # noqa: B006
    output: Annotated[Path, typer.Option(help="Picture.")] = Path("docs/figures/full_depth.png"),
) -> None:
    """Plot results: tokens per second of each system, case by case, relative to full KV of the same file."""
    import matplotlib.pyplot as plt

    found: dict[tuple[str, str], float] = {}
    for path in result:
        found |= relative_speeds(json.loads(path.read_text())["rows"])
    cases = list(dict.fromkeys(case for _, case in found))
    systems = [system for system in System if any(system == name for name, _ in found)]
    figure, axis = plt.subplots(figsize=(12, 4), layout="constrained")
    for index, system in enumerate(systems):
        places = [place + 0.8 / len(systems) * (index - (len(systems) - 1) / 2) for place in range(len(cases))]
        shares = [found.get((system, case), 0.0) for case in cases]
        bars = axis.bar(places, shares, width=0.75 / len(systems), label=system)
        axis.bar_label(bars, [f"{share:.2f}" if share else "" for share in shares], fontsize=8)
    axis.set(ylabel="tokens/s, full KV = 1", xticks=range(len(cases)))
    axis.set_xticklabels(cases, fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)


def title(row: dict[str, Any]) -> str:
    """Title of a case, in two lines."""
    if row["context"] == "mixed":
        return f"mixed,\n{row['requests']} a minute"
    size = row["context"] if row["context"] < 1024 else f"{row['context'] / 1024:.0f}K"
    selection = row["selection"] if row["overlap"] is None else f"{row['overlap']:.0%} kept"
    sharing = ",\nshared indexers" if row["shared_indexers"] > 1 else ""
    return f"{row['requests']} x {size},\n{selection}{sharing}"


def relative_speeds(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Tokens/s of a result's rows over those of full KV, by system and case; of cases that full KV has."""
    full = {title(row): row["tokens_per_s"] for row in rows if row["system"] == System.full}
    return {(row["system"], case): row["tokens_per_s"] / full[case] for row in rows if (case := title(row)) in full}


if __name__ == "__main__":
    app()
