"""Fits the planner's factors to measured rows, and compares its predictions with the measurements.

    python -m benchmarks.plan_calibration

Reads the committed results of `benchmarks.full_depth`, `benchmarks.trained_drafts` and of dense models
(`benchmarks.decode`). The factor of each cost of a decode step (`vllm_hisparse.cli.plan.step_time`) is fitted by
non-negative least squares of relative errors. Factors that every system has are fitted first, to rows of full KV; then
those of vLLM's own HiSparse and of the plugin, those of the plugin's indexer keys in 4 bits if there are rows with
them, and finally that of copies from managed memory. Writes the factors, the predictions beside the measurements, and
a picture.

The plugin divided every step of 24 to 128 requests when the rows were measured; predictions divide only those that miss
enough rows. Rows of 43 requests that are hot as a whole are therefore predicted too fast.

Rows of keys in 4 bits that were measured with the former kernel are predicted with the present one's factors.

Rows with `admission: auto` are predicted, but no factor is fitted to them, because their number of running requests may
change while steps are timed.

If one engine measured a case several times, the case is one row with the medians. In some rows of two files, steps
waited for a slow host. The host's time is fitted for each of these files; the planner assumes the fastest host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product, takewhile
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS, show
from benchmarks.decode import CHUNK_TOKENS
from benchmarks.decode_models import LLAMA
from benchmarks.full_depth import arrivals
from vllm_hisparse.cli.plan.gpus import Gpu
from vllm_hisparse.cli.plan.memory import KVMemory, System, independent_hit_rate
from vllm_hisparse.cli.plan.models import PRESETS, ModelShape
from vllm_hisparse.cli.plan.step_time import CALIBRATION, MANAGED, NARROW, STOCK_PARTS, Step
from vllm_hisparse.config import DEFAULT_TOP_K
from vllm_hisparse.kv_manager.blocks.admission import TOLERANCE
from vllm_hisparse.kv_manager.blocks.decode_model import bounded_least_squares

# Files whose plugin rows have managed memory, except those marked pinned; only a factor of copies is fitted to them
MANAGED_MEMORY = "managed memory"
FORMER_KERNEL = "keys in 4 bits, former kernel"  # a slower one, which is gone: it is predicted, not fitted
GROUPS = {  # of result files
    "full depth": (
        "h200/full_depth.json",
        "h200/full_depth_systems.json",
        "h200/full_depth_four_waves.json",
        "h200/full_depth_0.32.0.json",
        "h200/full_depth_0.33.0.json",
        "h200/full_depth_0.33.0_profile.json",
        "h200/full_depth_whole_steps.json",
    ),
    MANAGED_MEMORY: (
        "h200/full_depth_managed.json",
        "h200/full_depth_managed_default.json",
        "h200/full_depth_managed_drafts.json",
        "h200/full_depth_managed_8_bits.json",
        "h200/full_depth_drafts_native.json",
        "h200/full_depth_lrfu_managed.json",
        "h200/full_depth_lrfu_fit.json",
        "h200/full_depth_lrfu_drafts.json",
    ),
    "keys in 4 bits": ("h200/full_depth_keys.json",),
    FORMER_KERNEL: ("h200/full_depth_keys_first.json", "h200/full_depth_keys_128k.json"),
    "admission": ("h200/full_depth_admission.json",),
    "shared indexers": ("h200/full_depth_shared.json",),
    "drafts": ("h200/mtp.json", "h200/mtp_keys.json"),
    "drafts of a small model": ("h200/mtp_trained.json",),
    "two GPUs": ("h200x2/full_size.json", "h200x2/full_size_tp.json"),
    "dense model": (
        "h200/decode_llama_32k.json",
        "h200/decode_llama_32k_local.json",
        "h200/decode_llama_32k_small_buffers.json",
        "h200/decode_llama_128k.json",
        "h200/decode_llama_elastic.json",
    ),
}
SLOW_HOSTS = ("h200/mtp_trained.json", "h200/decode_llama_elastic.json")
SMALL_FILES = ("h200/decode.json", "h200/decode_single.json", "h200/decode_random_weights.json")  # wait for their host
SYSTEMS = {"full": System.full, "vllm_native": System.native, "ours": System.plugin}
SMALL_MODEL = Path(__file__).parent / "models" / "code-dsa" / "config.json"
DENSE_VOCABULARY = 512  # of the benchmark's Llama
MIXED_CASE = "mixed"
# Options of the plugin, where a row does not say
OPTIONS = {"admission": "off", "indexer_key_dtype": "auto", "rows_by_layer": "equal", "host_pool_memory": "pinned"}
NARROW_ROUNDS = 20  # more than enough, because each leaves less than half of the error
MOST_OFF, MOST_OFF_RUNNING = 0.15, 0.03  # errors of a row that is predicted
# Rows that are not predicted: file -> system -> why.
_HOST = (
    "its steps are so short that they wait for the host: three measurements of one case took 2.8, 3.0 and 4.0 ms "
    "in the median"
)
_TRIES = "the engine still tried numbers of running requests while steps were timed"
UNPREDICTED = {
    "h200/mtp_trained.json": {System.full: _HOST, System.plugin: _HOST},
    "h200/full_depth_admission.json": {System.plugin: _TRIES},
}

Factors = dict[str, dict[str, float]]  # part of a step, or file -> cost -> factor

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Measured:
    """A measured case, with the values that a plan needs.

    Attributes:
        group, file: group and result file of the row.
        system: system that decoded.
        row: the result's row; of a case that was measured several times, the median.
        repeats: number of measurements.
        gpu: GPU on which it was measured.
        model: sizes of the benchmark's model.
        host_bytes: host pool of a rank.
        lengths: tokens of equally frequent requests while steps were timed.
        starts: the same when the most requests run.
        turns: True if all requests end after `max_tokens`, those that do not fit run in a second turn, and tokens/s
            are those of all turns.
        output: tokens after which a request ends and another one takes its place. None: requests do not end.
    """

    group: str
    file: str
    system: System
    row: dict[str, Any]
    repeats: int
    gpu: Gpu
    model: ModelShape
    host_bytes: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    turns: bool = False
    output: float | None = None

    @property
    def case(self) -> str:
        row = self.row
        details = f", {row['drafts']} drafts" if row["drafts"] else ""
        details += f", {row['device_buffer_size']} hot rows" if row["device_buffer_size"] != 4096 else ""
        details += ", keys in 4 bits" if self.has_narrow_keys else ""
        details += ", admission auto" if self.is_limited else ""
        details += "" if self.has_equal_rows else f", rows by layer {self.row['rows_by_layer']}"
        return f"{Path(self.file).stem}: {row['requests']} x {row['context']} {row['selection']}{details}"

    @property
    def top_k(self) -> int:
        return self.model.top_k or DEFAULT_TOP_K

    @property
    def query_len(self) -> int:
        return 1 + self.row["drafts"]

    @property
    def has_narrow_keys(self) -> bool:
        """True if the plugin had indexer keys in 4 bits."""
        return self.row["indexer_key_dtype"] == "fp4"

    @property
    def has_equal_rows(self) -> bool:
        """True if all layers have the same number of hot rows."""
        return self.row["rows_by_layer"] == "equal"

    @property
    def host_is_managed(self) -> bool:
        """True if the plugin's host pool was managed memory. In this group, every pool with `auto` was."""
        return self.group == MANAGED_MEMORY and self.row["host_pool_memory"] == "auto"

    @property
    def is_limited(self) -> bool:
        """True if the plugin limited the number of running requests."""
        return self.row["admission"] == "auto"

    @property
    def memory(self) -> KVMemory:
        return KVMemory(
            self.model,
            int(self.row["device_kv_gib"] * 2**30),
            self.host_bytes,
            self.row["tensor_parallel"],
            max(self.row["device_buffer_size"], self.top_k * self.query_len),
            self.top_k,
            self.row["drafts"],
            self.row["max_num_seqs"] // self.row["data_parallel"],
            has_narrow_keys=self.has_narrow_keys,
        )

    @property
    def measured_running(self) -> float:
        """Requests at once on all ranks: the most, or the mean of a case in which requests come and go."""
        if self.output is None:
            return self.row["running_max"]
        return round(self.row["tokens_per_s"] * self.row["timed_s"] / self.row["steps"], 1)

    @property
    def step_ms(self) -> float:
        return self.row["itl_ms_p50"] * self.row["tokens_per_step"]

    def running(self, factors: Factors) -> int:
        """Predict the requests that run at once, on all ranks: all that fit, or with a limit those that pay."""
        ranks, most = self.row["data_parallel"], self.memory.seats(self.system, self.starts).running
        if not self.is_limited:
            return most * ranks
        numbers = [ranks * running for running in range(1, most + 1)]
        speeds = [running / self.step(running).total_ms(factors) for running in numbers]
        return max(
            running for running, speed in zip(numbers, speeds, strict=True) if speed >= (1 - TOLERANCE) * max(speeds)
        )

    def step(self, running: float) -> Step:
        """Return the step of one rank with so many requests on all ranks."""
        requests = running / self.row["data_parallel"]
        hit_rate = 1.0 if self.system == System.full else self._hit_rate(int(requests))
        return Step(
            model=self.model,
            gpu=self.gpu,
            system=self.system,
            requests=requests,
            num_tokens=float(np.mean(self.lengths)),
            top_k=self.top_k,
            drafts=self.row["drafts"],
            missed_rows=(1 - hit_rate) * self.top_k * self.query_len,
            tensor_parallel=self.row["tensor_parallel"],
            data_parallel=self.row["data_parallel"],
            has_narrow_keys=self.has_narrow_keys,
            host_is_managed=self.host_is_managed,
        )

    def measured_step(self) -> Step:
        """Return the step with the requests that ran."""
        return self.step(self.measured_running)

    def _hit_rate(self, running: int) -> float:
        overlap = self.row["overlap"]
        if overlap is None or not self.has_equal_rows:
            # The hit rate is given, as a user gives it, with a trace or with rows by layer. Native reports none.
            return self.row["hit_rate"] or 0.83
        rows = self.memory.hot_rows(self.system, self.lengths, running)
        rates = [forced_hit_rate(overlap, self.top_k, *each) for each in zip(rows, self.lengths, strict=True)]
        return float(np.mean(rates)) * (1 - 1 / self.output if self.output else 1.0)

    def predict(self, factors: Factors) -> dict[str, Any]:
        """Predict the row from its configuration alone (and the hit rate of a trace), beside what was measured."""
        running, tokens_per_step = self.running(factors), self.row["tokens_per_step"]
        if self.turns:
            batches = decode_batches(self.row["requests"], running, self.row["context"], self.row["max_tokens"])
            times = {each: self.step(each).total_ms(factors) for each in set(batches)}
            per_token = np.repeat([times[each] for each in batches], batches)
            step_ms, speed = float(np.median(per_token)), 1e3 * sum(batches) / sum(times[each] for each in batches)
        else:
            step_ms = self.step(running).total_ms(factors)
            speed = running * tokens_per_step / step_ms * 1e3
        return {
            "group": self.group,
            "case": self.case,
            "repeats": self.repeats,
            "system": str(self.system),
            "measured_tokens_per_s": self.row["tokens_per_s"],
            "predicted_tokens_per_s": round(speed, 1),
            "measured_itl_ms": self.row["itl_ms_p50"],
            "predicted_itl_ms": round(step_ms / tokens_per_step, 2),
            "measured_running": self.measured_running,
            "predicted_running": running,
        } | ({"is_limited": True} if self.is_limited else {})


