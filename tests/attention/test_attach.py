"""Which objects of vLLM get which classes of ours, and what is refused on the way."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
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
UNIT = 1  # tokens


def make(cls: type, **attributes: Any) -> Any:
    """An object of vLLM's class, as far as these tests look at it."""
    built = object.__new__(cls)
    built.__dict__.update(attributes)
    return built


def vllm_config(connector: str | None = "HiSparseHostConnector", is_dsa: bool = False, num_layers: int = 4) -> Any:
    text_config = SimpleNamespace(num_hidden_layers=num_layers, **({"index_topk": 64} if is_dsa else {}))
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        model_config=SimpleNamespace(use_mla=is_dsa, hf_text_config=text_config),
    )


@pytest.fixture(autouse=True)
def full_kv_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(_: type, engine: Any) -> SimpleNamespace:
        family = "mla" if engine.model_config.use_mla else "gqa"
        return SimpleNamespace(
            full_kv_layers=FULL_KV_LAYERS,
            algorithm_class=SimpleNamespace(model_family=family),
            tokens_per_unit=UNIT,
            kv_cache_dtypes=lambda _: ("auto", "bfloat16"),
        )

    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(config))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(attach, "warn_of_untried_device", lambda: None)


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

    def named_modules(self) -> list[tuple[str, Any]]:
        modules = [torch.nn.Linear(1, 1), *self.fused, self.generic, self.other, make(DeepseekV32IndexerCache)]
        return [(f"model.layers.{index}.attn", module) for index, module in enumerate(modules)]


@pytest.mark.usefixtures("on_cuda")
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


@pytest.mark.usefixtures("on_cuda")
def test_an_mla_backend_without_hot_buffers_is_refused(cuda_modules: dict[str, ModuleType]) -> None:
    layers, backend = cuda_modules["layers"], cuda_modules["backend"]
    model = MLALayers(layers.DeepseekV32Attention, backend.FlashMLASparseImpl, "FLASHINFER_MLA_SPARSE")
    expected = "^--attention-backend: got 'FLASHINFER_MLA_SPARSE', expected FLASHMLA_SPARSE or FLASH_ATTN_MLA_SPARSE"
    with pytest.raises(HiSparseConfigError, match=expected):
        attach.attach_hot_buffers(model, vllm_config(is_dsa=True))


def gqa_layer(index: int, impl_class: type, backend: str = "FLASH_ATTN", **changes: Any) -> Attention:
    """A plain layer; `changes` are of the layer, or of its implementation with a prefix `impl__`."""
    own = {name.removeprefix("impl__"): value for name, value in changes.items() if name.startswith("impl__")}
    impl = {"alibi_slopes": None, "logits_soft_cap": 0, "vllm_flash_attn_version": 3, "kv_cache_dtype": "auto"}
    plain = {
        "layer_name": f"model.layers.{index}.self_attn.attn",
        "attn_backend": Backend(backend),
        "impl": make(impl_class, **impl | own),
        "attn_type": "decoder",
        "sliding_window": None,
        "has_sink": False,
        "kv_sharing_target_layer_name": None,
        "use_mm_prefix": False,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "kv_cache_dtype": "auto",
    }
    layer_class = changes.pop("layer_class", Attention)
    return make(layer_class, **plain | {name: value for name, value in changes.items() if "__" not in name})


def model_of(layers: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(named_modules=lambda: [(getattr(each, "layer_name", "other"), each) for each in layers])


@pytest.mark.usefixtures("on_cuda")
def test_layers_of_a_dense_model_on_cuda_but_full_kv_layers(gqa_cuda: ModuleType) -> None:
    layers = [gqa_layer(index, gqa_cuda.FlashAttentionImpl) for index in range(3)]
    attach.attach_hot_buffers(model_of(layers), vllm_config(num_layers=3))
    assert [type(layer) for layer in layers] == [HotGQAAttention, Attention, HotGQAAttention]
    assert layers[0].attn_backend is gqa_cuda.HotFlashAttnBackend and type(layers[0].impl) is gqa_cuda.HotFlashAttnImpl
    assert type(layers[1].impl) is gqa_cuda.FlashAttentionImpl
    assert gqa_cuda.HotFlashAttnBackend.get_name() == "FLASH_ATTN"


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "FLEX_ATTENTION"},
            "^--attention-backend: got 'FLEX_ATTENTION', expected FLASH_ATTN or TRITON_ATTN",
        ),
        (
            {"impl__vllm_flash_attn_version": 2},
            "^--attention-backend: got 'FLASH_ATTN', expected .*units of 1 .*multiple of 16 tokens",
        ),
    ],
)
def test_backends_of_a_dense_model_on_cuda_that_are_refused(
    gqa_cuda: ModuleType, changes: dict[str, Any], message: str
) -> None:
    layers = [gqa_layer(0, gqa_cuda.FlashAttentionImpl, **changes)]
    with pytest.raises(HiSparseConfigError, match=message):
        attach.attach_hot_buffers(model_of(layers), vllm_config(num_layers=1))


