import functools
import pickle
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from vllm_hisparse.connector.metrics import COUNTERS, GAUGES, HISTOGRAMS, HiSparsePromMetrics, HiSparseStats

LABELS = ["model_name", "engine"]
NOTHING: dict[str, dict] = {"counters": {}, "gauges": {}, "histograms": {}, "nixl": {}, "tiers": {}}


def nixl_stats(num_transfers: int) -> NixlKVConnectorStats:
    stats = NixlKVConnectorStats()
    for _ in range(num_transfers):
        for values in stats.data.values():
            values.append(1.0)
    return stats


def test_starts_empty_and_resets() -> None:
    stats = HiSparseStats()
    assert stats.is_empty()
    for change in (
        lambda: stats.add(transfers=1),
        lambda: stats.set_gauges(host_blocks_used=0),
        lambda: stats.record(transfer_time_seconds=[0.0]),
    ):
        change()
        assert not stats.is_empty()
        stats.reset()
        assert stats.is_empty()
    stats.add_nixl(nixl_stats(1))
    assert not stats.is_empty()


def test_counters_add_up_and_the_latest_gauge_wins() -> None:
    stats = HiSparseStats()
    stats.add(cache_hits=3, cache_misses=1)
    stats.add(cache_hits=4)
    stats.set_gauges(host_blocks_used=5, host_blocks_free=9)
    stats.set_gauges(host_blocks_used=2)
    assert stats.data["counters"] == {"cache_hits": 7, "cache_misses": 1}
    assert stats.data["gauges"] == {"host_blocks_used": 2, "host_blocks_free": 9}


def test_aggregate_adds_counters_takes_gauges_and_joins_the_rest() -> None:
    worker, scheduler = HiSparseStats(), HiSparseStats()
    worker.add(cache_hits=3, host_to_device_bytes=10)
    worker.add_nixl(nixl_stats(2))
    worker.record(transfer_time_seconds=[0.5])
    scheduler.add(resumed_requests=1, host_to_device_bytes=5)
    scheduler.set_gauges(host_blocks_used=4)
    scheduler.record(transfer_time_seconds=[0.25, 2.0])
    scheduler.add_nixl(nixl_stats(1))
    before = pickle.dumps(scheduler.data)
    total = worker.aggregate(scheduler)
    assert total.data["counters"] == {"cache_hits": 3, "host_to_device_bytes": 15, "resumed_requests": 1}
    assert total.data["gauges"] == {"host_blocks_used": 4}
    assert total.data["histograms"] == {"transfer_time_seconds": [0.5, 0.25, 2.0]}
    assert all(len(values) == 3 for values in total.data["nixl"].values())
    assert pickle.dumps(scheduler.data) == before


def test_aggregate_with_nothing_changes_nothing() -> None:
    stats = HiSparseStats()
    stats.add(cache_hits=3)
    stats.set_gauges(host_blocks_used=4)
    stats.add_nixl(nixl_stats(1))
    before = pickle.dumps(stats.data)
    assert pickle.dumps(stats.aggregate(HiSparseStats()).data) == before


def tier_stats(num_hits: int) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    stats.increase_counter(TieringOffloadingMetrics.CHUNK_HITS, num_hits, ("1:fs",))
    return stats


def test_stats_of_the_tiers_add_up() -> None:
    stats, other = HiSparseStats(), HiSparseStats()
    stats.add_tiers(None)
    assert stats.is_empty()
    stats.add_tiers(tier_stats(2))
    other.add_tiers(tier_stats(3))
    stats.aggregate(other)
    assert stats.data["tiers"]["data"][TieringOffloadingMetrics.CHUNK_HITS] == {("1:fs",): 5}


def test_observes_stats_of_the_tiers(metrics: HiSparsePromMetrics, registry: CollectorRegistry) -> None:
    stats = HiSparseStats()
    stats.add_tiers(tier_stats(2))
    metrics.observe(stats.data, 1)
    name, labels = f"{TieringOffloadingMetrics.CHUNK_HITS}_total", {"model_name": "m", "engine": "1", "tier": "1:fs"}
    assert registry.get_sample_value(name, labels) == 2


def test_no_metrics_of_tiers_without_tiers(registry: CollectorRegistry) -> None:
    types = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    HiSparsePromMetrics(config, types, LABELS, {0: ["m", "0"]})
    assert not [family.name for family in registry.collect() if "kv_offload" in family.name]


def test_travels_as_plain_data() -> None:
    stats = HiSparseStats()
    stats.add(cache_hits=3)
    stats.add_nixl(nixl_stats(1))
    stats.add_tiers(tier_stats(1))
    assert HiSparseStats(pickle.loads(pickle.dumps(stats.data))).data == stats.data


