"""Residency of real models' layers: its bytes, the owners of its entries, and the rows that a moved request forgets."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.algorithms.base import AttentionShape
from vllm_hisparse.algorithms.registry import find_algorithm
from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.rows import reserved_memory
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.layout import KVLayout

CPU = torch.device("cpu")
KV_BYTES = 24 << 20
# Layers, full-KV layers, KV heads, heads, block size.
LLAMA_8B, LLAMA_70B_TP8, QWEN3_32B = (32, 8, 32), (80, 1, 8), (64, 8, 64)
MODELS = [
    (LLAMA_8B, "pq_cache", 0, 16),
    (LLAMA_8B, "cluster_kv", 2, 16),
    (LLAMA_8B, "oracle", 0, 16),
    (LLAMA_8B, "quest", 2, 256),
    (LLAMA_70B_TP8, "pq_cache", 0, 16),
    (LLAMA_70B_TP8, "quest", 2, 256),
    (QWEN3_32B, "pq_cache", 0, 16),
]


def dense_buffer(
    sizes: tuple[int, int, int], name: str, num_full_kv: int, block_size: int, kv_bytes: int = KV_BYTES
) -> tuple[GQAHotBuffer, KVLayout]:
    """The hot buffer of a model with heads of 128 bf16 elements, over blocks as vLLM would lay them out."""
    num_layers, kv_heads, heads = sizes
    cls = find_algorithm(name)
    algorithm = cls(cls.Options(), AttentionShape(heads, kv_heads, 128, torch.bfloat16), 2048, 32768, 1)
    row_bytes = 2 * 128 * 2 * kv_heads
    per_unit, state = algorithm.tokens_per_unit, algorithm.state_entries
    num_hot = num_layers - num_full_kv
    layout = KVLayout(row_bytes, row_bytes, num_hot, num_full_kv, block_size, per_unit, kv_heads, state_entries=state)
    num_blocks = max(kv_bytes // layout.device_block_bytes, 3)
    shape = HotBufferShape(
        num_requests=2,
        max_batch=2,
        num_layers=num_hot,
        top_k=2048,
        max_blocks=32768 // block_size,
        block_size=block_size,
        num_device_blocks=num_blocks,
        max_hot_blocks=4,
        rows_per_hot_block=layout.rows_per_hot_block,
        state_columns=layout.state.columns(32768),
    )
    # State as HiSparseWorkerConnector finds it: parts of one KV head from one block to the next.
    head_stride = layout.device_block_bytes // layout.block_alignment_bytes
    memory = torch.zeros(num_blocks, layout.device_block_bytes, dtype=torch.uint8)
    return GQAHotBuffer(algorithm, shape, head_stride, memory), layout


@pytest.mark.parametrize(("sizes", "name", "num_full_kv", "block_size"), MODELS)
def test_residency_bytes_of_dense_models(
    sizes: tuple[int, int, int], name: str, num_full_kv: int, block_size: int
) -> None:
    """One entry for each unit of the KV cache, whatever the number of layers, as the layout says."""
    buffer, layout = dense_buffer(sizes, name, num_full_kv, block_size)
    storages = {r.entries.untyped_storage().data_ptr(): r.entries.untyped_storage() for r in buffer.residency}
    num_blocks = buffer.shape.num_device_blocks
    assert sum(storage.nbytes() for storage in storages.values()) == num_blocks * layout.residency_block_bytes
    assert layout.residency_block_bytes / layout.device_block_bytes == 8 / layout.unit_bytes <= 0.016


def test_residency_bytes_of_dsa_models() -> None:
    """A table for each layer that selects: a layer that shares an indexer has no other."""
    layout = KVLayout(1152, 132, num_layers=78, num_resident_layers=20)
    shape = HotBufferShape(2, 2, 78, 2048, 16, 64, 50, 4, layout.rows_per_hot_block)
    buffer = MLAHotBuffer(shape, CPU, [index % 4 == 0 for index in range(78)])
    tables = {residency.entries.data_ptr() for residency in buffer.residency}
    assert len(tables) == 20
    assert buffer.table.nbytes == 50 * layout.residency_block_bytes == 20 * 50 * layout.rows_per_hot_block * 8


def test_the_layers_of_a_dense_model_have_entries_of_their_own() -> None:
    buffer, _ = dense_buffer((5, 2, 4), "streaming_llm", 0, 32, 1 << 20)
    heads, per_block = buffer.heads, buffer.shape.rows_per_hot_block // buffer.heads.tokens_per_unit
    parts = heads.parts_of(torch.arange(buffer.shape.num_device_blocks))[..., None] * per_block
    entries = (parts + torch.arange(per_block)).flatten()
    for layer, residency in enumerate(buffer.residency):
        assert (residency.positions[entries] == -1).all(), "another layer's"
        residency.positions[entries] = layer
    for layer, residency in enumerate(buffer.residency):
        assert (residency.positions[entries] == layer).all()
    blocks = torch.tensor([1])
    buffer.table.empty(blocks)
    assert (buffer.table.held(blocks)[0] == -1).all() and (buffer.table.held(torch.tensor([0, 2]))[0] >= 0).any()


def shared_layers_buffer(max_query_len: int) -> HotBuffer:
    """The hot buffer of a DSA model with four layers, of which the third shares the selection of the second."""
    shape = HotBufferShape(3, 3, 4, 8, 4, 4, 24, 9, rows_per_hot_block=7, max_query_len=max_query_len)
    return MLAHotBuffer(shape, CPU, [True, True, False, True])


def two_heads_buffer(max_query_len: int) -> HotBuffer:
    """The hot buffer of a dense model with two KV heads and several layers."""
    cls = find_algorithm("streaming_llm")
    algorithm = cls(cls.Options(), AttentionShape(4, 2, 8, torch.bfloat16), 64, 512, max_query_len)
    per_block = 2 * algorithm.tokens_per_unit
    shape = HotBufferShape(3, 3, 3, 64, 4, 128, 24, 9, rows_per_hot_block=per_block, max_query_len=max_query_len)
    return GQAHotBuffer(algorithm, shape, 7, torch.zeros(24, 1024, dtype=torch.uint8))


class PlainTables:
    """Changes of hot blocks in lists, request by request: the reference of hot buffers."""

    def __init__(self, buffer: HotBuffer):
        self.num_latest, self.entries = buffer.shape.max_query_len, buffer.table.entries[0].clone()
        self.blocks: dict[int, list[int]] = {}

    def change(self, changes: dict[int, tuple[int, list[int]]]) -> None:
        for first_hot_block_id, (first, ids) in changes.items():
            blocks = self.blocks.setdefault(first_hot_block_id, [])
            earlier = list(blocks)
            blocks[first:] = ids
            self.entries[:, [block for block in ids if block not in earlier], :, 0] = -1
            if first < len(earlier) and blocks:
                held = self.entries[:, blocks, :, 0]
                self.entries[:, blocks, :, 0] = held.where(held <= held.max() - self.num_latest, -1)


@pytest.mark.long
@pytest.mark.parametrize("max_query_len", [1, 3])
@pytest.mark.parametrize("make_buffer", [shared_layers_buffer, two_heads_buffer])
@given(seed=st.integers(0, 2**32))
def test_requests_whose_blocks_change_forget_what_they_must(
    make_buffer: Callable[[int], HotBuffer], max_query_len: int, seed: int
) -> None:
    """Rows of new blocks, and the latest positions that any layer and head holds; nobody else forgets anything."""
    source, buffer = random.Random(seed), make_buffer(max_query_len)
    generator, table, requests = torch.Generator().manual_seed(seed), buffer.table, buffer.requests
    plain, names, free = PlainTables(buffer), (3, 8, 20), set(range(1, buffer.shape.num_device_blocks)) - {3, 8, 20}
    for name in names:
        buffer.extend_host_block_tables({name: (0, [0])})
        buffer.change_hot_block_tables({name: (0, [name])})
        plain.change({name: (0, [name])})
    for _ in range(4):
        table.entries[0][..., 0].random_(-1, source.choice([2, 40]), generator=generator)
        plain.entries.copy_(table.entries[0])
        changed = {}
        for name in source.sample(names, source.randint(0, 3)):
            blocks = plain.blocks[name]
            changed[name] = first = source.randint(0, len(blocks))
            free |= set(blocks[first:])
        changes = {}
        for name, first in changed.items():
            wanted = min(source.randint(0, buffer.shape.max_hot_blocks - first), len(free))
            changes[name] = first, source.sample(sorted(free), wanted)
            free -= set(changes[name][1])
        buffer.change_hot_block_tables(changes)
        plain.change(changes)
        assert torch.equal(table.entries[0], plain.entries)
        for name, blocks in plain.blocks.items():
            index, seqs = requests.index_of(name), buffer.heads.seqs(requests.index_of(name))
            assert requests.hot_blocks_of(index).tolist() == blocks and requests.num_hot_blocks[index] == len(blocks)
            tables = requests.hot_block_tables[seqs]
            assert torch.equal(tables[:, : len(blocks)], buffer.heads.parts_of(torch.tensor(blocks).int()).t())
            assert not (tables[:, len(blocks) :] // buffer.heads.head_stride).any(), "blocks that it gave back"
    buffer.requests.check_integrity()


@dataclass
class Config:
    """A part of vLLM's configuration."""

    device_type: str = "cuda"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None

    @property
    def device_config(self) -> Config:
        return self

    @property
    def cache_config(self) -> Config:
        return self


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes that are reserved on a device of 80 MiB with 16 MiB of weights."""
    tensors = WeakSet()

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, **options: Any) -> torch.Tensor:
            tensors.add(tensor := torch.empty(*args, **options))
            return tensor

    monkeypatch.setattr(reserved_memory, "torch", Torch())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (60 << 20, 80 << 20))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 16 << 20)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CPU)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: None)
    return lambda: sum(tensor.nbytes for tensor in tensors)


def test_residency_bytes_are_held_while_vllm_measures(reserved: Callable[[], int]) -> None:
    """The table covers the largest KV cache that can follow from the memory that the weights leave; once per engine."""
    _, layout = dense_buffer(LLAMA_8B, "pq_cache", 0, 16, 1 << 20)
    left = int((80 << 20) * 0.9) - (16 << 20)
    engine = Config()
    for _ in range(layout.num_layers):
        reserved_memory.reserve_memory(layout, engine, 0)
    num_bytes = reserved()
    num_blocks = (left - num_bytes) // layout.device_block_bytes
    assert num_blocks * layout.residency_block_bytes <= num_bytes + layout.residency_block_bytes
    assert num_bytes + layout.residency_block_bytes >= left * 8 / (layout.unit_bytes + 8)
    reserved_memory.release_memory()
    assert reserved() == 0
    reserved_memory.reserve_memory(layout, engine, 0)
    assert reserved() == 0, "taken again after the KV cache was allocated"
    reserved_memory.reserve_memory(layout, other := Config(), 0)
    assert reserved() == num_bytes and other


@pytest.mark.parametrize("config", [Config(device_type="cpu"), Config(kv_cache_memory_bytes=1 << 20)])
def test_no_residency_bytes_are_held_where_vllm_does_not_measure(reserved: Callable[[], int], config: Config) -> None:
    _, layout = dense_buffer(LLAMA_8B, "quest", 2, 256, 1 << 20)
    reserved_memory.reserve_memory(layout, config, 1 << 20)
    assert reserved() == 0


def test_the_import_buffer_is_held_while_vllm_measures(reserved: Callable[[], int]) -> None:
    """Beside it, residency gets as much as a device that is smaller by the buffer."""
    _, layout = dense_buffer(LLAMA_8B, "pq_cache", 0, 16, 1 << 20)
    left, buffer_bytes = int((80 << 20) * 0.9) - (16 << 20), 20 << 20
    reserved_memory.reserve_memory(layout, engine := Config(), buffer_bytes)
    assert reserved() == buffer_bytes + reserved_memory.most_residency_bytes(layout, left - buffer_bytes)
    reserved_memory.release_memory()
    assert reserved() == 0 and engine
    with pytest.raises(HiSparseConfigError, match=r"import_buffer_gib: got 0\.0625, expected at most the 0\.0\d+ GiB"):
        reserved_memory.reserve_memory(layout, Config(), 64 << 20)


def test_residency_bytes_that_do_not_fit_are_refused() -> None:
    _, layout = dense_buffer(LLAMA_8B, "pq_cache", 0, 16, 1 << 20)
    needed = 100 * layout.residency_block_bytes
    reserved_memory.check_residency_fits(layout, 100, needed)
    with pytest.raises(HiSparseConfigError, match="--kv-cache-memory-bytes"):
        reserved_memory.check_residency_fits(layout, 100, needed - 1)
