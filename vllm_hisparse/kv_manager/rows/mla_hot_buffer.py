"""Hot buffer of a DSA model: one selection per request, a row per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_hisparse.kv_manager.rows.decode_step import MLADecodeStep
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.kv_manager.rows.row_copies import RowCopies
from vllm_hisparse.ops.kv_heads import KVHeads


class MLAHotBuffer(HotBuffer):
    """A `HotBuffer` whose newest rows go to the host at the end of a step, those of all layers at once.

    Args:
        shape, device, selects: as in `HotBuffer`.

    Attributes:
        copies: swap-in on CUDA, where rows of layers that share a selection are copied ahead.
    """

    step: MLADecodeStep

    def __init__(self, shape: HotBufferShape, device: torch.device, selects: Sequence[bool] | None = None):
        super().__init__(shape, KVHeads(), device, selects)
        self.copies = RowCopies(self)
        self.step = MLADecodeStep(self.requests, self.layers, self.ops, self.step_shape(shape.top_k), device)

    def _start(self, request_index: int) -> None:
        """A released index is left empty."""
