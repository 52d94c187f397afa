"""The outer MLA layer on the CPU: vLLM's, with our indexer and, under the connector, a hot buffer."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from vllm_hisparse.attention.mla.base import HotMLAAttention
from vllm_hisparse.attention.mla.indexer_cpu import IndexerCpu
from vllm_hisparse.compat import uses_host_connector


@PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")
class MLAWrapperCpu(MultiHeadLatentAttentionWrapper):
    """NOTE: vLLM builds indexer and attention inside; giving the built objects our class needs no patched function."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.indexer is not None:
            self.indexer.__class__ = IndexerCpu
        if self.is_sparse and uses_host_connector(get_current_vllm_config()):
            self.mla_attn.__class__ = HotMLAAttention
