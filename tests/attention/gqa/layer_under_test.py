"""One attention layer of a dense model against the formula: softmax over what the algorithm selects from all keys.

`CpuLayer` and `CudaLayer` run the code of their device under one interface; CUDA's kernels are replaced by formulas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from beside_flashinfer import import_flashinfer_cuda
from stand_ins import bare
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils

from vllm_hisparse.algorithms.base import AttentionShape, SparseAlgorithm
from vllm_hisparse.cpu.gqa import HotGQACpuImpl, HotGQACpuMetadataBuilder
from vllm_hisparse.cpu.unit_ops import CpuUnitOps
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.layout import StateLayout
from vllm_hisparse.ops.base import SwapInOps


def attend_paged(**call: Any) -> None:
    """`flash_attn_varlen_func` and `unified_attention` for one query token per request."""
    block_table, page_size = call["block_table"], call["k"].shape[1]
    scales = [call.get(f"{name}_descale") for name in "qkv"]
    query, *caches = (rows.float() for rows in (call["q"], call["k"], call["v"]))
    for i, num_tokens in enumerate(call["seqused_k"].tolist()):
        pages = block_table[i, : -(-num_tokens // page_size)].long()
        of_query, *others = (1 if scale is None else scale if scale.dim() == 0 else scale[i] for scale in scales)
        keys, values = (
            cache[pages].flatten(0, 1)[:num_tokens, 0] * scale for cache, scale in zip(caches, others, strict=True)
        )
        weights = (query[i] * of_query @ keys.T * call["softmax_scale"]).softmax(-1)
        call["out"][i] = weights @ values


def attend_xqa(**call: Any) -> None:
    """`flashinfer_xqa_batch_decode_with_kv_cache`, which takes strides of pages and tokens only; padding gets NaN."""
    keys, values = call["kv_cache"]
    units, num_tokens, page_size = call["block_tables"], call["seq_lens"], keys.shape[1]
    assert call["kv_layout"] == "NHD" and keys.shape[2] == 1 and page_size in flashinfer_cuda.UNITS
    assert call["max_seq_len"] == units.shape[1] * page_size
    assert all(each.is_contiguous() for each in (call["query"], call["out"], units, num_tokens))
    assert units.dtype == num_tokens.dtype == torch.int32
    scale = call["bmm1_scale"] * call["bmm2_scale"]
    paged = {"q": call["query"], "k": keys, "v": values, "out": call["out"], "block_table": units}
    attend_paged(**paged, seqused_k=num_tokens, softmax_scale=scale)
    call["out"][num_tokens == 0] = float("nan")


if not hasattr(fa_utils, "flash_attn_varlen_func"):
    fa_utils.flash_attn_varlen_func = attend_paged  # a CPU build of vLLM has none

from vllm_hisparse.algorithms.testing import poisoned_state  # noqa: E402
from vllm_hisparse.attention.gqa import flash_attn_cuda, triton_cuda  # noqa: E402

flashinfer_cuda = import_flashinfer_cuda()

BLOCK_SIZE, ROWS_PER_BLOCK, MAX_TOKENS = 32, 16, 224
NUM_DEVICE_BLOCKS, LAYERS_IN_A_BLOCK = 40, 3  # the layer under test is the second
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 2, 32
SHAPE = AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, torch.float32)
BUDGET, BUFFER = 32, 48
NUM_STATE_BLOCKS, STATE_BLOCK_BYTES = 400, 3 * 2 * NUM_KV_HEADS * HEAD_SIZE * 4  # bounds of three of Quest's pages


EXPECTED: dict[bytes, torch.Tensor] = {}  # by a hash of what it depends on

FP8, FP8_NAN = torch.float8_e4m3fn, 0x7F
SCALES = {"_q_scale": torch.tensor(0.5), "_k_scale": torch.tensor(2.0), "_v_scale": torch.tensor(0.25)}


class Request:
    """Random queries, keys and values of all positions, and where its blocks are."""

    def __init__(self, first_hot_block_id: int, host_ids: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(MAX_TOKENS, NUM_HEADS, HEAD_SIZE, generator=generator)
        self.key, self.value = torch.randn(2, MAX_TOKENS, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        self.first_hot_block_id, self.host_ids, self.num_computed = first_hot_block_id, host_ids, 0


class RoundedRequest(Request):
    """A request whose rows lose nothing in fp8 with `SCALES`."""

    def __init__(self, first_hot_block_id: int, host_ids: list[int], seed: int):
        super().__init__(first_hot_block_id, host_ids, seed)
        rows = zip((self.query, self.key, self.value), SCALES.values(), strict=True)
        self.query, self.key, self.value = ((each / scale).to(FP8).float() * scale for each, scale in rows)


class LayerUnderTest(ABC):
    """One attention layer with its builder over a small host pool; hot rows start as NaN.

    Args:
        algorithm_class: class of the algorithm.
        max_query_len: tokens that a decoding request computes in a step.
    """

    impl_class: type
    builder_class: type
    stores_fp8 = False

    def __init__(self, algorithm_class: type[SparseAlgorithm], max_query_len: int = 1):
        self.max_query_len, buffer = max_query_len, max(BUFFER, max_query_len * BUDGET)
        self.algorithm = algorithm_class(algorithm_class.Options(), SHAPE, BUDGET, MAX_TOKENS, max_query_len)
        self.hot_blocks = -(-(buffer + max_query_len * self.algorithm.tokens_per_unit) // ROWS_PER_BLOCK)
        self.num_slots = buffer // self.algorithm.tokens_per_unit
        sizes = 4, 6, 1, BUDGET, MAX_TOKENS // BLOCK_SIZE, BLOCK_SIZE, NUM_DEVICE_BLOCKS
        self.state_layout = StateLayout(self.algorithm.state_entries, 1, STATE_BLOCK_BYTES)
        columns = self.state_layout.columns(MAX_TOKENS)
        shape = HotBufferShape(*sizes, self.hot_blocks, ROWS_PER_BLOCK, max_query_len, columns)
        stride = LAYERS_IN_A_BLOCK * NUM_KV_HEADS
        size = (NUM_DEVICE_BLOCKS, LAYERS_IN_A_BLOCK, NUM_KV_HEADS, ROWS_PER_BLOCK, 2 * HEAD_SIZE)
        self.device = (
            torch.full(size, FP8_NAN, dtype=torch.uint8) if self.stores_fp8 else torch.full(size, float("nan"))
        )
        memory = torch.full((NUM_STATE_BLOCKS, STATE_BLOCK_BYTES // 4), float("nan")).view(torch.uint8)
        self.buffer = GQAHotBuffer(self.algorithm, shape, stride, memory, self.make_ops(shape))
        self.state_blocks: dict[int, int] = {}  # by first hot block
        self.free_state_blocks = (torch.randperm(NUM_STATE_BLOCKS - 1) + 1).tolist()
        self.host = torch.full((40, BLOCK_SIZE, NUM_KV_HEADS * 2 * HEAD_SIZE), 1e4)
        if self.stores_fp8:
            self.host = torch.full(self.host.shape, FP8_NAN, dtype=torch.uint8)
        self.started: list[Request] = []
        self.impl = bare(
            self.impl_class,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            scale=HEAD_SIZE**-0.5,
            kv_cache_dtype="fp8" if self.stores_fp8 else "auto",
        )
        self.impl.num_queries_per_kv, self.impl.vllm_flash_attn_version = NUM_HEADS // NUM_KV_HEADS, 3
        self.impl.bind(self.buffer, 0, self.host, self.device[:, 1])
        model = SimpleNamespace(get_num_attention_heads=lambda _: NUM_HEADS, dtype=torch.float32)
        spec = SimpleNamespace(
            block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        vllm_config = SimpleNamespace(
            model_config=model,
            parallel_config=None,
            compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(impl=self.impl)}),
        )
        self.builder = bare(self.builder_class, layer_names=["layer"], kv_cache_spec=spec, vllm_config=vllm_config)

    def make_ops(self, shape: HotBufferShape) -> SwapInOps | None:
        """Operations of the layer's platform; None: those for the device."""
        return None

    def start(self, request: Request) -> None:
        self.started.append(request)
        self.state_blocks[request.first_hot_block_id] = 0
        self.buffer.extend_host_block_tables({request.first_hot_block_id: (0, request.host_ids)})
        self.buffer.change_hot_block_tables(
            {
                request.first_hot_block_id: (
                    0,
                    range(request.first_hot_block_id, request.first_hot_block_id + self.hot_blocks),
                )
            }
        )

    def grow_state(self, request: Request, num_tokens: int) -> None:
        """Give a request the state blocks that it needs, any of those that are free."""
        first = self.state_blocks[request.first_hot_block_id]
        num_new = max(self.state_layout.num_blocks(num_tokens) - first, 0)
        self.state_blocks[request.first_hot_block_id] += num_new
        if num_new:
            new = [self.free_state_blocks.pop() for _ in range(num_new)]
            self.buffer.requests.extend_state({request.first_hot_block_id: (first, new)})

    def step(self, batch: list[tuple[Request, int]]) -> None:
        """Compute some tokens of each request and compare with the formula."""
        for (request, num), result in zip(batch, self.compute(batch), strict=True):
            span = range(request.num_computed - num, request.num_computed)
            assert len(result) == num
            torch.testing.assert_close(result, self.expected(request, span), atol=2e-5, rtol=2e-5)

    def draft_step(self, batch: list[tuple[Request, int, int]]) -> None:
        """Run `step` for (request, tokens, number of rejected ones); rejected tokens differ from later ones."""
        kept = {}
        for request, num, num_rejected in batch:
            span = slice(request.num_computed + num - num_rejected, request.num_computed + num)
            kept[request] = span, [rows[span].clone() for rows in (request.query, request.key, request.value)]
            for rows, scale in ((request.query, 1), (request.key, 3), (request.value, 1)):
                rows[span] = scale * torch.randn(rows[span].shape)
        self.step([(request, num) for request, num, _ in batch])
        for request, (span, (query, key, value)) in kept.items():
            request.query[span], request.key[span], request.value[span] = query, key, value
            request.num_computed = span.start

    def compute(self, batch: list[tuple[Request, int]]) -> list[torch.Tensor]:
        """Compute some tokens of each request: [tokens, num_heads, head_size] each."""
        spans = [range(request.num_computed, request.num_computed + num) for request, num in batch]
        pieces = [
            tuple(tensor[list(span)] for tensor in (request.query, request.key, request.value))
            for (request, _), span in zip(batch, spans, strict=True)
        ]
        query, key, value = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
        tables = torch.zeros(len(batch), 12, dtype=torch.int32)
        for i, (request, num) in enumerate(batch):
            if request in self.started:
                self.grow_state(request, request.num_computed + num)
            tables[i, : self.hot_blocks] = torch.arange(
                request.first_hot_block_id, request.first_hot_block_id + self.hot_blocks
            )
        starts = torch.tensor([0, *(num for _, num in batch)]).cumsum(0)
        seq_lens = torch.tensor([span.stop for span in spans])
        out = self.forward(batch, starts, seq_lens, tables, (query, key, value))
        others = self.device[:, ::2]  # a view
        assert (others.eq(FP8_NAN) if self.stores_fp8 else others.isnan()).all(), "wrote to another layer"
        self.buffer.check_integrity()
        for (request, _), span in zip(batch, spans, strict=True):
            request.num_computed = span.stop
        return list(out.split([len(span) for span in spans]))

    @abstractmethod
    def forward(
        self,
        batch: list[tuple[Request, int]],
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        tables: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Build the metadata and compute the batch.

        Args:
            batch: requests and their new tokens.
            starts: [requests + 1] int64. seq_lens: [requests] int64. tables: [requests, 12] int32.
            rows: query, key and value of all tokens.
        """

    def begin_decodes(self, batch: list[tuple[Request, int]], seq_lens: torch.Tensor) -> None:
        """The connector's part when requests begin to decode."""
        for (request, num), seq_len in zip(batch, seq_lens.tolist(), strict=True):
            decodes = num <= self.max_query_len and request in self.started
            for span in self.buffer.begin_decoding(request.first_hot_block_id, seq_len - num) if decodes else ():
                self.impl.represent(span)

    def expected(self, request: Request, span: range) -> torch.Tensor:
        """[tokens, num_heads, head_size]."""
        if len(span) > self.max_query_len:
            causal = torch.arange(span.stop) <= torch.tensor(span)[:, None]
            return attention(request, span, causal[:, None].expand(-1, NUM_KV_HEADS, -1))
        return torch.cat([self.expected_of(request, position) for position in span])

    def expected_of(self, request: Request, position: int) -> torch.Tensor:
        """[1, num_heads, head_size] of a token that is decoded. Layers of several devices get the same requests, so the
        first of them computes it for all."""
        rows = request.query[position], request.key[: position + 1], request.value[: position + 1]
        name = f"{type(self.algorithm).__name__} {self.algorithm.max_query_len} {position}".encode()
        inputs = sha256(b"".join((name, *(each.numpy().tobytes() for each in rows)))).digest()
        if inputs not in EXPECTED:
            EXPECTED[inputs] = self.compute_expected(request, position)
        return EXPECTED[inputs]

    def compute_expected(self, request: Request, position: int) -> torch.Tensor:
        per_unit = self.algorithm.tokens_per_unit
        state = poisoned_state(self.algorithm, 1)
        self.algorithm.construct_representations(state, 0, request.key[: position + 1], 0)
        selection = self.algorithm.retrieve_topk(
            state, torch.tensor([0]), request.query[position][None], torch.tensor([position + 1])
        )
        is_chosen = torch.zeros(1, NUM_KV_HEADS, -(-MAX_TOKENS // per_unit), dtype=torch.bool)
        for head, units in enumerate(selection[0]):
            is_chosen[0, head, units[units >= 0].long()] = True
        tokens = is_chosen.repeat_interleave(per_unit, -1)[..., : position + 1]
        return attention(request, range(position, position + 1), tokens)


def attention(request: Request, span: range, is_chosen: torch.Tensor) -> torch.Tensor:
    """Attention of each KV head's query heads to the tokens that it has chosen.

    Args:
        is_chosen: [tokens, num_kv_heads, span.stop] bool.

    Returns:
        [tokens, num_heads, head_size]
    """
    query = request.query[list(span)].unflatten(1, (NUM_KV_HEADS, -1))
    keys, values = request.key[: span.stop], request.value[: span.stop]
    scores = torch.einsum("tkhd,skd->tkhs", query, keys) * HEAD_SIZE**-0.5
    weights = scores.masked_fill(~is_chosen[:, :, None], float("-inf")).softmax(-1)
    return torch.einsum("tkhs,skd->tkhd", weights, values).flatten(1, 2)


def update_cache(_impl: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots) -> None:
    """`FlashAttentionImpl.do_kv_cache_update`."""
    if cache.dtype == torch.uint8:
        rows = (key, layer._k_scale), (value, layer._v_scale)
        key, value = ((each / scale).to(FP8).view(torch.uint8) for each, scale in rows)
    cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat((key, value), -1)


def attend_staged(_impl: Any, layer: Any, query: torch.Tensor, _key, _value, cache, metadata, output) -> torch.Tensor:
    """`FlashAttentionImpl.forward` over whole histories."""
    common = metadata.common
    if cache.dtype == torch.uint8:
        query, (keys, values) = query.float() * layer._q_scale, cache.view(FP8).float().chunk(2, -1)
        cache = torch.cat((keys * layer._k_scale, values * layer._v_scale), -1)
    for i, seq_len in enumerate(common.seq_lens.tolist()):
        rows = cache[common.block_table_tensor[i].long()].transpose(1, 2).flatten(0, 1)[:seq_len]
        keys, values = (part.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for part in rows.chunk(2, -1))
        span = slice(*common.query_start_loc_cpu[i : i + 2].tolist())
        length = span.stop - span.start
        scores = torch.einsum("qhd,khd->hqk", query[span], keys) * HEAD_SIZE**-0.5
        later = torch.arange(seq_len) > torch.arange(seq_len - length, seq_len)[:, None]
        output[span] = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -float("inf")).softmax(-1), values)
    return output


class CpuLayer(LayerUnderTest):
    impl_class, builder_class = HotGQACpuImpl, HotGQACpuMetadataBuilder

    def make_ops(self, shape: HotBufferShape) -> SwapInOps:
        return CpuUnitOps(self.algorithm, shape.block_size)

    def forward(self, batch, starts, seq_lens, tables, rows) -> torch.Tensor:
        self.begin_decodes(batch, seq_lens)  # Model Runner V1: before the metadata
        common = SimpleNamespace(
            num_reqs=len(batch), query_start_loc_cpu=starts, seq_lens=seq_lens, block_table_tensor=tables
        )
        metadata = self.builder.build(0, common)
        out = torch.full_like(rows[0], float("nan"))
        return self.impl.forward(None, *rows, self.device[:, 1], metadata, out)


class CudaLayer(LayerUnderTest):
    """A layer of one backend: `module` has its classes, and vLLM's `kernel` that attends over units."""

    module: ModuleType
    kernel: str
    formula = staticmethod(attend_paged)

    def __init__(self, algorithm_class: type, max_query_len: int = 1):
        patch = pytest.MonkeyPatch()
        patch.setattr(self.module, self.kernel, self.formula)
        patch.setattr(self.impl_class.vllm_class, "forward", attend_staged)
        patch.setattr(self.impl_class.vllm_class, "do_kv_cache_update", update_cache)
        vllm_builder = next(cls for cls in self.builder_class.__mro__ if cls.__module__.startswith("vllm."))
        patch.setattr(
            vllm_builder,
            "build",
            lambda _self, _prefix, common: SimpleNamespace(common=common, scheduler_metadata=None),
        )
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        self.undo = patch.undo
        super().__init__(algorithm_class, max_query_len)
        self.builder.device = torch.device("cpu")
        self.builder.allocate(max_query_len, 6)

    def forward(self, batch, starts, seq_lens, tables, rows) -> torch.Tensor:
        order = sorted(range(len(batch)), key=lambda i: batch[i][1])  # Model Runner V2: decodes first
        spans = [torch.arange(starts[i], starts[i + 1]) for i in order]
        tokens, lengths = torch.cat(spans), torch.tensor([len(span) for span in spans])
        new_starts = torch.cat((torch.tensor([0]), lengths.cumsum(0))).int()
        common = CommonAttentionMetadata(
            query_start_loc=new_starts,
            query_start_loc_cpu=new_starts,
            seq_lens=seq_lens[order].int(),
            seq_lens_cpu_upper_bound=seq_lens[order].int(),
            num_reqs=len(batch),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=tables[order],
            slot_mapping=torch.full((len(tokens),), -1),
        )
        metadata = self.builder.build(0, common)
        self.begin_decodes(batch, seq_lens)  # Model Runner V2: after the metadata
        prefills = [
            (request.first_hot_block_id, int(seq_len) - num, int(seq_len))
            for (request, num), seq_len in zip(batch, seq_lens, strict=True)
            if num > self.buffer.shape.max_query_len
        ]
        self.buffer.requests.expect_prefills(prefills)
        out = torch.full_like(rows[0], float("nan"))
        query, key, value = (part[tokens] for part in rows)
        layer = SimpleNamespace(**SCALES) if self.stores_fp8 else None
        if self.stores_fp8:
            query = (query / layer._q_scale).to(FP8)
        self.impl.forward(layer, query, key, value, self.device[:, 1], metadata, out)
        return torch.empty_like(out).index_copy_(0, tokens, out)


class FlashAttnLayer(CudaLayer):
    impl_class, builder_class = flash_attn_cuda.HotFlashAttnImpl, flash_attn_cuda.HotFlashAttnMetadataBuilder
    module, kernel = flash_attn_cuda, "flash_attn_varlen_func"


class TritonLayer(CudaLayer):
    impl_class, builder_class = triton_cuda.HotTritonImpl, triton_cuda.HotTritonMetadataBuilder
    module, kernel = triton_cuda, "unified_attention"


class FlashInferLayer(CudaLayer):
    impl_class = flashinfer_cuda.HotFlashInferImpl
    builder_class = flashinfer_cuda.HotFlashInferMetadataBuilder
    module, kernel = flashinfer_cuda, "flashinfer_xqa_batch_decode_with_kv_cache"
    formula = staticmethod(attend_xqa)

    def __init__(self, algorithm_class: type, max_query_len: int = 1):
        super().__init__(algorithm_class, max_query_len)
        self.builder._prefill_wrapper, self.builder.paged_kv_indices = None, torch.zeros(8, dtype=torch.int32)


class Fp8FlashAttnLayer(FlashAttnLayer):
    stores_fp8 = True


class Fp8TritonLayer(TritonLayer):
    stores_fp8 = True
