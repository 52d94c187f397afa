"""MiniMax-M3's layer over hot units against vLLM's own layer over full KV, both with vLLM's indexer and kernels.

The kernels run in Triton's interpreter. Two operations that are not Triton are formulas here: the kernel before
attention, and attention over hot units. Rows that nothing has written are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted_kernels import interpreted
from layer_under_test import attend_paged
from stand_ins import bare
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_hisparse.algorithms.base import AlgorithmOptions, AttentionShape
from vllm_hisparse.algorithms.msa import MSA
from vllm_hisparse.attention.gqa import triton_cuda
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.layout import MSA_BLOCK_SIZE, MSA_UNIT

NUM_HEADS, NUM_KV_HEADS, SIZE, BLOCKS = 4, 2, 32, 3  # blocks of a selection
Q_SIZE, KV_SIZE = NUM_HEADS * SIZE, NUM_KV_HEADS * SIZE
MAX_TOKENS, BUFFER = 8 * MSA_BLOCK_SIZE, 4 * MSA_BLOCK_SIZE
NUM_BLOCKS, HOT_BLOCKS, LAYERS_IN_A_BLOCK = 60, 60, 3  # of the pool and of a request; the layer is the second
NAME, KEYS = "model.layers.3.self_attn.attn", "model.layers.3.self_attn.attn.index_cache"


def fused_kernel(
    qkv: torch.Tensor,
    *args: Any,
    q_fp8_out: None = None,
    q_fp8_scale: float = 1.0,
    kv_k_scale: None = None,
    kv_v_scale: None = None,
) -> None:
    """`fused_minimax_m3_qknorm_rope_kv_insert`, with a scale in place of the norm and without rotation."""
    positions, slots, index_slots, cache, index_cache, block_size, q_out, index_q_out = (args[3], *args[11:18])
    query, key, value, index_query, index_key = qkv.split([Q_SIZE, KV_SIZE, KV_SIZE, KV_SIZE, SIZE], -1)
    scale = 1 + positions[:, None] / MAX_TOKENS
    key.mul_(scale)
    q_out.copy_(query * 2)
    index_q_out.copy_(index_query * 2)
    written = slots >= 0
    used = slots[written]
    rows = torch.cat([each[written].unflatten(-1, (NUM_KV_HEADS, -1)) for each in (key, value)], -1)
    cache[used // block_size, :, used % block_size] = rows
    written = index_slots >= 0
    used = index_slots[written]
    index_cache[used // block_size, used % block_size] = index_key[written] * scale[written]


class Caches:
    """vLLM's caches of full KV and of index keys; row 0 of block 0 takes the keys of padding."""

    def __init__(self) -> None:
        self.kv = torch.full((NUM_BLOCKS, NUM_KV_HEADS, MSA_BLOCK_SIZE, 2 * SIZE), float("nan"))
        apart = torch.full((NUM_BLOCKS, 2, MSA_BLOCK_SIZE, SIZE), float("nan"))  # blocks do not lie side by side
        self.keys = apart[:, 0]


