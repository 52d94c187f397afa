"""Attachment: vLLM's objects get classes of the plugin, or are refused."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from beside_flashinfer import import_flashinfer_cuda
from stand_ins import bare
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_hisparse.attention import attach, backends
from vllm_hisparse.attention.gqa.base import HotGQAAttention
from vllm_hisparse.attention.mla.base import HotMLAAttention
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.cpu.full_kv_mla import SparseMLACpuBackend, SparseMLACpuImpl
from vllm_hisparse.cpu.gqa import HotGQACpuBackend, HotGQACpuImpl
from vllm_hisparse.cpu.indexer import IndexerCpuCache
from vllm_hisparse.cpu.mla import HotMLACpuBackend, HotMLACpuImpl

SM100 = {"FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4"} & AttentionBackendEnum.__members__.keys()
FULL_KV_LAYERS = [1]
UNIT = 1  # tokens


def vllm_config(
    connector: str | None = "HiSparseHostConnector", is_dsa: bool = False, num_layers: int = 4, family: str = "gqa"
) -> Any:
    text_config = SimpleNamespace(num_hidden_layers=num_layers, **({"index_topk": 64} if is_dsa else {}))
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        model_config=SimpleNamespace(use_mla=is_dsa, family=family, hf_text_config=text_config),
    )


@pytest.fixture(autouse=True)
def full_kv_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(_: type, engine: Any) -> SimpleNamespace:
        family = "mla" if engine.model_config.use_mla else engine.model_config.family
        return SimpleNamespace(
            full_kv_layers=FULL_KV_LAYERS,
            algorithm_class=SimpleNamespace(model_family=family),
            tokens_per_unit=UNIT,
            has_narrow_keys=getattr(engine, "has_narrow_keys", False),
            kv_cache_dtypes=lambda _: ("auto", "bfloat16"),
        )

    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(config))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(attach, "warn_of_untried_device", lambda: None)
    monkeypatch.setattr(attach, "warn_of_untried_prompts", lambda _: None)


def named(name: str, impl_class: type) -> type:
    """A backend of another name."""
    return type(name, (), {"get_name": lambda: name, "get_impl_cls": lambda: impl_class})


class MLALayers:
    """A DSA model on CUDA: two fused layers, one of the generic class, one that is not sparse."""

    def __init__(self, fused_class: type, backend: type):
        self.fused = [self.layer(fused_class, backend) for _ in range(2)]
        self.generic = self.layer(MLAAttention, backend)
        self.other = self.layer(MLAAttention, named("ANOTHER", backend.get_impl_cls()), use_sparse=False)

    @staticmethod
    def layer(cls: type, backend: type, use_sparse: bool = True) -> MLAAttention:
        return bare(
            cls,
            use_sparse=use_sparse,
            indexer="an indexer",
            head_size=576,
            kv_cache_dtype="auto",
            impl=bare(backend.get_impl_cls(), weights="of the layer"),
            attn_backend=backend,
            prefill_backend="dense",
            _dense_mha_metadata_layer_name="layer",
        )

    def named_modules(self) -> list[tuple[str, Any]]:
        modules = [torch.nn.Linear(1, 1), *self.fused, self.generic, self.other, bare(DeepseekV32IndexerCache)]
        return [(f"model.layers.{index}.attn", module) for index, module in enumerate(modules)]


@pytest.mark.usefixtures("on_cuda")
def test_sparse_mla_layers_on_cuda(cuda_modules: dict[str, ModuleType]) -> None:
    backend, layers = cuda_modules["backend"], cuda_modules["layers"]
    model = MLALayers(layers.DeepseekV32Attention, backend.FlashMLASparseBackend)
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


class NarrowPlatform:
    """A GPU as far as keys in 4 bits look at it."""

    def __init__(self, capability: tuple[int, int] | None):
        self.capability = capability

    def is_cpu(self) -> bool:
        return False

    def get_device_capability(self) -> DeviceCapability | None:
        return None if self.capability is None else DeviceCapability(*self.capability)

    def get_device_name(self) -> str:
        return "Some GPU"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 9), None])
@pytest.mark.usefixtures("on_cuda")
def test_indexers_on_cuda_with_keys_in_4_bits(
    monkeypatch: pytest.MonkeyPatch, cuda_modules: dict[str, ModuleType], capability: tuple[int, int] | None
) -> None:
    """A layer that shares an indexer has none; draft layers are not among the model's."""
    supported: list[bool] = []
    monkeypatch.setattr(attach, "current_platform", NarrowPlatform(capability))
    monkeypatch.setattr(attach, "support_narrow_keys", lambda: supported.append(True))
    layers, backend = cuda_modules["layers"], cuda_modules["backend"]
    model = MLALayers(layers.DeepseekV32Attention, backend.FlashMLASparseBackend)
    indexers = [SimpleNamespace(k_cache=bare(DeepseekV32IndexerCache, head_dim=132)) for _ in model.fused]
    for layer, indexer in zip((*model.fused, model.generic), (*indexers, None), strict=True):
        layer.__dict__["indexer"] = indexer
    engine = vllm_config(is_dsa=True)
    engine.has_narrow_keys = True
    if capability != (9, 0):
        expected = "^indexer_key_dtype: got 'fp4', expected auto on Some GPU: .* compute capability 9.0"
        with pytest.raises(HiSparseConfigError, match=expected):
            attach.attach_hot_buffers(model, engine)
        assert all(indexer.k_cache.head_dim == 132 for indexer in indexers) and not supported
        return
    attach.attach_hot_buffers(model, engine)
    assert all(indexer.k_cache.head_dim == 68 for indexer in indexers) and supported == [True]


