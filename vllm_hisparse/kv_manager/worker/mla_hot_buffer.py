"""Hot buffer of a DSA model: one selection per request, a row per token."""

from __future__ import annotations

import torch

from vllm_hisparse.kv_manager.worker.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.ops.base import HotRows, StepTables


class MLAHotBuffer(HotBuffer):
    """A `HotBuffer` whose newest rows go to the host at the end of a step, those of all layers at once.

    Args:
        shape, device: as in `HotBuffer`.
    """

    def __init__(self, shape: HotBufferShape, device: torch.device):
        super().__init__(shape, device)
        self._layers: list[tuple[HotRows, torch.Tensor]] = []

    def add_layer(self, hot: HotRows, host_rows: torch.Tensor) -> None:
        """Name a layer's rows to `write_back`; in the order of the layers.

        Args:
            hot: hot rows of the layer.
            host_rows: [num_host_rows, row elements] of the layer.
        """
        self._layers.append((hot, host_rows))

    def begin_decode(self, hot_tables: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Say which requests decode one token in this step.

        Args:
            hot_tables, seq_lens: as in `StepTables`, graph padding included.
        """
        self.decode_tables = StepTables(self.state_rows, hot_tables, seq_lens, self.host_tables, self.shape.block_size)

    def write_back(self) -> None:
        """Copy the newest rows of the running step to the host."""
        assert self.decode_tables is not None
        hot, host_rows = zip(*self._layers, strict=True)
        self.ops.write_back(hot, host_rows, self.decode_tables, self.num_slots)
