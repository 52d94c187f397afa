"""Hot buffer of a DSA model: one selection per request, a row per token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from vllm_hisparse.kv_manager.rows.decode_step import MLADecodeStep
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.kv_manager.rows.residency_table import ResidencyTable
from vllm_hisparse.kv_manager.rows.swap_in import (
    FollowingSwapIn,
    LeadingSwapIn,
    SelectingSwapIn,
    SharingSwapIn,
    SwapIn,
)
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.limits import NUM_STREAMS


class MLAHotBuffer(HotBuffer):
    """A `HotBuffer` whose newest rows are copied to the host at the end of a step, for all layers at once.

    Args:
        shape: sizes.
        device: device of the hot rows.
        selects: as in `HotBuffer`; None: every layer selects.
        copies_ahead: True if rows of layers that share a selection are copied on a CUDA stream of their own while the
            layers before them run; None: True on CUDA.
        host_is_managed: True if host rows are in managed memory, from which they arrive sooner.
    """

    step: MLADecodeStep

    def __init__(
        self,
        shape: HotBufferShape,
        device: torch.device,
        selects: Sequence[bool] | None = None,
        copies_ahead: bool | None = None,
        host_is_managed: bool = False,
    ):
        selects = [True] * shape.num_layers if selects is None else selects
        sizes = shape.num_device_blocks, shape.classes
        super().__init__(shape, KVHeads(), ResidencyTable.by_selection(*sizes, selects, device), selects)
        self.copies_ahead = device.type == "cuda" if copies_ahead is None else copies_ahead
        self.host_is_managed = host_is_managed
        self.step = MLADecodeStep(self.requests, self.layers, self.ops, self.step_shape(shape.top_k), device)

    @cached_property
    def streams(self) -> list[torch.cuda.Stream]:
        """CUDA streams beside the main one. Copies for layers that share a selection use the first stream only."""
        return [torch.cuda.Stream(self.device) for _ in range(NUM_STREAMS - 1)]

    def swap_in_of(self, layer_index: int) -> SwapIn:
        last = layer_index + self.residency[layer_index].num_layers
        if not self.selects[layer_index]:
            if self.copies_ahead:
                return FollowingSwapIn(self.step, layer_index, self._copied[layer_index])
            return SharingSwapIn(self.step, layer_index)
        own = SelectingSwapIn(self.step, layer_index, self.residency[layer_index], self.counts.by_seq)
        if not self.copies_ahead or last == layer_index + 1:
            return own
        sharing = range(layer_index + 1, last)
        followers = [(SharingSwapIn(self.step, index), self._copied[index]) for index in sharing]
        return LeadingSwapIn(own, followers, self.streams[0])

    @cached_property
    def _copied(self) -> list[torch.cuda.Event]:
        """An event per layer, recorded when the layer's rows have been copied."""
        return [torch.cuda.Event() for _ in self.selects]

    def _start(self, request_index: int) -> None:
        """Do nothing: the tables of a released index are empty already."""