@pytest.mark.usefixtures("on_cuda")
def test_flashinfer_layers_of_a_dsa_model_on_hopper(cuda_modules: dict[str, ModuleType]) -> None:
    """Rows in fp8 with one scale per layer: vLLM would view the cache, which a fused layer may lack, as fp8."""
    flashinfer, layers = cuda_modules["flashinfer"], cuda_modules["layers"]
    model = MLALayers(layers.DeepseekV32Attention, flashinfer.FlashInferMLASparseSM90Backend)
    for layer in model.fused:
        layer._fp8_kv_needs_view = True
    attach.attach_hot_buffers(model, vllm_config(is_dsa=True))
    for layer in (*model.fused, model.generic):
        assert layer.attn_backend is flashinfer.HotFlashInferMLABackend and not layer._fp8_kv_needs_view
        assert type(layer.impl) is flashinfer.HotFlashInferMLAImpl
    assert flashinfer.HotFlashInferMLABackend.get_builder_cls() is flashinfer.HotFlashInferMLAMetadataBuilder


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("name", ["FLASHMLA_SPARSE", *sorted(SM100)])
def test_layers_of_a_dsa_model_on_sm100(
    monkeypatch: pytest.MonkeyPatch, cuda_modules: dict[str, ModuleType], name: str
) -> None:
    """Their backends are served; one that has run on no GPU is named in a warning."""
    warnings: list[str] = []
    monkeypatch.setattr(attach.logger, "warning_once", lambda text, *args: warnings.append(text % args), raising=False)
    layers, backend = cuda_modules["layers"], AttentionBackendEnum[name].get_class()
    model = MLALayers(layers.DeepseekV32Attention, backend)
    attach.attach_hot_buffers(model, vllm_config(is_dsa=True))
    hot = cuda_modules["sm100"].HOT_BACKENDS[name]
    for layer in (*model.fused, model.generic):
        assert layer.attn_backend is hot and type(layer.impl) is hot.get_impl_cls()
        assert isinstance(layer.impl, backend.get_impl_cls()) and not layer._fp8_kv_needs_view
    builder = hot.get_builder_cls()
    assert issubclass(builder, backend.get_builder_cls())
    # vLLM would capture graphs for batches whose lengths only the device knows.
    assert builder.get_varlen_cudagraph_max_query_len(vllm_config(is_dsa=True), None) is None
    assert len(warnings) == (3 if name in SM100 else 0)
    assert all(f"{name} has not run on a GPU of this kind" in warning for warning in warnings)


