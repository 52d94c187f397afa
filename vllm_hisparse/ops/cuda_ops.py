"""Swap-in operations as CUDA kernels: launches of the library of csrc/cuda."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_hisparse.ops.base import DecodeMetadata, HotRows, MovedRequests, Residency, Resolved, SwapInOps, UnitMetadata
from vllm_hisparse.ops.kernels import current_stream, kernels
from vllm_hisparse.ops.limits import MAX_LAYERS


class CudaSwapInOps(SwapInOps):
    """Launches kernels on the current stream. CUDA graphs can capture them, and they need no scratch memory.

    The device of the tensors must be the current one. Host rows are memory that the device maps, as a CPU tensor or as
    a device tensor over the same bytes.

    Raises:
        RuntimeError: the kernels were not built; or, from a launch, CUDA refused it.
    """

    def __init__(self) -> None:
        self._kernels = kernels()
        # Python's `id` of each layer's rows -> these rows, and the layers of each launch of `write_back`. The rows are
        # kept, so that no other object can get their ids.
        self._layers: dict[tuple[int, ...], tuple[Sequence[HotRows], list[Any]]] = {}

    def resolve(
        self,
        residency: Residency,
        decode: DecodeMetadata,
        selected_positions: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        self._kernels.resolve(
            residency.native, decode.native, selected_positions, hot_rows.native, counts, out.native, current_stream()
        )

    def gather(
        self,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        resolved: Resolved,
        batch: int,
        shares_device: bool = False,
    ) -> None:
        self._kernels.gather(host_rows, hot_rows.native, resolved.native, batch, shares_device, current_stream())

    def swap_in(
        self,
        residency: Residency,
        decode: DecodeMetadata,
        selected_positions: torch.Tensor,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
        shares_device: bool = False,
    ) -> None:
        selection = residency.native, decode.native, selected_positions
        rows = host_rows, hot_rows.native, counts, out.native
        self._kernels.swap_in(*selection, *rows, shares_device, current_stream())

    def compact(self, row_ids: torch.Tensor, num_valid: torch.Tensor) -> None:
        self._kernels.compact_rows(row_ids, num_valid, current_stream())

    def newest_row_ids(
        self,
        decode: DecodeMetadata,
        hot_rows: HotRows,
        out: torch.Tensor,
        equal_offsets: torch.Tensor | None = None,
    ) -> None:
        self._kernels.newest_row_ids(decode.native, hot_rows.native, out, equal_offsets, current_stream())

    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], decode: DecodeMetadata
    ) -> None:
        for group in self._layer_groups(hot_rows, host_rows):
            self._kernels.write_back(group, decode.native, current_stream())

    def stage_rows(
        self, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        self._kernels.stage_rows(host_rows, host_block_table, block_size, staging, current_stream())

    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int
    ) -> None:
        self._kernels.save_rows(rows, first, host_rows, host_block_table, block_size, current_stream())

    def begin_units(
        self,
        first_hot_block_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
        seq_indices: torch.Tensor,
        out: UnitMetadata,
    ) -> None:
        requests = first_hot_block_ids, seq_lens, query_lens, seq_indices
        num_seqs = out.num_requests * out.heads.num_heads + 1  # as in host tables, the last is for no request
        self._kernels.begin_units(*requests, num_seqs, out.native, current_stream())

    def write_tokens(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        units: UnitMetadata,
        decode: DecodeMetadata,
        hot_rows: HotRows,
        host_rows: torch.Tensor,
        first_units: torch.Tensor,
    ) -> None:
        rows = hot_rows.native, host_rows, first_units
        self._kernels.write_tokens(key, value, units.native, decode.native, *rows, current_stream())

    def empty_latest(
        self,
        entries: torch.Tensor,
        hot_block_tables: torch.Tensor,
        head_stride: int,
        moved: MovedRequests,
        num_latest: int,
    ) -> None:
        requests = moved.seqs, moved.num_blocks, moved.latest, moved.most_blocks
        self._kernels.empty_latest(entries, hot_block_tables, head_stride, *requests, num_latest, current_stream())

    def _layer_groups(self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor]) -> list[Any]:
        """Return the layers of each launch of `write_back`; layers of an earlier call come from a cache."""
        key = tuple(map(id, hot_rows))
        if key not in self._layers:
            pairs = list(zip(hot_rows, host_rows, strict=True))
            groups = [
                self._kernels.layer_group([hot.native for hot, _ in some], [host for _, host in some])
                for some in (pairs[first : first + MAX_LAYERS] for first in range(0, len(pairs), MAX_LAYERS))
            ]
            self._layers[key] = hot_rows, groups
        return self._layers[key][1]
