"""Which objects of vLLM get which classes of ours, and what is refused on the way."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_hisparse.attention import attach
from vllm_hisparse.attention.gqa.base import HotGQAAttention
from vllm_hisparse.attention.mla.base import HotMLAAttention
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.cpu.full_kv_mla import SparseMLACpuImpl
from vllm_hisparse.cpu.gqa import HotGQACpuBackend, HotGQACpuImpl
from vllm_hisparse.cpu.indexer import IndexerCpu
from vllm_hisparse.cpu.mla import HotMLACpuBackend, HotMLACpuImpl

FULL_KV_LAYERS = [1]


def make(cls: type, **attributes: Any) -> Any:
    """An object of vLLM's class, as far as these tests look at it."""
    built = object.__new__(cls)
    built.__dict__.update(attributes)
    return built


def vllm_config(connector: str | None = "HiSparseHostConnector", is_dsa: bool = False, **layers: Any) -> Any:
    text_config = SimpleNamespace(num_hidden_layers=4, **({"index_topk": 64} if is_dsa else {}))
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        model_config=SimpleNamespace(use_mla=is_dsa, hf_text_config=text_config),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


@pytest.fixture(autouse=True)
def full_kv_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(full_kv_layers=FULL_KV_LAYERS)
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))


class Backend:
    def __init__(self, name: str):
        self.name = name

    def get_name(self) -> str:
        return self.name


class MLALayers:
    """A DSA model on CUDA: two fused layers, one of the generic class, one that is not sparse."""

    def __init__(self, fused_class: type, impl_class: type, backend: str = "FLASHMLA_SPARSE"):
        self.fused = [self.layer(fused_class, impl_class, backend) for _ in range(2)]
        self.generic = self.layer(MLAAttention, impl_class, backend)
        self.other = self.layer(MLAAttention, impl_class, "ANOTHER", use_sparse=False)

    @staticmethod
    def layer(cls: type, impl_class: type, backend: str, use_sparse: bool = True) -> MLAAttention:
        impl = make(impl_class, weights="of the layer")
        return make(
            cls,
            use_sparse=use_sparse,
            impl=impl,
            attn_backend=Backend(backend),
            prefill_backend="dense",
            _dense_mha_metadata_layer_name="layer",
        )

    def modules(self) -> list[Any]:
        return [torch.nn.Linear(1, 1), *self.fused, self.generic, self.other]


def test_sparse_mla_layers_on_cuda(cuda_modules: dict[str, ModuleType]) -> None:
    backend, layers = cuda_modules["backend"], cuda_modules["layers"]
    model = MLALayers(layers.DeepseekV32Attention, backend.FlashMLASparseImpl)
    stock = [layer.impl for layer in model.fused]
    attach.attach_hot_buffers(model, vllm_config(is_dsa=True))
    assert [type(layer) for layer in model.fused] == [layers.HotDeepseekV32Attention] * 2
    assert type(model.generic) is HotMLAAttention and type(model.other) is MLAAttention
    for layer, before in zip(model.fused, stock, strict=True):
        assert layer.attn_backend is backend.HotFlashMLABackend
        assert type(layer.impl) is backend.HotFlashMLAImpl and layer.impl.weights == "of the layer"
        before.processed = True  # what vLLM does to the implementation that it built
        assert layer.impl.processed
        assert (layer.prefill_backend, layer._dense_mha_metadata_layer_name) == (None, "")
    assert model.other.prefill_backend == "dense" and type(model.other.impl) is backend.FlashMLASparseImpl


def test_hot_backends_report_the_names_of_vllms(cuda_modules: dict[str, ModuleType]) -> None:
    """NIXL's handshake compares them between the two sides."""
    backends = cuda_modules["backend"].HOT_BACKENDS
    assert set(backends) == {"FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"}
    assert all(backend.get_name() == name for name, backend in backends.items())


