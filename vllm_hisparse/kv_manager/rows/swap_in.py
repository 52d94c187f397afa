"""Ways in which a layer makes its selection hot. One is chosen when the layer is bound, and called in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_hisparse.ops.base import Residency, Resolved

if TYPE_CHECKING:
    from vllm_hisparse.kv_manager.rows.decode_step import DecodeStep


class SwapIn(ABC):
    """Makes one layer's selection hot."""

    @abstractmethod
    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        """Copy the missing rows to the hot buffer; enqueued on the current stream.

        Args:
            selected_positions: [batch, num_selected * max_query_len] int32 selections of the decoding requests, padding
                included, as `SwapInOps.resolve` takes them. For a dense model, they are units with a batch entry per KV
                head.
            requests: range of requests that select, while kernels run for the others; None: all requests.

        Returns:
            Places of the selected rows on the device.
        """


@dataclass(frozen=True)
class SelectingSwapIn(SwapIn):
    """Swap-in of a layer that selects for itself: it resolves the selection and copies the layer's rows.

    Attributes:
        step: the decoding requests.
        layer_index: index of the layer.
        residency: residency of the layer.
        counts: as in `SwapInOps.resolve`.
    """

    step: DecodeStep
    layer_index: int
    residency: Residency
    counts: torch.Tensor

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        decode, resolved = self.step.of_requests(self.layer_index, requests)
        layer, selection = self.step.layers[self.layer_index], (self.residency, decode, selected_positions)
        shares_device = requests is not None
        self.step.ops.swap_in(*selection, layer.host, layer.hot, self.counts, resolved, shares_device)
        return resolved


@dataclass(frozen=True)
class SharingSwapIn(SwapIn):
    """Swap-in of a layer that shares the selection of an earlier one, which has resolved it: it only copies rows.

    Attributes:
        step, layer_index: as in `SelectingSwapIn`.
    """

    step: DecodeStep
    layer_index: int

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        layer, (_, resolved) = self.step.layers[self.layer_index], self.step.of_requests(self.layer_index, requests)
        self.step.ops.gather(layer.host, layer.hot, resolved, len(selected_positions), shares_device=True)
        return resolved


@dataclass(frozen=True)
class LeadingSwapIn(SwapIn):
    """Swap-in of a layer on CUDA whose selection the following layers share. It copies their rows on a second stream,
    in the order of the layers, while this layer attends. In a CUDA graph, the streams become branches.

    Attributes:
        own: swap-in of the layer itself.
        followers: swap-in of each layer that shares the selection, with the event recorded when its rows are hot.
        stream: stream for the followers' copies.
    """

    own: SwapIn
    followers: Sequence[tuple[SwapIn, torch.cuda.Event]]
    stream: torch.cuda.Stream

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        resolved = self.own(selected_positions, requests)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for swap_in, copied in self.followers:
                swap_in(selected_positions, requests)
                copied.record()
        return resolved


@dataclass(frozen=True)
class FollowingSwapIn(SwapIn):
    """Swap-in of a layer on CUDA that shares a selection: it waits for its rows, which `LeadingSwapIn` copies.

    Attributes:
        step, layer_index: as in `SelectingSwapIn`.
        copied: event that is recorded when the layer's rows are hot.
    """

    step: DecodeStep
    layer_index: int
    copied: torch.cuda.Event

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        torch.cuda.current_stream().wait_event(self.copied)
        return self.step.of_requests(self.layer_index, requests)[1]
