"""Questions about the engine that a configuration of vLLM describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_hisparse.config import CONNECTOR_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RELEASES = ">=0.32"
VLLM = ("vllm.model_executor.models.utils.extract_layer_index",)


def uses_host_connector(vllm_config: VllmConfig) -> bool:
    """Return True if this engine runs `HiSparseHostConnector`."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR_NAME


def is_dsa_model(vllm_config: VllmConfig) -> bool:
    """Return True if the model has a DSA indexer."""
    model = vllm_config.model_config
    return model is not None and model.use_mla and hasattr(model.hf_text_config, "index_topk")


def is_draft_layer(layer_name: str, vllm_config: VllmConfig) -> bool:
    """Return True if a layer is a draft layer; vLLM numbers draft layers after the model's own."""
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(layer_name) >= vllm_config.model_config.hf_text_config.num_hidden_layers
