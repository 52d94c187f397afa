"""Hot buffer of a dense model: one selection per KV head, in units of an algorithm, with the algorithm's state."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm, check_selection
from vllm_hisparse.kv_manager.rows.algorithm_state import AlgorithmState, KeySpan
from vllm_hisparse.kv_manager.rows.decode_step import GQADecodeStep
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.kv_manager.rows.request_table import HotBlockChanges
from vllm_hisparse.kv_manager.rows.residency_table import ResidencyTable
from vllm_hisparse.kv_manager.rows.swap_in import SelectingSwapIn, SwapIn
from vllm_hisparse.layout import StateLayout
from vllm_hisparse.ops.base import HotRows, SwapInOps
from vllm_hisparse.ops.kv_heads import KVHeads


class GQAHotBuffer(HotBuffer):
    """A `HotBuffer` whose rows are units of one KV head (`KVHeads`), with the algorithm's state of each request.

    Args:
        algorithm: algorithm that selects units.
        shape: sizes.
        head_stride: distance from one device block to the next, in KV heads' parts of a block.
        memory: [num_device_blocks, bytes of a block] uint8, the memory of vLLM's device blocks.
        ops: swap-in operations; None: those for the device.

    Attributes:
        state: the algorithm's state.
    """

    step: GQADecodeStep

    def __init__(
        self,
        algorithm: SparseAlgorithm,
        shape: HotBufferShape,
        head_stride: int,
        memory: torch.Tensor,
        ops: SwapInOps | None = None,
    ):
        heads, device = KVHeads(algorithm.shape.num_kv_heads, head_stride, algorithm.tokens_per_unit), memory.device
        units_per_block = shape.rows_per_hot_block // heads.tokens_per_unit
        sizes = shape.num_device_blocks, head_stride * units_per_block, heads.num_heads * units_per_block
        table = ResidencyTable.by_row(*sizes, shape.num_layers, device)
        super().__init__(shape, heads, table, [True] * shape.num_layers, ops)
        self.algorithm = algorithm
        assert algorithm.max_query_len == shape.max_query_len, "algorithm and buffer are of other steps"
        layout = StateLayout(algorithm.state_entries, shape.num_layers, memory.shape[1])
        self.state = AlgorithmState(algorithm, layout, self.requests.state_block_tables, memory)
        self.step = GQADecodeStep(
            self.requests,
            self.layers,
            self.ops,
            self.step_shape(algorithm.num_selected),
            device,
            num_layers=shape.num_layers,
        )

    def _change_hot_blocks(self, changed: HotBlockChanges) -> None:
        super()._change_hot_blocks(changed)
        self.step.reload_newest_units(changed.seqs)

    def select(self, layer_index: int, key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Represent the decoding requests' new tokens and select for them, one token of each request after the other.

        Each token is represented and selects before the next one is represented, so it selects as it would alone.

        Args:
            layer_index: index of the layer.
            key: [batch * max_query_len, num_kv_heads, head_size], padded.
            query: [batch * max_query_len, num_heads, head_size], padded.

        Returns:
            [batch * num_kv_heads, max_query_len * num_selected] int32 units, with a request's selections side by side.
        """
        state, units, max_query_len = self.state.layers[layer_index], self.step.units, self.step.shape.max_query_len
        keys, queries = (rows.unflatten(0, (-1, max_query_len)) for rows in (key, query))
        batch, selections = len(keys), []
        for i in range(max_query_len):
            requests = units.request_indices[i, :batch]
            self.algorithm.update_representations(state, requests, keys[:, i], units.positions[i, :batch])
            selection = self.algorithm.retrieve_topk(state, requests, queries[:, i], units.num_tokens[i, :batch])
            check_selection(self.algorithm, selection, batch)
            selections.append(selection.flatten(0, 1))
        return torch.cat(selections, 1) if max_query_len > 1 else selections[0]

    def swap_in_of(self, layer_index: int) -> SwapIn:
        return SelectingSwapIn(self.step, layer_index, self.residency[layer_index], self.counts.by_seq)

    def begin_decoding(self, first_hot_block_id: int, position: int) -> tuple[KeySpan, ...]:
        """Keys to represent before a request decodes the token at `position`."""
        return self.state.begin_decoding(self.requests.index_of(first_hot_block_id), position)

    def begin_prefill(self, request_index: int, first: int, last: int) -> tuple[KeySpan, ...]:
        """Keys to represent when positions [first, last) of a prompt are on the host; called before any of them
        becomes hot.

        Args:
            request_index: index of the request, or `num_requests` in a run without requests.
            first, last: the chunk of the prompt, half-open.
        """
        if request_index == self.requests.num_requests:
            return ()
        if self.state.is_decoding(request_index):
            # NOTE: hot units may become stale, because a chunk of a prompt is written to the host only and may complete
            # them.
            self._empty(request_index)
        return self.state.prefill(request_index, first, last)

    def _start(self, request_index: int) -> None:
        self.state.start(request_index)
        self._reload_newest_units(request_index)

    def _empty(self, request_index: int) -> None:
        super()._empty(request_index)
        self._reload_newest_units(request_index)

    def _reload_newest_units(self, request_index: int) -> None:
        self.step.reload_newest_units(self.requests.seqs_of(request_index))


def view_units(cache: torch.Tensor, heads: KVHeads) -> HotRows:
    """View a layer's cache as units of one KV head. In this view, each KV head's part of a block is a block.

    Args:
        cache: [num_device_blocks, num_kv_heads, rows per hot block, 2 * head_size]; the distance from one block to the
            next is a whole number of heads' parts.
        heads: numbering of the parts; has that number (`head_stride`), and the rows of a unit.
    """
    num_blocks, num_heads, rows_per_block, width = cache.shape
    num_parts = heads.device_parts(num_blocks - 1).stop
    num_units, unit_elements = rows_per_block // heads.tokens_per_unit, heads.tokens_per_unit * width
    assert num_heads == heads.num_heads, f"cache of {num_heads} KV heads, expected {heads.num_heads}"
    return HotRows.from_cache(
        cache.as_strided((num_parts, num_units, unit_elements), (cache.stride(1), unit_elements, 1))
    )
