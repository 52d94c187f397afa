"""CUDA operations on units of KV heads against the torch reference."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.ops import page_bounds
from vllm_hisparse.ops.base import DecodeMetadata, HotRows, UnitMetadata
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.registry import swap_in_ops
from vllm_hisparse.ops.select_units import select_units
from vllm_hisparse.ops.torch_ops import TorchSwapInOps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_REQUESTS, NUM_BLOCKS, STRIDE_HEADS = 6, 40, 3  # layers of a device block: 3
SIZES = [(1, 4, 64, 16), (8, 4, 128, 16), (2, 3, 64, 1), (8, 1, 256, 32)]  # KV heads, blocks, head size, tokens


class Layer:
    """Tables and rows of one layer on a device, the same for the same seed; steps of one token or of up to four."""

    def __init__(self, num_heads: int, num_hot_blocks: int, head_size: int, per_unit: int, device: str, drafts: bool):
        generator = torch.Generator().manual_seed(num_heads * head_size + per_unit)
        self.num_heads, self.per_unit, self.device = num_heads, per_unit, torch.device(device)
        stride, units_per_block = num_heads * STRIDE_HEADS, 2
        num_hot_blocks = max(num_hot_blocks, 3) if drafts else num_hot_blocks  # slots for the new units are reserved
        self.units_per_host_block = 4
        self.max_query_len = 4 if drafts else 1
        query_lens = torch.tensor([1, 4, 3, 2, 4, 2], dtype=torch.int32) if drafts else None
        seq_lens = torch.tensor([1, 17, 300, 0, 5, 64], dtype=torch.int32)
        first_hot_block_ids = (
            torch.randperm(NUM_BLOCKS // num_hot_blocks, generator=generator)[:NUM_REQUESTS] * num_hot_blocks
        )
        block_tables = (first_hot_block_ids[:, None] + torch.arange(num_hot_blocks)).int()  # as vLLM has them
        seq_indices = torch.full((NUM_BLOCKS * stride,), -1, dtype=torch.int32)
        for request, first_hot_block_id in enumerate(first_hot_block_ids.tolist()):
            if request != 4:  # a request that nobody knows
                heads = torch.arange(num_heads, dtype=torch.int32)
                seq_indices[first_hot_block_id * stride : first_hot_block_id * stride + num_heads] = (
                    request * num_heads + heads
                )
        max_blocks = 300 // per_unit // self.units_per_host_block + 1
        num_host_blocks = NUM_REQUESTS * max_blocks
        by_request = torch.randperm(num_host_blocks, generator=generator).view(NUM_REQUESTS, max_blocks)
        by_head = (by_request[:, None] * num_heads + torch.arange(num_heads)[:, None]).flatten(0, 1)
        host_block_tables = torch.cat((by_head, torch.full((1, max_blocks), -1))).int()
        heads = KVHeads(num_heads, stride, per_unit)
        by_block = heads.parts_of(block_tables.flatten()).view(NUM_REQUESTS, num_hot_blocks, num_heads)
        hot_block_tables = torch.cat((by_block.mT.flatten(0, 1), torch.zeros(1, num_hot_blocks, dtype=torch.int32)))
        num_hot_rows = num_hot_blocks * units_per_block - torch.arange(len(hot_block_tables), dtype=torch.int32) % 2
        width = per_unit * 2 * head_size
        parts = (NUM_BLOCKS - 1) * stride + num_heads
        cache = torch.randn(parts, units_per_block, width, generator=generator).bfloat16()
        host = torch.randn(num_host_blocks * num_heads * self.units_per_host_block, width, generator=generator)
        self.hot = HotRows.from_cache(cache.to(device))
        self.host = host.bfloat16().pin_memory()
        self.key, self.value = (
            torch.randn(2, NUM_REQUESTS * self.max_query_len, num_heads, head_size, generator=generator)
            .bfloat16()
            .to(device)
        )
        before = torch.tensor([-1, 0, 1, 18, 297, 60] * 20, dtype=torch.int32) // per_unit  # of the step before
        self.first_units = before[: len(host_block_tables)].contiguous().to(device)
        self.units = UnitMetadata.allocate(NUM_REQUESTS, NUM_REQUESTS, heads, self.device, self.max_query_len)
        self.query_lens = None if query_lens is None else query_lens.to(device)
        self.seq_indices, self.seq_lens = seq_indices.to(device), seq_lens.to(device)
        self.block_tables = block_tables.to(device)
        self.by_seq = [each.to(device) for each in (hot_block_tables, num_hot_rows, host_block_tables)]

    def run(self, ops) -> None:
        units = self.units
        ops.begin_units(self.block_tables[:, 0], self.seq_lens, self.query_lens, self.seq_indices, units)
        decode = DecodeMetadata(
            self.seq_indices,
            units.first_hot_block_ids,
            units.num_units,
            *self.by_seq,
            self.units_per_host_block,
            units.num_new_units,
            self.max_query_len,
        )
        ops.write_tokens(self.key, self.value, units, decode, self.hot, self.host, self.first_units)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_units_and_tokens(sizes: tuple[int, int, int, int], drafts: bool) -> None:
    expected, got = Layer(*sizes, "cpu", drafts), Layer(*sizes, "cuda", drafts)
    before = expected.hot.rows.clone(), expected.host.clone()
    expected.run(TorchSwapInOps())
    got.run(swap_in_ops(torch.device("cuda")))
    torch.cuda.synchronize()
    for name in (
        "request_indices",
        "positions",
        "num_tokens",
        "tails",
        "first_hot_block_ids",
        "num_units",
        "num_new_units",
    ):
        assert torch.equal(getattr(got.units, name).cpu(), getattr(expected.units, name)), name
    assert torch.equal(got.first_units.cpu(), expected.first_units)
    assert torch.equal(got.hot.rows.cpu(), expected.hot.rows) and torch.equal(got.host, expected.host)
    assert expected.units.request_indices[0].tolist() == [0, 1, 2, NUM_REQUESTS, NUM_REQUESTS, 5]
    changed = [(now != then).any() for now, then in zip((expected.hot.rows, expected.host), before, strict=True)]
    assert all(changed)


@pytest.mark.parametrize("num_latest", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_size"), [(2, 4, 64), (8, 4, 128), (1, 7, 80), (2, 1, 256)])
def test_page_bounds(dtype: torch.dtype, num_kv_heads: int, group: int, head_size: int, num_latest: int) -> None:
    """Bounds are those of the reference in blocks of seven pages, in any order and apart, like those of one layer."""
    generator = torch.Generator().manual_seed(head_size)
    max_pages, per_block, by_head = 260, 7, (2, num_kv_heads, head_size)
    max_blocks = -(-max_pages // per_block)
    table = (torch.randperm(5 * max_blocks, generator=generator) + 1).view(5, max_blocks).int()
    memory = torch.randn(1 + 5 * max_blocks, 3, per_block, *by_head, generator=generator).sort(3).values.to(dtype)
    latest = torch.randn(5, num_latest, *by_head, generator=generator).sort(2).values.to(dtype)
    request_indices, positions = torch.tensor([3, 0, 4]), torch.tensor([0, 700, 4159])
    keys = torch.randn(3, num_kv_heads, head_size, generator=generator).to(dtype)
    query = torch.randn(3, num_kv_heads * group, head_size, generator=generator).to(dtype)
    on_device, latest_on_device, inputs = (
        memory.clone().cuda(),
        latest.clone().cuda(),
        (request_indices, keys, positions),
    )
    wide = torch.zeros(5, max_blocks + 3, dtype=torch.int32, device="cuda")  # another field's blocks beside it
    wide[:, 2:-1] = table.cuda()
    tables = table, wide[:, 2:-1]
    before = memory.clone()
    page_bounds.update(table, memory[:, 1], latest, *inputs, 16)
    page_bounds.update(tables[1], on_device[:, 1], latest_on_device, *(tensor.cuda() for tensor in inputs), 16)
    assert torch.equal(on_device.cpu(), memory) and torch.equal(latest_on_device.cpu(), latest)
    assert torch.equal(memory[:, [0, 2]], before[:, [0, 2]]) and not torch.equal(memory, before)
    expected = page_bounds.scores(table, memory[:, 1], request_indices, query, positions + 1, 16, max_pages)
    vectors = request_indices.cuda(), query.cuda(), positions.cuda() + 1
    got = page_bounds.scores(tables[1], on_device[:, 1], *vectors, 16, max_pages).cpu()
    for request, position in enumerate(positions.tolist()):
        num_pages = position // 16 + 1
        torch.testing.assert_close(got[request, :, :num_pages], expected[request, :, :num_pages], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("head_size", [12, 264])
def test_heads_that_no_warp_can_hold_are_refused(head_size: int) -> None:
    bounds = torch.zeros(5, 7, 2, 2, head_size, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(3, 4, dtype=torch.int32, device="cuda")
    query = torch.zeros(1, 2, head_size, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="over 256 or not a multiple of 8"):
        page_bounds.scores(table, bounds, table[0, :1].long(), query, table[0, :1].long(), 16, 1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("max_units", "num_selected"), [(1, 1), (7, 7), (700, 1), (700, 64), (8192, 128), (16500, 4096)]
)
def test_select_units(max_units: int, num_selected: int, ties: bool) -> None:
    """The same units but for ties, of which as many; the newest last; sinks are plus infinity, holes minus infinity or
    NaN."""
    generator = torch.Generator().manual_seed(max_units + num_selected)
    num_tokens = torch.tensor([0, 1, 16, 17, max_units * 8, max_units * 16])
    scores = torch.randn(len(num_tokens), 2, max_units, generator=generator)
    if ties:
        scores = (scores * 4).round()
    scores[:, :, :2], scores[:, :, 5:9], scores[:, :, 11:13] = float("inf"), -float("inf"), float("nan")
    expected = select_units(scores, num_tokens, 16, num_selected)
    units = select_units(scores.cuda(), num_tokens.cuda(), 16, num_selected).cpu()
    for request, length in enumerate(num_tokens.tolist()):
        for head in range(2):
            got, want = units[request, head].tolist(), expected[request, head].tolist()
            count = sum(unit >= 0 for unit in want)
            assert all(unit >= 0 for unit in got[:count])
            assert got[count:] == [-1] * (num_selected - count) and len(set(got[:count])) == count
            if count:
                assert got[count - 1] == want[count - 1] == -(-length // 16) - 1
            others, wanted = (sorted(scores[request, head, x[: max(count - 1, 0)]].tolist()) for x in (got, want))
            assert others == wanted
            assert ties or sorted(got) == sorted(want)


@pytest.mark.parametrize("num_columns", [1, 31, 257, 2048, 4096])
def test_compact(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    row_ids = torch.randint(-3, 9, (7, num_columns), generator=generator, dtype=torch.int32)
    row_ids[1] = 5
    num_valid = torch.randint(num_columns + 1, (7,), generator=generator, dtype=torch.int32)
    num_valid[:3] = torch.tensor([num_columns, num_columns, 0])
    got = row_ids.cuda(), num_valid.cuda()
    TorchSwapInOps().compact(row_ids, num_valid)
    swap_in_ops(torch.device("cuda")).compact(*got)
    assert torch.equal(got[0].cpu(), row_ids) and torch.equal(got[1].cpu(), num_valid)