def test_an_mla_backend_without_hot_buffers_is_refused(cuda_modules: dict[str, ModuleType]) -> None:
    layers, backend = cuda_modules["layers"], cuda_modules["backend"]
    model = MLALayers(layers.DeepseekV32Attention, backend.FlashMLASparseImpl, "FLASHINFER_MLA_SPARSE")
    expected = "^--attention-backend: got 'FLASHINFER_MLA_SPARSE', expected FLASHMLA_SPARSE or FLASH_ATTN_MLA_SPARSE"
    with pytest.raises(HiSparseConfigError, match=expected):
        attach.attach_hot_buffers(model, vllm_config(is_dsa=True))


def gqa_layer(index: int, impl_class: type, backend: str = "FLASH_ATTN", **changes: Any) -> Attention:
    plain = {
        "sliding_window": (-1, -1),
        "alibi_slopes": None,
        "logits_soft_cap": 0,
        "sinks": None,
        "kv_sharing_target_layer_name": None,
        "vllm_flash_attn_version": 3,
    }
    impl = make(impl_class, **plain | changes)
    name = f"model.layers.{index}.self_attn.attn"
    return make(Attention, layer_name=name, attn_backend=Backend(backend), impl=impl, attn_type="decoder")


def test_a_subclass_of_an_implementation_is_never_dropped(cuda_modules: dict[str, ModuleType]) -> None:
    """It may attend differently, with sinks for example: hot buffers would lose that without an error."""
    backend, layers = cuda_modules["backend"], cuda_modules["layers"]

    class WithSinks(backend.FlashMLASparseImpl):
        pass

    model = MLALayers(layers.DeepseekV32Attention, WithSinks)
    with pytest.raises(HiSparseConfigError, match="got 'WithSinks', expected FlashMLASparseImpl"):
        attach.attach_hot_buffers(model, vllm_config(is_dsa=True))
    assert type(model.fused[0]) is layers.DeepseekV32Attention, "half changed"

    class OtherLayer(layers.DeepseekV32Attention):
        pass

    model = MLALayers(OtherLayer, backend.FlashMLASparseImpl)
    with pytest.raises(HiSparseConfigError, match="got 'OtherLayer', expected"):
        attach.attach_hot_buffers(model, vllm_config(is_dsa=True))


def test_a_subclass_of_a_dense_layer_is_never_dropped(gqa_cuda: ModuleType) -> None:
    class WithSinks(gqa_cuda.FlashAttentionImpl):
        pass

    class OtherLayer(Attention):
        pass

    layer = gqa_layer(0, WithSinks)
    with pytest.raises(HiSparseConfigError, match="got 'WithSinks', expected FlashAttentionImpl"):
        attach.attach_hot_buffers(SimpleNamespace(modules=lambda: [layer]), vllm_config())
    layer = gqa_layer(0, gqa_cuda.FlashAttentionImpl)
    layer.__class__ = OtherLayer
    with pytest.raises(HiSparseConfigError, match="got 'OtherLayer', expected Attention"):
        attach.attach_hot_buffers(SimpleNamespace(modules=lambda: [layer]), vllm_config())


def test_layers_of_a_dense_model_on_cuda_but_full_kv_layers(gqa_cuda: ModuleType) -> None:
    layers = [gqa_layer(index, gqa_cuda.FlashAttentionImpl) for index in range(3)]
    attach.attach_hot_buffers(SimpleNamespace(modules=lambda: layers), vllm_config())
    assert [type(layer) for layer in layers] == [HotGQAAttention, Attention, HotGQAAttention]
    assert layers[0].attn_backend is gqa_cuda.HotGQABackend and type(layers[0].impl) is gqa_cuda.HotGQAImpl
    assert type(layers[1].impl) is gqa_cuda.FlashAttentionImpl
    assert gqa_cuda.HotGQABackend.get_name() == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "TRITON_ATTN"}, "^--attention-backend: got 'TRITON_ATTN', expected FLASH_ATTN"),
        ({"sliding_window": (511, 0)}, "^sliding_window of an attention layer: got 512"),
        ({"vllm_flash_attn_version": 2}, "^attention backend: got 'FlashAttention 2'"),
        ({"logits_soft_cap": 30.0}, "^logits_soft_cap of an attention layer: got 30.0"),
    ],
)
def test_layers_of_a_dense_model_on_cuda_that_are_refused(
    gqa_cuda: ModuleType, changes: dict[str, Any], message: str
) -> None:
    layers = [gqa_layer(0, gqa_cuda.FlashAttentionImpl, **changes)]
    with pytest.raises(HiSparseConfigError, match=message):
        attach.attach_hot_buffers(SimpleNamespace(modules=lambda: layers), vllm_config())