def test_reduces_to_a_log_line() -> None:
    stats = HiSparseStats()
    stats.add(cache_hits=867, cache_misses=133, host_to_device_bytes=3 * 2**20, transfers=2, transfer_failures=1)
    stats.set_gauges(host_blocks_used=4, requests_waiting_for_host_memory=6)
    figures = stats.reduce()
    assert figures["Hot-buffer hit rate (%)"] == 86.7
    assert figures["Host to device (MiB)"] == 3.0
    assert (figures["Host blocks used"], figures["Requests waiting for host memory"]) == (4, 6)
    assert (figures["Transfers"], figures["Failed transfers"]) == (2, 1)
    assert HiSparseStats().reduce()["Hot-buffer hit rate (%)"] == 0.0


def test_the_log_line_has_time_and_speed_of_transfers() -> None:
    stats = HiSparseStats()
    stats.add(transfer_bytes_to_host=2**30, transfer_bytes_to_device=2**28)
    stats.record(transfer_time_seconds=[0.75])
    stats.record(transfer_time_seconds=[0.25])
    figures = stats.reduce()
    assert (figures["Avg transfer time (ms)"], figures["Transfer throughput (MiB/s)"]) == (500.0, 1280.0)
    figures = HiSparseStats().reduce()
    assert (figures["Avg transfer time (ms)"], figures["Transfer throughput (MiB/s)"]) == (0, 0)


def test_the_log_line_names_no_gauge_that_nobody_reported() -> None:
    stats = HiSparseStats()
    stats.add(cache_hits=1)
    names = {"Host blocks used", "Host blocks free", "Host blocks cached", "Requests waiting for host memory"}
    assert not names & set(stats.reduce())
    stats.set_gauges(**dict.fromkeys(GAUGES, 0))
    assert names <= set(stats.reduce())


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> HiSparsePromMetrics:
    types = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    options = {"tiers": [{"type": "fs"}]}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options))
    return HiSparsePromMetrics(config, types, LABELS, {0: ["m", "0"], 1: ["m", "1"]})


@pytest.mark.long
def test_exports_every_name_with_its_engine(metrics: HiSparsePromMetrics, registry: CollectorRegistry) -> None:
    for index, name in enumerate(COUNTERS):
        assert registry.get_sample_value(f"vllm:hisparse_{name}_total", {"model_name": "m", "engine": "1"}) == 0
        data = NOTHING | {"counters": {name: index + 1}}
        metrics.observe(data, 1)
        metrics.observe(data, 1)
    for index, name in enumerate(GAUGES):
        metrics.observe(NOTHING | {"gauges": {name: 99}}, 1)
        metrics.observe(NOTHING | {"gauges": {name: index}}, 1)
    for engine, factor in (("0", 0), ("1", 1)):
        labels = {"model_name": "m", "engine": engine}
        for index, name in enumerate(COUNTERS):
            value = registry.get_sample_value(f"vllm:hisparse_{name}_total", labels)
            assert value == 2 * (index + 1) * factor
        for index, name in enumerate(GAUGES):
            assert registry.get_sample_value(f"vllm:hisparse_{name}", labels) == index * factor


def test_keeps_the_names_of_vllms_own_hisparse() -> None:
    assert {"cache_hits", "cache_misses", "host_to_device_bytes"} <= COUNTERS.keys()
    assert all(text.endswith(".") for text in (*COUNTERS.values(), *GAUGES.values(), *HISTOGRAMS.values()))


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_observes_every_value_of_a_histogram(
    metrics: HiSparsePromMetrics, registry: CollectorRegistry, name: str
) -> None:
    for values in ([0.25, 7.0], [0.75]):
        metrics.observe(NOTHING | {"histograms": {name: values}}, 1)
    for engine, factor in (("0", 0), ("1", 1)):
        labels = {"model_name": "m", "engine": engine}
        assert registry.get_sample_value(f"vllm:hisparse_{name}_sum", labels) == 8.0 * factor
        assert registry.get_sample_value(f"vllm:hisparse_{name}_count", labels) == 3 * factor
        for limit, count in (("0.2", 0), ("0.75", 2), ("5.0", 2), ("10.0", 3)):
            found = registry.get_sample_value(f"vllm:hisparse_{name}_bucket", {**labels, "le": limit})
            assert found == count * factor


def test_observes_nixl_stats(metrics: HiSparsePromMetrics, registry: CollectorRegistry) -> None:
    metrics.observe(NOTHING | {"nixl": nixl_stats(3).data}, 0)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:nixl_xfer_time_seconds_count", labels) == 3