def test_hot_backends_report_the_names_of_vllms(cuda_modules: dict[str, ModuleType]) -> None:
    """NIXL's handshake compares them between the two sides."""
    backends = cuda_modules["sm100"].HOT_BACKENDS
    tried = {"FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90"}
    assert set(backends) == tried | SM100 and "FLASHINFER_MLA_SPARSE" in SM100
    assert all(backend.get_name() == name for name, backend in backends.items())


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("FLASHINFER_MLA_SPARSE_SM120", "vLLM has no other one", "Use a GPU of compute capability 9.0 or 10.0"),
        ("ANOTHER", "FLASHINFER_MLA_SPARSE_SM90", "Set --attention-backend to FLASHMLA_SPARSE or"),
    ],
)
def test_an_mla_backend_without_hot_buffers_is_refused(
    cuda_modules: dict[str, ModuleType], name: str, reason: str, fix: str
) -> None:
    layers, backend = cuda_modules["layers"], cuda_modules["backend"]
    model = MLALayers(layers.DeepseekV32Attention, named(name, backend.FlashMLASparseImpl))
    expected = (
        f"^--attention-backend: got '{name}', expected FLASHMLA_SPARSE or FLASH_ATTN_MLA_SPARSE or.*{reason}.*{fix}"
    )
    with pytest.raises(HiSparseConfigError, match=expected):
        attach.attach_hot_buffers(model, vllm_config(is_dsa=True))


def test_mla_backends_of_newer_gpus_are_hot_or_refused(cuda_modules: dict[str, ModuleType]) -> None:
    """Also those of vLLM 0.33; the table of docs/models.md has all of them."""
    hot = cuda_modules["sm100"].HOT_BACKENDS.keys()
    known = backends.REFUSED_MLA_BACKENDS.keys() | hot
    ours = {name for name in AttentionBackendEnum.__members__ if "MLA_SPARSE" in name or name == "FLASHMLA_SPARSE"}
    elsewhere = {name for name in ours if name.startswith(("ROCM_", "XPU_")) or "_DSV4" in name}
    assert ours - elsewhere <= known, "say whether a new backend is hot, or why not"
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert all(f"| `{name}` |" in page for name in known)
    untried = {name for name in hot if re.search(rf"^\| `{name}` \|.*untried", page, re.MULTILINE)}
    assert untried == hot & set(backends.UNTRIED_MLA_BACKENDS)


def test_the_table_of_mla_backends_is_vllms(cuda_modules: dict[str, ModuleType]) -> None:
    """Which GPUs they are for. A release of vLLM may lack some."""
    assert cuda_modules["sm100"].HOT_BACKENDS.keys() == backends.MLA_BACKENDS.keys() & AttentionBackendEnum.__members__
    for major in range(8, 13):
        capability = DeviceCapability(major, 0)
        of_gpu = {
            name
            for name in (*backends.MLA_BACKENDS, *backends.REFUSED_MLA_BACKENDS)
            if name in AttentionBackendEnum.__members__
            and AttentionBackendEnum[name].get_class().supports_compute_capability(capability)
        }
        served = set(backends.mla_backends(tuple(capability))) & AttentionBackendEnum.__members__.keys()
        assert of_gpu == served | {name for name in [backends.REFUSED_MLA_MAJORS.get(major)] if name}
        assert bool(backends.mla_refusal(tuple(capability))) == (not served)


