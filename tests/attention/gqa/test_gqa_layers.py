"""Layers of dense models: prefill, decode, and every source of KV, with the code of both devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_under_test import (
    HEAD_SIZE,
    MAX_TOKENS,
    NUM_HEADS,
    CpuLayer,
    CudaLayer,
    FlashAttnLayer,
    FlashInferLayer,
    Fp8FlashAttnLayer,
    Fp8TritonLayer,
    LayerUnderTest,
    Request,
    RoundedRequest,
    TritonLayer,
    flashinfer_cuda,
)
from stand_ins import bare
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, get_kv_quant_mode
from vllm.v1.worker.utils import customize_attention_spec

from vllm_hisparse.algorithms.base import SparseAlgorithm
from vllm_hisparse.algorithms.cluster_kv import ClusterKV
from vllm_hisparse.algorithms.oracle import Oracle
from vllm_hisparse.algorithms.pq_cache import PQCache
from vllm_hisparse.algorithms.quest import Quest
from vllm_hisparse.algorithms.streaming_llm import StreamingLLM
from vllm_hisparse.attention.gqa import flash_attn_cuda, triton_cuda
from vllm_hisparse.attention.gqa.cuda import to_fp8
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.rows.request_table import RequestTable
from vllm_hisparse.layout import KVLayout


def marked_long(*params: type) -> list[Any]:
    return [pytest.param(param, marks=pytest.mark.long) for param in params]


@pytest.fixture(params=[Quest, *marked_long(Oracle, StreamingLLM)])
def algorithm(request: pytest.FixtureRequest) -> type[SparseAlgorithm]:
    return request.param


def skip_units_that_xqa_does_not_read(layer_class: type, algorithm: type[SparseAlgorithm]) -> None:
    if layer_class is FlashInferLayer and algorithm is Oracle:
        pytest.skip("XQA reads pages, not single tokens")


@pytest.fixture(params=[CpuLayer, FlashAttnLayer, *marked_long(TritonLayer, FlashInferLayer)])
def layer(request: pytest.FixtureRequest, algorithm: type[SparseAlgorithm]) -> Iterator[LayerUnderTest]:
    skip_units_that_xqa_does_not_read(request.param, algorithm)
    layer = request.param(algorithm)
    yield layer
    if isinstance(layer, CudaLayer):
        layer.undo()


def assert_latest_are_hot(layer: LayerUnderTest, request: Request) -> None:
    """State after a chunk of a prompt: the latest whole units of the request, as many as fit."""
    last, buffer = request.num_computed // layer.algorithm.tokens_per_unit, layer.buffer
    expected = set(range(max(last - layer.num_slots, 0), last))
    for parts in buffer.requests.hot_block_tables[
        buffer.heads.seqs(buffer.requests.index_of(request.first_hot_block_id))
    ].long():
        hot = buffer.residency[0].positions.view(-1, buffer.layers[0].hot.rows_per_block)[parts]
        assert expected <= set(hot.flatten().tolist())


@pytest.mark.long
def test_prefill_in_chunks_beside_decodes(layer: LayerUnderTest) -> None:
    """Three requests come and decode past several pages, past the budget and past the buffer."""
    first = Request(1, [5, 9, 2, 7, 11, 30, 31], 0)
    second, third = Request(11, [1, 3, 4, 6, 8, 10, 12], 1), Request(21, [13, 14, 15, 16, 17, 18, 19], 2)
    layer.start(first)
    for num in (20, 37, 30, 1, 1):
        layer.step([(first, num)])
    layer.start(second)
    layer.step([(first, 1), (second, 5)])
    layer.start(third)
    layer.step([(third, 64), (second, 2), (first, 1)])
    for _ in range(50):
        layer.step([(second, 1), (first, 1), (third, 1)])
    hits, misses = layer.buffer.counts.take()
    assert hits > misses > 0


@pytest.mark.long
@pytest.mark.parametrize("layer_class", [Fp8FlashAttnLayer, Fp8TritonLayer])
@pytest.mark.parametrize("algorithm_class", [Quest, Oracle])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_kv_in_fp8(layer_class: type[CudaLayer], algorithm_class: type[SparseAlgorithm], max_query_len: int) -> None:
    """Rows that lose nothing in fp8 give the formula's answers; the scales of query, keys and values differ."""
    layer = layer_class(algorithm_class, max_query_len)
    try:
        first = RoundedRequest(1, [5, 9, 2, 7, 11, 30, 31], 0)
        second = RoundedRequest(21, [1, 3, 4, 6, 8, 10, 12], 1)
        layer.start(first)
        for num in (20, 37, 30):
            layer.step([(first, num)])
        layer.start(second)
        layer.step([(second, 64), (first, 1)])
        for _ in range(30):
            layer.step([(second, max_query_len), (first, 1)])
        hits, misses = layer.buffer.counts.take()
        assert hits > misses > 0
        assert layer.host[5].view(torch.float8_e4m3fn).float().isfinite().all()
    finally:
        layer.undo()


