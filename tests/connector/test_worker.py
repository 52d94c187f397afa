"""The worker's half: which layer gets which memory, in which order a step's changes are applied, what is reported."""

from __future__ import annotations

import ctypes
import unittest
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.connector.worker import HiSparseWorkerConnector, layer_views
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.kv_manager.rows import host_memory
from vllm_hisparse.kv_manager.rows.algorithm_state import KeySpan
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.usage_sampler import STEPS_PER_REPORT
from vllm_hisparse.kv_manager.usage import Usage
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.ops.base import HotRows
from vllm_hisparse.trace import Trace

NUM_LAYERS, NUM_HOST_BLOCKS, NUM_DEVICE_BLOCKS, KEY_BYTES, WIDTH = 3, 8, 12, 132, 16
MLA_LAYOUT = KVLayout(WIDTH * 4, KEY_BYTES, NUM_LAYERS, 2)
GQA_LAYOUT = KVLayout(
    *(2 * 2 * 32 * 4, 2 * 2 * 32 * 4, NUM_LAYERS, 0),
    tokens_per_unit=16,
    num_kv_heads=2,
    state_entries=((16, 2 * 2 * 32 * 4),),  # of Quest
)
HOT_LAYERS, INDEXER_LAYERS = ["m0", "m1", "m2"], ["k0", "k2"]


class Impl:
    """A layer's implementation, which notes what it is told."""

    divides_steps = False

    def bind(self, hot_buffer: Any, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        self.hot_buffer, self.layer_index, self.host_rows, self.cache = hot_buffer, layer_index, host_rows, cache
        self.spans: list[KeySpan] = []

    def represent(self, span: KeySpan) -> None:
        self.spans.append(span)


def device_groups(is_dense: bool) -> DeviceGroups:
    if is_dense:
        full = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(HOT_LAYERS, HotBufferSpec.from_full_spec(full, GQA_LAYOUT, 64, elastic=False))]
    else:
        mla = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
        keys = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=KEY_BYTES, dtype=torch.uint8)
        hot = HotBufferSpec.from_mla_spec(mla, MLA_LAYOUT, 64, elastic=False)
        groups = [KVCacheGroupSpec(HOT_LAYERS, hot), KVCacheGroupSpec(INDEXER_LAYERS, keys)]
    tensor = KVCacheTensor(size=1 << 20, layers=[], layer_stride=0, block_stride=0)
    config = KVCacheConfig(num_blocks=NUM_DEVICE_BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=groups)
    return DeviceGroups.from_config(config)


def make_worker(
    is_dense: bool = False, rank: int = 0, transport: Any = None, **options: Any
) -> HiSparseWorkerConnector:
    sizes = {"max_model_len": 300, "use_mla": not is_dense, "get_num_attention_heads": lambda _: 4}
    model = SimpleNamespace(model="models/some", **sizes)
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={name: SimpleNamespace(impl=Impl(), indexer=object()) for name in HOT_LAYERS}
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=rank, data_parallel_index=3),
        speculative_config=None,
    )
    options |= {"algorithm": "quest", "algorithm_options": {"page_size": 16}} if is_dense else {}
    config = HiSparseConfig(top_k=32, device_buffer_size=64, host_pool_gib=1.0, **options)
    return HiSparseWorkerConnector(vllm_config, config, device_groups(is_dense), NUM_HOST_BLOCKS, transport)


def device_caches(is_dense: bool = False, num_more_rows: int = 0) -> dict[str, torch.Tensor]:
    """All layers of a block side by side, as vLLM lays them out.

    Args:
        is_dense: True for a dense model.
        num_more_rows: rows of a DSA model by which blocks are larger than its layers need.
    """
    if is_dense:
        memory = torch.zeros(NUM_DEVICE_BLOCKS, NUM_LAYERS, 2, 64, 64)
        assert memory[0].nbytes == GQA_LAYOUT.device_block_bytes
        return {name: memory[:, index] for index, name in enumerate(HOT_LAYERS)}
    rows, more_bytes = MLA_LAYOUT.rows_per_hot_block, num_more_rows * MLA_LAYOUT.row_bytes
    memory = torch.zeros(NUM_DEVICE_BLOCKS, MLA_LAYOUT.device_block_bytes + more_bytes, dtype=torch.uint8)
    hot = memory.view(torch.float32)[:, : NUM_LAYERS * rows * WIDTH].view(-1, NUM_LAYERS, 1, rows, WIDTH)
    keys = memory[:, : MLA_LAYOUT.resident_block_bytes].view(-1, 2, 1, 64, KEY_BYTES)
    layers = [hot[:, index] for index in range(NUM_LAYERS)] + [keys[:, index] for index in range(2)]
    return dict(zip(HOT_LAYERS + INDEXER_LAYERS, layers, strict=True))


