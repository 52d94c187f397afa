"""Copies of missed rows on CUDA streams of their own, while other layers run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vllm_hisparse.ops.limits import NUM_STREAMS

if TYPE_CHECKING:
    from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
    from vllm_hisparse.ops.base import Resolved


class RowCopies:
    """Makes selections hot; rows of layers that share the selection of another layer travel before they are needed.

    The layer that selects resolves the selection and copies its own rows. The rows of the layers after it that share
    the selection follow on a second stream, in their order, and each of these layers waits for its own. In a CUDA
    graph, the streams become branches of it.

    Args:
        hot_buffer: of the rows.
    """

    def __init__(self, hot_buffer: MLAHotBuffer):
        self.hot_buffer = hot_buffer

    def swap_in(self, layer_index: int, top_k: torch.Tensor, requests: slice | None = None) -> Resolved:
        """Make a layer's selection hot, as `HotBuffer.swap_in`; that of some requests only where no layers share."""
        if not self.hot_buffer.selects[layer_index]:
            torch.cuda.current_stream().wait_event(self._copied[layer_index])
            return self.hot_buffer.step.resolved
        resolved = self.hot_buffer.swap_in(layer_index, top_k, requests)
        sharing = range(layer_index + 1, layer_index + self.hot_buffer.residency[layer_index].num_layers)
        if not sharing:
            return resolved
        second = self.streams[0]
        second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second):
            for index in sharing:
                self.hot_buffer.swap_in(index, top_k)
                self._copied[index].record()
        return resolved

    @cached_property
    def streams(self) -> list[torch.cuda.Stream]:
        """Beside the main one: copies for layers that follow use the first, waves all of them."""
        return [torch.cuda.Stream(self.hot_buffer.device) for _ in range(NUM_STREAMS - 1)]

    @cached_property
    def _copied(self) -> list[torch.cuda.Event]:
        """Recorded when the rows of a layer have been copied."""
        return [torch.cuda.Event() for _ in self.hot_buffer.selects]