@pytest.mark.long
def test_kv_that_arrived_in_the_host_pool(layer: LayerUnderTest) -> None:
    """A transfer or the prefix cache brought the first tokens: a request decodes, or prefills, right after them."""
    former = Request(1, [5, 9, 2, 7, 11, 30, 31], 0)
    layer.start(former)
    layer.step([(former, 75)])
    layer.buffer.release(former.first_hot_block_id)
    other = Request(31, [20, 21, 22, 23, 24, 25, 26], 5)  # leaves its state where the next requests find it
    layer.start(other)
    layer.step([(other, 100)])
    layer.step([(other, 1)])
    layer.buffer.release(other.first_hot_block_id)
    for first_hot_block_id, num in ((10, 1), (20, 9)):
        request = Request(first_hot_block_id, former.host_ids, 0)
        request.num_computed = 75
        layer.start(request)
        layer.step([(request, num)])
        if num > 1:
            assert_latest_are_hot(layer, request)
        for _ in range(20):
            layer.step([(request, 1)])
        layer.buffer.release(first_hot_block_id)


@pytest.mark.long
def test_the_latest_whole_units_of_a_prompt_are_hot(layer: LayerUnderTest) -> None:
    """A prompt that fits, in chunks that end within pages; then one of which only the end fits."""
    short, long = Request(1, [5, 9, 2, 7, 11, 30, 31], 0), Request(11, [1, 3, 4, 6, 8, 10, 12], 1)
    layer.start(short)
    for num in (5, 20, 15):
        layer.step([(short, num)])
    layer.step([(short, 1)])
    hits, misses = layer.buffer.counts.take()
    assert hits > 0 == misses
    layer.start(long)
    for num in (130, 37):
        layer.step([(long, num)])
    assert_latest_are_hot(layer, long)
    for _ in range(20):
        layer.step([(long, 1), (short, 1)])


@pytest.mark.long
def test_a_prompt_of_one_token(layer: LayerUnderTest) -> None:
    request = Request(3, [5, 9, 2, 7, 11, 30, 31], 0)
    layer.start(request)
    for _ in range(40):
        layer.step([(request, 1)])


def test_block_tables_of_no_request_give_zeros(algorithm: type[SparseAlgorithm]) -> None:
    """Profiling and padding."""
    layer = CpuLayer(algorithm)
    known, unknown = Request(1, [5, 9, 2, 7, 11, 30, 31], 0), Request(21, [1], 1)
    layer.start(known)
    layer.step([(known, 40)])
    layer.expected = lambda request, span: (
        torch.zeros(len(span), NUM_HEADS, HEAD_SIZE)
        if request is unknown
        else LayerUnderTest.expected(layer, request, span)
    )
    layer.step([(unknown, 3), (known, 1), (unknown, 1)])


def test_no_metadata_gives_zeros(layer: LayerUnderTest) -> None:
    out = torch.full((2, NUM_HEADS, HEAD_SIZE), float("nan"))
    assert not layer.impl.forward(None, out, out, out, None, None, out).any()


@pytest.mark.parametrize("layer_class", [FlashAttnLayer, TritonLayer, FlashInferLayer])
def test_layers_without_storage_get_no_metadata(layer_class: type[CudaLayer]) -> None:
    """vLLM captures CUDA graphs once before there is a connector, to see how much memory they take."""
    layers = {"layer": SimpleNamespace(impl=bare(layer_class.impl_class))}
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    attributes = {"layer_names": ["layer"], "vllm_config": vllm_config, "device": torch.device("cpu")}
    builder = bare(layer_class.builder_class, **attributes)
    builder.allocate(max_query_len=1, max_batch=1)
    assert builder.build(0, None) is None and builder.build_for_cudagraph_capture(None) is None


@pytest.mark.parametrize(
    ("version", "unit", "reason"),
    [
        (2, 16, None),
        (2, 48, None),
        (2, 1, "multiple of 16"),
        (3, 1, None),
        (4, 1, None),
        (5, 16, "FlashAttention 5 is unknown"),
    ],
)
def test_units_that_each_version_of_flash_attention_reads(version: int, unit: int, reason: str | None) -> None:
    impl = SimpleNamespace(vllm_flash_attn_version=version, kv_cache_dtype="auto", fa4_hd256=False)
    found = FlashAttnLayer.impl_class.unsupported(impl, unit)
    assert found is None if reason is None else reason in found


