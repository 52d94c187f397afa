"""How a layer makes its selection hot: chosen once, when the layer is bound, and called in every decode step."""

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
        """Copy what is missing to the hot buffer; enqueued on the current stream.

        Args:
            selected_positions: [batch, num_selected * max_query_len] int32 of the decoding requests, padding included,
                as `SwapInOps.resolve` takes them. Of a dense model they are units, with a batch entry per KV head.
            requests: those whose selection it is, while kernels run for others; None: all.

        Returns:
            Where the selected rows are.
        """


@dataclass(frozen=True)
class SelectingSwapIn(SwapIn):
    """Of a layer that selects for itself: resolves the selection and copies the layer's rows.

    Attributes:
        step: the decoding requests.
        layer_index: of the layer.
        residency: of the layer.
        counts: as in `SwapInOps.resolve`.
    """

    step: DecodeStep
    layer_index: int
    residency: Residency
    counts: torch.Tensor

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        tables, resolved = self.step.of_requests(requests)
        layer, selection = self.step.layers[self.layer_index], (self.residency, tables, selected_positions)
        shares_device = requests is not None
        self.step.ops.swap_in(*selection, layer.host, layer.hot, self.counts, resolved, shares_device)
        return resolved


@dataclass(frozen=True)
class SharingSwapIn(SwapIn):
    """Of a layer that shares the selection of an earlier one, which has resolved it: copies the layer's rows.

    Attributes:
        step, layer_index: as in `SelectingSwapIn`.
    """

    step: DecodeStep
    layer_index: int

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        layer, (_, resolved) = self.step.layers[self.layer_index], self.step.of_requests(requests)
        self.step.ops.gather(layer.host, layer.hot, resolved, len(selected_positions), shares_device=True)
        return resolved


@dataclass(frozen=True)
class LeadingSwapIn(SwapIn):
    """Of a layer on CUDA whose selection the layers after it share: their rows follow on a second stream, in the order
    of the layers, while this layer attends. In a CUDA graph, the streams become branches of it.

    Attributes:
        own: of the layer.
        followers: of the layers that share the selection, each with the event that is recorded when its rows are hot.
        stream: for their copies.
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
    """Of a layer on CUDA that shares a selection: waits for its rows.

    Attributes:
        step: the decoding requests.
        copied: recorded when the layer's rows are hot (`LeadingSwapIn`).
    """

    step: DecodeStep
    copied: torch.cuda.Event

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        torch.cuda.current_stream().wait_event(self.copied)
        return self.step.of_requests(requests)[1]
