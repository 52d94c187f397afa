"""Time of a decode step, as a sum of parts: each is its time at the GPU's rates, multiplied by a calibrated factor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vllm_hisparse.attention.mla.microbatch_sizes import MAX_REQUESTS, MIN_REQUESTS
from vllm_hisparse.cli.plan.gpus import Gpu
from vllm_hisparse.cli.plan.memory import QUEST_PAGE, System
from vllm_hisparse.cli.plan.models import ModelShape, narrow_key_bytes
from vllm_hisparse.kv_manager.blocks.step_form import MIN_COPIED_BYTES

CALIBRATION = Path(__file__).with_name("calibration.json")
# Parts that a step has in every system: the kinds of kernels that `benchmarks.full_depth` profiles.
STOCK_PARTS = ("matrix products", "experts", "attention", "indexer", "communication", "other")
NARROW = "narrow "  # begins the names of costs of indexer keys in 4 bits
MANAGED = "managed "  # begins the names of factors of copies from managed memory
WAITING = "waiting for the host"  # part of a step whose other parts take less time than the host needs for it


@dataclass(frozen=True)
class Step:
    """One decode step of one engine rank.

    Attributes:
        model: sizes of the model.
        gpu: rates of the GPU.
        system: way to keep KV.
        requests: requests of the rank.
        num_tokens: mean tokens of a request.
        top_k: positions that a query token selects; with full KV, a dense model reads all of them.
        drafts: drafts of each request.
        missed_rows: mean rows per request and layer that are copied from host memory.
        tensor_parallel, data_parallel: GPUs of the rank, and ranks that share the experts.
        full_kv_layers: layers of a dense model in which the plugin reads all rows.
        has_narrow_keys: True if the plugin keeps the indexer keys of a DSA model in 4 bits.
        host_is_managed: True if the plugin's host pool is in managed memory, from which rows arrive sooner.
    """

    model: ModelShape
    gpu: Gpu
    system: System
    requests: float
    num_tokens: float
    top_k: int
    drafts: int = 0
    missed_rows: float = 0.0
    tensor_parallel: int = 1
    data_parallel: int = 1
    full_kv_layers: int = 0
    has_narrow_keys: bool = False
    host_is_managed: bool = False

    @property
    def hot_layers(self) -> int:
        """Layers whose rows are selected."""
        return self.model.num_layers - self.model.num_full_kv_layers - self.full_kv_layers

    def costs(self) -> dict[str, dict[str, float]]:
        """Return the costs of each part by name: milliseconds at the datasheet's rates, or counts.

        A cost per layer counts 1/61 for each layer, because the measured models have 61 layers.
        """
        model, gpu = self.model, self.gpu
        tokens = self.requests * (1 + self.drafts)
        bytes_per_ms, flops_per_ms = gpu.memory_tb_s * 1e9, gpu.bf16_tflops * 1e9
        ranks = self.tensor_parallel * self.data_parallel
        layers = model.num_layers / 61
        kind = "layers" if model.is_dsa else "dense layers"  # dense layers have fewer and larger matrix products
        parts: dict[str, dict[str, float]] = {
            "matrix products": {
                kind: layers,
                "weights": model.dense_weight_bytes / self.tensor_parallel / bytes_per_ms,
                "flops": model.token_flops * tokens / self.tensor_parallel / flops_per_ms,
                "drafts": self.drafts,
            },
            "experts": {
                "weights": self._expert_bytes() / ranks / bytes_per_ms,
                "tokens": tokens * layers * self.data_parallel if model.num_experts else 0.0,
                "drafts": self.drafts if model.num_experts else 0.0,
            },
            "other": {"layers": layers, "tokens": tokens * layers},
        }
        if model.is_dsa:
            # A DSA kernel reads `top_k` rows even if the sequence is shorter.
            rows = model.row_flops * tokens * self.top_k / self.tensor_parallel / flops_per_ms
            parts["attention"] = {"layers": layers, "selected rows": rows}
        else:
            parts["attention"] = {"all rows": self._read_rows * model.row_bytes / self.tensor_parallel / bytes_per_ms}
        if model.is_dsa:
            is_narrow = self.has_narrow_keys and self.system == System.plugin
            key_bytes, kind = model.key_bytes, "keys"
            if is_narrow:
                key_bytes, kind = narrow_key_bytes(model.index_head_dim), f"{NARROW}keys"
            keys = self.requests * self.num_tokens * model.num_indexers * key_bytes / bytes_per_ms
            indexers = model.num_indexers / 61
            parts["indexer"] = {"indexers": indexers, kind: keys, f"{kind} of drafts": keys * self.drafts}
            parts["indexer"]["tokens"] = tokens * indexers
        shares_experts = self.data_parallel > 1 and model.num_experts > 0
        if shares_experts or self.tensor_parallel > 1:
            kind = "expert parallel" if shares_experts else "tensor parallel"
            parts["communication"] = {f"{kind} layers": layers, f"{kind} tokens": tokens * layers}
        if self.system == System.plugin and model.is_dsa:
            groups = model.num_indexers / 61
            parts["resolve"] = {"resolves": groups, "microbatches": groups * self.decodes_in_microbatches}
        elif self.system == System.plugin:
            hot = self.hot_layers / 61
            scored = self.requests * self.num_tokens / QUEST_PAGE * self.hot_layers * model.bounds_bytes
            parts["resolve"] = {"dense layers": hot, "dense tokens": tokens * hot}
            parts["resolve"]["page bounds"] = scored / self.tensor_parallel / bytes_per_ms
            # Units of several tokens are copied at a share of the rate of a large copy. No other work hides them.
            parts["copies"] = {"units": self.copied_bytes / (gpu.link_gb_s * 1e6)}
        elif self.system == System.native:
            table = "resolves with room" if self.drafts else "resolves of a full table"
            parts["resolve"] = {table: model.num_indexers / 61, "tokens": tokens * layers}
        return parts

    @property
    def _read_rows(self) -> float:
        """Return the number of rows that the attention of a dense model reads, in all layers of all requests."""
        if self.system == System.full:
            return self.requests * self.num_tokens * self.model.num_layers
        selected = min(self.top_k, self.num_tokens)
        return self.requests * (self.num_tokens * self.full_kv_layers + selected * self.hot_layers)

    def _expert_bytes(self) -> float:
        model = self.model
        if not model.num_experts:
            return 0.0
        share = model.experts_per_token / model.num_experts
        tokens = self.requests * (1 + self.drafts) * self.data_parallel
        return (1 - (1 - share) ** tokens) * model.num_experts * model.expert_bytes

    @property
    def copied_bytes(self) -> float:
        """Bytes that a GPU copies from host memory in the step."""
        shared = self.tensor_parallel if self.model.has_kv_heads else 1
        return self.requests * self.missed_rows * self.hot_layers * self.model.row_bytes / shared

    @property
    def copy_ms(self) -> float:
        """Milliseconds that the link needs for these bytes from pinned memory, hidden or not."""
        return self.copied_bytes / (self.gpu.scattered_gb_s * 1e6)

    @property
    def decodes_in_microbatches(self) -> bool:
        """True if the plugin decodes the step in microbatches, which copy rows while others compute.

        Every layer must have an indexer, as in `attention.mla.microbatches_cuda`.
        """
        model = self.model
        has_indexers = model.is_dsa and model.num_indexers == model.num_layers
        may_be_divided = has_indexers and MIN_REQUESTS <= self.requests <= MAX_REQUESTS
        layer_bytes = self.requests * self.missed_rows * model.row_bytes
        return may_be_divided and layer_bytes >= MIN_COPIED_BYTES

    def exposed_copy_ms(self, stock_ms: float, factors: Mapping[str, float]) -> float:
        """Return the milliseconds of copies that the plugin's step waits for with a DSA model.

        Microbatches copy while others compute. Layers that share an indexer have no microbatches; the rows of those
        after the first are copied ahead.

        Args:
            stock_ms: milliseconds of the parts that every system has.
            factors: factors of the part `copies`.
        """
        own = self.model.num_indexers / self.hot_layers
        waited = self.copy_ms * (own + factors["share of copies ahead"] * (1 - own))
        if not self.decodes_in_microbatches:
            return waited
        least = factors[f"{MANAGED}least share" if self.host_is_managed else "least share"]
        return max(least * waited, waited - factors["hidden share of a step"] * stock_ms)

    def parts_ms(self, factors: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, float]:
        """Return the milliseconds of each part; they add up to the step.

        Args:
            factors: factors of each part's costs. None: the installed calibration. Keys in 4 bits that were not
                measured get the factors of keys in 8 bits, so that their bytes make the difference.
        """
        factors = calibration()["factors"] if factors is None else factors
        parts = {
            part: sum(
                factors[part].get(cost, factors[part].get(cost.removeprefix(NARROW), 0.0)) * value
                for cost, value in costs.items()
            )
            for part, costs in self.costs().items()
        }
        for part in STOCK_PARTS:  # kernels overlap a little, so that a step takes less than their sum
            if part in parts:
                parts[part] *= factors["step"]["kernels"]
        if self.system == System.plugin and self.model.is_dsa:
            stock_ms = sum(parts.get(part, 0.0) for part in STOCK_PARTS)
            parts["copies"] = self.exposed_copy_ms(stock_ms, factors["copies"])
        parts[WAITING] = max(0.0, host_ms(factors["host"], self.drafts) - sum(parts.values()))
        return parts

    def total_ms(self, factors: Mapping[str, Mapping[str, float]] | None = None) -> float:
        """Return the milliseconds of the step."""
        return sum(self.parts_ms(factors).values())


def host_ms(factors: Mapping[str, float], drafts: int) -> float:
    """Return the milliseconds that a host needs for a step with so many drafts."""
    return factors["step"] + factors["drafts"] * drafts


def has_timed_narrow_keys() -> bool:
    """Return whether indexer keys in 4 bits are among the measured rows."""
    return f"{NARROW}keys" in calibration()["factors"]["indexer"]


def measured_hosts_ms(drafts: int) -> tuple[float, float]:
    """Return the milliseconds of the fastest and of the slowest host that was measured; predictions use the fastest."""
    hosts = calibration()["factors"]["host"], *calibration()["slow_hosts"].values()
    times = [host_ms(factors, drafts) for factors in hosts]
    return min(times), max(times)


@cache
def calibration() -> dict[str, Any]:
    """Read the factors that `python -m benchmarks.plan_calibration` has fitted to measured rows."""
    return json.loads(CALIBRATION.read_text())