def test_pages_of_flash_attention_4_for_the_largest_heads() -> None:
    impl = SimpleNamespace(vllm_flash_attn_version=4, kv_cache_dtype="auto", fa4_hd256=True)
    assert "pages of 128 tokens" in FlashAttnLayer.impl_class.unsupported(impl, 16)


@pytest.mark.parametrize(("version", "reads"), [(2, False), (3, True), (4, False)])
def test_version_3_of_flash_attention_reads_fp8(version: int, reads: bool) -> None:
    impl = SimpleNamespace(vllm_flash_attn_version=version, kv_cache_dtype="fp8", fa4_hd256=False)
    assert (FlashAttnLayer.impl_class.unsupported(impl, 16) is None) == reads


@pytest.mark.parametrize("scale", [1.0, 0.037])
def test_rows_are_quantised_like_vllms(scale: float) -> None:
    """Saturated beyond the largest number of fp8."""
    rows = torch.tensor([[0.0, 1.3, -17.01, 448.0 * scale, -1e6, 1e6]])
    found = to_fp8(rows, torch.tensor(scale)).view(torch.float8_e4m3fn).float()
    assert found.tolist() == [[*(rows[0, :4] / scale).to(torch.float8_e4m3fn).float().tolist(), -448.0, 448.0]]


@pytest.mark.parametrize(("version", "num_splits"), [(2, 0), (3, 32), (4, 0)])
def test_splits_of_each_version_of_flash_attention(
    monkeypatch: pytest.MonkeyPatch, version: int, num_splits: int
) -> None:
    """Version 2 refuses a number of splits above 1."""
    layer, calls = FlashAttnLayer(Quest), []
    try:
        layer.impl.vllm_flash_attn_version = version
        kernel = layer.module.flash_attn_varlen_func
        monkeypatch.setattr(layer.module, "flash_attn_varlen_func", lambda **call: calls.append(call) or kernel(**call))
        request = Request(3, [5, 9, 2, 7, 11, 30, 31], 0)
        layer.start(request)
        layer.step([(request, 40)])
        layer.step([(request, 1)])
        assert [(call["num_splits"], call["fa_version"]) for call in calls] == [(num_splits, version)]
    finally:
        layer.undo()


@pytest.mark.parametrize(
    "backend", [flash_attn_cuda.HotFlashAttnBackend, triton_cuda.HotTritonBackend, flashinfer_cuda.HotFlashInferBackend]
)
def test_backends_leave_the_spec_of_hot_rows_alone(backend: type) -> None:
    """vLLM's Triton backend adds room for scales to a spec with the quantisation mode that makes vLLM zero blocks."""
    layout = KVLayout(512, 512, 4, 0, 16, 16, 4, 1, 0, ((16, 512),))
    full = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    spec = HotBufferSpec.from_full_spec(full, layout, 128, elastic=True)
    assert customize_attention_spec(backend, spec) == spec


@pytest.mark.parametrize(
    ("kv_cache_dtype", "mode"),
    [("auto", KVQuantMode.NONE), ("bfloat16", KVQuantMode.NONE), ("fp8_e4m3", KVQuantMode.FP8_PER_TENSOR)],
)
@pytest.mark.parametrize("layer_class", [FlashAttnLayer, TritonLayer, FlashInferLayer])
def test_builders_of_vllm_learn_how_kv_is_stored(
    monkeypatch: pytest.MonkeyPatch, layer_class: type[CudaLayer], kv_cache_dtype: str, mode: KVQuantMode
) -> None:
    """FlashInfer's builder does not start if the spec says that KV is quantised, and its dtype says that it is not."""
    layout = KVLayout(512, 512, 4, 0, 16, 16, 4, 1, 0, ((16, 512),))
    full = FullAttentionSpec(
        block_size=16,
        num_kv_heads=4,
        head_size=32,
        dtype=torch.bfloat16,
        kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
    )
    spec = HotBufferSpec.from_full_spec(full, layout, 128, elastic=True)
    assert spec.kv_quant_mode != mode, "the mode that makes vLLM zero blocks"
    found = {}

    def construct(builder: Any, spec: HotBufferSpec, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        found.update(spec=spec)
        builder.vllm_config, builder.device = vllm_config, device

    vllm_class = next(each for each in layer_class.builder_class.__mro__ if each.__module__.startswith("vllm."))
    monkeypatch.setattr(vllm_class, "__init__", construct)
    vllm_config = SimpleNamespace(
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(kv_cache_dtype=kv_cache_dtype)}
        ),
    )
    layer_class.builder_class(spec, ["layer"], vllm_config, torch.device("cpu"))
    assert found["spec"] == replace(spec, kv_quant_mode=mode)


