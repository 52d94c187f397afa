"""The model classes that the plugin puts in the place of vLLM's on CUDA."""

from importlib import import_module
from types import SimpleNamespace

import pytest
from vllm import ModelRegistry

from vllm_hisparse import plugin
from vllm_hisparse.attention import models_cuda
from vllm_hisparse.attention.models_cuda import HotBufferModel
from vllm_hisparse.config import CUDA_MODELS, REFUSED_MODELS, HiSparseConfig, HiSparseConfigError


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(ModelRegistry, "register_model", found.__setitem__)
    plugin._register_cuda_models()
    return found


def test_they_load_without_the_kernels_of_hot_buffers(registered: dict[str, str]) -> None:
    """Without the connector a model must not need more than vLLM's own class does: there are no CUDA kernels here."""
    assert {"DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "LlamaForCausalLM"} <= set(registered)
    assert {"Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"} <= set(registered)
    assert "HYV4ForCausalLM" in registered  # to be refused before its weights are loaded
    for name, path in registered.items():
        if name in REFUSED_MODELS:
            continue  # its module may need kernels
        module, _, attribute = path.partition(":")
        model_class = getattr(import_module(module), attribute)
        assert issubclass(model_class, HotBufferModel)
        assert issubclass(model_class, getattr(import_module(CUDA_MODELS[name]), name))
        assert attribute == name == model_class.__name__
        assert getattr(import_module(module), attribute) is model_class, "a class is made twice"


def test_a_class_is_made_of_its_own_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense model must not import what a DSA model needs."""
    imported = []
    monkeypatch.setattr(models_cuda, "import_module", lambda name: imported.append(name) or import_module(name))
    models_cuda.__getattr__.cache_clear()
    assert models_cuda.LlamaForCausalLM.__name__ == "LlamaForCausalLM"
    assert imported == ["vllm.model_executor.models.llama"]
    with pytest.raises(AttributeError, match="FalconForCausalLM"):
        _ = models_cuda.FalconForCausalLM


@pytest.mark.parametrize(("connector", "attached"), [(None, 0), ("NixlConnector", 0), ("HiSparseHostConnector", 1)])
def test_layers_get_hot_buffers_under_the_connector_only(
    monkeypatch: pytest.MonkeyPatch, connector: str | None, attached: int
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(models_cuda, "attach_hot_buffers", lambda model, vllm_config: calls.append(model))
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: None))

    class Model:
        def __init__(self, *, vllm_config: object, prefix: str):
            self.prefix = prefix

    class HotModel(HotBufferModel, Model):
        pass

    transfer = SimpleNamespace(kv_connector=connector) if connector else None
    model = HotModel(vllm_config=SimpleNamespace(kv_transfer_config=transfer), prefix="model")
    assert model.prefix == "model"
    assert calls == [model] * attached


def test_options_are_checked_before_layers_are_built() -> None:
    built = []

    class Model:
        def __init__(self, *, vllm_config: object, prefix: str):
            built.append(self)

    class HotModel(HotBufferModel, Model):
        pass

    transfer = SimpleNamespace(kv_connector="HiSparseHostConnector", kv_connector_extra_config={"hots_pool_gib": 1})
    with pytest.raises(HiSparseConfigError, match="one of the known options"):
        HotModel(vllm_config=SimpleNamespace(kv_transfer_config=transfer), prefix="model")
    assert not built
