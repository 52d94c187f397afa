"""Prefill on CUDA: histories of prefilling requests, copied from the host to the device for one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_hisparse.compat.attention import replace_batch
from vllm_hisparse.kv_manager.rows.algorithm_state import KeySpan
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, Seeds


@dataclass(frozen=True)
class PrefillRequest:
    """One request of a group, as the attention metadata describes it.

    Attributes:
        first, last: positions of its query tokens, half-open.
        first_block: staging block of its position 0.
        first_hot_block_id: [1] int32.
    """

    first: int
    last: int
    first_block: int
    first_hot_block_id: torch.Tensor


@dataclass(frozen=True)
class PrefillPlan:
    """Work for one prefilling request in every layer.

    Attributes:
        request: the request.
        host_block_table: [blocks] int32 host blocks, -1 beyond the request's blocks.
        seeds: units that become hot in the layers of each row class.
        staged_seeds: for each row class, [KV heads, units] int64 places of the seeds in the staging memory, in units of
            one KV head.
        key_spans: keys that a dense model's algorithm represents once the query tokens are on the host.
    """

    request: PrefillRequest
    host_block_table: torch.Tensor
    seeds: tuple[Seeds, ...]
    staged_seeds: tuple[torch.Tensor, ...]
    key_spans: tuple[KeySpan, ...]


@dataclass
class PrefillGroup:
    """Requests whose histories fit in the staging memory together.

    Attributes:
        tokens: the requests' tokens in the step's batch.
        requests: the requests, in the order of the batch.
        slots: [tokens] int64 row of each token in the staging memory.
        metadata: vLLM's metadata over the staged block tables.
        plans: a plan for each request; the first layer makes them for all layers (`PrefillStaging.plan`).
    """

    tokens: slice
    requests: tuple[PrefillRequest, ...]
    slots: torch.Tensor
    metadata: Any
    plans: tuple[PrefillPlan, ...] = ()


class PrefillStaging:
    """Device memory for the KV of whole requests in one layer, shared by all layers.

    Args:
        hot_buffer: hot buffer of the model. Its staging memory, [blocks, block_size, row elements], holds the longest
            request.
    """

    def __init__(self, hot_buffer: HotBuffer):
        self.hot_buffer, self.cache = hot_buffer, hot_buffer.staging_memory()
        self.rows = self.cache.flatten(0, 1)
        self.num_blocks, self.block_size, _ = self.cache.shape

    def groups(
        self,
        common: CommonAttentionMetadata,
        first_request: int,
        build: Callable[[CommonAttentionMetadata], Any],
    ) -> list[PrefillGroup]:
        """Split the requests from `first_request` on into groups.

        Args:
            common: the step's batch.
            first_request: index of the first prefilling request.
            build: makes vLLM's metadata for a part of the batch.
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

    def plan(self, group: PrefillGroup) -> None:
        """Look the requests up; called by the first layer before it loads.

        NOTE: this cannot be done when the metadata is built, because the connector tells the worker of new requests
        after that.
        """
        group.plans = tuple(self._plan(request) for request in group.requests)

    def load(self, group: PrefillGroup, host_rows: torch.Tensor) -> None:
        """Copy the rows before the query tokens from the host.

        Args:
            group: a group with plans.
            host_rows: [num_host_rows, row elements] host rows of the layer.
        """
        for plan in group.plans:
            history = self._rows_of(plan.request, 0, self._num_rows_to_load(plan.request))
            self.hot_buffer.ops.stage_rows(host_rows, plan.host_block_table, self.block_size, history)
            self.hot_buffer.count_staged(history.nbytes)

    def store(self, group: PrefillGroup, layer_index: int, host_rows: torch.Tensor) -> None:
        """Copy the query tokens' rows to the host, and the latest rows of each request to its hot buffer.

        Args:
            group: a group with plans.
            layer_index: index of the layer.
            host_rows: as in `load`.
        """
        for plan in group.plans:
            first, last = self._span_to_save(plan.request)
            rows = self._rows_of(plan.request, first, last)
            self.hot_buffer.ops.save_rows(rows, first, host_rows, plan.host_block_table, self.block_size)
            self._seed(plan, layer_index)

    def _plan(self, request: PrefillRequest) -> PrefillPlan:
        """Make the plan for a request of a DSA model."""
        requests = self.hot_buffer.requests
        return self._make_plan(
            request, requests.host_block_table(requests.find(request.first_hot_block_id))[0], key_spans=()
        )

    def _make_plan(
        self, request: PrefillRequest, host_block_table: torch.Tensor, key_spans: tuple[KeySpan, ...]
    ) -> PrefillPlan:
        buffer, place = self.hot_buffer, (request.first_hot_block_id, request.last)
        seeds = tuple(buffer.seeds(*place, row_class) for row_class in range(len(buffer.classes)))
        staged_seeds = tuple(self._places(request, each.units) for each in seeds)
        return PrefillPlan(request, host_block_table, seeds, staged_seeds, key_spans)

    def _places(self, request: PrefillRequest, units: torch.Tensor) -> torch.Tensor:
        """Places of a request's units in the staging memory: [KV heads, units] int64, in units of one KV head."""
        heads = self.hot_buffer.heads
        units_per_block = self.block_size // heads.tokens_per_unit
        parts = heads.host_parts(request.first_block + units // units_per_block)  # numbered as on the host
        return parts * units_per_block + units % units_per_block

    def _seed(self, plan: PrefillPlan, layer_index: int) -> None:
        hot, row_class = self.hot_buffer.layers[layer_index].hot, self.hot_buffer.classes.of_layer[layer_index]
        seeds = plan.seeds[row_class]
        staged = self.cache.view(-1, hot.rows.shape[1])[plan.staged_seeds[row_class].flatten()]
        hot.rows.index_copy_(0, self.hot_buffer.seeded_rows(layer_index, seeds).flatten(), staged)
        self.hot_buffer.seed(layer_index, seeds)

    def _rows_of(self, request: PrefillRequest, first: int, last: int) -> torch.Tensor:
        """Staged rows of positions [first, last) of a request: [last - first, row elements]."""
        start = request.first_block * self.block_size
        return self.rows[start + first : start + last]

    def _num_rows_to_load(self, request: PrefillRequest) -> int:
        return request.first

    def _span_to_save(self, request: PrefillRequest) -> tuple[int, int]:
        return request.first, request.last

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
            first_hot_block_id = common.block_table_tensor[index, :1]
            requests.append(PrefillRequest(begin, min(seq_len, num_rows), num_blocks, first_hot_block_id))
            num_blocks += cdiv(seq_len, self.block_size)
        block_table = self._block_table(requests, max(seq_lens[first:last]))
        part = slice_requests(common, first, last).replace(block_table_tensor=block_table)
        tokens = slice(starts[first], starts[last])
        # NOTE: the last tokens share a row if a request is longer than `max_model_len`, as in vLLM's warm-up.
        return PrefillGroup(tokens, tuple(requests), torch.cat(slots).clamp_max(num_rows - 1), build(part))

    def _block_table(self, requests: list[PrefillRequest], max_seq_len: int) -> torch.Tensor:
        """Staging blocks of each request: [requests, blocks of the longest request] int32."""
        first_blocks = torch.tensor([request.first_block for request in requests], dtype=torch.int32)
        columns = torch.arange(cdiv(max_seq_len, self.block_size), dtype=torch.int32)
        table = (first_blocks[:, None] + columns).clamp_max(self.num_blocks - 1)
        return table.pin_memory().to(self.rows.device, non_blocking=True)


class WholeBlockStaging(PrefillStaging):
    """Staging for a dense model. It copies whole blocks only, because blocks are ordered by KV head first.

    Args:
        hot_buffer: hot buffer of the model.
    """

    hot_buffer: GQAHotBuffer

    def load_span(self, span: KeySpan, host_rows: torch.Tensor) -> torch.Tensor:
        """Copy the blocks that contain some keys of one request to the start of the staging memory.

        Args:
            span: the keys.
            host_rows: as in `load`.

        Returns:
            [blocks, block_size, row elements]; the first block contains position `span.first`.
        """
        first_block, last_block = span.first // self.block_size, cdiv(span.last, self.block_size)
        host_block_table = self.hot_buffer.requests.host_block_table(span.request_index)[
            first_block:last_block
        ].contiguous()
        staged = self.cache[: last_block - first_block]
        self.hot_buffer.ops.stage_rows(host_rows, host_block_table, self.block_size, staged.flatten(0, 1))
        self.hot_buffer.count_staged(staged.nbytes)
        return staged

    def _plan(self, request: PrefillRequest) -> PrefillPlan:
        requests = self.hot_buffer.requests
        request_index = requests.take_prefill(request.first, request.last)
        if request_index is None:
            # NOTE: this waits for the device, but only if several requests prefill the same positions in this step.
            request_index = int(requests.find(request.first_hot_block_id))
        key_spans = self.hot_buffer.begin_prefill(request_index, request.first, request.last)
        return self._make_plan(request, requests.host_block_table(request_index), key_spans)

    def _num_rows_to_load(self, request: PrefillRequest) -> int:
        return cdiv(request.first, self.block_size) * self.block_size

    def _span_to_save(self, request: PrefillRequest) -> tuple[int, int]:
        first, last = request.first // self.block_size, cdiv(request.last, self.block_size)
        return first * self.block_size, last * self.block_size


def slice_requests(common: CommonAttentionMetadata, first: int, last: int) -> CommonAttentionMetadata:
    """Return the part of a batch with requests [first, last)."""
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