def test_the_backend_to_set_has_run_with_hot_buffers() -> None:
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert backends.mla_choice(capability) is None
    for capability in ((10, 0), (10, 3)):
        name, reason = backends.mla_choice(capability)
        assert name not in backends.UNTRIED_MLA_BACKENDS
        assert all(untried in reason for untried in backends.UNTRIED_MLA_BACKENDS)


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_the_table_of_gpus_without_minimax_m3_is_vllms(
    msa_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, major: int
) -> None:
    """Elsewhere, vLLM selects blocks with the Triton kernels that hot buffers know."""
    from vllm.models.minimax_m3.common import indexer

    gpu = SimpleNamespace(
        is_cuda=lambda: True,
        is_device_capability_family=lambda family: family // 10 == major,
        supports_fp8=lambda: True,
    )
    own = type("MiniMaxM3IndexerMSAImpl", (), {})
    name = "vllm.models.minimax_m3.nvidia.indexer_msa"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MiniMaxM3IndexerMSAImpl=own))
    monkeypatch.setattr(indexer, "current_platform", gpu)
    engine = SimpleNamespace(attention_config=SimpleNamespace(minimax_m3_indexer_cp=False))  # since vLLM 0.33
    monkeypatch.setattr(indexer, "get_current_vllm_config", lambda: engine, raising=False)
    chosen = indexer.select_indexer_impl_cls(topk_blocks=16)
    assert bool(backends.msa_refusal((major, 0))) == (chosen is not indexer.MiniMaxM3IndexerTritonImpl)


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_the_table_of_heads_that_need_whole_pages_is_vllms(gqa_cuda: ModuleType, major: int) -> None:
    """Start-up refuses FlashAttention where vLLM runs its kernel for such heads, and `plan` chooses another backend."""
    from vllm.v1.attention.backends import fa_utils

    for head_size in (64, 128, 192, 256):
        with pytest.MonkeyPatch.context() as patch:
            gpu = SimpleNamespace(get_device_capability=lambda: DeviceCapability(major, 0))
            patch.setattr(fa_utils, "current_platform", gpu)
            needs_pages = fa_utils.uses_fa4_hd256_kernel(head_size)
        impl = SimpleNamespace(vllm_flash_attn_version=4, kv_cache_dtype="auto", fa4_hd256=needs_pages)
        is_refused = gqa_cuda.HotFlashAttnImpl.unsupported(impl, 16) is not None
        choice = backends.dense_choice((major, 0), "auto", head_size)
        assert is_refused == (choice is not None and choice[0] == "TRITON_ATTN")


