from types import SimpleNamespace

import pytest
from vllm.platforms.cpu import CpuPlatform

from vllm_hisparse.compat.engine import is_dsa_model, uses_host_connector
from vllm_hisparse.config import CONNECTOR_NAME, HiSparseConfigError
from vllm_hisparse.cpu import platform as cpu
from vllm_hisparse.cpu.platform import (
    DENSE_MODEL_BACKEND,
    FULL_ATTENTION_MLA_BACKEND,
    FULL_KV_BACKEND,
    HiSparseCpuPlatform,
)


def engine(connector: str | None = None, dsa: bool = True, custom_ops: tuple[str, ...] = ()) -> SimpleNamespace:
    transfer = SimpleNamespace(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={})
    return SimpleNamespace(
        kv_transfer_config=transfer if connector else None,
        model_config=SimpleNamespace(
            use_mla=True, hf_text_config=SimpleNamespace(index_topk=256) if dsa else SimpleNamespace()
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=512),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=None),
        compilation_config=SimpleNamespace(custom_ops=list(custom_ops)),
    )


@pytest.fixture(autouse=True)
def vllms_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of vLLM's CPU platform to MLA models."""

    def check_and_update_config(cls: type, vllm_config: SimpleNamespace) -> None:
        vllm_config.scheduler_config.enable_chunked_prefill = False
        vllm_config.scheduler_config.max_num_batched_tokens = 4096
        vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.cache_config.block_size = 16

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda *args: "vllm's own"))


@pytest.mark.parametrize("connector", [None, "NixlConnector", CONNECTOR_NAME])
def test_sparse_mla_layers_have_full_kv_until_they_are_attached(
    monkeypatch: pytest.MonkeyPatch, connector: str | None
) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: engine(connector))
    selector = SimpleNamespace(use_sparse=True, use_mla=True)
    assert HiSparseCpuPlatform.get_attn_backend_cls(None, selector, 8) == FULL_KV_BACKEND


@pytest.mark.parametrize(("use_sparse", "use_mla"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("connector", [None, "NixlConnector"])
def test_other_models_keep_vllms_backend(
    monkeypatch: pytest.MonkeyPatch, connector: str | None, use_sparse: bool, use_mla: bool
) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: engine(connector, dsa=False))
    selector = SimpleNamespace(use_sparse=use_sparse, use_mla=use_mla)
    assert HiSparseCpuPlatform.get_attn_backend_cls(None, selector, 8) == "vllm's own"


@pytest.mark.parametrize("connector", [None, CONNECTOR_NAME])
def test_layers_of_a_dsa_model_that_do_not_select(monkeypatch: pytest.MonkeyPatch, connector: str | None) -> None:
    """vLLM's own backend on the CPU needs other block sizes than the layers that select."""
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: engine(connector))
    selector = SimpleNamespace(use_sparse=False, use_mla=True)
    assert HiSparseCpuPlatform.get_attn_backend_cls(None, selector, 8) == FULL_ATTENTION_MLA_BACKEND


def test_dense_models_get_hot_buffers_under_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: engine(CONNECTOR_NAME))
    selector = SimpleNamespace(use_sparse=False, use_mla=False)
    assert HiSparseCpuPlatform.get_attn_backend_cls(None, selector, 8) == DENSE_MODEL_BACKEND


def test_dsa_models_keep_the_users_options() -> None:
    config = engine()
    HiSparseCpuPlatform.check_and_update_config(config)
    assert config.scheduler_config == SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=512)
    assert config.cache_config == SimpleNamespace(enable_prefix_caching=True, block_size=64)
    assert config.compilation_config.custom_ops == ["-rotary_embedding"]


def test_other_models_get_vllms_options() -> None:
    config = engine(dsa=False)
    HiSparseCpuPlatform.check_and_update_config(config)
    assert config.cache_config == SimpleNamespace(enable_prefix_caching=False, block_size=16)
    assert config.compilation_config.custom_ops == []


@pytest.mark.parametrize("choice", ["+rotary_embedding", "-rotary_embedding"])
def test_the_users_rotary_kernel_stays(choice: str) -> None:
    config = engine(custom_ops=("none", choice))
    HiSparseCpuPlatform.check_and_update_config(config)
    assert config.compilation_config.custom_ops == ["none", choice]


def test_refuses_bad_options_before_the_model_loads() -> None:
    with pytest.raises(HiSparseConfigError, match="exactly one of the two"):
        HiSparseCpuPlatform.check_and_update_config(engine(CONNECTOR_NAME))


def test_backends_exist() -> None:
    for path in (FULL_KV_BACKEND, DENSE_MODEL_BACKEND):
        module, _, name = path.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name)
    assert cpu.BLOCK_SIZE == 64


def test_recognises_models_and_connectors() -> None:
    assert is_dsa_model(engine()) and not is_dsa_model(engine(dsa=False))
    assert not is_dsa_model(SimpleNamespace(model_config=None))
    assert uses_host_connector(engine(CONNECTOR_NAME)) and not uses_host_connector(engine())
