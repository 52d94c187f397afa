"""A plan: the predicted memory and speed of full KV, vLLM's own HiSparse and the plugin for a load on given GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from vllm_hisparse.cli.plan.gpus import Gpu
from vllm_hisparse.cli.plan.memory import KVMemory, Seats, System
from vllm_hisparse.cli.plan.models import FP4_REFUSAL, ModelShape
from vllm_hisparse.cli.plan.step_time import WAITING, Step, has_timed_narrow_keys, measured_hosts_ms
from vllm_hisparse.layout import MIN_IMPORT_PARTS, least_import_buffer_bytes

STOCK_MEMORY_UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
ACTIVATIONS_GIB = 4.0  # CUDA graphs, activations and the CUDA context of a rank
# Memory that a rank uses in addition to its weights before vLLM takes memory for KV. On an H200 of 139.8 GiB with 48.2
# GiB of weights, 85 to 87 GiB were free.
BEFORE_KV_GIB = 6.0
MEASURED_GPUS, MEASURED_EXPERTS = 2, 24  # largest numbers in the results that calibrate
NATIVE_HIT_RATES = 0.8, 0.92  # hit rates of vLLM's own HiSparse in these results; its copies were not timed separately
HOST_GPUS = 8  # GPUs of most hosts
FOUR_BITS = (
    " Nobody measured weights in 4 bits: half a byte for each, and a scale of one byte for every 32 of them, are "
    "assumed, for all weights except the head, and except attention that the checkpoint leaves in 16 bits."
)
ROUNDING = 1e-6  # tolerance for rounding errors of floats
LEAST_RANK_GIB = 0.1  # host memory of a rank, which commands have in tenths of a GiB
WORTH_IT = 1.02  # ratio of tokens/s from which on the plugin pays
HitRate = Callable[[int, int], float]  # (hot rows, tokens of the request) -> share of selected rows that are hot


class PlanError(ValueError):
    """Options contradict each other or the model; the message names them."""


@dataclass(frozen=True)
class Load:
    """The load: requests to serve.

    Attributes:
        prompts: lengths in tokens of equally frequent prompts.
        output: mean tokens of an answer.
        longest: tokens of the longest prompt with its answer.
        concurrency: requests at once on all ranks. None: it is computed from `requests_per_s`.
        requests_per_s: requests that arrive per second.
    """

    prompts: tuple[int, ...]
    output: float
    longest: int
    concurrency: int | None = None
    requests_per_s: float | None = None

    @property
    def context(self) -> float:
        """Mean tokens of a prompt."""
        return fmean(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of equally frequent requests, halfway through their answers."""
        return [round(prompt + self.output / 2) for prompt in self.prompts]

    @property
    def full_lengths(self) -> list[int]:
        """Tokens of equally frequent requests at their end, for which memory has to suffice."""
        return [round(prompt + self.output) for prompt in self.prompts]