@pytest.mark.parametrize("major", [8, 9, 10, 11, 12])
def test_the_table_of_gpus_with_flashinfer_first_is_vllms(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """`plan` and `doctor` name another backend there, because start-up refuses that one."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    library = "vllm._C_stable_libtorch"  # which the CPU build does not have
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    module = "vllm.platforms.cuda"
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # so that the import below is undone
    del sys.modules[module]
    platform = importlib.import_module(module).CudaPlatformBase
    capability = DeviceCapability(major, 0)
    config = AttentionSelectorConfig(128, torch.bfloat16, "auto", 16)
    valid, invalid = platform.get_valid_backends(capability, config, 8)
    tried = {each.backend.name: each.priority for each in valid}
    tried |= {backend.name: priority for backend, (priority, _) in invalid.items()}
    assert (tried["FLASHINFER"] < tried["FLASH_ATTN"]) == (major in backends.FLASHINFER_MAJORS)
    assert (backends.dense_choice(capability, "auto", 128) is None) == (major not in backends.FLASHINFER_MAJORS)


def gqa_layer(index: int, backend: type, **changes: Any) -> Attention:
    """A plain layer; `changes` are of the layer, or of its implementation with a prefix `impl__`."""
    own = {name.removeprefix("impl__"): value for name, value in changes.items() if name.startswith("impl__")}
    impl = {"alibi_slopes": None, "logits_soft_cap": 0, "vllm_flash_attn_version": 3, "kv_cache_dtype": "auto"}
    impl["fa4_hd256"] = False
    plain = {
        "layer_name": f"model.layers.{index}.self_attn.attn",
        "attn_backend": backend,
        "impl": bare(backend.get_impl_cls(), **impl | own),
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
    return bare(layer_class, **plain | {name: value for name, value in changes.items() if "__" not in name})


def model_of(layers: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(named_modules=lambda: [(getattr(each, "layer_name", "other"), each) for each in layers])


@pytest.mark.usefixtures("on_cuda")
def test_layers_of_a_dense_model_on_cuda_but_full_kv_layers(gqa_cuda: ModuleType) -> None:
    layers = [gqa_layer(index, gqa_cuda.FlashAttentionBackend) for index in range(3)]
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
            {"name": "FLEX_ATTENTION"},
            "^--attention-backend: got 'FLEX_ATTENTION', expected FLASH_ATTN or TRITON_ATTN or FLASHINFER",
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
    backend, name = gqa_cuda.FlashAttentionBackend, changes.pop("name", None)
    layers = [gqa_layer(0, named(name, backend.get_impl_cls()) if name else backend, **changes)]
    with pytest.raises(HiSparseConfigError, match=message):
        attach.attach_hot_buffers(model_of(layers), vllm_config(num_layers=1))


@pytest.mark.usefixtures("on_cuda")
def test_triton_layers_of_a_dense_model_on_cuda(gqa_cuda: ModuleType) -> None:
    from vllm_hisparse.attention.gqa.triton_cuda import (
        HotTritonBackend,
        HotTritonImpl,
        TritonAttentionBackend,
        TritonAttentionImpl,
    )

    layers = [gqa_layer(index, TritonAttentionBackend, impl__use_td=False) for index in range(2)]
    attach.attach_hot_buffers(model_of(layers), vllm_config(num_layers=2))
    assert layers[0].attn_backend is HotTritonBackend and type(layers[0].impl) is HotTritonImpl
    assert type(layers[1].impl) is TritonAttentionImpl and HotTritonBackend.get_name() == "TRITON_ATTN"


@pytest.mark.usefixtures("on_cuda")
def test_flashinfer_layers_of_a_dense_model_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 16 tokens in blocks of 64 at most, although full-KV layers may need larger ones."""
    backend = import_flashinfer_cuda()
    monkeypatch.setattr(
        backend, "current_platform", SimpleNamespace(get_device_capability=lambda: DeviceCapability(9, 0))
    )
    monkeypatch.setattr("vllm_hisparse.attention.gqa.base.preferred_block_size", lambda _: 128)
    engine = vllm_config(num_layers=2)
    engine.cache_config = SimpleNamespace(user_specified_block_size=True, block_size=64)
    layers = [gqa_layer(index, backend.FlashInferBackend, impl__head_size=64) for index in range(2)]
    with pytest.raises(HiSparseConfigError, match=r"^--attention-backend: got 'FLASHINFER', .* units of 1 tokens: "):
        attach.attach_hot_buffers(model_of(layers), engine)
    monkeypatch.setattr(sys.modules[__name__], "UNIT", 16)
    attach.attach_hot_buffers(model_of(layers), engine)
    assert layers[0].attn_backend is backend.HotFlashInferBackend and type(layers[0].impl) is backend.HotFlashInferImpl
    assert type(layers[1].impl) is backend.FlashInferImpl and backend.HotFlashInferBackend.get_name() == "FLASHINFER"
    engine.cache_config.user_specified_block_size = False
    layers = [gqa_layer(index, backend.FlashInferBackend, impl__head_size=64) for index in range(2)]
    with pytest.raises(HiSparseConfigError, match=r"^--block-size: got 128, .*at most 64 .*Set full_kv_layers to \[\]"):
        attach.attach_hot_buffers(model_of(layers), engine)


def test_nothing_is_attached_without_the_connector() -> None:
    layers = [gqa_layer(0, CPUAttentionBackend, sliding_window=9)]
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
    impl = bare(hot, microbatch=None, decode_cache=None)
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


def test_backends_are_derived_from_the_layers_own() -> None:
    """A model's backend keeps what it adds; one whose builder would be lost is refused."""

    class Stock:
        @staticmethod
        def get_builder_cls() -> str:
            return "stock"

    class Hot(Stock):
        vllm_class, runs_own_class = Stock, True

        @staticmethod
        def get_builder_cls() -> str:
            return "hot"

    added = type("Added", (Stock,), {"supports_sink": classmethod(lambda cls: True)})
    hot = attach.derive_hot_class(Hot, added)
    assert issubclass(hot, added) and hot.supports_sink() and hot.get_builder_cls() == "hot"
    lost = type("Lost", (Stock,), {"get_builder_cls": staticmethod(lambda: "own")})
    with pytest.raises(HiSparseConfigError, match=r"layers with Lost, which changes get_builder_cls.*would be lost"):
        attach.derive_hot_class(Hot, lost)


@pytest.mark.usefixtures("on_cuda")
def test_sinks_reach_the_kernels_of_every_step(
    cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HY-V4's layers have a backend and an implementation of their own, under the name of vLLM's."""
    from vllm.models.hy_v4.nvidia import flashmla_sparse as hy_v4

    calls: list[Any] = []

    def kernel(query: torch.Tensor, *args: Any, attn_sink: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        calls.append(attn_sink)
        return query, query, query[:, :, 0]

    def kernel_fp8(q: torch.Tensor, *, attn_sink: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        calls.append(attn_sink)
        return q, q[:, 0, :, :1]

    monkeypatch.setattr(hy_v4, "flash_mla_sparse_fwd", kernel)
    monkeypatch.setattr(hy_v4, "flash_mla_with_kvcache", kernel_fp8)
    layers, backend = cuda_modules["layers"], cuda_modules["backend"]
    model = MLALayers(layers.DeepseekV32Attention, hy_v4.HYV4FlashMLASparseBackend)
    attach.attach_hot_buffers(model, vllm_config(is_dsa=True))
    layer, sinks = model.generic, torch.tensor([0.5, -7.0])
    assert issubclass(layer.attn_backend, hy_v4.HYV4FlashMLASparseBackend) and layer.attn_backend.supports_sink()
    assert issubclass(layer.attn_backend, backend.HotFlashMLABackend) and isinstance(
        layer.impl, backend.HotFlashMLAImpl
    )
    layer.impl.__dict__.update(
        sinks=sinks, num_heads=2, softmax_scale=1.0, prefill_padding=4, fp8_decode_padded_heads=4
    )
    layer.impl.topk_indices_buffer = torch.zeros(3, 1)
    prefilling = layer.impl._for_tokens(layer.impl.vllm_class, 1)
    assert type(prefilling) is hy_v4.HYV4FlashMLASparseImpl
    query, rows, metadata = torch.zeros(3, 2, 8), torch.zeros(5, 1, 8), SimpleNamespace()
    metadata.dummy_block_table = metadata.cache_lens = metadata.scheduler_metadata = None
    for impl in (layer.impl, prefilling):
        impl._bf16_flash_mla_kernel(query, rows, torch.zeros(3, 1))
        impl._fp8_flash_mla_kernel(query[:, None], rows, torch.zeros(3, 1), metadata)
    padded = torch.tensor([0.5, -7.0, float("-inf"), float("-inf")])
    assert len(calls) == 4 and all(torch.equal(call, padded) for call in calls)


def sparse_layer(index: int, indexer: Any = None, use_sparse: bool = True) -> Any:
    """A layer of full KV of a DSA model on the CPU."""
    name = f"model.layers.{index}.self_attn.attn"
    impl = bare(SparseMLACpuImpl, num_heads=3)
    attributes = {"layer_name": name, "use_sparse": use_sparse, "indexer": indexer, "impl": impl}
    attributes |= {"head_size": 576, "kv_cache_dtype": "auto"}
    return bare(MLAAttention, **attributes, attn_backend=SparseMLACpuBackend)


@pytest.mark.parametrize("connector", [None, "HiSparseHostConnector"])
def test_mla_layers_on_the_cpu(connector: str | None) -> None:
    """A layer that shares another's indexer is sparse, too; one that does not select keeps its KV on the device."""
    layers = [
        sparse_layer(0, "an indexer"),
        sparse_layer(1),
        *(sparse_layer(index, use_sparse=False) for index in (2, 3)),
    ]
    attach.attach_hot_buffers(model_of([*layers, bare(IndexerCpuCache)]), vllm_config(connector, is_dsa=True))
    is_hot = [connector is not None] * 2 + [False] * 2
    assert [type(layer) is HotMLAAttention for layer in layers] == is_hot
    assert [type(layer.impl) is HotMLACpuImpl for layer in layers] == is_hot
    assert [layer.attn_backend is HotMLACpuBackend for layer in layers] == is_hot
    assert all(layer.impl.num_heads == 3 for layer in layers)


def test_layers_of_a_dense_model_on_the_cpu_but_full_kv_layers() -> None:
    layers = [gqa_layer(index, CPUAttentionBackend) for index in range(3)]
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


@pytest.mark.parametrize(("multimodal", "is_tried"), [(None, True), (True, True), (False, False)])
def test_prompts_that_were_never_tried_on_a_gpu_are_named(
    monkeypatch: pytest.MonkeyPatch, multimodal: bool | None, is_tried: bool
) -> None:
    """`multimodal`: the value of `--language-model-only`; None for a model of text."""
    warnings: list[str] = []
    monkeypatch.setattr(attach.logger, "warning_once", lambda text, *args: warnings.append(text % args), raising=False)
    config = vllm_config()
    config.model_config.multimodal_config = None
    if multimodal is not None:
        config.model_config.multimodal_config = SimpleNamespace(language_model_only=multimodal)
    attach.warn_of_untried_prompts(config)
    assert len(warnings) == (not is_tried)
    assert all("images" in warning and "--language-model-only" in warning for warning in warnings)


def block_layer(index: int, backend: type, impl: type, indexer_impl: type, **changes: Any) -> Any:
    """A layer of MiniMax-M3 that selects blocks."""
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

    return bare(
        MiniMaxM3SparseAttention,
        layer_name=f"model.layers.{index}.self_attn.attn",
        attn_backend=backend,
        impl=bare(impl, topk_blocks=16),
        indexer=SimpleNamespace(impl=bare(indexer_impl)),
        **changes,
    )


@pytest.mark.usefixtures("on_cuda")
def test_layers_of_minimax_m3_that_select(gqa_cuda: ModuleType, msa_cuda: ModuleType) -> None:
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerTritonImpl

    stock = msa_cuda.MiniMaxM3SparseBackend, msa_cuda.MiniMaxM3SparseTritonImpl, MiniMaxM3IndexerTritonImpl
    layers = [gqa_layer(0, gqa_cuda.FlashAttentionBackend), block_layer(1, *stock), block_layer(2, *stock)]
    attach.attach_hot_buffers(model_of([*layers, bare(msa_cuda.MiniMaxM3IndexerCache)]), vllm_config(family="msa"))
    assert [type(layer) for layer in layers] == [Attention, *[msa_cuda.HotMSAAttention] * 2]
    assert type(layers[0].impl) is gqa_cuda.FlashAttentionImpl
    for layer in layers[1:]:
        assert type(layer.impl) is msa_cuda.HotMSAImpl and layer.impl.topk_blocks == 16
        assert layer.get_attn_backend() is msa_cuda.HotMSABackend
    # NIXL's handshake compares the names, and blocks of keys have the same size on both sides.
    assert msa_cuda.HotMSABackend.get_name() == "MINIMAX_M3_SPARSE"
    assert msa_cuda.HotMSABackend.get_supported_kernel_block_sizes() == [128]


@pytest.mark.usefixtures("on_cuda")
def test_layers_of_minimax_m3_that_hot_buffers_cannot_serve(gqa_cuda: ModuleType, msa_cuda: ModuleType) -> None:
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerTritonImpl

    backend, impl = msa_cuda.MiniMaxM3SparseBackend, msa_cuda.MiniMaxM3SparseTritonImpl
    own, own_indexer = type("OtherImpl", (impl,), {}), type("OtherIndexer", (MiniMaxM3IndexerTritonImpl,), {})
    full = gqa_layer(0, gqa_cuda.FlashAttentionBackend)
    for layer, message in (
        (block_layer(1, backend, own, MiniMaxM3IndexerTritonImpl), "with OtherImpl, vLLM's choice here"),
        (block_layer(1, backend, impl, own_indexer), "with OtherIndexer, vLLM's choice here"),
        (gqa_layer(1, gqa_cuda.FlashAttentionBackend, sliding_window=512), "with sliding_window=512"),
        (bare(MLAAttention), "its own way to attend"),
        (gqa_layer(1, gqa_cuda.FlashAttentionBackend), "full attention, as all others"),
    ):
        with pytest.raises(HiSparseConfigError, match=f"^--model: got .*{message}.*MiniMax-M3's layers"):
            attach.attach_hot_buffers(model_of([full, layer]), vllm_config(family="msa"))
