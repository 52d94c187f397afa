"""The adaptor against the formula: softmax over what the algorithm selects from all keys, in one loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_hisparse.algorithms.base import AttentionShape, SparseAlgorithm
from vllm_hisparse.algorithms.oracle import Oracle
from vllm_hisparse.algorithms.quest import Quest
from vllm_hisparse.algorithms.streaming_llm import StreamingLLM
from vllm_hisparse.attention.paged_gqa_cpu import PagedGqaCpuImpl, PagedGqaCpuMetadataBuilder
from vllm_hisparse.kv_manager.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.paged_hot_buffer import PagedHotBuffer

BLOCK_SIZE, ROWS_PER_BLOCK, MAX_TOKENS = 32, 16, 224
NUM_DEVICE_BLOCKS, LAYERS_IN_A_BLOCK = 40, 3  # the layer under test is the second
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 2, 32
SHAPE = AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, torch.float32)
BUDGET, BUFFER = 32, 48


class Request:
    """Random queries, keys and values of all positions, and where its blocks are."""

    def __init__(self, handle: int, host_ids: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(MAX_TOKENS, NUM_HEADS, HEAD_SIZE, generator=generator)
        self.key, self.value = torch.randn(2, MAX_TOKENS, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        self.handle, self.host_ids, self.num_computed = handle, host_ids, 0


class Layer:
    """One attention layer with its builder over a small host pool; hot rows start as NaN."""

    def __init__(self, algorithm_class: type[SparseAlgorithm]):
        self.algorithm = algorithm_class(algorithm_class.Options(), SHAPE, BUDGET, MAX_TOKENS)
        shape = HotBufferShape(4, BUFFER, 1, BUDGET, MAX_TOKENS // BLOCK_SIZE, BLOCK_SIZE, NUM_DEVICE_BLOCKS)
        stride = LAYERS_IN_A_BLOCK * NUM_KV_HEADS
        self.buffer = PagedHotBuffer(self.algorithm, shape, stride, torch.device("cpu"), refresh_hits=True)
        self.hot_blocks = -(-(BUFFER + self.algorithm.tokens_per_unit) // ROWS_PER_BLOCK)
        size = (NUM_DEVICE_BLOCKS, LAYERS_IN_A_BLOCK, NUM_KV_HEADS, ROWS_PER_BLOCK, 2 * HEAD_SIZE)
        self.device = torch.full(size, float("nan"))
        self.host = torch.full((40, BLOCK_SIZE, NUM_KV_HEADS * 2 * HEAD_SIZE), 1e4)
        self.impl = object.__new__(PagedGqaCpuImpl)
        self.impl.num_kv_heads, self.impl.head_size, self.impl.scale = NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5
        self.impl.bind(self.buffer, 0, self.host, self.device[:, 1])
        model = SimpleNamespace(get_num_attention_heads=lambda _: NUM_HEADS, dtype=torch.float32)
        self.builder = object.__new__(PagedGqaCpuMetadataBuilder)
        self.builder.layer_names = ["layer"]
        self.builder.kv_cache_spec = SimpleNamespace(
            blocks_per_request=self.hot_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
        )
        self.builder.vllm_config = SimpleNamespace(
            model_config=model,
            parallel_config=None,
            compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(impl=self.impl)}),
        )

    def start(self, request: Request) -> None:
        self.buffer.extend_table(request.handle, 0, request.host_ids)

    def step(self, batch: list[tuple[Request, int]]) -> None:
        """Compute some tokens of each request and compare with the formula."""
        spans = [range(request.num_computed, request.num_computed + num) for request, num in batch]
        pieces = [
            tuple(tensor[list(span)] for tensor in (request.query, request.key, request.value))
            for (request, _), span in zip(batch, spans, strict=True)
        ]
        query, key, value = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
        tables = torch.zeros(len(batch), 12, dtype=torch.int32)
        for i, (request, _) in enumerate(batch):
            tables[i, : self.hot_blocks] = torch.arange(request.handle, request.handle + self.hot_blocks)
        common = SimpleNamespace(
            num_reqs=len(batch),
            query_start_loc_cpu=torch.tensor([0, *(num for _, num in batch)]).cumsum(0),
            seq_lens=torch.tensor([span.stop for span in spans]),
            block_table_tensor=tables,
        )
        metadata = self.builder.build(0, common)
        out = torch.full_like(query, float("nan"))
        self.impl.forward(None, query, key, value, self.device[:, 1], metadata, out)
        assert self.device[:, [0, 2]].isnan().all(), "wrote to another layer"
        self.buffer.check_integrity()
        for (request, _), span, result in zip(batch, spans, out.split([len(span) for span in spans]), strict=True):
            torch.testing.assert_close(result, self.expected(request, span), atol=2e-5, rtol=2e-5)
            request.num_computed = span.stop

    def expected(self, request: Request, span: range) -> torch.Tensor:
        """[tokens, num_heads, head_size]."""
        if len(span) > 1:
            return torch.stack([attention(request, p, [range(p + 1)] * NUM_KV_HEADS) for p in span])
        position, per_unit = span.start, self.algorithm.tokens_per_unit
        state = self.algorithm.allocate_state(1)
        self.algorithm.construct_representations(state, 0, request.key[: position + 1], 0)
        selection = self.algorithm.retrieve_topk(
            state, torch.tensor([0]), request.query[position][None], torch.tensor([position + 1])
        )
        chosen = []
        for units, count in zip(selection.units[0].tolist(), selection.counts[0].tolist(), strict=True):
            tokens = [unit * per_unit + i for unit in units[:count] for i in range(per_unit)]
            chosen.append([token for token in tokens if token <= position])
        return attention(request, position, chosen)[None]


def attention(request: Request, position: int, chosen: list) -> torch.Tensor:
    """[num_heads, head_size]."""
    out, per_group = [], NUM_HEADS // NUM_KV_HEADS
    for head in range(NUM_HEADS):
        tokens, kv_head = list(chosen[head // per_group]), head // per_group
        keys, values = request.key[tokens, kv_head], request.value[tokens, kv_head]
        weights = (keys @ request.query[position, head] * HEAD_SIZE**-0.5).softmax(0)
        out.append(weights @ values)
    return torch.stack(out)


@pytest.fixture(params=[Quest, Oracle, StreamingLLM])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


def test_prefill_in_chunks_beside_decodes(layer: Layer) -> None:
    """Three requests come and decode past several pages, past the budget and past the buffer."""
    first = Request(0, [5, 9, 2, 7, 11, 30, 31], 0)
    second, third = Request(10, [1, 3, 4, 6, 8, 10, 12], 1), Request(20, [13, 14, 15, 16, 17, 18, 19], 2)
    layer.start(first)
    for num in (20, 37, 30, 1, 1):
        layer.step([(first, num)])
    layer.start(second)
    layer.step([(first, 1), (second, 5)])
    layer.start(third)
    layer.step([(third, 64), (second, 2), (first, 1)])
    for _ in range(50):
        layer.step([(second, 1), (first, 1), (third, 1)])
    hits, misses = layer.buffer.take_counts()
    assert hits > misses > 0


def test_kv_that_arrived_in_the_host_pool(layer: Layer) -> None:
    """A transfer or the prefix cache brought the first tokens: a request decodes, or prefills, right after them."""
    former = Request(0, [5, 9, 2, 7, 11, 30, 31], 0)
    layer.start(former)
    layer.step([(former, 75)])
    layer.buffer.release(former.handle)
    other = Request(30, [20, 21, 22, 23, 24, 25, 26], 5)  # leaves its state where the next requests find it
    layer.start(other)
    layer.step([(other, 100)])
    layer.step([(other, 1)])
    layer.buffer.release(other.handle)
    for handle, num in ((10, 1), (20, 9)):
        request = Request(handle, former.host_ids, 0)
        request.num_computed = 75
        layer.start(request)
        layer.step([(request, num)])
        for _ in range(20):
            layer.step([(request, 1)])
        layer.buffer.release(handle)


def test_a_prompt_of_one_token(layer: Layer) -> None:
    request = Request(3, [5, 9, 2, 7, 11, 30, 31], 0)
    layer.start(request)
    for _ in range(40):
        layer.step([(request, 1)])


def test_block_tables_of_no_request_give_zeros(layer: Layer) -> None:
    """Profiling and padding."""
    known, unknown = Request(0, [5, 9, 2, 7, 11, 30, 31], 0), Request(20, [1], 1)
    layer.start(known)
    layer.step([(known, 40)])
    layer.expected = lambda request, span: (
        torch.zeros(len(span), NUM_HEADS, HEAD_SIZE) if request is unknown else Layer.expected(layer, request, span)
    )
    layer.step([(unknown, 3), (known, 1), (unknown, 1)])


def test_no_metadata_gives_zeros(layer: Layer) -> None:
    out = torch.full((2, NUM_HEADS, HEAD_SIZE), float("nan"))
    assert not layer.impl.forward(None, out, out, out, None, None, out).any()
