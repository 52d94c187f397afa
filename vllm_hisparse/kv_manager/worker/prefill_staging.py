"""Prefill on CUDA: the history of requests with several query tokens, staged from the host for one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_hisparse.compat import replace_batch
from vllm_hisparse.kv_manager.worker.gqa_hot_buffer import GQAHotBuffer, Represent
from vllm_hisparse.kv_manager.worker.hot_buffer import HotBuffer, Seeds
from vllm_hisparse.ops.base import HotRows


@dataclass
class PrefillRequest:
    """One request of a group.

    Attributes:
        first, last: positions of its query tokens, half-open.
        first_row: staging row of its position 0.
        hot_table: [1, hot blocks per request] int32.
        row: [1] int64 row of the hot buffer's state, set by the first layer.
        host_table: [blocks] int32 host blocks, set by the first layer.
        represent: keys that a dense model's algorithm has yet to see, or None; set by the first layer.
        seeds: what becomes hot, set by the first layer.
        staged_seeds: [KV heads, units] int64 rows of the staging memory, in units, where that is; likewise.
    """

    first: int
    last: int
    first_row: int
    hot_table: torch.Tensor
    row: torch.Tensor | None = None
    host_table: torch.Tensor | None = None
    represent: Represent | None = None
    seeds: Seeds | None = None
    staged_seeds: torch.Tensor | None = None


@dataclass
class PrefillGroup:
    """Requests whose histories fit in the staging memory together.

    Attributes:
        tokens: their tokens in the step's batch.
        requests: in the batch's order.
        slots: [tokens] int64 staging row of each token.
        metadata: vLLM's metadata over the staged block tables.
    """

    tokens: slice
    requests: list[PrefillRequest]
    slots: torch.Tensor
    metadata: Any


class PrefillStaging:
    """Device memory for the KV of whole requests in one layer, shared by all layers.

    Args:
        cache: [blocks, block_size, row elements]; the longest request must fit.
    """

    def __init__(self, cache: torch.Tensor):
        self.cache, self.rows = cache, cache.flatten(0, 1)
        self.num_blocks, self.block_size, _ = cache.shape

    def groups(
        self,
        common: CommonAttentionMetadata,
        first_request: int,
        build: Callable[[CommonAttentionMetadata], Any],
    ) -> list[PrefillGroup]:
        """Split the requests from `first_request` on into groups.

        Args:
            common: the step's batch.
            first_request: first prefilling request.
            build: vLLM's metadata from a part of the batch.
        """
        starts = common.query_start_loc_cpu.tolist()
        seq_lens = common.seq_lens_cpu_upper_bound.tolist()
        groups, first = [], first_request
        while first < common.num_reqs and starts[first + 1] > starts[first]:
            last, num_blocks = first + 1, cdiv(seq_lens[first], self.block_size)
            while last < common.num_reqs and starts[last + 1] > starts[last]:
                num_blocks += cdiv(seq_lens[last], self.block_size)
                if num_blocks > self.num_blocks:
                    break
                last += 1
            groups.append(self._group(common, first, last, starts, seq_lens, build))
            first = last
        return groups

    def load(self, group: PrefillGroup, hot_buffer: HotBuffer, host_rows: torch.Tensor) -> None:
        """Copy what came before the query tokens from the host."""
        for request in group.requests:
            if request.row is None:
                # NOTE: not when the metadata is built: the connector tells the worker of new requests after that.
                request.row, request.host_table = self._find(request.hot_table, hot_buffer)
            history = self.rows[request.first_row : request.first_row + self._rows_to_load(request)]
            hot_buffer.ops.stage_rows(host_rows, request.host_table, self.block_size, history)
            hot_buffer.staged_bytes += history.nbytes

    def store(
        self, group: PrefillGroup, hot_buffer: HotBuffer, layer_index: int, host_rows: torch.Tensor, hot: HotRows
    ) -> None:
        """Bring the query tokens' rows to the host, and the latest rows of the request to its hot buffer."""
        for request in group.requests:
            first, last = self._rows_to_save(request)
            rows = self.rows[request.first_row + first : request.first_row + last]
            hot_buffer.ops.save_rows(rows, first, host_rows, request.host_table, self.block_size)
            self._seed(request, hot_buffer, layer_index, hot)

    def _find(self, hot_table: torch.Tensor, hot_buffer: HotBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of a request, [1] int64, or of its KV heads, and its host blocks, [blocks] int32."""
        row = hot_buffer.rows_of(hot_table)
        return row, hot_buffer.host_tables[row].flatten()

    def _rows_to_load(self, request: PrefillRequest) -> int:
        return request.first

    def _rows_to_save(self, request: PrefillRequest) -> tuple[int, int]:
        return request.first, request.last

    def _seed(self, request: PrefillRequest, hot_buffer: HotBuffer, layer_index: int, hot: HotRows) -> None:
        if request.seeds is None:
            request.seeds = hot_buffer.seeds(request.hot_table, request.last, hot)
            units, per_block = request.seeds.units, hot_buffer.shape.block_size
            heads = torch.arange(hot_buffer.num_heads, device=units.device)[:, None]
            blocks = request.first_row // self.block_size + units // per_block
            request.staged_seeds = (blocks * hot_buffer.num_heads + heads) * per_block + units % per_block
        staged = self.cache.view(-1, hot.rows.shape[1])[request.staged_seeds.flatten()]
        hot.rows.index_copy_(0, request.seeds.hot_rows.flatten(), staged)
        hot_buffer.seed(layer_index, request.seeds)

    def _group(
        self,
        common: CommonAttentionMetadata,
        first: int,
        last: int,
        starts: list[int],
        seq_lens: list[int],
        build: Callable[[CommonAttentionMetadata], Any],
    ) -> PrefillGroup:
        requests, slots, num_blocks, num_rows = [], [], 0, len(self.rows)
        for index in range(first, last):
            seq_len, first_row = seq_lens[index], num_blocks * self.block_size
            begin = seq_len - (starts[index + 1] - starts[index])
            slots.append(torch.arange(first_row + begin, first_row + seq_len, device=self.rows.device))
            hot_table = common.block_table_tensor[index, None]
            requests.append(PrefillRequest(begin, min(seq_len, num_rows), first_row, hot_table))
            num_blocks += cdiv(seq_len, self.block_size)
        block_table = self._block_table(requests, max(seq_lens[first:last]))
        part = slice_requests(common, first, last).replace(block_table_tensor=block_table)
        tokens = slice(starts[first], starts[last])
        # NOTE: vLLM warms up with requests longer than `max_model_len`: their last tokens share a row.
        return PrefillGroup(tokens, requests, torch.cat(slots).clamp_max(num_rows - 1), build(part))

    def _block_table(self, requests: list[PrefillRequest], max_seq_len: int) -> torch.Tensor:
        """[requests, blocks of the longest] int32 staging blocks."""
        first_blocks = torch.tensor([r.first_row // self.block_size for r in requests], dtype=torch.int32)
        columns = torch.arange(cdiv(max_seq_len, self.block_size), dtype=torch.int32)
        table = (first_blocks[:, None] + columns).clamp_max(self.num_blocks - 1)
        return table.pin_memory().to(self.rows.device, non_blocking=True)


class WholeBlockStaging(PrefillStaging):
    """Staging for KV whose blocks are ordered by KV head first, so that only whole blocks can be copied."""

    def _find(self, hot_table: torch.Tensor, hot_buffer: GQAHotBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        row = hot_buffer.request_rows(hot_table)
        return row, hot_buffer.host_table(row)[0]

    def _rows_to_load(self, request: PrefillRequest) -> int:
        return cdiv(request.first, self.block_size) * self.block_size

    def _rows_to_save(self, request: PrefillRequest) -> tuple[int, int]:
        first, last = request.first // self.block_size, cdiv(request.last, self.block_size)
        return first * self.block_size, last * self.block_size

    def load_span(
        self, hot_buffer: GQAHotBuffer, host_table: torch.Tensor, first: int, last: int, host_rows: torch.Tensor
    ) -> torch.Tensor:
        """Copy the blocks of positions [first, last) of one request: [blocks, block_size, row elements]."""
        first_block, last_block = first // self.block_size, cdiv(last, self.block_size)
        num_blocks = last_block - first_block
        table = host_table[first_block:last_block].contiguous()
        staged = self.cache[:num_blocks]
        hot_buffer.ops.stage_rows(host_rows, table, self.block_size, staged.flatten(0, 1))
        hot_buffer.staged_bytes += staged.nbytes
        return staged


def slice_requests(common: CommonAttentionMetadata, first: int, last: int) -> CommonAttentionMetadata:
    """The part of a batch with requests [first, last)."""
    if first == 0 and last == common.num_reqs:
        return common
    starts = common.query_start_loc_cpu[first : last + 1]
    start, end = int(starts[0]), int(starts[-1])
    upper = common.seq_lens_cpu_upper_bound[first:last]
    return replace_batch(
        common,
        query_start_loc=common.query_start_loc[first : last + 1] - start,
        query_start_loc_cpu=starts - start,
        seq_lens=common.seq_lens[first:last],
        seq_lens_cpu_upper_bound=upper,
        num_reqs=last - first,
        num_actual_tokens=end - start,
        max_query_len=int(torch.diff(starts).max()),
        max_seq_len=int(upper.max()),
        block_table_tensor=common.block_table_tensor[first:last],
        slot_mapping=common.slot_mapping[start:end],
        positions=None if common.positions is None else common.positions[start:end],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[first:last],
    )
