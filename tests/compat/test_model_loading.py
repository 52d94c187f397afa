"""Models are visited after they are built and before their weights are loaded; draft models are not."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_hisparse import plugin
from vllm_hisparse.compat.model_loading import when_built
from vllm_hisparse.config import HiSparseConfigError


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls in the order in which they came; vLLM's function that builds a model answers with its configuration."""
    create = BaseModelLoader.create_model
    monkeypatch.setattr(BaseModelLoader, "create_model", getattr(create, "__wrapped__", create))
    found: list[Any] = []

    def build(model_config: Any, **_: Any) -> str:
        found.append("build")
        return f"model of {model_config.name}"

    monkeypatch.setattr(base_loader, "initialize_model", build)
    monkeypatch.setattr(base_loader, "log_online_quantization", lambda _: None)
    when_built(found.append, lambda model, vllm_config: found.append((model, vllm_config)))
    when_built(pytest.fail, lambda *_: pytest.fail("registered twice"))
    return found


def model_config(name: str, runner_type: str = "generate") -> Any:
    return SimpleNamespace(name=name, runner_type=runner_type)


def test_the_served_model_is_visited_before_its_weights_are_loaded(visited: list[Any]) -> None:
    engine = SimpleNamespace(model_config=model_config("target"))
    model = BaseModelLoader.create_model(object(), vllm_config=engine, model_config=engine.model_config)
    assert model == "model of target" and visited == [engine, "build", (model, engine)]


def test_options_are_checked_before_layers_are_built() -> None:
    transfer = SimpleNamespace(kv_connector="HiSparseHostConnector", kv_connector_extra_config={"hots_pool_gib": 1})
    with pytest.raises(HiSparseConfigError, match="one of the known options"):
        plugin.check_options(Engine(kv_transfer_config=transfer))
    plugin.check_options(Engine(kv_transfer_config=None))


def test_connectors_that_contain_or_replace_ours_are_refused() -> None:
    """The second one by vLLM, for an option: the engine would serve full KV without a word."""
    ours = {"kv_connector": "HiSparseHostConnector", "kv_connector_extra_config": {"host_pool_gib": 1}}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    several = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_consumer", kv_connector_extra_config={"connectors": [nixl, ours]}
    )
    cache = SimpleNamespace(kv_offloading_size=None)
    with pytest.raises(HiSparseConfigError, match=r"^kv_connector: got 'MultiConnector', .* itself"):
        plugin.check_options(Engine(kv_transfer_config=several, cache_config=cache))
    several.kv_connector_extra_config["connectors"].pop()
    plugin.check_options(Engine(kv_transfer_config=several, cache_config=cache))

    replaced = VllmConfig(
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **ours), cache_config=CacheConfig(kv_offloading_size=1)
    )
    assert replaced.kv_transfer_config.kv_connector == "OffloadingConnector", "vLLM no longer replaces it"
    with pytest.raises(HiSparseConfigError, match=r"^--kv-offloading-size: got 1.*replaces it by OffloadingConnector"):
        plugin.check_options(replaced)
    plugin.check_options(VllmConfig(cache_config=CacheConfig(kv_offloading_size=1)))


class Engine(SimpleNamespace):
    """A configuration that can be referenced weakly, like a `VllmConfig`."""


def test_models_that_draft_are_not_visited(visited: list[Any]) -> None:
    engine = SimpleNamespace(model_config=model_config("target"))
    BaseModelLoader.create_model(object(), vllm_config=engine, model_config=model_config("draft", "draft"))
    drafting = SimpleNamespace(model_config=model_config("draft", "draft"))
    BaseModelLoader.create_model(object(), vllm_config=drafting, model_config=drafting.model_config)
    assert visited == ["build"] * 2
