"""Who writes the new rows of a step on CUDA: the fused kernel or the backend. vLLM's own layer is replaced."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import bare
from vllm.config import CUDAGraphMode

from vllm_hisparse.attention.mla.base import HotMLAImpl
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape

PREFIX, KEYS = "model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"
ROWS = torch.zeros(3, 1), torch.zeros(3, 1)


@pytest.fixture
def layers(cuda_modules: dict[str, ModuleType]) -> ModuleType:
    return cuda_modules["layers"]


class Impl(HotMLAImpl):
    def begin_decode(self, num_decode_tokens: int) -> tuple[str, str]:
        return "hot rows", f"slots of {num_decode_tokens}"


def run_layer(
    layers: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, num_decode_tokens: int | None
) -> tuple[Any, Any, Any]:
    """One forward of three tokens: the kernel's cache and slots, and the rows that the backend is to write."""
    found: list[Any] = []
    slot_mapping = {KEYS: "indexer's slots"}
    context = SimpleNamespace(slot_mapping=slot_mapping, cudagraph_runtime_mode=mode)
    metadata = (
        None if num_decode_tokens is None else SimpleNamespace(num_decode_tokens=num_decode_tokens, microbatches=())
    )

    def forward(layer: Any, positions: torch.Tensor, _hidden_states: torch.Tensor) -> None:
        found.extend((layer.kv_cache, slot_mapping[PREFIX]))
        layer._sparse_indexer_and_attn(positions, *[None] * 6, *ROWS)

    monkeypatch.setattr(layers, "get_forward_context", lambda: context)
    monkeypatch.setattr(layers, "get_attention_context", lambda _name: (metadata, None, None, None))
    monkeypatch.setattr(layers.DeepseekV32Attention, "forward", forward)
    monkeypatch.setattr(
        layers.DeepseekV32Attention,
        "_sparse_indexer_and_attn",
        lambda layer, *_args: found.append(layer.impl.new_rows),
    )
    indexer = SimpleNamespace(k_cache=SimpleNamespace(prefix=KEYS))
    attributes = {"layer_name": PREFIX, "impl": Impl(), "indexer": indexer, "kv_cache": "of another step"}
    layer = bare(layers.HotDeepseekV32Attention, **attributes)
    layer.forward(torch.arange(3), torch.zeros(3, 1))
    assert layer.impl.new_rows is None, "the rows of a step are kept"
    return tuple(found)


@pytest.mark.parametrize(
    ("microbatches", "runs_whole", "is_divided"),
    [(("some",), False, True), (("some",), True, False), ((), False, False)],
)
def test_a_step_is_divided_unless_it_is_to_run_whole(
    layers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    microbatches: tuple[str, ...],
    runs_whole: bool,
    is_divided: bool,
) -> None:
    calls: list[Any] = []
    context = SimpleNamespace(slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    metadata = SimpleNamespace(num_decode_tokens=3, microbatches=microbatches)
    monkeypatch.setattr(layers, "get_forward_context", lambda: context)
    monkeypatch.setattr(layers, "get_attention_context", lambda _name: (metadata, None, None, None))
    monkeypatch.setattr(layers, "run_in_microbatches", lambda *args: calls.append(args[-1]))
    step = SimpleNamespace(runs_whole=runs_whole, finish=lambda index: calls.append(f"end of {index}"))
    impl = SimpleNamespace(hot_buffer=SimpleNamespace(step=step), layer_index=5)
    layer = bare(layers.HotDeepseekV32Attention, layer_name=PREFIX, impl=impl)
    layer.select_and_attend(lambda *_: calls.append("whole"), [torch.arange(3)])
    assert calls == ([microbatches, "end of 5"] if is_divided else ["whole"])


@pytest.mark.parametrize("divides_steps", [True, False])
def test_the_forms_of_an_engines_steps(layers: ModuleType, divides_steps: bool) -> None:
    forms = import_module("vllm_hisparse.attention.mla.step_forms").MicrobatchForms
    shape = HotBufferShape(99, 99, 2, 8, 10, 64, 1, max_hot_blocks=20, rows_per_hot_block=40)
    step = SimpleNamespace(runs_whole=False)
    hot_buffer = SimpleNamespace(shape=shape, selects=[True, True], step=step)
    impl = SimpleNamespace(hot_buffer=None, divides_steps=divides_steps)
    layer = bare(layers.HotDeepseekV32Attention, impl=impl, indexer=object())
    context = {"other": object(), "layer": layer}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    if not divides_steps:
        assert forms.find(config) is None
        return
    found = forms.find(config)
    found.runs_whole = True
    assert not found.runs_whole, "no storage yet"
    assert [found.has_two(num, num) for num in (23, 24, 128, 129)] == [False, True, True, False]
    impl.hot_buffer = hot_buffer
    found = forms.find(config)
    assert [found.has_two(num, num) for num in (23, 24)] == [False, True]
    assert not found.has_two(24, 48), "a graph of requests that prefill"
    found.runs_whole = True
    assert step.runs_whole and forms.find(config).runs_whole
    hot_buffer.shape = replace(shape, num_device_blocks=10**6)
    assert found.has_two(24, 24), "ranks whose memory differs capture the same graphs"
    context["next"] = bare(layers.HotDeepseekV32Attention, impl=impl, indexer=None)
    assert forms.find(config) is None, "layers that share an indexer"
    del context["layer"], context["next"]
    assert forms.find(config) is None


def test_steps_of_drafts_have_two_forms_if_every_request_has_all_of_its_drafts(layers: ModuleType) -> None:
    del layers
    forms = import_module("vllm_hisparse.attention.mla.step_forms").MicrobatchForms
    shape = HotBufferShape(99, 99, 2, 8, 10, 64, 1, max_hot_blocks=20, rows_per_hot_block=40, max_query_len=3)
    found = forms(SimpleNamespace(shape=shape, selects=[True, True], step=SimpleNamespace(runs_whole=False)))
    assert [found.has_two(30, num_tokens) for num_tokens in (30, 60, 90)] == [False, False, True]


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_the_kernel_writes_where_every_token_decodes(
    layers: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    assert run_layer(layers, monkeypatch, mode, 3) == ("hot rows", "slots of 3", None)


@pytest.mark.parametrize(
    ("mode", "num_decode_tokens"),
    [
        (CUDAGraphMode.PIECEWISE, 3),  # replayed for other batches
        (CUDAGraphMode.NONE, 2),  # a prefill, or padding
        (CUDAGraphMode.NONE, 0),
        (CUDAGraphMode.FULL, None),  # before there is storage
    ],
)
def test_the_backend_writes_otherwise(
    layers: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, num_decode_tokens: int | None
) -> None:
    cache, slots, rows = run_layer(layers, monkeypatch, mode, num_decode_tokens)
    assert (cache, slots) == (None, "indexer's slots")
    assert (rows.kv_c is ROWS[0]) and (rows.k_pe is ROWS[1])