def forced_hit_rate(overlap: float, top_k: int, hot_rows: int, num_tokens: int) -> float:
    """Return the share of selected rows that are hot with the independent selections of `benchmarks.selection_kernel`.

    Each position moves to one of a few places, and may move to where it is. The kernel counts places in whole 4,096
    tokens of the sequence.

    Args:
        overlap: probability that a position does not move.
        top_k: tokens of a selection.
        hot_rows: hot rows of a request and layer.
        num_tokens: tokens of the sequence.
    """
    places = max(num_tokens // 4096 * 4096 // top_k, 1)
    if hot_rows >= num_tokens:
        return 1.0
    return independent_hit_rate(overlap + (1 - overlap) / places, top_k, hot_rows, places * top_k)


def decode_batches(requests: int, seats: int, context: int, max_tokens: int) -> list[int]:
    """Return the requests of each step that `benchmarks.decode` times: in it and the one before, nobody prefills.

    Args:
        requests: submitted at once.
        seats: requests at once.
        context: tokens of each prompt, computed in chunks.
        max_tokens: tokens of each answer.
    """
    waiting, prefilling, decoding, batches, was_decode = requests, [], [], [], False
    while waiting or prefilling or decoding:
        budget, only_decodes = CHUNK_TOKENS - len(decoding), True
        decoding = [left - 1 for left in decoding]
        num_decodes = len(decoding)
        while budget and (prefilling or (waiting and len(prefilling) + len(decoding) < seats)):
            if not prefilling:
                waiting -= 1
                prefilling = [context]
            only_decodes, chunk = False, min(budget, prefilling[0])
            budget -= chunk
            prefilling = [left for left in (prefilling[0] - chunk,) if left]
            decoding += [] if prefilling else [max_tokens - 1]  # the last chunk gives the first token
        if only_decodes and was_decode:
            batches.append(num_decodes)
        was_decode = only_decodes
        decoding = [left for left in decoding if left]
    return batches


def read_rows(folder: Path, group: str, name: str) -> list[Measured]:
    """Read the cases of a result file."""
    result = json.loads((folder / name).read_text())
    rows, repeats = _medians([row | _options(row) for row in result["rows"]])
    gpu = Gpu.from_doctor({"gpu": {"name": result["hardware"]["gpu"]}})
    read = {"dense model": _dense, "drafts of a small model": _small}.get(group, _full_depth)
    return [
        Measured(
            group,
            name,
            SYSTEMS[row["system"]],
            host_bytes=_host_bytes(result["command"], row),
            repeats=count,
            gpu=gpu,
            **read(result, row),
        )
        for row, count in zip(rows, repeats, strict=True)
    ]


def _host_bytes(commands: str, row: dict[str, Any]) -> int:
    """Return the bytes of the host pool of a row's engine.

    Its command is the one with its system and case, and of several the first with most of its options.
    """
    parts = commands.split(" && ")
    own = [
        part for part in parts if f"--system {row['system']} " in part and f"{row['context']}x{row['requests']}" in part
    ]
    options = [
        f"--{name.replace('_', '-')} {row.get(name)} " for name in ("indexer_key_dtype", "rows_by_layer", "drafts")
    ]
    command = max(own or parts, key=lambda part: sum(option in f"{part} " for option in options))
    return int(float(_option(command, "--host-pool-gib")) * 2**30)


def _options(row: dict[str, Any]) -> dict[str, str]:
    """Return the plugin's options with which a row was measured."""
    is_plugin = SYSTEMS[row["system"]] == System.plugin
    return {name: (is_plugin and row.get(name)) or default for name, default in OPTIONS.items()}


def _medians(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return each case once, with the medians of what was measured, and how often it was."""
    cases: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        names = ("system", "context", "requests", "selection", "drafts", "device_buffer_size", *OPTIONS)
        cases.setdefault(tuple(row.get(name) for name in names), []).append(row)
    found = [
        each[0]
        | {
            name: median(row[name] for row in each)
            for name in ("tokens_per_s", "itl_ms_p50", "tokens_per_step", "hit_rate")
            if each[0].get(name) is not None
        }
        for each in cases.values()
    ]
    return found, [len(each) for each in cases.values()]


def _full_depth(result: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    # Dummy weights route every token to the same 8 experts: the others are never read.
    active = min(8, row["experts"])
    sizes = {
        "n_routed_experts": active,
        "num_experts_per_tok": active,
        "moe_intermediate_size": int(_option(result["command"], "--expert-size")),
        "quantization_config": None,
        "index_topk_freq": row["shared_indexers"],
    }
    config = PRESETS[row.get("model") or "DeepSeek-V3.2"] | sizes
    found = {"model": ModelShape.from_config("benchmark", config, row["kv_dtype"], "bfloat16")}
    if row["context"] == MIXED_CASE:
        mixed_s = float(_option(result["command"], "--mixed-s"))
        found_arrivals = list(takewhile(lambda each: each.seconds < mixed_s, arrivals(row["requests"] / 60, seed=0)))
        output = mean(each.answer for each in found_arrivals)
        lengths = tuple(round(each.prompt + output / 2) for each in found_arrivals)
        row = row | {"max_num_seqs": 1 << 20, "timed_s": mixed_s / 2}
        return found | {"row": row, "lengths": lengths, "starts": lengths, "output": output}
    start = row["context"] + (row.get("settle") or 48) * row["tokens_per_step"]
    length = round(start + 24 * row["tokens_per_step"])
    row = row | {"max_num_seqs": row["requests"]}
    return found | {"row": row, "lengths": (length,), "starts": (round(start),)}


def _dense(result: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    layers = int(_option(result["command"], "--num-layers"))
    config = LLAMA | {"num_hidden_layers": layers, "vocab_size": DENSE_VOCABULARY}
    model = ModelShape.from_config("benchmark", config, "bfloat16")
    length = row["context"] + row["max_tokens"] // 2
    return {"model": model, "row": _complete(row), "lengths": (length,), "starts": (length,), "turns": True}


def _small(result: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(SMALL_MODEL.read_text()) | dict.fromkeys(("num_attention_heads", "index_n_heads"), 64)
    model = ModelShape.from_config("benchmark", config, row["kv_dtype"])
    length = round(row["context"] + (row["settle"] + row["steps"] / 2) * row["tokens_per_step"])
    return {"model": model, "row": _complete(row), "lengths": (length,), "starts": (length,)}


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an engine on one GPU whose selections were the model's own."""
    common = {"tokens_per_step": 1.0, "drafts": 0, "tensor_parallel": 1, "data_parallel": 1, "overlap": None}
    return common | {"selection": "model", "kernel_ms": {}, "max_num_seqs": row["requests"]} | row


def _option(command: str, name: str) -> str:
    """Return the value of an option of the benchmark, whose rows do not have it."""
    words = command.split()
    return words[words.index(name) + 1]


def fit(rows: Iterable[Measured]) -> Factors:
    """Fit the factor of every cost.

    Parts that every system has are fitted to the kernel times of full KV, and their sum to its steps; costs that each
    HiSparse adds are fitted to its own steps.
    """
    rows = [row for row in rows if row.file not in SLOW_HOSTS and not row.is_limited]
    managed = [row for row in rows if row.host_is_managed]
    rows = [row for row in rows if row.group != MANAGED_MEMORY]
    dense = [row for row in rows if not row.model.is_dsa]
    rows = [row for row in rows if row.model.is_dsa and row.output is None]
    full = [row for row in rows if row.system == System.full]
    factors: Factors = {"host": {"step": 0.0, "drafts": 0.0}}  # none of these rows waits for it
    factors |= {part: _fit_part(part, full) for part in STOCK_PARTS}
    factors["step"] = {"kernels": 1.0}
    sums = np.array([row.measured_step().total_ms(factors) for row in full])
    steps = np.array([row.step_ms for row in full])
    factors["step"]["kernels"] = round(float(np.median(steps / sums)), 4)
    native = _fit_resolve([row for row in rows if row.system == System.native], factors)
    plugin = [row for row in rows if row.system == System.plugin and not row.has_narrow_keys]
    candidates = []
    for hidden, ahead, least in product((0.2, 0.3, 0.4, 0.5, 0.6), (0.0, 0.25, 0.5), (0.25, 0.5, 0.75)):
        copies = {"hidden share of a step": hidden, "share of copies ahead": ahead, "least share": least}
        found = native | _fit_resolve(plugin, factors | {"copies": copies})
        predictions = [row.predict(factors | {"copies": copies, "resolve": found}) for row in plugin]
        off = max(np.abs(errors(predictions, what)).max() for what in ("tokens_per_s", "itl_ms"))
        candidates.append((off, copies, found))
    _, factors["copies"], factors["resolve"] = min(candidates, key=lambda candidate: candidate[0])
    narrow = [row for row in rows if row.has_narrow_keys and row.group != FORMER_KERNEL]
    factors["indexer"] |= _fit_narrow_keys(narrow, factors)
    factors["copies"] |= _fit_managed(managed, factors)
    _fit_dense(dense, factors)
    factors["host"]["step"] = _fastest_host_ms()
    return factors


def _fit_managed(rows: list[Measured], factors: Factors) -> dict[str, float]:
    """Fit the least share of copies from managed memory that a step waits for: the one whose largest error is smallest.
    Without rows, it is that of pinned memory.
    """
    if not rows:
        return {f"{MANAGED}least share": factors["copies"]["least share"]}
    candidates = []
    for least in (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5):
        copies = {f"{MANAGED}least share": least}
        predictions = [row.predict(factors | {"copies": factors["copies"] | copies}) for row in rows]
        off = max(np.abs(errors(predictions, what)).max() for what in ("tokens_per_s", "itl_ms"))
        candidates.append((off, copies))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _fit_narrow_keys(rows: list[Measured], factors: Factors) -> dict[str, float]:
    """Fit what the indexer's keys in 4 bits take; nothing without rows. All other factors are known.

    The rest of a step depends on these keys a little, because copies hide behind the indexer. So it is computed again
    with the factors that were found.
    """
    steps, measured = [row.measured_step() for row in rows], np.array([row.step_ms for row in rows])
    costs = [
        {name: cost for name, cost in step.costs()["indexer"].items() if cost and name.startswith(NARROW)}
        for step in steps
    ]
    found = {name: factors["indexer"][name.removeprefix(NARROW)] for each in costs for name in each}
    kernels = factors["step"]["kernels"]
    for _ in range(NARROW_ROUNDS if rows else 0):
        fitted = factors | {"indexer": factors["indexer"] | found}
        own = np.array([kernels * sum(found[name] * cost for name, cost in each.items()) for each in costs])
        known = np.array([step.total_ms(fitted) for step in steps]) - own
        found = {name: round(factor / kernels, 5) for name, factor in _solve(costs, measured, known).items()}
    return found


def _fit_dense(rows: list[Measured], factors: Factors) -> None:
    """Fit what a dense model adds: its layers and reads of all rows with full KV, and the plugin's own work."""
    full = [row for row in rows if row.system == System.full]
    steps = [row.measured_step() for row in full]
    known = np.array([step.total_ms(factors) for step in steps])
    costs = [
        {"dense layers": step.costs()["matrix products"]["dense layers"]} | step.costs()["attention"] for step in steps
    ]
    found = _solve(costs, np.array([row.step_ms for row in full]), known)
    kernels = factors["step"]["kernels"]
    factors["matrix products"]["dense layers"] = round(found["dense layers"] / kernels, 5)
    factors["attention"]["all rows"] = round(found["all rows"] / kernels, 5)
    plugin = [row for row in rows if row.system == System.plugin]
    steps = [row.measured_step() for row in plugin]
    known = np.array([step.total_ms(factors | {"copies": {}}) for step in steps])
    costs = [step.costs()["resolve"] | step.costs()["copies"] for step in steps]
    found = _solve(costs, np.array([row.step_ms for row in plugin]), known)
    factors["copies"]["units"] = found.pop("units")
    factors["resolve"] |= found


def fit_hosts(rows: Iterable[Measured]) -> Factors:
    """Fit the milliseconds of the host in a step, and of each draft, by result file whose engine had a slow one."""
    found = {}
    for name in SLOW_HOSTS:
        own = [row for row in rows if row.file == name]
        own = [row for row in own if row.row["requests"] == min(each.row["requests"] for each in own)]
        costs = [{"step": 1.0, "drafts": float(row.row["drafts"])} for row in own]
        found[name] = _solve(costs, np.array([row.step_ms for row in own]))
    return found


def _fastest_host_ms() -> float:
    """Return the least median step of one request of models with four layers, whose kernels take less."""
    rows = [row for name in SMALL_FILES for row in json.loads((RESULTS / name).read_text())["rows"]]
    return min(row["itl_ms_p50"] for row in rows if row["system"] == "full" and row["requests"] == 1)


def _fit_part(part: str, rows: list[Measured]) -> dict[str, float]:
    """Fit one part to the profiled kernel times of full KV."""
    rows = [row for row in rows if part in row.row.get("kernel_ms", {})]
    costs = [row.measured_step().costs()[part] for row in rows]
    return _solve(costs, np.array([row.row["kernel_ms"][part] for row in rows]))


def _fit_resolve(rows: list[Measured], factors: Factors) -> dict[str, float]:
    """Fit the costs that a HiSparse adds to its step."""
    steps = [row.measured_step() for row in rows]
    known = np.array([step.total_ms(factors | {"resolve": {}}) for step in steps])
    measured = np.array([row.step_ms for row in rows])
    return _solve([step.costs()["resolve"] for step in steps], measured, known)


def _solve(costs: list[dict[str, float]], measured: np.ndarray, known: np.ndarray | float = 0.0) -> dict[str, float]:
    """Fit factors >= 0 of costs to milliseconds, by relative errors."""
    names = sorted({name for each in costs for name in each})
    table = np.array([[each.get(name, 0.0) for name in names] for each in costs]) / measured[:, None]
    solution = bounded_least_squares(table, (measured - known) / measured)
    return {name: round(float(value), 5) for name, value in zip(names, solution, strict=True)}


def all_rows(folder: Path = RESULTS) -> list[Measured]:
    """Read all rows with which predictions are compared."""
    return [row for group, names in GROUPS.items() for name in names for row in read_rows(folder, group, name)]


def predict_all(rows: Iterable[Measured], factors: Factors, hosts: Factors) -> list[dict[str, Any]]:
    """Predict every row, with the host that its engine had. A row that is known not to be predicted says why."""
    found = []
    for row in rows:
        prediction = row.predict(factors | {"host": hosts.get(row.file, factors["host"])})
        reason = UNPREDICTED.get(row.file, {}).get(row.system)
        if reason and not is_predicted(prediction):
            prediction["not_predicted"] = reason
        found.append(prediction)
    return found


def predict_left_out(rows: list[Measured]) -> list[dict[str, Any]]:
    """Predict every row with factors and times of hosts that were fitted to all others."""
    found = []
    for row in rows:
        others = [other for other in rows if other is not row]
        found += predict_all([row], fit(others), fit_hosts(others))
    return found


def is_predicted(prediction: dict[str, Any]) -> bool:
    """Return whether all errors of a row are as small as they have to be.

    With a limit, the number of running requests may differ, because tokens/s change little around their maximum.
    """
    off = {what: abs(errors([prediction], what)[0]) for what in ("tokens_per_s", "itl_ms", "running")}
    if "is_limited" in prediction:
        return off["tokens_per_s"] <= MOST_OFF
    return max(off["tokens_per_s"], off["itl_ms"]) <= MOST_OFF and off["running"] <= MOST_OFF_RUNNING


def summary(predictions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and the largest error of each group and of all rows, those not predicted counted apart."""
    groups = dict.fromkeys(each["group"] for each in predictions)
    found = []
    for group in [*groups, "all"]:
        own = [each for each in predictions if group in (each["group"], "all")]
        good = [each for each in own if "not_predicted" not in each]
        line: dict[str, Any] = {"group": group, "rows": len(own), "not_predicted": len(own) - len(good)}
        for what in ("tokens_per_s", "itl_ms", "running"):
            off = np.abs(errors(good or own, what))
            line |= {f"{what}_median": round(float(np.median(off)), 4), f"{what}_worst": round(float(off.max()), 4)}
        found.append(line)
    return found


def errors(predictions: list[dict[str, Any]], what: str) -> np.ndarray:
    """Return predicted over measured, minus 1: [rows] float64."""
    pairs = [(each[f"predicted_{what}"], each[f"measured_{what}"]) for each in predictions]
    return np.array([predicted / measured - 1 for predicted, measured in pairs])


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Predictions beside measurements.")] = RESULTS / "plan.json",
    factors_file: Annotated[Path, typer.Option(help="Factors that the planner reads.")] = CALIBRATION,
    picture: Annotated[Path | None, typer.Option(help="Picture of predicted over measured.")] = Path(
        "docs/figures/plan.png"
    ),
) -> None:
    """Fit, predict, and write both."""
    rows = all_rows()
    factors, hosts = fit(rows), fit_hosts(rows)
    predictions = predict_all(rows, factors, hosts)
    source: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat()}
    source |= {"command": "python -m benchmarks.plan_calibration", "gpu": "NVIDIA H200"}
    source |= {"sources": [name for names in GROUPS.values() for name in names]}
    factors_file.write_text(json.dumps(source | {"factors": factors, "slow_hosts": hosts}, indent=2) + "\n")
    counts = {"constants": sum(map(len, factors.values())) + sum(map(len, hosts.values())), "num_rows": len(rows)}
    tables = {"errors": summary(predictions), "errors_left_out": summary(predict_left_out(rows))}
    output.write_text(json.dumps(source | counts | tables | {"rows": predictions}, indent=2) + "\n")
    for title, table in tables.items():
        show(title.replace("_", " "), table)
    if picture:
        plot(predictions, picture)


def plot(predictions: list[dict[str, Any]], picture: Path) -> None:
    """Draw predicted over measured tokens/s and inter-token latency."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for axis, what, title in zip(
        axes, ("tokens_per_s", "itl_ms"), ("tokens/s", "inter-token latency, ms"), strict=True
    ):
        for system, is_good in product(System, (True, False)):
            chosen = [
                each for each in predictions if each["system"] == system and ("not_predicted" not in each) == is_good
            ]
            if not chosen:
                continue
            measured = [each[f"measured_{what}"] for each in chosen]
            label, marker = (str(system), "o") if is_good else (f"{system}, not predicted", "x")
            axis.scatter(
                measured, [each[f"predicted_{what}"] for each in chosen], label=label, alpha=0.7, marker=marker
            )
        low, high = axis.get_xlim()
        axis.plot([low, high], [low, high], color="grey", linewidth=1)
        axis.fill_between([low, high], [0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high], color="grey", alpha=0.12)
        axis.set(xscale="log", yscale="log", xlabel=f"measured {title}", ylabel=f"predicted {title}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    app()