@pytest.mark.usefixtures("on_cuda")
def test_triton_layers_of_a_dense_model_on_cuda(gqa_cuda: ModuleType) -> None:
    from vllm_hisparse.attention.gqa.triton_cuda import HotTritonBackend, HotTritonImpl, TritonAttentionImpl

    layers = [gqa_layer(index, TritonAttentionImpl, "TRITON_ATTN", impl__use_td=False) for index in range(2)]
    attach.attach_hot_buffers(model_of(layers), vllm_config(num_layers=2))
    assert layers[0].attn_backend is HotTritonBackend and type(layers[0].impl) is HotTritonImpl
    assert type(layers[1].impl) is TritonAttentionImpl and HotTritonBackend.get_name() == "TRITON_ATTN"


def test_nothing_is_attached_without_the_connector() -> None:
    layers = [gqa_layer(0, CPUAttentionBackendImpl, sliding_window=9)]
    for connector in (None, "NixlConnector"):
        attach.attach_hot_buffers(model_of(layers), vllm_config(connector, num_layers=1))
    assert type(layers[0]) is Attention


def test_what_a_layers_own_class_adds_is_kept_or_refused(cuda_modules: dict[str, ModuleType]) -> None:
    """Attention sinks, as HY-V4 adds them: a class of the model over vLLM's, under the same name."""
    backend = cuda_modules["backend"]

    class Sinks(backend.FlashMLASparseImpl):
        def _bf16_flash_mla_kernel(self) -> str:
            return "with sinks"

        def forward_mqa(self, *args: Any) -> tuple[str, None]:
            return self._bf16_flash_mla_kernel(), None

    hot = attach.derive_hot_class(backend.HotFlashMLAImpl, Sinks)
    assert issubclass(hot, Sinks) and hot.vllm_class is Sinks
    impl = make(hot, wave=None, decode_cache=None)
    impl.topk_indices_buffer = torch.zeros(3)
    assert impl._decode((1, 2), SimpleNamespace(decode=None), None) == "with sinks"
    assert impl._for_tokens(hot.vllm_class, 1).forward_mqa() == ("with sinks", None)  # requests that prefill
    assert attach.derive_hot_class(backend.HotFlashMLAImpl, backend.FlashMLASparseImpl) is backend.HotFlashMLAImpl


@pytest.mark.parametrize("name", ["HotFlashAttnMLAImpl", "HotFlashMLAImpl"])
def test_a_class_whose_changes_would_be_lost_is_refused(cuda_modules: dict[str, ModuleType], name: str) -> None:
    """FlashAttention's rows are read by a call of ours; a selection is located by ours, whatever the class does."""
    hot = getattr(cuda_modules["backend"], name)
    changes = {"_convert_logical_to_physical_topk": lambda self: None} if hot.runs_own_class else {}
    own = type("Own", (hot.vllm_class,), changes)
    with pytest.raises(HiSparseConfigError, match=r"^--attention-backend: got 'layers with Own.*would be lost"):
        attach.derive_hot_class(hot, own)
    with pytest.raises(HiSparseConfigError, match=r"^--attention-backend: got 'layers with Another"):
        attach.derive_hot_class(hot, type("Another", (), {}))


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
    layers = [gqa_layer(index, CPUAttentionBackendImpl) for index in range(3)]
    attach.attach_hot_buffers(model_of([torch.nn.Linear(1, 1), *layers]), vllm_config(num_layers=3))
    assert [type(layer) for layer in layers] == [HotGQAAttention, Attention, HotGQAAttention]
    assert [layer.attn_backend is HotGQACpuBackend for layer in layers] == [True, False, True]
    assert [type(layer.impl) for layer in layers] == [HotGQACpuImpl, CPUAttentionBackendImpl, HotGQACpuImpl]


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
