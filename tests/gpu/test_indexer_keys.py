"""CUDA operations on indexer keys in 4 bits against the torch reference."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.ops import indexer_keys
from vllm_hisparse.ops.indexer_keys import FP8, GROUP, HEAD_DIM, KEY_BYTES, TILE, WIDE_KEY_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MARGIN = 2e-3  # of the largest score: tensor cores add fp8 products with 14 bits or so


def random_keys(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-9, 3, (count, HEAD_DIM // GROUP), generator=generator).float())
    keys = torch.randn(count, HEAD_DIM, generator=generator) * sizes.repeat_interleave(GROUP, -1)
    keys[::17] = 0
    keys[1::19, :GROUP] = 0
    return keys.bfloat16()


class Batch:
    """Requests of odd lengths in blocks in random order, NaN wherever there is no key.

    Attributes:
        cache: [num_blocks, TILE, KEY_BYTES] uint8 in wider blocks. query, weights, seq_lens, block_table: as in
            `indexer_keys.paged_logits`, on the CPU.
    """

    def __init__(self, lengths: list[int], num_queries: int, heads: int, seed: int, whole_numbers: bool = False):
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // TILE) for length in lengths]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=generator)
        blocks = torch.full((num_blocks, TILE * KEY_BYTES + 112), 0xFF, dtype=torch.uint8)
        self.cache = blocks[:, : TILE * KEY_BYTES].unflatten(1, (TILE, KEY_BYTES))
        self.block_table = torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own, order = order[:count], order[count:]
            self.block_table[request, :count] = own
            keys = random_keys(length, seed + request)
            if whole_numbers:
                keys = torch.randint(-3, 4, keys.shape, generator=generator).bfloat16()
            slots = (own[:, None] * TILE + torch.arange(TILE)).flatten()[:length]
            indexer_keys.insert(self.cache, keys, slots)
        newest = torch.tensor(lengths, dtype=torch.int32)[:, None]
        self.seq_lens = (newest - torch.arange(num_queries, dtype=torch.int32).flip(0)).clamp_min(0)
        shape = (len(lengths), num_queries, heads, HEAD_DIM)
        self.query = torch.randn(shape, generator=generator).to(FP8)
        self.weights = torch.randn(len(lengths) * num_queries, heads, generator=generator)
        if whole_numbers:
            self.query = torch.randint(-1, 2, shape, generator=generator).float().to(FP8)
            self.weights = torch.randint(-2, 3, self.weights.shape, generator=generator).float()

    def logits(self, width: int, device: str) -> torch.Tensor:
        cache = self.cache
        if device == "cuda":
            blocks = torch.as_strided(cache, (len(cache), cache.stride(0)), (cache.stride(0), 1)).cuda()
            cache = blocks[:, : TILE * KEY_BYTES].unflatten(1, (TILE, KEY_BYTES))
        parts = (part.to(device) for part in (self.query, self.weights, self.seq_lens, self.block_table))
        return indexer_keys.paged_logits(cache, *parts, width)


LENGTHS = [
    [1],
    [64],
    [65, 0, 1, 63],
    [130, 4097, 7, 0, 0, 640, 1000],
    [0, 0, 0],
    list(range(1, 70)),
    [5000] * 3 + [0] * 30 + [9, 20000],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("num_queries", "heads"), [(1, 64), (2, 64), (3, 32), (3, 64), (8, 64), (1, 32)])
def test_logits_of_whole_numbers_are_exact(lengths: list[int], num_queries: int, heads: int) -> None:
    batch = Batch(lengths, num_queries, heads, seed=len(lengths), whole_numbers=True)
    width = max(max(lengths), 1) + 3
    expected, found = batch.logits(width, "cpu"), batch.logits(width, "cuda").cpu()
    for row, length in enumerate(batch.seq_lens.flatten().tolist()):
        assert torch.equal(found[row, :length], expected[row, :length]), row


@pytest.mark.parametrize("lengths", [[3001], [4097, 2600, 9000], [20011, 0, 5000]], ids=str)
@pytest.mark.parametrize(("num_queries", "heads"), [(1, 64), (2, 64), (5, 32)])
def test_selections_are_those_of_the_reference_up_to_ties(lengths: list[int], num_queries: int, heads: int) -> None:
    top_k, batch = 2048, Batch(lengths, num_queries, heads, seed=3)
    expected, found = batch.logits(max(lengths), "cpu"), batch.logits(max(lengths), "cuda").cpu()
    for row, length in enumerate(batch.seq_lens.flatten().tolist()):
        if length <= top_k:
            continue
        exact, own = expected[row, :length], found[row, :length]
        margin = MARGIN * float(exact.abs().max())
        torch.testing.assert_close(own, exact, rtol=0, atol=margin)
        cut = float(exact.topk(top_k).values[-1])
        chosen = set(own.topk(top_k).indices.tolist())
        others = chosen ^ set(exact.topk(top_k).indices.tolist())
        assert all(abs(float(exact[index]) - cut) <= 2 * margin for index in others), "no tie"
        assert len(others) < top_k // 20


def test_a_graph_follows_its_inputs() -> None:
    """Lengths, tables and keys may change between replays."""
    first, second = Batch([700, 65, 3000], 2, 64, seed=5), Batch([3000, 1, 130], 2, 64, seed=6)
    parts = [(part.query, part.weights, part.seq_lens) for part in (first, second)]
    blocks = max(len(first.cache), len(second.cache))
    cache = torch.zeros(blocks, TILE, KEY_BYTES, dtype=torch.uint8, device="cuda")
    table = torch.zeros(3, 60, dtype=torch.int32, device="cuda")
    inputs = [part.cuda() for part in parts[0]]

    def fill(batch: Batch, values: tuple[torch.Tensor, ...]) -> None:
        cache[: len(batch.cache)] = batch.cache.cuda()
        table[:, : batch.block_table.shape[1]] = batch.block_table.cuda()
        for part, value in zip(inputs, values, strict=True):
            part.copy_(value)

    fill(first, parts[0])
    query, weights, seq_lens = inputs
    indexer_keys.paged_logits(cache, query, weights, seq_lens, table, 3000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = indexer_keys.paged_logits(cache, query, weights, seq_lens, table, 3000)
    for batch, values in ((first, parts[0]), (second, parts[1]), (first, parts[0])):
        fill(batch, values)
        graph.replay()
        alone = batch.logits(3000, "cuda")
        for row, length in enumerate(batch.seq_lens.flatten().tolist()):
            assert torch.equal(logits[row, :length], alone[row, :length])


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_keys_are_quantised_alike(count: int) -> None:
    keys, generator = random_keys(count, seed=count), torch.Generator().manual_seed(count)
    wide = torch.randn(count, 2 * HEAD_DIM).bfloat16()
    wide[:, :HEAD_DIM] = keys
    slots = torch.randperm(17 * TILE, generator=generator)[:count]
    slots[::5] = -1
    caches = [torch.full((17, TILE, KEY_BYTES), 0xFF, dtype=torch.uint8, device=device) for device in ("cpu", "cuda")]
    indexer_keys.insert(caches[0], keys, slots)
    indexer_keys.insert(caches[1], wide.cuda()[:, :HEAD_DIM], slots.cuda())
    assert torch.equal(caches[1].cpu(), caches[0])


def test_strange_keys_are_quantised_alike() -> None:
    keys = random_keys(12, seed=0)
    keys[0], keys[1], keys[2, 5], keys[3, 70], keys[4] = torch.nan, torch.inf, torch.nan, -torch.inf, 1e-38
    keys[5], keys[6] = 3e38, -0.0
    caches = [torch.zeros(1, TILE, KEY_BYTES, dtype=torch.uint8, device=device) for device in ("cpu", "cuda")]
    for cache in caches:
        indexer_keys.insert(cache, keys.to(cache.device), torch.arange(12, device=cache.device))
    assert torch.equal(caches[1].cpu(), caches[0])


def test_gather_of_many_requests() -> None:
    batch = Batch([65, 1, 640, 63], 1, 32, seed=8)
    starts = torch.tensor([0, 65, 66, 706, 769], dtype=torch.int32)
    found = []
    for device in ("cpu", "cuda"):
        values = torch.zeros(800, HEAD_DIM, dtype=torch.uint8, device=device).view(FP8)
        scales = torch.zeros(800, 4, dtype=torch.uint8, device=device)
        indexer_keys.gather(
            batch.cache.contiguous().to(device), batch.block_table.to(device), starts.to(device), values, scales
        )
        found.append((values.view(torch.uint8).cpu(), scales.cpu()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("num_blocks", [1, 5, 61])
def test_blocks_are_converted_alike(num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    elements = torch.randint(0, 256, (num_blocks, TILE * HEAD_DIM), generator=generator, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-20, 9, (num_blocks, TILE), generator=generator).float())
    scales[0, 3] = torch.nan  # an unused key
    wide, found = torch.cat((elements, scales.view(torch.uint8)), 1), []
    for device in ("cpu", "cuda"):
        narrow = torch.full((num_blocks, TILE * KEY_BYTES), 0xFF, dtype=torch.uint8, device=device)
        back = torch.full((num_blocks, TILE * WIDE_KEY_BYTES), 0xFF, dtype=torch.uint8, device=device)
        indexer_keys.narrow_blocks(wide.to(device), narrow)
        indexer_keys.widen_blocks(narrow, back)
        found.append((narrow.cpu(), back.cpu()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_wrong_tensors_are_refused() -> None:
    batch = Batch([100], 1, 64, seed=1)
    cache, table, lengths = batch.cache.contiguous().cuda(), batch.block_table.cuda(), batch.seq_lens.cuda()
    with pytest.raises(RuntimeError, match="invalid argument"):
        few_heads = batch.query[:, :, :4].contiguous().cuda()
        indexer_keys.paged_logits(cache, few_heads, batch.weights[:, :4].contiguous().cuda(), lengths, table, 100)
    with pytest.raises(ValueError, match="lengths are of other requests"):
        indexer_keys.paged_logits(cache, batch.query.cuda(), batch.weights.cuda(), lengths[:0], table, 100)
    with pytest.raises(TypeError, match="keys are bfloat16"):
        indexer_keys.insert(cache, torch.zeros(1, HEAD_DIM, device="cuda"), torch.zeros(1, device="cuda").long())
    with pytest.raises(ValueError, match="rows of another size"):
        indexer_keys.narrow_blocks(torch.zeros(5, 64, dtype=torch.uint8).cuda(), torch.zeros_like(cache.flatten(1)))
    with pytest.raises(ValueError, match="rows of another size"):
        wide = torch.zeros(5, 2 * TILE * WIDE_KEY_BYTES, dtype=torch.uint8).cuda()[:, : TILE * WIDE_KEY_BYTES]
        indexer_keys.narrow_blocks(wide, torch.zeros_like(cache.flatten(1)))