@pytest.mark.parametrize(
    ("capability", "unit", "impl", "reason"),
    [
        ((9, 0), 16, {}, None),
        ((10, 3), 32, {}, None),
        ((12, 0), 128, {}, None),
        ((8, 0), 16, {}, "compute capability 9.0, 10.x and 12.x"),
        (None, 16, {}, "compute capability"),
        ((9, 0), 1, {}, "pages of 16, 32, 64, 128 tokens"),
        ((9, 0), 48, {}, "pages of 16, 32, 64, 128 tokens"),
        ((9, 0), 16, {"head_size": 72}, "multiple of 16 elements up to 256; the model's have 72"),
        ((9, 0), 16, {"head_size": 512}, "the model's have 512"),
        ((9, 0), 16, {"kv_cache_dtype": "fp8"}, "KV in fp8 was never tried"),
    ],
)
def test_what_xqa_reads(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    unit: int,
    impl: dict[str, Any],
    reason: str | None,
) -> None:
    found = capability and DeviceCapability(*capability)
    monkeypatch.setattr(flashinfer_cuda, "current_platform", SimpleNamespace(get_device_capability=lambda: found))
    layer = SimpleNamespace(**{"head_size": 128, "kv_cache_dtype": "auto"} | impl)
    message = FlashInferLayer.impl_class.unsupported(layer, unit)
    assert message is None if reason is None else reason in message


def test_flashinfers_kernel_runs_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled in its first call; padding gets zeros, although the kernel may write NaN."""
    calls: list[dict[str, Any]] = []
    formula = FlashInferLayer.formula
    watched = staticmethod(lambda **call: calls.append(call) or formula(**call))
    monkeypatch.setattr(FlashInferLayer, "formula", watched)
    layer = FlashInferLayer(Quest)
    try:
        (call,) = calls
        assert call["query"].shape == (1, NUM_HEADS // 2, HEAD_SIZE) and not call["out"].any()
        assert call["workspace_buffer"].nbytes > 8 << 20 and not call["workspace_buffer"].any()
    finally:
        layer.undo()


def test_triton_without_tensor_descriptors_reads_any_unit() -> None:
    refuses = [TritonLayer.impl_class.unsupported(SimpleNamespace(use_td=use_td), 1) for use_td in (False, True)]
    assert refuses[0] is None and "VLLM_TRITON_USE_TD" in refuses[1]


@pytest.mark.parametrize(("num_rows", "splits"), [(128, True), (129, False)])
def test_triton_divides_rows_of_small_batches(monkeypatch: pytest.MonkeyPatch, num_rows: int, splits: bool) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(TritonLayer.module, "unified_attention", lambda **call: calls.append(call))
    impl = SimpleNamespace(
        hot_keys=None,
        hot_values=None,
        query_starts=torch.arange(200),
        scale=1.0,
        stores_fp8=False,
        algorithm=SimpleNamespace(tokens_per_unit=16),
    )
    query = torch.zeros(num_rows, 3, 80)
    TritonLayer.impl_class.run_kernel(impl, None, query, torch.zeros(num_rows, 4), torch.ones(num_rows), query)
    (call,) = calls
    assert ("softmax_segm_output" in call) == splits and len(call["cu_seqlens_q"]) == num_rows + 1
    if splits:
        assert call["seq_threshold_3D"] >= num_rows and call["softmax_segm_output"].shape == (num_rows, 3, 16, 128)
        assert call["softmax_segm_max"].shape == call["softmax_segm_expsum"].shape == (num_rows, 3, 16)
    assert call["max_seqlen_k"] == 64


def test_a_prefill_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler half has said which request prefills; only requests with the same positions are looked up."""
    layer, lookups = FlashAttnLayer(Quest), []
    find = RequestTable.find
    monkeypatch.setattr(RequestTable, "find", lambda *args: lookups.append(len(args[1])) or find(*args))
    try:
        first, second = Request(3, [5, 9, 2, 7, 11, 30, 31], 0), Request(13, [1, 3, 4, 6, 8, 10, 12], 1)
        layer.start(first)
        layer.start(second)
        layer.step([(first, 40), (second, 50)])
        layer.step([(first, 7), (second, 1)])
        assert not lookups
        third = Request(25, [13, 14, 15, 16, 17, 18, 19], 2)
        layer.start(third)
        layer.buffer.release(second.first_hot_block_id)
        fourth = Request(13, [1, 3, 4, 6, 8, 10, 12], 3)
        layer.start(fourth)
        layer.step([(third, 20), (fourth, 20)])
        assert lookups == [1, 1]
    finally:
        layer.undo()


