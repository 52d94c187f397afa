"""Connector statistics: counters, gauges and histograms for Prometheus and vLLM's stats log line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Name -> documentation; exported as vllm:hisparse_<name>. vLLM's native HiSparse also uses the first three names.
COUNTERS = {
    "cache_hits": "Number of selected KV rows found in hot buffers.",
    "cache_misses": "Number of selected KV rows copied from the host pool.",
    "host_to_device_bytes": "Bytes copied from the host pool: missed rows and restored device-resident KV.",
    "hot_rows_taken_back": "Number of lent hot rows per layer that were taken back for other uses.",
    "prefill_staged_bytes": "Bytes copied from the host pool for prefill chunks and for algorithms that read prompts.",
    "device_to_host_bytes": "Bytes copied to the host pool: new rows and device-resident KV.",
    "host_prefix_tokens": "Number of tokens served from the host pool instead of being computed.",
    "resumed_requests": "Number of preempted requests that were resumed.",
    "recomputed_tokens": "Number of tokens that resumed requests had to recompute.",
    "transfers": "Number of finished KV transfers from prefill instances.",
    "transfer_failures": "Number of KV transfers that failed.",
    "transfers_refused": "Number of prompts computed locally because of a malformed or foreign transfer, or kv_both.",
    "transfers_expired": "Number of prompts computed locally because their KV's lease may have ended before the pull.",
    "transfer_bytes_to_host": "Bytes received from prefill instances into the host pool.",
    "transfer_bytes_through_buffer": "Bytes received into the host pool through the import buffer.",
    "transfer_bytes_to_device": "Bytes received from prefill instances into the device KV cache.",
    "tier_loaded_blocks": "Number of blocks loaded into the host pool from the tiers below it.",
    "tier_damaged_blocks": "Number of blocks from a tier that were not what had been stored, and were not used.",
    "tier_load_timeouts": "Number of requests that computed the rest of their prefix because a tier did not answer.",
    "tier_slow_loads": "Number of requests that computed the rest of their prefix because it came too slowly.",
    "tier_skipped_loads": "Number of requests that computed their prefix because too many others were being loaded.",
    "tier_dropped_blocks": "Number of blocks evicted from the host pool before they could be stored in a tier.",
}
GAUGES = {
    "host_blocks_used": "Number of host blocks allocated to requests.",
    "host_blocks_free": "Number of empty host blocks.",
    "host_blocks_cached": "Number of host blocks kept for later requests; evicted when blocks are needed.",
    "requests_waiting_for_host_memory": "Number of requests waiting for host blocks.",
    "transfers_waiting_for_buffer": "Number of KV transfers waiting for the import buffer, on the rank with most.",
    "hot_rows_lent": "Number of hot rows per layer that requests have beyond device_buffer_size.",
    "admission_limit": "Number of requests that may run at once because more would decode slower; 0 if none applies.",
    "admission_missing_predictions": "Number of predictions before the limit applies; until then, hot requests run.",
    "requests_held_back": "Number of requests waiting because of the limit or of missing predictions.",
    "hot_rows_wanted": "Number of hot rows per layer beyond device_buffer_size that would hold all sequences.",
}
HISTOGRAMS = {
    "transfer_time_seconds": "Histogram of the time from the start to the end of a KV transfer from prefill instances.",
}
# The buckets of vLLM's `vllm:nixl_xfer_time_seconds`, and longer ones, because a prompt's transfer may consist of many
# NIXL transfers.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class HiSparseStats(KVConnectorStats):
    """Counters (summed), gauges (the latest value wins), histograms (all values), and vLLM's own stats of its NIXL
    connector and its tiers.

    `data` is sent between processes: `{"counters": {…}, "gauges": {…}, "histograms": {…}, "nixl": {…}, "tiers": {…}}`.
    """

    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "histograms": {}, "nixl": {}, "tiers": {}}

    def add(self, **counters: int) -> None:
        """Add to counters."""
        own = self.data["counters"]
        for name, value in counters.items():
            own[name] = own.get(name, 0) + value

    def set_gauges(self, **gauges: int) -> None:
        """Set gauges."""
        self.data["gauges"].update(gauges)

    def record(self, **values: list[float]) -> None:
        """Add values to histograms."""
        own = self.data["histograms"]
        for name, added in values.items():
            own[name] = own.get(name, []) + added

    def add_nixl(self, stats: NixlKVConnectorStats) -> None:
        """Add stats of the NIXL connector."""
        own = NixlKVConnectorStats(data=self.data["nixl"])
        self.data["nixl"] = own.aggregate(stats).data

    def add_tiers(self, stats: OffloadingConnectorStats | None) -> None:
        """Add stats of vLLM's tiering."""
        if stats is not None:
            own = OffloadingConnectorStats(data=self.data["tiers"])
            self.data["tiers"] = own.aggregate(stats).data

    def aggregate(self, other: KVConnectorStats) -> HiSparseStats:
        self.add(**other.data["counters"])
        self.set_gauges(**other.data["gauges"])
        self.record(**other.data["histograms"])
        if other.data["nixl"]:
            self.add_nixl(NixlKVConnectorStats(data=other.data["nixl"]))
        if other.data["tiers"]:
            self.add_tiers(OffloadingConnectorStats(data=other.data["tiers"]))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's stats log line, with gauges only if the scheduler half has reported them."""
        counters = {name: self.data["counters"].get(name, 0) for name in COUNTERS}
        selected = counters["cache_hits"] + counters["cache_misses"]
        times = self.data["histograms"].get("transfer_time_seconds", [])
        received = (counters["transfer_bytes_to_host"] + counters["transfer_bytes_to_device"]) / 2**20
        figures: dict[str, int | float] = {
            "Hot-buffer hit rate (%)": round(100 * counters["cache_hits"] / selected, 1) if selected else 0.0,
            "Host to device (MiB)": round(counters["host_to_device_bytes"] / 2**20, 1),
            "Device to host (MiB)": round(counters["device_to_host_bytes"] / 2**20, 1),
            "Transfers": counters["transfers"],
            "Failed transfers": counters["transfer_failures"],
            "Received to host (MiB)": round(counters["transfer_bytes_to_host"] / 2**20, 1),
            "Avg transfer time (ms)": round(1e3 * sum(times) / len(times), 3) if times else 0.0,
            "Transfer throughput (MiB/s)": round(received / sum(times), 3) if sum(times) else 0.0,
        }
        return figures | {name.replace("_", " ").capitalize(): value for name, value in self.data["gauges"].items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HiSparsePromMetrics(KVConnectorPromMetrics):
    """Registers and updates the metrics `vllm:hisparse_*`, `vllm:nixl_*` for transfers and, if tiers are configured,
    `vllm:kv_offload_tiering_*` for each tier.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._label_names = labelnames
        self._nixl = NixlPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        tiers = tiering_options(vllm_config)
        self._tiers = tiers and OffloadPromMetrics(tiers, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._create(metric_types[Counter], name, documentation) for name, documentation in COUNTERS.items()
        }
        self._gauges = {
            name: self._create(metric_types[Gauge], name, documentation, multiprocess_mode="mostrecent")
            for name, documentation in GAUGES.items()
        }
        self._histograms = {
            name: self._create(metric_types[Histogram], name, documentation, buckets=BUCKETS_S)
            for name, documentation in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data["counters"].items():
            self._counters[name][engine_idx].inc(value)
        for name, value in transfer_stats_data["gauges"].items():
            self._gauges[name][engine_idx].set(value)
        for name, values in transfer_stats_data["histograms"].items():
            for value in values:
                self._histograms[name][engine_idx].observe(value)
        if transfer_stats_data["nixl"]:
            self._nixl.observe(transfer_stats_data["nixl"], engine_idx)
        if self._tiers and transfer_stats_data["tiers"]:
            self._tiers.observe(transfer_stats_data["tiers"], engine_idx)

    def _create(self, metric_type: type, name: str, documentation: str, **kwargs: Any) -> Any:
        metric = metric_type(
            name=f"vllm:hisparse_{name}", documentation=documentation, labelnames=self._label_names, **kwargs
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)


def tiering_options(vllm_config: VllmConfig) -> Any | None:
    """Return the part of a configuration that vLLM's tiering metrics read; None without tiers."""
    if not vllm_config.kv_transfer_config.kv_connector_extra_config.get("tiers"):
        return None
    options = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": []}
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options))
