"""What vLLM moves between releases, in one place. Written for vLLM 0.32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_hisparse.config import CONNECTOR_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def uses_host_connector(vllm_config: VllmConfig) -> bool:
    """Whether this engine runs `HiSparseHostConnector`."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR_NAME


def is_dsa_model(vllm_config: VllmConfig) -> bool:
    """Whether the model has a DSA indexer."""
    model = vllm_config.model_config
    return model is not None and model.use_mla and hasattr(model.hf_text_config, "index_topk")
