"""Hot buffer of a dense model: one selection per KV head, in units of an algorithm, with the algorithm's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm
from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.worker.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.ops.base import HotRows, Resolved, StepTables, UnitTables

DECODING = -1  # in place of a number of represented tokens: every token so far, each as it was decoded


@dataclass(frozen=True)
class Represent:
    """Keys that the algorithm has yet to see: positions [first, last) of a request, which are on the host.

    Attributes:
        row: the request's row of the algorithm's state.
        first, last: the positions, half-open.
    """

    row: int
    first: int
    last: int


class GQAHotBuffer(HotBuffer):
    """A `HotBuffer` whose rows are units of one KV head, and what the algorithm knows of each request.

    To the swap-in operations every KV head is a request of its own and every unit a row: head h of request row r has
    state row `r * num_heads + h`, its part of device block b is block `b * head_stride + h`, of host block b block
    `b * num_heads + h`. Units replace tokens in lengths, positions and block sizes.

    Representations follow the host pool: whatever brought a request's KV there - prefill, a transfer, a prefix hit, a
    resumption - the positions not represented yet are read from the host before the request decodes.

    Args:
        algorithm: selects the units.
        shape: sizes by request and token.
        num_hot_blocks: device blocks of a request.
        head_stride: parts of KV heads from one device block to the next.
        device: where the hot rows are.

    Attributes:
        states: the algorithm's state of each layer, with a row after the last request's for padding.
        units: tables of the step's decoding requests.
        reload: [num_layers, num_requests by KV head + 1] int32, as in `SwapInOps.write_tokens`.
    """

    def __init__(
        self,
        algorithm: SparseAlgorithm,
        shape: HotBufferShape,
        num_hot_blocks: int,
        head_stride: int,
        device: torch.device,
    ):
        per_unit, num_heads = algorithm.tokens_per_unit, algorithm.shape.num_kv_heads
        by_head = HotBufferShape(
            num_requests=shape.num_requests,
            max_batch=shape.max_batch * num_heads,
            num_slots=shape.num_slots // per_unit,
            num_layers=shape.num_layers,
            top_k=algorithm.num_selected,
            max_blocks=shape.max_blocks,
            block_size=shape.block_size // per_unit,
            num_device_blocks=shape.num_device_blocks * head_stride,
        )
        super().__init__(by_head, device, num_heads, head_stride, per_unit)
        self.algorithm, self.num_requests, self.block_size = algorithm, shape.num_requests, shape.block_size
        self.states = [algorithm.allocate_state(shape.num_requests + 1, device) for _ in range(shape.num_layers)]
        self.units = UnitTables.allocate(shape.max_batch, num_hot_blocks, num_heads, head_stride, per_unit, device)
        self.reload = torch.zeros((shape.num_layers, len(self.host_tables)), dtype=torch.int32, device=device)
        self._num_represented = [0] * shape.num_requests  # by row

    def extend_table(self, handle: int, first: int, host_ids: Sequence[int]) -> None:
        super().extend_table(handle, first, host_ids)
        if first == 0:
            row = self.row_of(handle)
            self._num_represented[row] = 0
            self.reload[:, self.rows_of_heads(row)] = 1

    def request_rows(self, hot_tables: torch.Tensor) -> torch.Tensor:
        """Row of each request, [batch] int64; `num_requests` where there is none."""
        return self.rows_of(hot_tables * self.head_stride) // self.num_heads

    def host_table(self, row: int | torch.Tensor) -> torch.Tensor:
        """Host blocks of a request: [max_blocks] int32, -1 beyond."""
        return self.host_tables[row * self.num_heads].div(self.num_heads, rounding_mode="floor")

    def begin_units(self, hot_tables: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Say which requests decode one token in this step; `units` and `decode_tables` are theirs from now on.

        Args:
            hot_tables, seq_lens: as in `StepTables`, by request and token, graph padding included.
        """
        by_request = StepTables(self.state_rows, hot_tables, seq_lens, self.host_tables, self.block_size)
        self.ops.begin_units(by_request, self.units)
        by_head = slice(0, len(seq_lens) * self.num_heads)
        hot_tables, num_units = self.units.hot_tables[by_head], self.units.num_units[by_head]
        self.decode_tables = StepTables(self.state_rows, hot_tables, num_units, self.host_tables, self.shape.block_size)

    def resolve(self, layer: int, units: torch.Tensor, hot: HotRows) -> Resolved:
        """`swap_in` without the copies, which depend on how the host orders a unit.

        Args:
            layer: index of the layer.
            units: [batch * num_heads, k] int32 of the decoding requests.
            hot: hot units of the layer.
        """
        assert self.decode_tables is not None
        self.ops.resolve(self.residency[layer], self.decode_tables, units, hot, self.counts.by_row, self.resolved)
        return self.resolved

    def write_tokens(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, hot: HotRows, host_units: torch.Tensor
    ) -> None:
        """Put the decoding requests' new tokens into their newest units, on the device and on the host.

        Args:
            layer: index of the layer.
            key, value: [batch, num_kv_heads, head_size].
            hot: hot units of the layer.
            host_units: [num_host_units, unit elements] of the layer, a KV head's part of a block after the other.
        """
        self.ops.write_tokens(
            key, value, self.units, self.decode_tables, self.num_slots, hot, host_units, self.reload[layer]
        )

    def represent_prefill(self, row: int, first: int, last: int) -> Represent | None:
        """What to represent now that a chunk of the prompt, positions [first, last), is on the host, too.

        Args:
            row: of the request, or `num_requests` in a run without requests.
            first, last: the chunk.
        """
        if row == self.num_requests:
            return None
        if self._num_represented[row] == DECODING:
            # NOTE: a chunk of a prompt goes to the host alone, and may complete units that are hot.
            self._empty(row)
            if last - first == 1:
                # NOTE: a step of one token that Model Runner V1 put among the prefills; the scheduler counts it as one
                # that decodes.
                return Represent(row, first, last)
            self._num_represented[row] = 0 if self.algorithm.needs_whole_prompt else first
        return None if self.algorithm.needs_whole_prompt else self._represent(row, last)

    def begin_decoding(self, handle: int, position: int) -> Represent | None:
        """What to represent before the token at `position`, which the request decodes next; from then on it represents
        each token itself. With nothing before it, [0, 0) lets the algorithm forget who had the row before."""
        row = self.row_of(handle)
        if self._num_represented[row] == DECODING:
            return None
        missing, self._num_represented[row] = self._represent(row, position), DECODING
        return Represent(row, 0, 0) if position == 0 else missing

    def staging(self, hot: HotRows) -> torch.Tensor:
        """[max_blocks, block_size, row elements of all KV heads], shared by all layers."""
        if self._staging is None:
            row_elements = hot.rows.shape[1] // self.algorithm.tokens_per_unit * self.num_heads
            self._staging = hot.rows.new_zeros(self.shape.max_blocks, self.block_size, row_elements)
        return self._staging

    def _empty(self, row: int) -> None:
        super()._empty(row)
        self.reload[:, self.rows_of_heads(row)] = 1

    def _represent(self, row: int, last: int) -> Represent | None:
        first, self._num_represented[row] = self._num_represented[row], last
        return Represent(row, first, last) if first < last else None


