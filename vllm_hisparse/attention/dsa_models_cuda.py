"""DSA model classes on CUDA: vLLM's own, fused ones, whose attention layers get hot buffers under the connector."""

from __future__ import annotations

from vllm.models import deepseek_v32

from vllm_hisparse.attention.base import HotBufferModel


class DeepseekV32ForCausalLM(HotBufferModel, deepseek_v32.DeepseekV32ForCausalLM):
    layers_module = "vllm_hisparse.attention.mla.fused_cuda"


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    pass
