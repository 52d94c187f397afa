"""Sparse MLA over hot buffers on both devices, against softmax over the selected rows of the full KV.

On CUDA vLLM's implementations are replaced by formulas that see what they would: a query, a paged cache, block tables,
and the start of the buffer of selections.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sm100_kernels
import torch
from stand_ins import bare
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_hisparse.attention.mla.base import NewRows
from vllm_hisparse.compat.row_kernels import FlashAttnKernel
from vllm_hisparse.cpu.mla import HotMLACpuImpl, HotMLACpuMetadataBuilder
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.swap_in import SharingSwapIn

LATENT, ROPE, NUM_HEADS, SCALE = 6, 2, 3, 0.4
WIDTH = LATENT + ROPE
NUM_LAYERS, TOP_K, NUM_SLOTS, BLOCK_SIZE, ROWS_PER_BLOCK = 2, 5, 8, 4, 3
MAX_TOKENS, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, MAX_BATCH_TOKENS = 40, 30, 40, 64
QUERY_SCALE, KEY_SCALE = 0.5, 0.25  # of a model in fp8
IN_FP8 = " in fp8"  # end of the name of a model whose rows and queries are in fp8, with one scale per layer
SM100 = [
    name
    for name in ("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE" + IN_FP8, "FLASH_ATTN_MLA_SPARSE_FA4")
    if name.removesuffix(IN_FP8) in AttentionBackendEnum.__members__
]
CUDA = ["HotFlashMLA", "HotFlashAttnMLA", "HotFlashInferMLA", *SM100]


class Request:
    """Rows and queries of all positions of a request in all layers, and where its blocks are."""

    def __init__(self, first_hot_block_id: int, host_ids: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randn(NUM_LAYERS, MAX_TOKENS, WIDTH, generator=generator)
        self.query = torch.randn(NUM_LAYERS, MAX_TOKENS, NUM_HEADS, WIDTH, generator=generator)
        for values in (self.rows, self.query):  # numbers that fp8 has, scaled or not
            values.copy_(values.to(torch.float8_e4m3fn))
        self.first_hot_block_id, self.host_ids, self.num_computed = first_hot_block_id, host_ids, 0

    def reject(self, first: int) -> None:
        """Other tokens will be computed from a position on."""
        for values in (self.rows, self.query):
            values[:, first:] = torch.randn(values[:, first:].shape).to(torch.float8_e4m3fn)


def attend(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[num_heads, LATENT] of one token over [n, WIDTH] rows."""
    return (query @ rows.T * SCALE).softmax(-1) @ rows[:, :LATENT]