def mla_wrapper(index: int = 0, indexer: Any = None, is_sparse: bool = True) -> SimpleNamespace:
    """vLLM's outer layer with an attention layer of full KV."""
    impl = make(SparseMLACpuImpl, num_heads=3)
    layer = make(MLAAttention, layer_name=f"model.layers.{index}.self_attn.attn", attn_backend=None, impl=impl)
    return SimpleNamespace(indexer=indexer, is_sparse=is_sparse, mla_attn=layer)


@pytest.mark.parametrize(
    ("connector", "index", "is_hot"),
    [(None, 3, False), ("HiSparseHostConnector", 3, True), ("HiSparseHostConnector", 4, False)],
)
def test_mla_layers_on_the_cpu(connector: str | None, index: int, is_hot: bool) -> None:
    """Layers of the model, whose KV is on the host; the fifth one drafts."""
    wrapper = mla_wrapper(index, make(Indexer))
    attach.attach_mla_cpu(wrapper, vllm_config(connector, is_dsa=True))
    layer = wrapper.mla_attn
    assert type(wrapper.indexer) is IndexerCpu and layer.impl.num_heads == 3
    kinds = (HotMLAAttention, HotMLACpuImpl) if is_hot else (MLAAttention, SparseMLACpuImpl)
    assert (type(layer), type(layer.impl)) == kinds
    assert (layer.attn_backend is HotMLACpuBackend) == is_hot


def test_mla_layers_without_an_indexer_on_the_cpu() -> None:
    """A layer that shares another's indexer is sparse, too; one of a model without indexers is left alone."""
    shared, plain = mla_wrapper(), mla_wrapper(is_sparse=False)
    for wrapper in (shared, plain):
        attach.attach_mla_cpu(wrapper, vllm_config())
    assert type(shared.mla_attn) is HotMLAAttention and type(plain.mla_attn) is MLAAttention


def test_layers_of_a_dense_model_on_the_cpu_but_full_kv_layers() -> None:
    layers = {}
    for index in range(3):
        name = f"model.layers.{index}.self_attn.attn"
        layers[name] = make(Attention, layer_name=name, impl=make(CPUAttentionBackendImpl), attn_backend="stock")
    config = vllm_config(**{"no attention": object()}, **layers)
    for layer in layers.values():
        attach.attach_gqa_cpu(layer.impl, config)
    assert [type(layer) for layer in layers.values()] == [HotGQAAttention, Attention, HotGQAAttention]
    assert [layer.attn_backend for layer in layers.values()] == [HotGQACpuBackend, "stock", HotGQACpuBackend]
    assert [type(layer.impl) for layer in layers.values()] == [HotGQACpuImpl, CPUAttentionBackendImpl, HotGQACpuImpl]


@pytest.mark.parametrize(("capability", "is_tried"), [((9, 0), True), ((10, 0), False), ((8, 0), False), (None, False)])
def test_a_gpu_that_was_never_tried_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, is_tried: bool
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(attach.logger, "warning_once", lambda text, *args: warnings.append(text % args), raising=False)
    platform = SimpleNamespace(
        get_device_capability=lambda: None if capability is None else DeviceCapability(*capability),
        get_device_name=lambda: "Some GPU",
    )
    monkeypatch.setattr(attach, "current_platform", platform)
    attach.warn_of_untried_device()
    assert len(warnings) == (not is_tried)
    expected = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
    assert all(f"(Some GPU, compute capability {expected})" in warning for warning in warnings)
