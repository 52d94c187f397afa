"""The outer MLA layer on the CPU, registered in place of vLLM's when this module is imported."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from vllm_hisparse.cpu.indexer import IndexerCpu


@PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")
class MLAWrapperCpu(MultiHeadLatentAttentionWrapper):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.indexer is not None:
            self.indexer.__class__ = IndexerCpu  # vLLM's indexer with the plugin's forward