def stock_forward(impl: Any, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> tuple[torch.Tensor, None]:
    """`forward_mqa` of vLLM: rows of the selected positions by block tables, or by a hook where every token decodes."""
    query, common = torch.cat(q, -1) if isinstance(q, tuple) else q, metadata.common
    top_k = impl.topk_indices_buffer[: len(query)]
    if common.max_query_len == 1:
        row_ids, num_valid = impl._convert_logical_to_physical_topk(top_k, metadata, return_valid_counts=True)
        return attend_flat(query, cache.flatten(0, 1), row_ids, num_valid), None
    requests = torch.arange(common.num_reqs).repeat_interleave(torch.diff(common.query_start_loc_cpu))
    block_size = cache.shape[1]
    blocks = common.block_table_tensor[requests].long().gather(1, top_k.clamp_min(0).long() // block_size)
    row_ids = torch.where(top_k >= 0, blocks * block_size + top_k % block_size, -1)
    return attend_flat(query, cache.flatten(0, 1), row_ids, torch.full((len(query),), TOP_K)), None


def attend_flat(
    query: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor, num_valid: torch.Tensor
) -> torch.Tensor:
    """[tokens, num_heads, LATENT]; no row: zeros."""
    out = query.new_zeros(len(query), NUM_HEADS, LATENT)
    for i, ids in enumerate(row_ids):
        ids = ids[: num_valid[i]]
        if (ids >= 0).any():
            out[i] = attend(query[i], rows[ids[ids >= 0].long()])
    return out


def run_kernel(
    _impl: Any, nope: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor, *selection: Any, cache_is_flat: bool
) -> torch.Tensor:
    """`FlashAttnMLASparseImpl._run_mqa_kernel` of vLLM 0.32 over flat rows."""
    assert cache_is_flat
    return attend_pages(torch.cat((nope, rope), -1), rows, *selection[:2])


def forward_kernel(
    _impl: Any, query: Any, cache: torch.Tensor, *selection: torch.Tensor, layer: Any, block_size: int, is_decode: bool
) -> tuple[torch.Tensor, None]:
    """`FlashAttnMLASparseImpl._forward_mqa_kernel` of vLLM 0.33 over a paged cache."""
    assert is_decode and cache.shape[1] == block_size
    return attend_pages(torch.cat(query, -1), flat_kv_row_view(cache, block_size)[0], *selection), None


@pytest.mark.parametrize(("name", "kernel"), [("_run_mqa_kernel", run_kernel), ("_forward_mqa_kernel", forward_kernel)])
def test_flash_attentions_kernel_of_each_release(name: str, kernel: Callable[..., Any]) -> None:
    """The same rows are attended to, whichever method vLLM has; hot rows lie in one allocation with others."""
    rows, query = torch.randn(9, WIDTH)[2:], torch.randn(4, NUM_HEADS, WIDTH)
    ids = torch.tensor([[6, 0, -1], [3, 3, 5], [1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    num_valid = torch.tensor([2, 3, 1, 0], dtype=torch.int32)
    impl = type("Impl", (type("Stock", (), {name: kernel}), FlashAttnKernel), {})()
    parts = query[..., :LATENT], query[..., LATENT:]
    out = impl.attend_to_rows(parts, rows.unsqueeze(1), (ids, num_valid), object(), is_decode=True)
    assert torch.equal(out, attend_flat(query, rows, ids, num_valid))


class PlannedState:
    """Stands for FlashInfer's state of `FlashInferMLASparseSM90Builder`, which keeps one plan."""

    SIZES = ("num_heads", "kv_dtype", "max_tokens", "topk_width", "kv_lora_rank", "qk_rope_head_dim", "sm_scale")

    def __init__(self, device: torch.device, index_topk: int, index_kpool: int, **sizes: Any):
        self.__dict__.update(sizes, device=device, index_topk=index_topk, index_kpool=index_kpool, wrapper=self)
        assert set(sizes) == set(self.SIZES)

    def plan(self, common: CommonAttentionMetadata) -> None:
        """Count the rows of each token, from the lengths of the requests."""
        starts, seq_lens = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        spans = [
            range(length - last + first, length)
            for (first, last), length in zip(pairwise(starts), seq_lens, strict=True)
        ]
        self.num_valid = torch.tensor([min(position + 1, self.index_topk) for span in spans for position in span])

    def pack_indices(self, row_ids: torch.Tensor) -> None:
        assert row_ids.is_contiguous() and row_ids.dtype == torch.int32 and len(row_ids) == len(self.num_valid)
        self.row_ids = row_ids.where(row_ids >= 0, row_ids[:, :1].clamp_min(0))

    def run(self, nope: torch.Tensor, rope: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((ckv, kpe), -1).squeeze(1)
        return attend_pages(torch.cat((nope, rope), -1), rows, self.row_ids, self.num_valid)


def forward_planned(impl: Any, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> tuple[torch.Tensor, None]:
    """`FlashInferMLASparseSM90Impl.forward_mqa` over staged rows, by the plan that was made for them."""
    planned = metadata.state.num_valid
    assert planned.tolist() == (impl.topk_indices_buffer[: len(q[0])] >= 0).sum(1).tolist()
    return stock_forward(impl, q, cache, metadata, layer)


def update_cache(_impl: Any, kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any):
    """`concat_and_cache_mla`: as many rows as there are slots, none for a negative one."""
    rows = torch.cat((kv_c, k_pe.flatten(1)), -1)[: len(slots)]
    rows = rows if cache.dtype == rows.dtype else in_fp8(rows, KEY_SCALE).view(cache.dtype)
    cache.view(-1, WIDTH)[slots[slots >= 0]] = rows[slots >= 0]


def in_fp8(values: torch.Tensor, scale: float) -> torch.Tensor:
    return (values / scale).to(torch.float8_e4m3fn)


@pytest.fixture(params=CUDA)
def cuda_model(
    request: pytest.FixtureRequest, cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Model:
    return make_cuda_model(request.param, cuda_modules["backend"], monkeypatch)


@pytest.fixture(params=["HotMLACpu", *CUDA])
def model(
    request: pytest.FixtureRequest, cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Model:
    if request.param == "HotMLACpu":
        return Model(HotMLACpuImpl, HotMLACpuMetadataBuilder)
    return make_cuda_model(request.param, cuda_modules["backend"], monkeypatch)


def attend_pages(query: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, num_valid: torch.Tensor) -> torch.Tensor:
    """Attention like FlashAttention's, to which every leading id is a page."""
    leads = torch.arange(ids.shape[1]) < num_valid[:, None]
    assert (ids[leads] >= 0).all(), "page -1 is read"
    return attend_flat(query, rows, ids, num_valid)


def make_cuda_model(name: str, backend: ModuleType, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Model:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for vllm_class in (backend.FlashMLASparseImpl, backend.FlashAttnMLASparseImpl):
        monkeypatch.setattr(vllm_class, "forward_mqa", stock_forward)
        monkeypatch.setattr(vllm_class, "do_kv_cache_update", update_cache)
    for method, kernel in (("_run_mqa_kernel", run_kernel), ("_forward_mqa_kernel", forward_kernel)):
        if hasattr(backend.FlashAttnMLASparseImpl, method):
            monkeypatch.setattr(backend.FlashAttnMLASparseImpl, method, kernel)
    for builder in (backend.FlashMLASparseMetadataBuilder, backend.FlashAttnMLASparseMetadataBuilder):
        monkeypatch.setattr(
            builder,
            "build",
            lambda _self, _prefix, common: SimpleNamespace(common=common, req_id_per_token=common.seq_lens),
        )
    if name == "HotFlashInferMLA":
        return make_flashinfer_model(monkeypatch, **options)
    if name in SM100:
        return make_sm100_model(name, monkeypatch, **options)
    return Model(getattr(backend, name + "Impl"), getattr(backend, name + "MetadataBuilder"), **options)


def make_flashinfer_model(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Model:
    """A model whose builder of vLLM makes a plan in the builder's state."""
    module = import_module("vllm_hisparse.attention.mla.flashinfer_cuda")
    monkeypatch.setattr(module.FlashInferMLASparseSM90Impl, "forward_mqa", forward_planned)
    monkeypatch.setattr(module.FlashInferMLASparseSM90Impl, "do_kv_cache_update", update_cache)

    def build(builder: Any, _common_prefix_len: int, common: CommonAttentionMetadata) -> SimpleNamespace:
        builder.state.plan(common)
        return SimpleNamespace(common=common, req_id_per_token=common.seq_lens, state=builder.state)

    monkeypatch.setattr(module.FlashInferMLASparseSM90Builder, "build", build)
    model = Model(module.HotFlashInferMLAImpl, module.HotFlashInferMLAMetadataBuilder, **options)
    sizes = dict.fromkeys(PlannedState.SIZES)
    model.builder.state = PlannedState(torch.device("cpu"), TOP_K, 1, **sizes)
    for impl in model.impls:
        impl.use_fp8_kv_cache = False
    return model


def make_sm100_model(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Model:
    """A model over vLLM's own code, down to the calls of the kernels."""
    backend = sm100_kernels.install(monkeypatch).HOT_BACKENDS[name.removesuffix(IN_FP8)]
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    monkeypatch.setattr(impl.vllm_class, "do_kv_cache_update", update_cache)
    monkeypatch.setattr(backend.vllm_class.get_builder_cls(), "build", sm100_kernels.build_metadata)
    return Model(impl, builder, is_in_fp8=name.endswith(IN_FP8), **options)


class LazyStreams:
    """Stands for `torch.cuda`'s streams: what is copied on a second stream happens when someone waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.copies: list[Callable[[], None]] = []
        self.num_waits, self._on_second = 0, False
        copy_rows = SharingSwapIn.__call__

        def copy_later(swap_in: SharingSwapIn, *selection: Any) -> None:
            assert self._on_second
            self.copies.append(partial(copy_rows, swap_in, *selection))

        monkeypatch.setattr(SharingSwapIn, "__call__", copy_later)
        stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=self._wait)
        for name, value in (("Stream", lambda _: stream), ("current_stream", lambda: stream), ("Event", self._event)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "stream", self._second)

    @contextmanager
    def _second(self, _stream: Any) -> Iterator[None]:
        self._on_second = True
        yield
        self._on_second = False

    def _event(self) -> SimpleNamespace:
        event = SimpleNamespace(num_copies=0)
        event.record = lambda: setattr(event, "num_copies", len(self.copies))
        return event

    def _wait(self, event: SimpleNamespace) -> None:
        self.num_waits += 1
        for index, copy in enumerate(self.copies[: event.num_copies]):
            copy()
            self.copies[index] = lambda: None


class Model:
    """All layers of a model with their builder; hot rows start as NaN."""

    def __init__(
        self,
        impl_class: type,
        builder_class: type,
        selects: tuple[bool, ...] | None = None,
        query_len: int = 1,
        is_in_fp8: bool = False,
    ):
        num_slots = NUM_SLOTS + (query_len - 1) * TOP_K
        self.hot_blocks = -(-(num_slots + query_len) // ROWS_PER_BLOCK)
        sizes = 3, 4, NUM_LAYERS, TOP_K, MAX_TOKENS // BLOCK_SIZE, BLOCK_SIZE, NUM_DEVICE_BLOCKS
        shape = HotBufferShape(*sizes, self.hot_blocks, ROWS_PER_BLOCK, query_len)
        copies_ahead = impl_class is not HotMLACpuImpl
        self.buffer = MLAHotBuffer(shape, torch.device("cpu"), selects, copies_ahead)
        self.is_in_fp8 = is_in_fp8
        self.host = self._unused(NUM_LAYERS, NUM_HOST_BLOCKS, BLOCK_SIZE, WIDTH)
        self.device = self._unused(NUM_DEVICE_BLOCKS, NUM_LAYERS, 1, ROWS_PER_BLOCK, WIDTH)
        self.top_k = torch.full((MAX_BATCH_TOKENS, TOP_K), -1, dtype=torch.int32)
        self.random = random.Random(0)
        self.outputs: list[torch.Tensor] = []  # of every layer and step
        self.impls = [self._make_impl(impl_class, index) for index in range(NUM_LAYERS)]
        layers = {"0": SimpleNamespace(impl=self.impls[0])}
        self.builder = bare(
            builder_class,
            layer_names=["0"],
            vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
            device=torch.device("cpu"),
        )
        if builder_class is not HotMLACpuMetadataBuilder:
            self.builder.allocate(query_len, MAX_BATCH_TOKENS)

    def _unused(self, *shape: int) -> torch.Tensor:
        values = torch.full(shape, float("nan"))
        return values.to(torch.float8_e4m3fn).view(torch.uint8) if self.is_in_fp8 else values

    def _make_impl(self, impl_class: type, index: int) -> Any:
        sizes = {"num_heads": NUM_HEADS, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "head_size": WIDTH}
        impl = bare(impl_class, kv_cache_dtype="fp8" if self.is_in_fp8 else "auto", sinks=None, scale=SCALE, **sizes)
        impl.__dict__.update(index_group=None, need_to_return_lse_for_decode=False)
        impl.__dict__.update(_workspace_buffer=None, bmm1_scale=None, bmm2_scale=None)  # FlashInfer's
        impl.__dict__.update(is_nope_mla=False, qk_nope_head_dim=128)
        impl.topk_indices_buffer = self.top_k
        impl.bind(self.buffer, index, self.host[index], self.device[:, index])
        return impl

    def start(self, request: Request) -> None:
        self.buffer.extend_host_block_tables({request.first_hot_block_id: (0, request.host_ids)})
        self.buffer.change_hot_block_tables(
            {
                request.first_hot_block_id: (
                    0,
                    range(request.first_hot_block_id, request.first_hot_block_id + self.hot_blocks),
                )
            }
        )

    def step(
        self,
        *batch: tuple[Request, int],
        layer_writes: bool = False,
        expect_zeros: bool = False,
        in_microbatches: bool = False,
    ) -> None:
        """Compute tokens of each request, those with the fewest first, and compare every layer with the formula.

        Args:
            batch: requests and how many tokens.
            layer_writes: the layer's own kernel writes the new rows, as the fused one does.
            expect_zeros: whether zeros are expected instead of the formula's result.
            in_microbatches: the layer's own kernel writes the new rows, and the layer attends microbatch by microbatch.
        """
        spans = [(request, range(request.num_computed, request.num_computed + num)) for request, num in batch]
        metadata = self.builder.build(0, self._common(spans))
        num_tokens = sum(len(span) for _, span in spans)
        self.top_k[:] = -1
        selections = [self._select(position) for _, span in spans for position in span]
        for i, selected in enumerate(selections):
            self.top_k[i, self.random.sample(range(TOP_K), len(selected))] = torch.tensor(selected, dtype=torch.int32)
        for index, impl in enumerate(self.impls):
            rows = torch.cat([request.rows[index, list(span)] for request, span in spans])
            query = torch.cat([request.query[index, list(span)] for request, span in spans])
            new_rows = NewRows(rows[:, :LATENT], rows[:, LATENT:])
            if layer_writes or in_microbatches:
                cache, slots = impl.begin_decode(num_tokens)
                update_cache(impl, rows[:, :LATENT], rows[:, LATENT:], cache, slots)
            layer = SimpleNamespace(_k_scale=None, _q_scale_float=QUERY_SCALE, _k_scale_float=KEY_SCALE)
            parts = in_fp8(query, QUERY_SCALE) if self.is_in_fp8 else tuple(query.split([LATENT, ROPE], -1))
            if in_microbatches:
                out = self._attend_in_microbatches(impl, parts, metadata.microbatches, layer)
            else:
                with impl.writing(None if layer_writes else new_rows):
                    out, _ = impl.forward_mqa(parts, None, metadata, layer)
            self.outputs.append(out)
            owners = [request for request, span in spans for _ in span]
            expected = [attend(query[i], owners[i].rows[index, selected]) for i, selected in enumerate(selections)]
            torch.testing.assert_close(out, torch.stack(expected) * (not expect_zeros))
        for request, span in spans:
            request.num_computed = span.stop
        self.buffer.check_integrity()

    def microbatches(self, *batch: tuple[Request, int]) -> Any:
        """Arguments of a step."""
        spans = [(request, range(request.num_computed, request.num_computed + num)) for request, num in batch]
        return self.builder.build(0, self._common(spans)).microbatches

    def _attend_in_microbatches(
        self, impl: Any, query: tuple[torch.Tensor, ...], microbatches: Any, layer: Any
    ) -> torch.Tensor:
        assert [microbatch.tokens.start for microbatch in microbatches[1:]] == [
            microbatch.tokens.stop for microbatch in microbatches[:-1]
        ]
        outputs = [
            impl.of_microbatch(microbatch).forward_mqa(
                tuple(part[microbatch.tokens] for part in query), None, microbatch.metadata, layer
            )[0]
            for microbatch in reversed(microbatches)  # in any order
        ]
        self.buffer.step.finish(impl.layer_index)
        return torch.cat(outputs[::-1])

    def check_host(self, request: Request) -> None:
        """Every row that was computed is on the host, in every layer."""
        rows = self.host[:, request.host_ids].flatten(1, 2)[:, : request.num_computed]
        rows = rows.view(torch.float8_e4m3fn).float() * KEY_SCALE if self.is_in_fp8 else rows
        assert torch.equal(rows, request.rows[:, : request.num_computed])

    def _select(self, position: int) -> list[int]:
        others = self.random.sample(range(position), min(TOP_K - 1, position))
        return self.random.sample([*others, position], len(others) + 1)

    def _common(self, spans: list[tuple[Request, range]]) -> CommonAttentionMetadata:
        lengths = torch.tensor([len(span) for _, span in spans])
        starts = torch.cat((torch.tensor([0]), lengths.cumsum(0))).int()
        seq_lens = torch.tensor([span.stop for _, span in spans], dtype=torch.int32)
        tables = torch.zeros(len(spans), 12, dtype=torch.int32)
        for i, (request, _) in enumerate(spans):
            tables[i, 0] = request.first_hot_block_id
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(spans),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=tables,
            slot_mapping=torch.full((int(starts[-1]),), -1),
        )


@pytest.mark.long
def test_prefill_in_chunks_beside_decodes(model: Model) -> None:
    """Selections, new rows and staged histories of each request are its own, wherever its tokens stand in the batch."""
    first = Request(1, [5, 9, 2, 7, 11, 30, 31, 32, 33, 34], 0)
    second, third = Request(8, [1, 3, 4, 6, 8, 10, 12, 13, 14, 15], 1), Request(16, list(range(16, 26)), 2)
    model.start(first)
    model.step((first, 6))
    model.start(second)
    model.step((first, 1), (second, 9))
    model.start(third)
    model.step((first, 1), (second, 3), (third, 11))
    for _ in range(20):
        model.step((first, 1), (second, 1), (third, 1))
    for request in (first, second, third):
        model.check_host(request)
    hits, misses = model.buffer.counts.take()
    assert hits > 0 and misses > 0


@pytest.mark.long
@pytest.mark.parametrize("name", CUDA)
def test_rows_that_are_copied_while_another_layer_attends(
    cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Arguments of a layer that shares the selection of the one before it."""
    streams = LazyStreams(monkeypatch)
    model = make_cuda_model(name, cuda_modules["backend"], monkeypatch, selects=(True, False))
    requests = [Request(1 + 7 * i, list(range(10 * i, 10 * i + 10)), i) for i in range(3)]
    for request in requests:
        model.start(request)
        model.step((request, 9))
    for _ in range(20):
        model.step(*((request, 1) for request in requests))
    for request in requests:
        model.check_host(request)
    hits, misses = model.buffer.counts.take()
    assert hits + misses == NUM_LAYERS * 20 * 3 * (TOP_K - 1)
    assert streams.num_waits == 20


@pytest.mark.parametrize("name", CUDA)
def test_holes_in_a_selection(cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A request that decodes from its first token on has fewer positions than a selection, anywhere in it."""
    model = make_cuda_model(name, cuda_modules["backend"], monkeypatch)
    request = Request(1, list(range(10)), 0)
    model.start(request)
    for _ in range(TOP_K):
        model.step((request, 1))
    model.check_host(request)


def test_rows_at_the_end_of_the_memory(cuda_model: Model) -> None:
    """Blocks of 64 rows do not divide the hot rows: the request's are behind the last whole block."""
    model, request = cuda_model, Request(NUM_DEVICE_BLOCKS - cuda_model.hot_blocks, list(range(10)), 0)
    assert model.impls[0].hot.flat_row_ids(torch.tensor([[request.first_hot_block_id]]), torch.tensor([[0]])) >= 128
    model.start(request)
    model.step((request, 9))
    for _ in range(10):
        model.step((request, 1))


def test_layers_that_share_a_selection(cuda_modules: dict[str, ModuleType]) -> None:
    """Layers on the CPU share a residency, but have their own rows."""
    model = Model(HotMLACpuImpl, HotMLACpuMetadataBuilder, (True, False))
    assert model.buffer.residency[0] is model.buffer.residency[1]
    request = Request(1, list(range(10)), 0)
    model.start(request)
    model.step((request, 9))
    for _ in range(20):
        model.step((request, 1))
    model.check_host(request)
    assert sum(model.buffer.counts.take()) == NUM_LAYERS * 20 * (TOP_K - 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["HotMLACpu", *CUDA])
@pytest.mark.parametrize("layer_writes", [False, True])
def test_drafts(
    cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, name: str, layer_writes: bool
) -> None:
    """Each request computes one token, or some drafts too, of which some are rejected, beside others that prefill."""
    if name == "HotMLACpu":
        model = Model(HotMLACpuImpl, HotMLACpuMetadataBuilder, query_len=3)
    else:
        model = make_cuda_model(name, cuda_modules["backend"], monkeypatch, query_len=3)
    choice, requests = random.Random(1), [Request(1 + 9 * i, list(range(10 * i, 10 * i + 10)), i) for i in range(3)]
    for i, request in enumerate(requests[:2]):
        model.start(request)
        model.step((request, 5 + 9 * i))
    for index in range(16):
        lengths = sorted(choice.choice([3, 3, choice.randint(1, 3)]) for _ in requests[:2])
        batch = list(zip(choice.sample(requests[:2], 2), lengths, strict=True))
        if index == 6:
            model.start(requests[2])
            batch.append((requests[2], 12))
        model.step(*batch, layer_writes=layer_writes and name != "HotMLACpu" and index != 6)
        for request, length in batch[:2]:
            request.num_computed -= choice.randint(0, length - 1)
            request.num_computed -= 2 * (request.num_computed > 30)
            request.reject(request.num_computed)
    for request in requests:
        model.check_host(request)
    hits, misses = model.buffer.counts.take()
    assert hits > 0 and misses > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["HotFlashMLA", "HotFlashAttnMLA"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_microbatches(
    cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, name: str, query_len: int
) -> None:
    """Requests of a microbatch attend to their own rows; steps in which not all decode alike have no microbatches."""
    backend = cuda_modules["backend"]
    monkeypatch.setattr(cuda_modules["microbatches"], "MIN_REQUESTS", 2)
    monkeypatch.setattr(cuda_modules["microbatches"], "LEAST_REQUESTS", 1)
    monkeypatch.setattr(backend, "join_query", lambda nope, rope: torch.cat((nope, rope), -1))
    model = make_cuda_model(name, backend, monkeypatch, query_len=query_len)
    requests = [Request(1 + 9 * i, list(range(10 * i, 10 * i + 10)), i) for i in range(3)]
    for request in requests:
        model.start(request)
        model.step((request, 9))
    for _ in range(20 // query_len):
        model.step(*((request, query_len) for request in requests), in_microbatches=True)
    for request in requests:
        model.check_host(request)
    hits, misses = model.buffer.counts.take()
    assert hits > 0 and misses > 0
    short, *others = [(requests[i], max(query_len - (i == 0), 1)) for i in range(3)]
    assert bool(model.microbatches(short, *others)) == (query_len == 1)
    assert not model.microbatches(*others)
    assert not model.microbatches(*others, (requests[0], query_len + 1))


def test_groups_that_share_the_staging_memory(model: Model) -> None:
    """Histories too long for one group: the second one's selections do not start the batch."""
    first, second = Request(1, list(range(10)), 0), Request(8, list(range(10, 20)), 1)
    for request in (first, second):
        model.start(request)
        model.step((request, 21))
    model.step((first, 2), (second, 5))
    for request in (first, second):
        model.check_host(request)


def test_attention_over_a_prompt_alone_is_not_copied(
    cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as 8K tokens of all heads; beside other groups, the parts are joined in one tensor."""
    backend, found = cuda_modules["backend"], []
    model = make_cuda_model("HotFlashMLA", backend, monkeypatch)

    def forward(*args: Any) -> tuple[torch.Tensor, None]:
        found.append(stock_forward(*args)[0])
        return found[-1], None

    monkeypatch.setattr(backend.FlashMLASparseImpl, "forward_mqa", forward)
    first, second = Request(1, list(range(10)), 0), Request(8, list(range(10, 20)), 1)
    for request in (first, second):
        model.start(request)
    model.step((first, 6))
    assert [out.data_ptr() for out in model.outputs] == [out.data_ptr() for out in found]
    model.step((first, 1), (second, 9))
    assert model.outputs[-1].data_ptr() not in {out.data_ptr() for out in found}


@pytest.mark.long
def test_rows_that_the_layer_has_written(cuda_model: Model) -> None:
    request, model = Request(1, list(range(10)), 0), cuda_model
    model.start(request)
    model.step((request, 7))
    for _ in range(10):
        model.step((request, 1), layer_writes=True)
    model.check_host(request)


def test_block_tables_of_no_request_give_zeros_and_touch_no_state(model: Model) -> None:
    """Profiling and padding."""
    known, unknown = Request(1, list(range(10)), 0), Request(8, list(range(10, 20)), 1)
    model.start(known)
    model.step((known, 6))
    host, counts = model.host.clone(), model.buffer.counts.by_seq.clone()
    model.step((unknown, 1), expect_zeros=True)
    assert torch.equal(model.host.nan_to_num(-1), host.nan_to_num(-1))
    assert torch.equal(model.buffer.counts.by_seq, counts)
    model.step((known, 1))


def test_a_layer_without_storage_gets_no_metadata(cuda_modules: dict[str, ModuleType]) -> None:
    """vLLM captures CUDA graphs once before there is a connector, to see how much memory they take."""
    backend = cuda_modules["backend"]
    builder = SimpleNamespace(impl=bare(backend.HotFlashMLAImpl))
    assert backend.HotMLAMetadataBuilder.build(builder, 0, None) is None


def test_steps_whose_parts_would_share_a_plan_or_a_workspace_are_not_divided(
    cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_modules["microbatches"], "MIN_REQUESTS", 2)
    monkeypatch.setattr(cuda_modules["microbatches"], "LEAST_REQUESTS", 1)
    requests = [Request(1 + 9 * i, list(range(10 * i, 10 * i + 10)), i) for i in range(3)]
    for name, is_divided in (("HotFlashAttnMLA", True), *((name, False) for name in ("HotFlashInferMLA", *SM100))):
        model = make_cuda_model(name, cuda_modules["backend"], monkeypatch)
        for request in requests:
            request.num_computed = 0
            model.start(request)
            model.step((request, 9))
        assert bool(model.microbatches(*((request, 1) for request in requests))) == is_divided


def test_rows_in_fp8_are_divided_by_the_layers_scale() -> None:
    adapter, calls = import_module("vllm_hisparse.compat.flashinfer"), []
    state = SimpleNamespace(pack_indices=lambda ids: None)
    state.wrapper = SimpleNamespace(run=lambda *args, **scales: calls.append((args, scales)))
    impl = SimpleNamespace(use_fp8_kv_cache=True, kv_lora_rank=LATENT)
    rows = torch.randn(5, WIDTH).to(torch.float8_e4m3fn)
    adapter.attend_to_planned_rows(
        impl, state, (None, None), rows.view(torch.uint8), None, SimpleNamespace(_k_scale_float=0.5)
    )
    ((_, _, latent, rope), scales) = calls[0]
    assert scales == {"ckv_scale": 0.5, "kpe_scale": 1.0}
    assert torch.equal(torch.cat((latent.float(), rope.float()), -1).squeeze(1), rows.float())