@pytest.mark.parametrize(
    "chunks", [(1, 19, 1, 1), (1, 20, 1, 1, 1), (20, 1, 30, 1, 1), (20, 1, 3, 1), (70, 1, 1, 9, 1)]
)
def test_prefill_after_a_step_of_one_token(layer: LayerUnderTest, chunks: tuple[int, ...]) -> None:
    """A hot unit is completed on the host: it must not be taken for whole."""
    request = Request(3, [5, 9, 2, 7, 11, 30, 31], 0)
    layer.start(request)
    for num in chunks:
        layer.step([(request, num)])
        if num > 1:
            assert_latest_are_hot(layer, request)


@pytest.mark.long
@pytest.mark.parametrize("algorithm_class", [ClusterKV, PQCache])
@pytest.mark.parametrize("layer_class", [CpuLayer, FlashAttnLayer, TritonLayer])
def test_a_prompt_of_one_token_of_a_request_with_a_used_index(layer_class: type, algorithm_class: type) -> None:
    """The state of the index's former owner is forgotten: the same answers as with a fresh index."""

    def answers(used: bool) -> list[torch.Tensor]:
        layer = layer_class(algorithm_class)
        try:
            if used:
                former = Request(1, [5, 9, 2, 7, 11, 30, 31], 0)
                layer.start(former)
                for num in (100, *[1] * 40):
                    layer.compute([(former, num)])
                layer.buffer.release(former.first_hot_block_id)
            request = Request(11, [1, 3, 4, 6, 8, 10, 12], 1)
            layer.start(request)
            return [layer.compute([(request, 1)])[0] for _ in range(60)]
        finally:
            if isinstance(layer, CudaLayer):
                layer.undo()

    for fresh, reused in zip(answers(False), answers(True), strict=True):
        torch.testing.assert_close(reused, fresh)


@pytest.fixture(params=[CpuLayer, FlashAttnLayer, *marked_long(TritonLayer, FlashInferLayer)])
def drafting_layer(request: pytest.FixtureRequest, algorithm: type[SparseAlgorithm]) -> Iterator[LayerUnderTest]:
    skip_units_that_xqa_does_not_read(request.param, algorithm)
    layer = request.param(algorithm, max_query_len=4)
    yield layer
    if isinstance(layer, CudaLayer):
        layer.undo()


@pytest.mark.long
def test_drafts(drafting_layer: LayerUnderTest) -> None:
    """Steps of four tokens, some of which are rejected, and of fewer; past several pages, the budget and the buffer,
    beside a prompt; what was rejected is nowhere when the request goes on with a prompt."""
    layer, choose = drafting_layer, random.Random(0)
    torch.manual_seed(0)
    first = Request(1, [5, 9, 2, 7, 11, 30, 31], 0)
    second, third = Request(13, [1, 3, 4, 6, 8, 10, 12], 1), Request(25, [13, 14, 15, 16, 17, 18, 19], 2)
    layer.start(first)
    layer.step([(first, 21)])
    for _ in range(10):
        layer.draft_step([(first, 4, choose.randrange(4))])
    layer.start(second)
    layer.step([(first, 2), (second, 90)])
    layer.start(third)
    layer.step([(third, 6), (second, 1), (first, 4)])
    for _ in range(40):
        sizes = [choose.choice([1, 2, 4, 4]) for _ in range(3)]
        requests = [(first, second, third)[i] for i in choose.sample(range(3), 3)]
        batch = [(r, num, choose.randrange(num)) for r, num in zip(requests, sizes, strict=True)]
        layer.draft_step([item for item in batch if item[0].num_computed < 180])
    layer.step([(third, 9)])
    for _ in range(5):
        layer.draft_step([(third, 4, choose.randrange(1, 4))])
    hits, misses = layer.buffer.counts.take()
    assert hits > misses and (misses > 0) == (not isinstance(layer.algorithm, StreamingLLM))


@pytest.mark.long
@pytest.mark.parametrize("num_rejected", [0, 1])
def test_drafts_open_a_page_that_the_next_step_continues(drafting_layer: LayerUnderTest, num_rejected: int) -> None:
    """Past the buffer, where the page moves to the first reserved slot."""
    layer, request = drafting_layer, Request(1, [5, 9, 2, 7, 11, 30, 31], 0)
    torch.manual_seed(0)
    layer.start(request)
    layer.step([(request, 170)])
    while request.num_computed + 4 <= MAX_TOKENS:
        layer.draft_step([(request, 4, num_rejected)])