def check_state_fits(algorithm: str, num_requests: int, max_num_seqs: int, request_bytes: int, free_bytes: int) -> None:
    """Refuse state that the device cannot hold beside what vLLM has allocated.

    Args:
        algorithm: its name.
        num_requests: requests with state at once, at most `max_num_seqs`.
        max_num_seqs: what was asked for.
        request_bytes: of one request of `--max-model-len`, all layers.
        free_bytes: of the device, for state.

    Raises:
        HiSparseConfigError: there is no room.
    """
    if (num_requests + 1) * request_bytes > free_bytes:
        raise HiSparseConfigError(
            "--max-num-seqs",
            max_num_seqs,
            f"at most {max(free_bytes // request_bytes - 1, 0)}: '{algorithm}' keeps {request_bytes / 2**20:.1f} MiB "
            f"for a request of --max-model-len, and {free_bytes / 2**30:.1f} GiB of the device are free for it",
            "Lower it or --max-model-len, or lower --gpu-memory-utilization to leave more free.",
        )


def view_units(cache: torch.Tensor, tokens_per_unit: int, head_stride: int) -> HotRows:
    """View a layer's cache as units of one KV head, block `b * head_stride + h` being head h's part of block b.

    Args:
        cache: [num_device_blocks, num_kv_heads, rows per hot block, 2 * head_size], a whole number of heads' parts from
            one block to the next.
        tokens_per_unit: rows of a unit.
        head_stride: that number.
    """
    num_blocks, num_heads, rows_per_block, width = cache.shape
    num_parts, units = (num_blocks - 1) * head_stride + num_heads, rows_per_block // tokens_per_unit
    unit_elements = tokens_per_unit * width
    return HotRows.from_cache(cache.as_strided((num_parts, units, unit_elements), (cache.stride(1), unit_elements, 1)))