@dataclass(frozen=True)
class Point:
    """Prediction of decoding at one concurrency.

    Attributes:
        concurrency: requests on all ranks, running and waiting.
        running: requests that run; the others wait.
        tokens_per_s: tokens per second of all ranks.
        itl_ms: mean time between two tokens of a request.
        hit_rate: share of selected rows that are hot.
        parts_ms: milliseconds of each part of a step; copies count only as far as the step waits for them.
        hidden_copy_ms: milliseconds of copies that run beside other work.
    """

    concurrency: int
    running: int
    tokens_per_s: float
    itl_ms: float
    hit_rate: float | None
    parts_ms: dict[str, float]
    hidden_copy_ms: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Prediction of a load on given GPUs.

    Attributes:
        model, gpu, load: model, GPU and load of the plan.
        hit_rate: hit rate by hot rows and tokens of a request.
        locality: source of the hit rate, in words.
        host_gib: host memory for KV of all ranks of one host.
        top_k, device_buffer_size: options of the plugin and of vLLM's own HiSparse.
        tensor_parallel, data_parallel: number of GPUs of a rank, and number of ranks.
        drafts, acceptance: drafts of a step, and the probability that a draft is accepted.
        gpu_memory_utilization: vLLM's option.
        device_kv_gib: device memory for KV of each GPU. None: the memory beside the weights.
        max_num_seqs: vLLM's option, per rank.
        full_kv_layers: layers of a dense model in which the plugin keeps full KV.
        has_narrow_keys: True if the plugin keeps the indexer keys of a DSA model in 4 bits.
        import_buffer_gib: device memory of the plugin's import buffer on each GPU, in GiB.
        pins_host_pool: True if the plugin's host pool is pinned in any case, as on the decode side of a pair.
    """

    model: ModelShape
    gpu: Gpu
    load: Load
    hit_rate: HitRate
    locality: str
    host_gib: float
    top_k: int
    device_buffer_size: int
    tensor_parallel: int = 1
    data_parallel: int = 1
    drafts: int = 0
    acceptance: float = 0.8
    gpu_memory_utilization: float = STOCK_MEMORY_UTILIZATION
    device_kv_gib: float | None = None
    max_num_seqs: int = 1024
    full_kv_layers: int = 0
    has_narrow_keys: bool = False
    import_buffer_gib: float = 0.0
    pins_host_pool: bool = False

    def __post_init__(self) -> None:
        more_gpus = "raise --tensor-parallel-size" + (" or --data-parallel-size" if self.model.num_experts else "")
        if self.kv_gib <= 0:
            used = self.gpu.memory_gib * self.gpu_memory_utilization
            raise PlanError(
                f"{self.model.name} needs {self.weights_gib:.1f} GiB on each GPU for weights, and {ACTIVATIONS_GIB:g} "
                f"GiB for activations, and vLLM may use {used:.1f} GiB ({self.gpu_memory_utilization:g} of "
                f"{self.gpu.name}'s {self.gpu.memory_gib:.1f} GiB): no memory is left for KV; {more_gpus} or "
                "--gpu-memory-utilization, or choose a larger --gpu"
            )
        if self.device_kv_gib is not None and self.device_kv_gib + self.weights_gib > self.gpu.memory_gib:
            raise PlanError(
                f"--device-kv-gib: got {self.device_kv_gib:g}, and {self.gpu.name} for --gpu, which has "
                f"{self.gpu.memory_gib:.1f} GiB; {self.model.name} needs {self.weights_gib:.1f} GiB on each for "
                f"weights: lower it, {more_gpus}, or choose a larger --gpu"
            )
        free_gib = self.kv_gib if self.device_kv_gib is None else self._unused_gib
        if self.import_buffer_gib and self.import_buffer_gib >= free_gib:
            left = "weights" if self.device_kv_gib is None else "weights and KV (--device-kv-gib)"
            raise PlanError(
                f"--import-buffer-gib: got {self.import_buffer_gib:g}, and {self.gpu.name} for --gpu, expected less "
                f"than the {max(math.floor(free_gib * 100) / 100, 0):g} GiB that are left beside {left}: lower it, or "
                "choose a larger --gpu"
            )
        if self.import_buffer_gib and not self.pair_fits_host:
            raise PlanError(
                f"--import-buffer-gib: got {self.import_buffer_gib:g}, and {2 * self.num_gpus} GPUs for a "
                f"prefill/decode pair, expected up to {HOST_GPUS}: larger pairs are on several hosts, and the buffer "
                "pays through CUDA IPC alone, which works within a host. Leave it out"
            )
        least_gib = 0.0
        if self.import_buffer_gib and not self.model.refusal:
            least_gib = least_import_buffer_bytes(self.memory.layout.received_block_bytes) / 2**30
        if self.import_buffer_gib < least_gib:
            raise PlanError(
                f"--import-buffer-gib: got {self.import_buffer_gib:g}, expected at least "
                f"{math.ceil(least_gib * 1e4) / 1e4:g}, {MIN_IMPORT_PARTS} blocks of all layers. Raise it, or leave it "
                "out"
            )
        if self.rank_gib < LEAST_RANK_GIB - ROUNDING and not self.model.refusal:
            raise PlanError(
                f"--host-memory-gib: got {self.host_gib:g}, and {self.data_parallel} ranks, expected at least "
                f"{LEAST_RANK_GIB * self.data_parallel:g}: {LEAST_RANK_GIB} for each"
            )
        if self.model.num_heads % self.tensor_parallel:
            raise PlanError(
                f"--tensor-parallel-size: got {self.tensor_parallel}, expected a divisor of the {self.model.num_heads} "
                f"attention heads of {self.model.name}"
            )
        kv_heads, ranks = self.model.num_kv_heads, self.tensor_parallel
        if self.model.has_kv_heads and max(kv_heads, ranks) % min(kv_heads, ranks):
            raise PlanError(
                f"--tensor-parallel-size: got {ranks}, expected a divisor or a multiple of the {kv_heads} KV heads of "
                f"{self.model.name}"
            )
        if self.load.longest > self.model.max_model_len:
            raise PlanError(
                f"--context and --output-tokens: got {self.load.longest} tokens at most, expected up to the "
                f"{self.model.max_model_len} that {self.model.name} takes"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of one side of a pair, or of one instance."""
        return self.tensor_parallel * self.data_parallel

    @property
    def rank_gib(self) -> float:
        """Host memory for KV of a rank, in GiB."""
        return self.host_gib / self.data_parallel

    @property
    def host_is_managed(self) -> bool:
        """True if the plugin keeps its host pool in managed memory: the pool of a rank is not larger than the memory
        that its GPU has free before vLLM takes memory for KV, and tensor parallel ranks do not share the pool.

        NOTE: managed memory was not measured with dense models, so they are predicted as with pinned memory.
        """
        free_gib = self.gpu.memory_gib - self.weights_gib - BEFORE_KV_GIB
        may_be_managed = self.model.is_dsa and self.tensor_parallel == 1 and not self.pins_host_pool
        return may_be_managed and self.rank_gib <= free_gib

    @property
    def pair_fits_host(self) -> bool:
        """True if both sides of a pair are on one host."""
        return 2 * self.num_gpus <= HOST_GPUS

    @property
    def wanted_tokens_per_s(self) -> float:
        """Tokens per second that the arriving requests need; 0 if `requests_per_s` is not given."""
        return (self.load.requests_per_s or 0.0) * self.load.output

    @property
    def systems(self) -> tuple[System, ...]:
        """Return the systems that can serve the model."""
        native = (System.native,) if self.model.has_native else ()
        if self.model.refusal == FP4_REFUSAL:
            return (System.full, *native)
        return (System.full,) if self.model.refusal else (System.full, *native, System.plugin)

    @property
    def best_system(self) -> System:
        """The plugin, or what serves a model that it refuses."""
        return self.systems[-1]

    @property
    def weights_gib(self) -> float:
        """Weights on each GPU in GiB: experts are divided among all GPUs, other weights among the GPUs of a rank."""
        dense = self.model.dense_weight_bytes / self.tensor_parallel
        experts = self.model.num_experts * self.model.expert_bytes / self.num_gpus
        return (dense + experts) / 2**30

    @property
    def kv_gib(self) -> float:
        """Device memory for KV on each GPU, in GiB."""
        if self.device_kv_gib is not None:
            return self.device_kv_gib
        return self.gpu.memory_gib * self.gpu_memory_utilization - self.weights_gib - ACTIVATIONS_GIB

    @property
    def stock_kv_gib(self) -> float:
        """Device memory for KV on each GPU of an instance with vLLM's defaults, in GiB."""
        return self.gpu.memory_gib * STOCK_MEMORY_UTILIZATION - self.weights_gib - ACTIVATIONS_GIB

    @property
    def _unused_gib(self) -> float:
        """Device memory beside weights and KV, in GiB."""
        return self.gpu.memory_gib - self.weights_gib - self.kv_gib

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a request gets in a step: one, and the drafts accepted before the first rejection."""
        return sum(self.acceptance**index for index in range(self.drafts + 1))

    @cached_property
    def memory(self) -> KVMemory:
        """KV memory of one rank."""
        return KVMemory(
            self.model,
            int(self.kv_gib * 2**30),
            int(self.rank_gib * 2**30),
            self.tensor_parallel,
            self.device_buffer_size,
            self.top_k,
            self.drafts,
            self.max_num_seqs,
            self.full_kv_layers,
            self.has_narrow_keys,
            # vLLM takes it from the memory that it measures, and not from a size that is given.
            int(self.import_buffer_gib * 2**30) if self.device_kv_gib is None else 0,
        )

    def seats(self, system: System) -> Seats:
        """Requests that run at once on one rank."""
        return self.memory.seats(system, self.load.full_lengths)

    def point(self, system: System, concurrency: int) -> Point:
        """Predict the decode of `concurrency` requests on all ranks."""
        per_rank = -(-concurrency // self.data_parallel)
        running = min(per_rank, self.seats(system).running)
        if running == 0:
            return Point(concurrency, 0, 0.0, float("inf"), None, {})
        step, hit_rate = self._step(system, running)
        parts = step.parts_ms()
        step_ms = sum(parts.values())
        is_hidden = system == System.plugin and self.model.is_dsa
        hidden = max(0.0, step.copy_ms - parts["copies"]) if is_hidden else 0.0
        total = min(running * self.data_parallel, concurrency)
        tokens_per_s = total * self.tokens_per_step / step_ms * 1e3
        return Point(concurrency, total, tokens_per_s, step_ms / self.tokens_per_step, hit_rate, parts, hidden)

    def _step(self, system: System, running: int) -> tuple[Step, float | None]:
        lengths = self.load.lengths
        hit_rate = None
        if system != System.full:
            rows = self.memory.hot_rows(system, lengths, running)
            rates = [
                1.0 if hot >= num_tokens else self.hit_rate(hot, num_tokens)
                for hot, num_tokens in zip(rows, lengths, strict=True)
            ]
            hit_rate = fmean(rates) * (1 - 1 / max(self.load.output, 1))  # a request's first selection is not hot
        missed = 0.0 if hit_rate is None else (1 - hit_rate) * self.top_k * (1 + self.drafts)
        step = Step(
            self.model, self.gpu, system, running, fmean(lengths), self.top_k, self.drafts, missed,
            self.tensor_parallel, self.data_parallel, self.full_kv_layers, self.has_narrow_keys, self.host_is_managed,
        )  # fmt: skip
        return step, hit_rate

    @property
    def concurrency(self) -> int:
        """Planned number of requests at once: as given, computed from arrivals, or the largest number that the plugin
        runs.
        """
        if self.load.concurrency is not None:
            return self.load.concurrency
        most = max(self.seats(system).running for system in self.systems) * self.data_parallel
        if self.load.requests_per_s is None:
            return max(1, most)
        concurrency = 1
        while concurrency < most:  # Little's law: requests in the system = arrivals per second x seconds in the system
            itl_ms = self.point(self.best_system, concurrency).itl_ms
            needed = self.load.requests_per_s * self.load.output * itl_ms / 1e3
            if needed <= concurrency:
                break
            concurrency = min(most, max(concurrency + 1, round(needed)))
        return concurrency

    def curve(self, system: System) -> list[Point]:
        """Predict points of growing concurrency, up to more than is planned and more than can run."""
        most = max(self.concurrency, *(self.seats(each).running * self.data_parallel for each in self.systems))
        count = min(most, 40)
        steps = sorted({max(1, round(most * index / count)) for index in range(1, count + 1)} | {1, self.concurrency})
        return [self.point(system, concurrency) for concurrency in steps]

    @cached_property
    def crossover(self) -> int | None:
        """Return the lowest concurrency from which on the plugin pays, up to the planned one; None if there is none."""
        if self.model.refusal:
            return None
        # NOTE: as soon as all seats are taken, more requests wait and change nothing.
        most = max(self.seats(system).running for system in self.systems) * self.data_parallel
        found = None
        for concurrency in range(max(1, min(self.concurrency, most)), 0, -1):
            plugin = self.point(System.plugin, concurrency).tokens_per_s
            if plugin < WORTH_IT * self.point(System.full, concurrency).tokens_per_s:
                break
            found = concurrency
        return found

    @cached_property
    def fewer_requests(self) -> Point | None:
        """Return the plugin's fastest point, if fewer requests than planned give clearly more tokens per second.

        With fewer requests at once, each has more hot rows.
        """
        if self.model.refusal:
            return None
        best = max(self.curve(System.plugin), key=lambda point: point.tokens_per_s)
        planned = self.point(System.plugin, self.concurrency)
        pays = best.tokens_per_s > WORTH_IT * planned.tokens_per_s
        return best if pays and best.running < planned.running else None

    @cached_property
    def advised(self) -> Point | None:
        """Return `fewer_requests` if the plugin pays with it; None if all planned requests are to run."""
        best, full = self.fewer_requests, self.point(System.full, self.concurrency)
        return best if best and best.tokens_per_s >= WORTH_IT * full.tokens_per_s else None

    @property
    def confidence(self) -> str:
        """Return a few sentences about the accuracy of the prediction."""
        return self._accuracy + (FOUR_BITS if self.model.weight_bits == 4 else "")

    @property
    def _accuracy(self) -> str:
        """Accuracy of the prediction, whatever the bits of the weights."""
        if self.model.refusal and self.model.refusal != FP4_REFUSAL:
            return "Rough: no such model was measured. KV of windows and states of linear layers is counted as full KV."
        if self.model.selects_blocks:
            return "Rough: no such model was measured. Its times are those of a DSA model with as many selected rows."
        if not self.model.is_dsa:
            found = (
                "Scaled from 8 layers of one Llama with Quest on an H200, which are predicted within 15%: expect "
                "errors of 30% with other sizes, algorithms and GPUs."
            )
        elif "H200" in self.gpu.name and "GH200" not in self.gpu.name:
            found = "Calibrated on H200s with 61 layers and few experts; what was measured is predicted within 15%."
        elif self.gpu.is_measured:
            found = (
                "Scaled from an H200 by the datasheet's GPU rates and the measured link: expect errors of 20 to 30%."
            )
        else:
            found = (
                "Scaled from an H200 by datasheets, the link too: expect errors of 30%. Run `vllm-hisparse doctor` "
                "there."
            )
        if self.has_narrow_keys and not has_timed_narrow_keys():
            found += " Indexer keys in 4 bits were not timed: their time is predicted from their bytes."
        native = self.point(System.native, self.concurrency).hit_rate if System.native in self.systems else None
        low, high = NATIVE_HIT_RATES
        if native is not None and not low <= native <= high:
            found += (
                " Native HiSparse was measured with hit rates of 83% to 89% only, and is predicted as with these: with "
                f"{native:.0%}, its steps are {'longer' if native < low else 'shorter'}."
            )
        if self.num_gpus > MEASURED_GPUS:
            found += f" Nobody measured more than {MEASURED_GPUS} GPUs: communication is extrapolated."
        if self.model.num_experts > MEASURED_EXPERTS:
            found += (
                f" Nobody measured layers of more than {MEASURED_EXPERTS} experts, or experts that are chosen "
                "unequally often."
            )
        return found

    @property
    def host_memory_note(self) -> str:
        """Return what a pinned host pool would change; empty if the pool is pinned anyway, or if the tokens per second
        change by less than 2%.
        """
        if not self.host_is_managed or System.plugin not in self.systems:
            return ""
        pinned = replace(self, pins_host_pool=True)
        speeds = [plan.point(System.plugin, self.concurrency).tokens_per_s for plan in (self, pinned)]
        if speeds[0] < WORTH_IT * speeds[1]:
            return ""
        return (
            f"{'Each host pool' if self.data_parallel > 1 else 'The host pool'} of {self.rank_gib:.1f} GiB is expected "
            "to be in managed memory. On the decode side of a pair, and with tiers, host pools are pinned: expect "
            f"{speeds[1]:,.0f} tokens/s there."
        )

    @property
    def waits_for_host(self) -> str:
        """Return a warning if steps would wait for one of the measured hosts; empty if the GPUs are the slower part."""
        fastest, slowest = measured_hosts_ms(self.drafts)
        points = {system: self.point(system, self.concurrency) for system in self.systems}
        own_ms = {
            system: sum(point.parts_ms.values()) - point.parts_ms[WAITING]
            for system, point in points.items()
            if point.running
        }
        short = [f"{value:.1f} ms ({system})" for system, value in own_ms.items() if value < slowest]
        if not short:
            return ""
        return (
            f"Steps wait for a slow host: for a step, the GPU needs {', '.join(short)}, and the hosts that were "
            f"measured needed {fastest:.1f} to {slowest:.1f} ms. The prediction is for the fastest of them."
        )

    @property
    def hosts(self) -> str:
        """Hosts that the GPUs of one instance need, in a sentence; empty if one host with 8 GPUs has them."""
        if self.tensor_parallel > HOST_GPUS and not self.model.is_dsa:
            return f"{self.tensor_parallel} tensor parallel ranks are on several hosts, which was never tried."
        if self.tensor_parallel > HOST_GPUS:
            return (
                f"{self.tensor_parallel} tensor parallel ranks need a host with as many GPUs: they share a host pool."
            )
        if self.num_gpus > HOST_GPUS:
            return (
                f"{self.num_gpus} GPUs are on several hosts: add vLLM's --data-parallel-size-local and "
                "--data-parallel-address, and start the other hosts with --headless and --data-parallel-start-rank."
            )
        return ""

    def as_json(self) -> dict[str, Any]:
        """Return the whole prediction."""
        systems: dict[str, Any] = {}
        for system in self.systems:
            seats, point = self.seats(system), self.point(system, self.concurrency)
            systems[str(system)] = {
                "device_bytes_per_request": seats.device_bytes,
                "host_bytes_per_request": seats.host_bytes,
                "host_gib": round(seats.host_bytes * point.running / 2**30, 1),
                "seats": seats.running * self.data_parallel,
                "bound": seats.bound,
                "running": point.running,
                "tokens_per_s": round(point.tokens_per_s, 1),
                "itl_ms": round(point.itl_ms, 2) if point.running else None,
                "hit_rate": point.hit_rate,
                "step_parts_ms": {name: round(value, 2) for name, value in point.parts_ms.items()},
                "hidden_copies_ms": round(point.hidden_copy_ms, 2),
                "curve": [
                    {"concurrency": p.concurrency, "running": p.running, "tokens_per_s": round(p.tokens_per_s, 1)}
                    | {"itl_ms": round(p.itl_ms, 2) if p.running else None}
                    for p in self.curve(system)
                ],
            }
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "gpu_source": self.gpu.source,
            "concurrency": self.concurrency,
            "weights_gib_per_gpu": round(self.weights_gib, 1),
            "device_kv_gib_per_gpu": round(self.kv_gib, 1),
            "host_kv_gib": round(self.host_gib, 1),
            "locality": self.locality,
            "confidence": self.confidence,
            "more_tokens_per_s_with": self.fewer_requests.running if self.fewer_requests else None,
            "host_memory": self.host_memory_note or None,
            "waits_for_host": self.waits_for_host or None,
            "hosts": self.hosts or None,
            "wanted_tokens_per_s": round(self.wanted_tokens_per_s, 1) or None,
            "not_hosted": self.model.refusal or None,
            "crossover": self.crossover,
            "systems": systems,
        }
