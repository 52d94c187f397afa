"""Hot buffer of a DSA model: one selection per request, a row per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_hisparse.kv_manager.rows.decode_step import MLADecodeStep
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.kv_manager.rows.residency_table import ResidencyTable
from vllm_hisparse.kv_manager.rows.row_copies import RowCopies
from vllm_hisparse.ops.kv_heads import KVHeads


class MLAHotBuffer(HotBuffer):
    """A `HotBuffer` whose newest rows go to the host at the end of a step, those of all layers at once.

    Args:
        shape: sizes.
        device: where the hot rows are.
        selects: as in `HotBuffer`; None: every layer selects.

    Attributes:
        copies: swap-in on CUDA, where rows of layers that share a selection are copied ahead.
    """

    step: MLADecodeStep

    def __init__(self, shape: HotBufferShape, device: torch.device, selects: Sequence[bool] | None = None):
        selects = [True] * shape.num_layers if selects is None else selects
        sizes = shape.num_device_blocks, shape.rows_per_hot_block
        super().__init__(shape, KVHeads(), ResidencyTable.by_selection(*sizes, selects, device), selects)
        self.copies = RowCopies(self)
        self.step = MLADecodeStep(self.requests, self.layers, self.ops, self.step_shape(shape.top_k), device)

    def _start(self, request_index: int) -> None:
        """A released index is left empty."""