class Request:
    """A request: what its tokens are projected to, its blocks in both caches, on the host and in the hot buffer."""

    def __init__(self, first_hot_block_id: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.qkv = torch.randn(MAX_TOKENS, Q_SIZE + 3 * KV_SIZE + SIZE, generator=generator)
        self.first_hot_block_id = first_hot_block_id
        self.blocks = (torch.randperm(NUM_BLOCKS // 2 - 1, generator=generator)[:8] * 2 + 1 + seed % 2).tolist()
        self.num_computed = 0


class Indexer:
    """vLLM's indexer; that of the layer with hot units repeats the other's selection, because kernels are slow.

    Args:
        impl: vLLM's implementation.
    """

    def __init__(self, impl: Any):
        self.impl, self.index_cache, self.same_as = impl, impl.index_cache, None

    def __call__(self, index_query: torch.Tensor) -> None:
        if self.same_as is None:
            self.index_query = index_query.clone()
            self.impl.forward(index_query)
            return
        other = self.same_as.indexer
        torch.testing.assert_close(index_query[: len(other.index_query)], other.index_query, atol=0, rtol=0)
        keys = [each.index_cache.kv_cache[1:] for each in (self, other)]  # without the null block
        torch.testing.assert_close(*keys, atol=0, rtol=0, equal_nan=True)
        self.impl.topk_indices_buffer.copy_(self.same_as.topk_indices_buffer)


class Model:
    """A layer of vLLM and a layer with hot units, which get the same tokens.

    Args:
        msa_cuda: the module under test.
        patch: for modules of vLLM.
        max_query_len: tokens that a decoding request computes in a step.
        decodes_index: True if the indexer runs its kernels for decoding requests; those for prefilling ones, which give
            the same, take less time in the interpreter.
    """

    def __init__(
        self, msa_cuda: ModuleType, patch: pytest.MonkeyPatch, max_query_len: int = 1, decodes_index: bool = False
    ):
        from vllm import _custom_ops
        from vllm.models.minimax_m3.common import indexer, sparse_attention
        from vllm.models.minimax_m3.nvidia import model

        self.max_query_len = max_query_len
        for module in (indexer, sparse_attention, model, msa_cuda):
            patch.setattr(module, "get_forward_context", lambda: self.context)
        for name in ("minimax_m3_index_decode", "minimax_m3_index_score", "minimax_m3_index_topk"):
            patch.setattr(indexer, name, getattr(interpreted()["index_topk"], name))
        for name in ("minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode"):
            patch.setattr(sparse_attention, name, getattr(interpreted()["sparse_attn"], name))
        patch.setattr(msa_cuda, "minimax_m3_sparse_attn", interpreted()["sparse_attn"].minimax_m3_sparse_attn)
        patch.setattr(triton_cuda, "unified_attention", attend_paged)
        patch.setattr(_custom_ops, "fused_minimax_m3_qknorm_rope_kv_insert", fused_kernel)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        self.indexer_class = indexer.MiniMaxM3IndexerTritonImpl
        self.stock_caches, self.hot_caches = Caches(), Caches()
        self.stock = self._layer(model.MiniMaxM3SparseAttention, self.stock_caches)
        self.stock.impl, self.stock.kv_cache = self._impl(msa_cuda.HotMSAImpl.vllm_class), self.stock_caches.kv
        self.hot = self._layer(msa_cuda.HotMSAAttention, self.hot_caches)
        self.hot.indexer.same_as = self.stock
        self.hot.impl = self._impl(msa_cuda.HotMSAImpl)
        self._make_hot_buffer(max_query_len)
        self.builders = [
            self._builder(cls)
            for cls in (
                indexer.MiniMaxM3IndexerTritonMetadataBuilder,
                sparse_attention.MiniMaxM3SparseMetadataBuilder,
                msa_cuda.HotMSAMetadataBuilder,
            )
        ]
        self.builders[0].reorder_batch_threshold = max_query_len if decodes_index else 0
        self.builders[-1].allocate(max_query_len, 6)

    def _layer(self, cls: type, caches: Caches) -> Any:
        buffer = torch.full((64, NUM_KV_HEADS, BLOCKS), 1 << 30, dtype=torch.int32)
        index_cache = SimpleNamespace(prefix=KEYS, kv_cache=caches.keys, dtype=torch.float32)
        sizes = {"num_kv_heads": NUM_KV_HEADS, "num_index_heads": NUM_KV_HEADS, "index_head_dim": SIZE}
        selection = {"topk_blocks": BLOCKS, "init_blocks": 0, "local_blocks": 1, "topk_indices_buffer": buffer}
        impl = bare(self.indexer_class, index_cache=index_cache, **sizes, **selection)

        indexer = Indexer(impl)
        norm = SimpleNamespace(weight=torch.zeros(SIZE), variance_epsilon=1e-6)
        return bare(
            cls,
            hidden_size=Q_SIZE,
            qkv_proj=lambda hidden: (hidden.clone(), None),
            o_proj=lambda hidden: (hidden, None),
            **dict.fromkeys(("q_norm", "k_norm", "index_q_norm", "index_k_norm"), norm),
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.zeros(1), rotary_dim=SIZE // 2),
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            num_idx_heads=NUM_KV_HEADS,
            head_dim=SIZE,
            idx_head_dim=SIZE,
            q_size=Q_SIZE,
            kv_size=KV_SIZE,
            index_q_size=KV_SIZE,
            layer_name=NAME,
            kv_cache_dtype="auto",
            use_nvfp4_kv=False,
            _q_scale_float=1.0,
            indexer=indexer,
            topk_indices_buffer=buffer,
        )

    def _impl(self, cls: type) -> Any:
        sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_size": SIZE, "scale": SIZE**-0.5}
        return bare(cls, **sizes, kv_cache_dtype="auto", use_fp8_kv=False)

    def _make_hot_buffer(self, max_query_len: int) -> None:
        shape = AttentionShape(NUM_HEADS, NUM_KV_HEADS, SIZE, torch.float32)
        self.algorithm = MSA(AlgorithmOptions(), shape, BLOCKS * MSA_BLOCK_SIZE, MAX_TOKENS, max_query_len)
        rows = 2 * MSA_UNIT  # of a hot block
        sizes = 4, 6, 1, BLOCKS * MSA_BLOCK_SIZE, MAX_TOKENS // MSA_BLOCK_SIZE, MSA_BLOCK_SIZE, 3 * HOT_BLOCKS
        shape = HotBufferShape(*sizes, HOT_BLOCKS, rows, max_query_len, ())
        stride = LAYERS_IN_A_BLOCK * NUM_KV_HEADS
        size = 3 * HOT_BLOCKS, LAYERS_IN_A_BLOCK, NUM_KV_HEADS, rows, 2 * SIZE
        self.device = torch.full(size, float("nan"))
        self.buffer = GQAHotBuffer(self.algorithm, shape, stride, self.device.flatten(1).view(torch.uint8))
        self.host = torch.full((NUM_BLOCKS, MSA_BLOCK_SIZE, NUM_KV_HEADS * 2 * SIZE), float("nan"))
        self.hot_blocks = -(-(BUFFER * max_query_len + max_query_len * MSA_UNIT) // rows)
        self.hot.kv_cache = self.device[:, 1]
        self.hot.impl.bind(self.buffer, 0, self.host, self.device[:, 1])

    def _builder(self, cls: type) -> Any:
        static = SimpleNamespace(static_forward_context={NAME: self.hot})
        config = SimpleNamespace(compilation_config=static)
        return bare(
            cls,
            layer_names=[NAME],
            vllm_config=config,
            device=torch.device("cpu"),
            reorder_batch_threshold=self.max_query_len,
            max_decode_query_len=self.max_query_len,
            context_len_buffer=torch.zeros(64, dtype=torch.int32),
            use_aiter_sparse_pa=False,
            page16_slot_mapping_buffer=None,
        )

    def start(self, request: Request, num_tokens: int = 0) -> None:
        """Start a request whose first tokens' KV is there already, as after a pull or a hit in the prefix cache."""
        first = request.first_hot_block_id
        self.buffer.extend_host_block_tables({first: (0, request.blocks)})
        self.buffer.change_hot_block_tables({first: (0, range(first, first + self.hot_blocks))})
        if num_tokens:
            positions = torch.arange(num_tokens)
            slots, args = self._slots(request, positions), [None] * 18
            args[3], args[11:16] = (
                positions,
                [slots, slots, self.stock_caches.kv, self.stock_caches.keys, MSA_BLOCK_SIZE],
            )
            args[16], args[17] = torch.empty(num_tokens, Q_SIZE), torch.empty(num_tokens, KV_SIZE)
            fused_kernel(request.qkv[:num_tokens].clone(), *args)
            self.host[request.blocks] = self.stock_caches.kv[request.blocks].flatten(1).view(-1, *self.host.shape[1:])
            self.hot_caches.keys[request.blocks] = self.stock_caches.keys[request.blocks]
        request.num_computed = num_tokens

    @staticmethod
    def _slots(request: Request, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor(request.blocks)[positions // MSA_BLOCK_SIZE] * MSA_BLOCK_SIZE + positions % MSA_BLOCK_SIZE

    def step(self, batch: list[tuple[Request, int]], num_padding: int = 0) -> None:
        """Compute some tokens of each request, decoding ones first, with both layers, and compare."""
        spans = [torch.arange(request.num_computed, request.num_computed + num) for request, num in batch]
        lengths = torch.tensor([len(span) for span in spans])
        starts = torch.cat((torch.tensor([0]), lengths.cumsum(0))).int()
        seq_lens = torch.tensor([int(span[-1]) + 1 for span in spans], dtype=torch.int32)
        slots = torch.cat([self._slots(request, span) for (request, _), span in zip(batch, spans, strict=True)])
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(batch),
            num_actual_tokens=len(slots),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.tensor([request.blocks for request, _ in batch], dtype=torch.int32),
            slot_mapping=slots,
        )
        hot_tables = [range(each.first_hot_block_id, each.first_hot_block_id + self.hot_blocks) for each, _ in batch]
        hot_common = common.replace(block_table_tensor=torch.tensor([list(table) for table in hot_tables]).int())
        index, stock = (builder.build(0, common) for builder in self.builders[:2])
        hot = self.builders[-1].build(0, hot_common)
        for (request, num), seq_len in zip(batch, seq_lens.tolist(), strict=True):
            if num <= self.max_query_len:
                assert self.buffer.begin_decoding(request.first_hot_block_id, seq_len - num) is not None
        prefills = [
            (request.first_hot_block_id, request.num_computed, request.num_computed + num)
            for request, num in batch
            if num > self.max_query_len
        ]
        self.buffer.requests.expect_prefills(prefills)
        rows = torch.cat([request.qkv[span] for (request, _), span in zip(batch, spans, strict=True)])
        positions = torch.cat(spans)
        padding = slots.new_full((num_padding,), -1)
        all_slots, inputs = torch.cat((slots, padding)), torch.cat((rows, rows[:1].expand(num_padding, -1)))
        all_positions = torch.cat((positions, positions.new_zeros(num_padding)))
        self.context = SimpleNamespace(
            attn_metadata={KEYS: index, NAME: stock}, slot_mapping={KEYS: slots, NAME: slots}
        )
        expected = self.stock.forward(positions, rows)
        self.context = SimpleNamespace(attn_metadata={KEYS: index, NAME: hot}, slot_mapping={KEYS: all_slots})
        found = self.hot.forward(all_positions, inputs)[: len(rows)]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        others = self.device[:, ::2]  # a view
        assert others.isnan().all(), "wrote to another layer"
        self.buffer.check_integrity()
        for request, num in batch:
            request.num_computed += num
            self._check_host(request)

    def _check_host(self, request: Request) -> None:
        """Check that the KV of all tokens is on the host."""
        host = self.host[request.blocks].view(-1, NUM_KV_HEADS, MSA_BLOCK_SIZE, 2 * SIZE).transpose(1, 2).flatten(0, 1)
        stock = self.stock_caches.kv[request.blocks].transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(host[: request.num_computed], stock[: request.num_computed])


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.long
def test_decode_with_the_indexers_kernels_for_it(msa_cuda: ModuleType, patch: pytest.MonkeyPatch) -> None:
    model, request = Model(msa_cuda, patch, decodes_index=True), Request(1, 0)
    model.start(request, 4 * MSA_BLOCK_SIZE - 1)
    model.step([(request, 1)])


@pytest.mark.long
def test_decode_after_transferred_kv(msa_cuda: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Requests of other lengths, one with fewer blocks than a selection has, decode past ends of units and blocks."""
    model = Model(msa_cuda, patch)
    first, second = Request(1, 0), Request(41, 1)
    model.start(first, 7 * MSA_BLOCK_SIZE - 3)
    model.start(second, MSA_BLOCK_SIZE - 5)
    for _ in range(6):
        model.step([(first, 1), (second, 1)], num_padding=2)
    assert model.buffer.counts.take()[1] > 0, "nothing was missed"


@pytest.mark.long
def test_chunks_of_a_prompt_beside_decodes(msa_cuda: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """A prompt after a hit in the prefix cache, whose chunks end inside units and blocks; then it decodes, too."""
    model = Model(msa_cuda, patch)
    first, second, third = Request(1, 0), Request(41, 1), Request(81, 2)
    model.start(first, 5 * MSA_BLOCK_SIZE)
    model.start(second, 3 * MSA_BLOCK_SIZE)
    model.step([(first, 1), (second, 9)])
    model.start(third)
    model.step([(first, 1), (second, 11), (third, 5)])
    model.step([(first, 1), (second, 1), (third, 3)])
    for _ in range(2):
        model.step([(first, 1), (second, 1), (third, 1)])


@pytest.mark.long
def test_drafts_of_which_some_are_rejected(msa_cuda: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Steps of three tokens, and of fewer, across ends of units and blocks; a rejected token comes again as another."""
    model, first, second = Model(msa_cuda, patch, max_query_len=3), Request(1, 0), Request(61, 1)
    model.start(first, 5 * MSA_BLOCK_SIZE - 4)
    model.start(second, 2 * MSA_BLOCK_SIZE - 9)
    for num_second, num_rejected in ((3, 1), (2, 1), (3, 2), (1, 0), (3, 0), (3, 2), (2, 0)):
        model.step([(second, num_second), (first, 3)])
        for request in (first, second)[: 2 if num_second > num_rejected else 1]:
            request.num_computed -= num_rejected
            rejected = slice(request.num_computed, request.num_computed + num_rejected)
            request.qkv[rejected] = torch.randn(request.qkv[rejected].shape)
