"""Copies of missed rows on a stream of their own, while attention runs."""

from __future__ import annotations

from functools import cached_property

import torch

from vllm_hisparse.kv_manager.worker.mla_hot_buffer import MLAHotBuffer


class RowCopies:
    """Enqueues what the layers of a step miss: what is attended to next comes first.

    The layer that selects resolves the selection and copies the rows of the requests that attend first. The rows of the
    others, and then those of the layers that share the selection, travel on a second stream. Attention waits for the
    rows that it reads and for no others. In a CUDA graph both streams become branches of it.

    Args:
        hot_buffer: of the rows.
        device: where they are.
    """

    def __init__(self, hot_buffer: MLAHotBuffer, device: torch.device):
        self.hot_buffer, self.device = hot_buffer, device

    def start(self, layer_index: int, top_k: torch.Tensor, num_first: int) -> None:
        """Make a layer's selection hot; the rows of the first requests are waited for, those of others by `wait`.

        Args:
            layer_index: of the layer; nothing happens if it does not select.
            top_k: as in `HotBuffer.swap_in`.
            num_first: requests that attend first.
        """
        if not self.hot_buffer.selects[layer_index]:
            return
        self.hot_buffer.swap_in(layer_index, top_k, num_first)
        batch, sharing = len(top_k), self._sharing(layer_index)
        if num_first == batch and not sharing:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if num_first < batch:
                self.hot_buffer.copy_missed(layer_index, slice(num_first, batch))
                self._copied[layer_index].record()
            for index in sharing:
                self.hot_buffer.copy_missed(index, slice(0, batch))
                self._copied[index].record()

    def wait(self, layer_index: int) -> None:
        """Let the current stream wait for rows of a layer that travel on the other one."""
        torch.cuda.current_stream().wait_event(self._copied[layer_index])

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @cached_property
    def _copied(self) -> list[torch.cuda.Event]:
        """Recorded when the rows of a layer have been copied."""
        return [torch.cuda.Event() for _ in self.hot_buffer.selects]

    def _sharing(self, layer_index: int) -> range:
        """The layers that share the selection of one that selects."""
        return range(layer_index + 1, layer_index + self.hot_buffer.residency[layer_index].num_layers)
