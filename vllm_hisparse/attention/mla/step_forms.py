"""The two forms of a DSA model's decode steps on CUDA: in microbatches, or as a whole."""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_hisparse.attention.mla.fused_cuda import HotDeepseekV32Attention
from vllm_hisparse.attention.mla.microbatches_cuda import may_be_divided
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer


class MicrobatchForms:
    """The forms that the layers run (`compat.step_graphs.StepForms`).

    Args:
        hot_buffer: hot buffer of the layers; None before they have storage.
    """

    def __init__(self, hot_buffer: HotBuffer | None):
        self._hot_buffer = hot_buffer

    @classmethod
    def find(cls, vllm_config: VllmConfig) -> MicrobatchForms | None:
        """Return the forms of an engine's model; None if its layers run all steps as a whole."""
        context = vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if isinstance(layer, HotDeepseekV32Attention)]
        if not layers or not layers[0].impl.divides_steps or any(layer.indexer is None for layer in layers):
            return None
        return cls(layers[0].impl.hot_buffer)

    @property
    def runs_whole(self) -> bool:
        return self._hot_buffer is not None and self._hot_buffer.step.runs_whole

    @runs_whole.setter
    def runs_whole(self, value: bool) -> None:
        if self._hot_buffer is not None:
            self._hot_buffer.step.runs_whole = value

    def has_two(self, num_requests: int, num_tokens: int) -> bool:
        # NOTE: data parallel ranks must capture the same graphs, because their experts wait for each other. So this
        # does not ask whether the device holds all rows of the requests: ranks may have unequal memory.
        if self._hot_buffer is None:
            return may_be_divided(num_requests)
        return may_be_divided(num_requests) and num_tokens == num_requests * self._hot_buffer.shape.max_query_len