@pytest.fixture
def worker() -> Iterator[HiSparseWorkerConnector]:
    worker = make_worker()
    worker.register_kv_caches(device_caches())
    yield worker
    worker.shutdown()


@pytest.mark.parametrize(("memory", "has_transport"), [("managed", True), ("managed", False), ("pinned", True)])
def test_the_host_pool_has_the_memory_of_the_option(
    monkeypatch: pytest.MonkeyPatch, memory: str, has_transport: bool
) -> None:
    """Managed memory for NIXL comes with a warning."""
    sizes: list[int] = []

    def allocate(num_bytes: int) -> Any:
        sizes.append(num_bytes)
        return (ctypes.c_uint8 * num_bytes)()

    monkeypatch.setattr(host_memory, "allocate_managed", allocate)
    level = "WARNING" if memory == "managed" and has_transport else None
    log = unittest.TestCase().assertLogs if level else unittest.TestCase().assertNoLogs
    with log("vllm.vllm_hisparse.connector.worker", "WARNING"):
        worker = make_worker(transport=Mock() if has_transport else None, host_pool_memory=memory)
    assert sizes == ([worker.store.pool.nbytes] if memory == "managed" else [])
    assert isinstance(worker.host_memory.memory, ctypes.Array) == worker.store.is_managed == (memory == "managed")
    if not has_transport:
        worker.register_kv_caches(device_caches())
        assert worker.hot_buffer.host_is_managed
    worker.shutdown()


