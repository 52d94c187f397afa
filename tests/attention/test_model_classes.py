"""The model classes that the plugin puts in the place of vLLM's on CUDA."""

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from vllm import ModelRegistry

from vllm_hisparse import plugin
from vllm_hisparse.attention.base import HotBufferModel


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(ModelRegistry, "register_model", found.__setitem__)
    plugin._register_cuda_models()
    return found


def test_they_load_without_the_kernels_of_hot_buffers(registered: dict[str, str]) -> None:
    """Without the connector a model must not need more than vLLM's own class does: there are no CUDA kernels here."""
    assert {"DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "LlamaForCausalLM"} <= set(registered)
    for name, path in registered.items():
        module, _, attribute = path.partition(":")
        model_class = getattr(import_module(module), attribute)
        assert issubclass(model_class, HotBufferModel)
        assert attribute == name
        assert find_spec(model_class.layers_module) is not None


@pytest.mark.parametrize(("connector", "attached"), [(None, 0), ("NixlConnector", 0), ("HiSparseHostConnector", 1)])
def test_layers_get_hot_buffers_under_the_connector_only(
    monkeypatch: pytest.MonkeyPatch, connector: str | None, attached: int
) -> None:
    calls: list[object] = []
    layers = SimpleNamespace(attach_hot_buffers=lambda model, vllm_config: calls.append(model))
    monkeypatch.setattr("vllm_hisparse.attention.base.import_module", {"layers": layers}.__getitem__)

    class Model:
        def __init__(self, *, vllm_config: object, prefix: str):
            self.prefix = prefix

    class HotModel(HotBufferModel, Model):
        layers_module = "layers"

    transfer = SimpleNamespace(kv_connector=connector) if connector else None
    model = HotModel(vllm_config=SimpleNamespace(kv_transfer_config=transfer), prefix="model")
    assert model.prefix == "model"
    assert calls == [model] * attached
