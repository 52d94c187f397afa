"""vLLM's generic class of DeepSeek models on CUDA, which DSA models take on request (`--hf-overrides`)."""

from __future__ import annotations

from vllm.model_executor.models import deepseek_v2

from vllm_hisparse.attention.base import HotBufferModel


class DeepseekV3ForCausalLM(HotBufferModel, deepseek_v2.DeepseekV3ForCausalLM):
    layers_module = "vllm_hisparse.attention.mla.fused_cuda"