@pytest.mark.parametrize("memory", ["managed", "pinned"])
def test_memory_that_nixl_cannot_register(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    """The error names the option if this may be the reason."""
    monkeypatch.setattr(host_memory, "allocate_managed", lambda num_bytes: (ctypes.c_uint8 * num_bytes)())
    transport = Mock(register=Mock(side_effect=RuntimeError("NIXL_ERR_BACKEND")))
    worker = make_worker(transport=transport, host_pool_memory=memory)
    expected = r"^host_pool_memory: got 'managed', expected pinned.*BACKEND" if memory == "managed" else "^NIXL_ERR"
    with pytest.raises(HiSparseConfigError if memory == "managed" else RuntimeError, match=expected):
        worker.register_kv_caches(device_caches())


@pytest.mark.parametrize("num_more_rows", [0, 5])
def test_every_layer_gets_its_own_rows_in_order(num_more_rows: int) -> None:
    """vLLM's blocks are larger if the backend of a draft layer asks for pages of several rows."""
    worker, caches = make_worker(), device_caches(num_more_rows=num_more_rows)
    worker.register_kv_caches(caches)
    for index, (impl, name) in enumerate(zip(worker.impls, HOT_LAYERS, strict=True)):
        assert impl.hot_buffer is worker.hot_buffer and impl.layer_index == index
        assert impl.cache.data_ptr() == caches[name].data_ptr()
        assert (impl.cache.shape, impl.cache.stride()) == (caches[name].shape, caches[name].stride())
        assert impl.host_rows is worker.store.main_kv[name]
    shape = worker.hot_buffer.shape
    assert (shape.num_requests, shape.max_batch, shape.top_k) == (4, 4, 32)
    assert (shape.max_blocks, shape.block_size, shape.num_device_blocks) == (5, 64, NUM_DEVICE_BLOCKS)


@pytest.mark.parametrize("num_more_rows", [0, 5])
@pytest.mark.parametrize("shares", [((1.0, 1), (2.0, 1), (3.0, 1)), ((1.0, 2), (3.0, 1)), ((3.0, 1), (1.0, 2))])
def test_a_block_has_rows_of_each_layer_in_both_divisions(
    num_more_rows: int, shares: tuple[tuple[float, int], ...]
) -> None:
    layout, caches = replace(MLA_LAYOUT, row_shares=shares), list(device_caches(num_more_rows=num_more_rows).values())
    caches = caches[:NUM_LAYERS]
    assert len(set(layout.layer_rows)) > 1, "all layers have the same number of rows"
    assert layout.equal_rows > layout.fewest_rows
    owners = torch.zeros(2, layout.device_block_bytes // layout.row_bytes, dtype=torch.int32)
    groups = [group for group, (_, num_layers) in enumerate(shares) for _ in range(num_layers)]
    row_ids: dict[tuple[int, int], list[int]] = {}
    for index, (view, place) in enumerate(zip(layer_views(caches, layout), layout.row_places, strict=True)):
        assert view.shape == (NUM_DEVICE_BLOCKS, 1, layout.layer_rows[index], WIDTH)
        hot = HotRows.from_cache(view.squeeze(1), layout.equal_rows, place.equal_offset)
        assert hot.block_stride_rows == owners.shape[1] + num_more_rows
        first = (view.data_ptr() - caches[0].data_ptr()) // layout.row_bytes
        last_block, block = torch.tensor([[NUM_DEVICE_BLOCKS - 1]]), torch.tensor([[0]])
        for is_equal, num_rows in enumerate((hot.rows_per_block, layout.equal_rows)):
            slots, division = torch.arange(num_rows)[None], torch.tensor([is_equal])
            ids = hot.flat_row_ids(block, slots, division)[0]
            assert row_ids.setdefault((is_equal, groups[index]), ids.tolist()) == ids.tolist(), "shared ids differ"
            owners[is_equal, first + ids] += 1
            assert hot.flat_row_ids(last_block, slots, division).max() < len(hot.rows)
    assert owners.max() == 1, "a row belongs to two layers"
    assert owners.sum(1).tolist() == [sum(layout.layer_rows), NUM_LAYERS * layout.equal_rows]


def test_as_many_requests_as_have_hot_blocks() -> None:
    """vLLM's block 0 is nobody's."""
    worker = make_worker(is_dense=True)
    worker.vllm_config.scheduler_config.max_num_seqs = 100
    worker.register_kv_caches(device_caches(is_dense=True))
    assert worker.hot_buffer.shape.num_requests == (NUM_DEVICE_BLOCKS - 1) // 3  # two hot ones and one of state


def test_an_algorithms_state_is_in_the_device_blocks_that_the_scheduler_says() -> None:
    """Every layer has memory beside the hot rows of others; nothing else is allocated for long requests."""
    worker, caches = make_worker(is_dense=True), device_caches(is_dense=True)
    worker.vllm_config.model_config.max_model_len = 64 * 16 + 3
    worker.register_kv_caches(caches)
    worker.apply_changes(HiSparseMetadata(host_block_tables={3: (0, [5])}, hot_block_tables={3: (0, [3, 4])}))
    worker.apply_changes(HiSparseMetadata(state_block_tables={3: (0, [9, 7])}))
    index, before = worker.hot_buffer.requests.index_of(3), caches["m0"].clone()
    for layer, state in enumerate(worker.hot_buffer.state.layers):
        assert state["bounds"].blocks.shape == (NUM_DEVICE_BLOCKS, 64, 2, 2, 32) and state["latest"].numel() == 0
        state["bounds"][index, torch.arange(65)] = layer + 1.0
    for layer, name in enumerate(HOT_LAYERS):
        assert (caches[name][9] == layer + 1).all(), "a block of 64 pages is as wide as one of 64 hot rows"
        assert (caches[name][7] == layer + 1).sum() == 2 * 2 * 32, "one page"
    unused = [block for block in range(NUM_DEVICE_BLOCKS) if block not in (7, 9)]
    assert torch.equal(caches["m0"][unused], before[unused])
    worker.apply_changes(HiSparseMetadata(released=[3]))
    assert not worker.hot_buffer.requests.state_block_tables.any()
    worker.hot_buffer.check_integrity()


def test_selections_are_recorded_on_the_first_rank_if_that_is_wanted(tmp_path: Path) -> None:
    """Requests that run when the engine ends are written, too."""
    options = {"selection_trace_dir": str(tmp_path / "traces")}
    for worker in (make_worker(), make_worker(rank=1, **options)):
        worker.register_kv_caches(device_caches())
        assert type(worker.hot_buffer) is MLAHotBuffer
        worker.shutdown()
    assert not (tmp_path / "traces").exists()
    worker = make_worker(**options)
    worker.register_kv_caches(device_caches())
    worker.apply_changes(HiSparseMetadata(host_block_tables={3: (0, [5, 2])}, hot_block_tables={3: (0, [3])}))
    for index, impl in enumerate(worker.impls):
        worker.hot_buffer.add_layer(HotRows.from_cache(impl.cache[:, 0]), impl.host_rows.flatten(0, 1))
        worker.hot_buffer.step.plan(torch.tensor([3], dtype=torch.int32), torch.tensor([71], dtype=torch.int32))
        worker.hot_buffer.swap_in_of(index)(torch.arange(32, dtype=torch.int32)[None])
    worker.shutdown()
    trace = Trace.read(tmp_path / "traces" / "3-000001.trace")
    assert (trace.model, trace.top_k, trace.layers, trace.row_bytes) == ("some", 32, tuple(HOT_LAYERS), WIDTH * 4)
    assert trace.requests[0].first_position == 70
    assert trace.requests[0].positions[:, 0].tolist() == [list(range(32))] * NUM_LAYERS


def test_a_block_may_change_hands_within_a_step(worker: HiSparseWorkerConnector) -> None:
    requests = worker.hot_buffer.requests
    worker.apply_changes(
        HiSparseMetadata(host_block_tables={3: (0, [5, 2]), 4: (0, [1])}, hot_block_tables={3: (0, [3])})
    )
    worker.apply_changes(HiSparseMetadata(host_block_tables={3: (2, [7])}))
    assert requests.hot_blocks_of(requests.index_of(3)).tolist() == [3]
    assert requests.host_block_table(requests.index_of(3)).tolist() == [5, 2, 7, -1, -1]
    worker.apply_changes(HiSparseMetadata(released=[3], host_block_tables={3: (0, [6])}))
    assert requests.host_block_table(requests.index_of(3)).tolist() == [6, -1, -1, -1, -1]
    assert len(requests) == 2
    worker.hot_buffer.check_integrity()


def test_device_resident_kv_travels_as_the_scheduler_says(worker: HiSparseWorkerConnector) -> None:
    """The tail of a preempted request is saved before anything is restored, into the same device block, too."""
    keys = worker.resident_kv
    assert keys.shape == (NUM_DEVICE_BLOCKS, MLA_LAYOUT.resident_block_bytes)
    keys.copy_(torch.randint(0, 255, keys.shape, dtype=torch.uint8))
    before = keys.clone()
    worker.store.resident_kv[2] = 77
    worker.apply_changes(HiSparseMetadata(preemption_saves=[(4, 6)], restores=[(2, 4)]))
    assert torch.equal(worker.store.resident_kv[6], before[4])
    assert (keys[4] == 77).all()
    worker.bind_metadata(HiSparseMetadata(saves=[(5, 1)]))
    assert not torch.equal(worker.store.resident_kv[1], before[5]), "saved before the forward"
    worker.finish_step()
    assert torch.equal(worker.store.resident_kv[1], before[5])
    keys[5] = 0
    worker.finish_step()
    assert torch.equal(worker.store.resident_kv[1], before[5]), "saved twice"


def test_every_layer_represents_a_prompt_before_its_request_decodes() -> None:
    worker = make_worker(is_dense=True)
    worker.register_kv_caches(device_caches(is_dense=True))
    worker.apply_changes(HiSparseMetadata(host_block_tables={3: (0, [5, 2])}, first_decodes=[(3, 75)]))
    index = worker.hot_buffer.requests.index_of(3)
    assert [impl.spans for impl in worker.impls] == [[KeySpan(index, 0, 75)]] * NUM_LAYERS
    worker.apply_changes(HiSparseMetadata(first_decodes=[(3, 76)]))
    assert [len(impl.spans) for impl in worker.impls] == [1] * NUM_LAYERS


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_reports_requests(rank: int) -> None:
    worker = make_worker(rank=rank)
    worker.register_kv_caches(device_caches())
    worker.apply_changes(HiSparseMetadata(host_block_tables={3: (0, [5])}))
    assert worker.take_worker_metadata() is None
    worker.hot_buffer.counts.by_seq[worker.hot_buffer.requests.index_of(3)] = torch.tensor([9, 4])
    worker.apply_changes(HiSparseMetadata(released=[3]))
    metadata = worker.take_worker_metadata()
    assert metadata.requests == [(3, 9, 4)] if rank == 0 else metadata is None


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_reports_its_pulls(rank: int) -> None:
    """A transfer takes as long as on the slowest rank; its KV is used only if no rank says that a lease was over."""
    nothing = {"register": lambda *_: None}
    pulls = {"take_expired": lambda: {"late"}, "take_pull_seconds": lambda: {"a": 1.5}, "take_num_waiting": lambda: 0}
    worker = make_worker(rank=rank, transport=SimpleNamespace(**nothing, **pulls))
    worker.register_kv_caches(device_caches())
    metadata = worker.take_worker_metadata()
    assert (metadata.expired, metadata.pull_seconds, metadata.waiting) == ({"late"}, {"a": 1.5}, {rank: 0})
    worker.transport.take_expired = set
    assert worker.take_worker_metadata().pull_seconds == {"a": 1.5}
    worker.transport.take_pull_seconds = dict
    assert worker.take_worker_metadata().waiting == {rank: 0}
    worker.transport.take_num_waiting = lambda: None
    assert worker.take_worker_metadata() is None


@pytest.mark.parametrize(("divides_steps", "rank"), [(True, 0), (True, 1), (False, 0)])
def test_misses_are_reported_where_steps_may_be_divided(
    monkeypatch: pytest.MonkeyPatch, divides_steps: bool, rank: int
) -> None:
    """They say if dividing pays; no row is looked at."""
    monkeypatch.setattr(Impl, "divides_steps", divides_steps)
    worker = make_worker(rank=rank)
    worker.register_kv_caches(device_caches())
    worker.apply_changes(HiSparseMetadata(host_block_tables={3: (0, [5])}))
    worker.hot_buffer.counts.by_seq[1] += torch.tensor([50, 3])
    worker.bind_metadata(HiSparseMetadata(step=7))
    found = [worker.take_worker_metadata() for _ in range(STEPS_PER_REPORT)]
    assert found[:-1] == [None] * (STEPS_PER_REPORT - 1)
    if divides_steps and rank == 0:
        assert found[-1].usage == Usage(7, 50, 3, None)
    else:
        assert found[-1] is None


def test_the_scheduler_says_which_steps_run_whole(worker: HiSparseWorkerConnector) -> None:
    for runs_whole in (True, False):
        worker.apply_changes(HiSparseMetadata(runs_whole=runs_whole))
        assert worker.hot_buffer.step.runs_whole == runs_whole


def test_statistics_since_the_last_call(worker: HiSparseWorkerConnector) -> None:
    assert worker.take_stats() is None
    worker.hot_buffer.counts.by_seq[1] += torch.tensor([5, 3])
    worker.hot_buffer.count_staged(1000)
    data = worker.take_stats().data["counters"]
    assert (data["cache_hits"], data["cache_misses"], data["prefill_staged_bytes"]) == (5, 3, 1000)
    assert data["host_to_device_bytes"] == 3 * WIDTH * 4
    assert worker.take_stats() is None


def test_memory_is_unpinned_after_the_transport_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    worker = make_worker(transport=SimpleNamespace(shutdown=lambda: calls.append("transport")))
    monkeypatch.setattr(worker.store, "close", lambda: calls.append("store"))
    worker.shutdown()
    assert calls == ["transport", "store"]
