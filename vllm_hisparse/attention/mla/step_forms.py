"""The two forms of a DSA model's decode steps on CUDA: in microbatches, or as a whole."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_hisparse.attention.mla.fused_cuda import HotDeepseekV32Attention
from vllm_hisparse.attention.mla.microbatches_cuda import num_microbatches


class MicrobatchForms:
    """The forms that the layers run (`compat.step_graphs.StepForms`).

    Args:
        layer: any layer with a hot buffer.
    """

    def __init__(self, layer: HotDeepseekV32Attention):
        self._divides_steps = layer.impl.divides_steps
        self._hot_buffer: Any = layer.impl.hot_buffer

    @classmethod
    def find(cls, vllm_config: VllmConfig) -> MicrobatchForms | None:
        """Return the forms of an engine's model; None if its layers run all steps as a whole, or have no storage."""
        for layer in vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, HotDeepseekV32Attention):
                return None if layer.impl.hot_buffer is None else cls(layer)
        return None

    @property
    def runs_whole(self) -> bool:
        return self._hot_buffer.step.runs_whole

    @runs_whole.setter
    def runs_whole(self, value: bool) -> None:
        self._hot_buffer.step.runs_whole = value

    def has_two(self, num_requests: int) -> bool:
        return self._divides_steps and num_microbatches(self._hot_buffer, num_requests) > 1
