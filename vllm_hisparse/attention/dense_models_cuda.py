"""Dense model classes on CUDA: vLLM's own, whose attention layers get hot buffers under the connector."""

from __future__ import annotations

from vllm.model_executor.models import llama, mistral, qwen2, qwen3

from vllm_hisparse.attention.base import HotBufferModel


class DenseHotBufferModel(HotBufferModel):
    layers_module = "vllm_hisparse.attention.gqa_layers_cuda"


class LlamaForCausalLM(DenseHotBufferModel, llama.LlamaForCausalLM):
    pass


class MistralForCausalLM(DenseHotBufferModel, mistral.MistralForCausalLM):
    pass


class Qwen2ForCausalLM(DenseHotBufferModel, qwen2.Qwen2ForCausalLM):
    pass


class Qwen3ForCausalLM(DenseHotBufferModel, qwen3.Qwen3ForCausalLM):
    pass
