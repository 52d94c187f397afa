"""A decode step: data of the decoding requests that all layers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vllm_hisparse.kv_manager.rows.request_table import RequestTable
from vllm_hisparse.ops.base import DecodeMetadata, HotRows, Resolved, SwapInOps, UnitMetadata


@dataclass(frozen=True)
class LayerRows:
    """The rows of one layer.

    Attributes:
        hot: hot rows on the device.
        host: [num_host_rows, row elements] rows in the host pool.
    """

    hot: HotRows
    host: torch.Tensor


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step. A batch entry is a request, or one KV head of it if every KV head selects for itself.

    Attributes:
        max_batch: batch entries of a layer in a step, graph padding included.
        num_selected: entries of one selection.
        block_size: rows of a host block.
        max_query_len: new tokens of a request, each with a selection of its own: one and its drafts.
    """

    max_batch: int
    num_selected: int
    block_size: int
    max_query_len: int = 1


class DecodeStep(ABC):
    """The decoding requests of the running step, in static tensors, so that a CUDA graph may replay the step.

    `plan` sets the requests when the metadata is built; it does not use the device. In the forward, every layer calls
    `begin` before its new tokens are written, and `finish` when it has attended. Work that a step needs only once is
    done in the first layer's `begin` and the last layer's `finish`.

    The operations work on exactly `max_query_len` queries of each request, request by request. `pad_queries` turns a
    step's tokens into such queries, and `unpad_queries` turns queries into tokens again. If every request has
    `max_query_len` tokens, nothing is copied.

    NOTE: `begin` looks the requests up on the device, because Model Runner V2 builds the metadata before the connector
    tells the worker of new requests, and replays the forward from a graph.

    Args:
        requests: the running requests.
        layers: rows of all layers, in order; filled before the first step.
        ops: swap-in operations of the device.
        shape: sizes.
        device: device of the hot rows.

    Attributes:
        by_class: metadata of the decoding requests in the layers of each row class; empty before the first `plan`.
        resolved: output of the last `resolve` or `swap_in`.
        runs_whole: True if layers that could divide the step into microbatches are to run it as a whole. Set before the
            forward, and while a CUDA graph is captured.
    """

    runs_whole: bool = False

    def __init__(
        self, requests: RequestTable, layers: list[LayerRows], ops: SwapInOps, shape: StepShape, device: torch.device
    ):
        self.requests, self.layers, self.ops, self.shape = requests, layers, ops, shape
        self.by_class: tuple[DecodeMetadata, ...] = ()
        self._num_queries = 0
        self._query_indices: torch.Tensor | None = None
        self._slices: dict[tuple[int, int], tuple[tuple[DecodeMetadata, ...], Resolved]] = {}  # by request range
        num_columns = shape.num_selected * shape.max_query_len
        self.resolved = Resolved.allocate(shape.max_batch, num_columns, device, shape.max_query_len)

    def plan(
        self,
        first_hot_block_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | None = None,
        query_indices: torch.Tensor | None = None,
    ) -> None:
        """Set the requests that decode in this step.

        Args:
            first_hot_block_ids: [batch] int32 first hot block of each request, graph padding included, as in
                `DecodeMetadata`.
            seq_lens: [batch] int32 tokens of each request, the new ones included; less than 1 for padding.
            query_lens: [batch] int32 new tokens of each request; None: one each.
            query_indices: [tokens] int64 padded query of each token; None: every request has `max_query_len` tokens.
        """
        self._num_queries, self._query_indices = len(seq_lens) * self.shape.max_query_len, query_indices
        self._slices.clear()
        self.by_class = self._plan(first_hot_block_ids, seq_lens, query_lens)

    def pad_queries(self, values: torch.Tensor, empty: int = 0) -> torch.Tensor:
        """Turn a step's tokens into padded queries.

        Args:
            values: [tokens, ...].
            empty: value for padding.

        Returns:
            [batch * max_query_len, ...].
        """
        if self._query_indices is None:
            return values
        padded = values.new_full((self._num_queries, *values.shape[1:]), empty)
        return padded.index_copy(0, self._query_indices, values)

    def unpad_queries(self, values: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Drop the padding: [batch * max_query_len, ...] to [num_tokens, ...]."""
        return values[:num_tokens] if self._query_indices is None else values[self._query_indices]

    def decode_of(self, layer_index: int) -> DecodeMetadata:
        """Return the metadata of the decoding requests for a layer."""
        return self.by_class[self.requests.classes.of_layer[layer_index]]

    def of_requests(self, layer_index: int, requests: slice | None) -> tuple[DecodeMetadata, Resolved]:
        """Return a layer's metadata and the resolution for a range of the step's requests, in the step's own memory.

        Args:
            layer_index: index of the layer.
            requests: the range; None: all requests.
        """
        if requests is None:
            return self.decode_of(layer_index), self.resolved
        key = requests.start, requests.stop
        if key not in self._slices:
            decodes = tuple(decode.slice_requests(requests) for decode in self.by_class)
            self._slices[key] = decodes, self.resolved.slice_requests(requests)
        decodes, resolved = self._slices[key]
        return decodes[self.requests.classes.of_layer[layer_index]], resolved

    def begin(self, layer_index: int) -> None:
        """Begin a layer; every layer calls this before its new tokens are written."""
        if layer_index == 0:
            self._begin()

    def finish(self, layer_index: int) -> None:
        """End a layer; every layer calls this when it has attended."""
        if layer_index == len(self.layers) - 1:
            self._finish()

    @abstractmethod
    def _plan(
        self, first_hot_block_ids: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor | None
    ) -> tuple[DecodeMetadata, ...]:
        """Make the step's metadata for each row class; arguments as for `plan`."""

    @abstractmethod
    def _begin(self) -> None:
        """Do the work that a step needs once, before the first layer's tokens are written."""

    @abstractmethod
    def _finish(self) -> None:
        """Do the work that a step needs once, after the last layer has attended."""

    def _make_tables(
        self, first_hot_block_ids: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor | None
    ) -> tuple[DecodeMetadata, ...]:
        requests, shape = self.requests, self.shape
        return tuple(
            DecodeMetadata(
                requests.seq_indices,
                first_hot_block_ids,
                seq_lens,
                requests.hot_block_tables,
                num_hot_rows,
                requests.host_block_tables,
                shape.block_size,
                query_lens,
                shape.max_query_len,
                requests.has_equal_rows,
            )
            for num_hot_rows in requests.num_hot_rows.unbind()
        )


class MLADecodeStep(DecodeStep):
    """A step of a DSA model: new rows are written to `newest_row_ids`, and copied to the host after the last layer.

    Attributes:
        newest_row_ids: [n, max_batch * max_query_len] int64 flat hot row of each new position, request by request, -1
            for padding. n is the number of row classes, because the layers of a class share the ids. If requests may
            have equal rows, n is the number of layers, in the order of their classes.
    """

    def __init__(
        self, requests: RequestTable, layers: list[LayerRows], ops: SwapInOps, shape: StepShape, device: torch.device
    ):
        super().__init__(requests, layers, ops, shape, device)
        num_rows, classes = shape.max_batch * shape.max_query_len, requests.classes
        num_lists = len(classes.of_layer) if classes.equal_rows else len(classes)
        self.newest_row_ids = torch.full((num_lists, num_rows), -1, dtype=torch.int64, device=device)
        if not classes.equal_rows:
            self._newest_by_class = [(ids, None) for ids in self.newest_row_ids.unbind()]
            self._newest_by_layer = [self._newest_by_class[each][0] for each in classes.of_layer]
            return
        offsets = torch.tensor(classes.equal_offsets, dtype=torch.int32)
        lists = self.newest_row_ids.split([len(layers) for layers in classes.layers])
        self._newest_by_class = [
            (ids, offsets[list(layers)].to(device)) for ids, layers in zip(lists, classes.layers, strict=True)
        ]
        order = [layer for layers in classes.layers for layer in layers]
        self._newest_by_layer = [self.newest_row_ids[order.index(layer)] for layer in range(len(order))]

    def newest_rows_of(self, layer_index: int) -> torch.Tensor:
        """`newest_row_ids` in a layer: [max_batch * max_query_len] int64."""
        return self._newest_by_layer[layer_index]

    def join_selections(self, selected_positions: torch.Tensor) -> torch.Tensor:
        """Turn selections of a step's tokens, [tokens, num_selected] int32, into the form that a `SwapIn` takes:
        [batch, max_query_len * num_selected].
        """
        num_columns = self.shape.max_query_len * selected_positions.shape[1]
        return self.pad_queries(selected_positions, -1).view(-1, num_columns)

    def _plan(
        self, first_hot_block_ids: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor | None
    ) -> tuple[DecodeMetadata, ...]:
        return self._make_tables(first_hot_block_ids, seq_lens, query_lens)

    def _begin(self) -> None:
        classes = self.requests.classes.layers
        for decode, (out, offsets), (first, *_) in zip(self.by_class, self._newest_by_class, classes, strict=True):
            self.ops.newest_row_ids(decode, self.layers[first].hot, out, offsets)

    def _finish(self) -> None:
        for decode, indices in zip(self.by_class, self.requests.classes.layers, strict=True):
            layers = [self.layers[index] for index in indices]
            self.ops.write_back([layer.hot for layer in layers], [layer.host for layer in layers], decode)


class GQADecodeStep(DecodeStep):
    """A step of a dense model: metadata has an entry per KV head and counts units; every layer writes its new tokens to
    the host itself.

    Args:
        requests, layers, ops, shape, device: as in `DecodeStep`; batch entries are KV heads, and rows are units.
        num_layers: layers with a hot buffer.

    Attributes:
        units: units of the decoding requests.
        first_units: [num_layers, num_seqs + 1] int32 unit of each sequence's first new token in its last step. -1: the
            tokens of the sequence's newest unit are on the host, but not in the unit's slot.
    """

    def __init__(
        self,
        requests: RequestTable,
        layers: list[LayerRows],
        ops: SwapInOps,
        shape: StepShape,
        device: torch.device,
        num_layers: int,
    ):
        super().__init__(requests, layers, ops, shape, device)
        heads = requests.heads
        max_batch = shape.max_batch // heads.num_heads
        self.units = UnitMetadata.allocate(max_batch, requests.num_requests, heads, device, shape.max_query_len)
        self.first_units = torch.full((num_layers, requests.num_seqs + 1), -1, dtype=torch.int32, device=device)
        self._by_request: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None  # as planned

    def reload_newest_units(self, seqs: torch.Tensor) -> None:
        """Mark the newest units of sequences: their tokens are on the host, but not in the slots of these units.

        Args:
            seqs: [n] int64 sequence indices, on the device.
        """
        self.first_units.index_fill_(1, seqs, -1)

    def write_tokens(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the decoding requests' new tokens into their units, on the device and on the host.

        Args:
            layer_index: index of the layer.
            key, value: [batch * max_query_len, num_kv_heads, head_size], padded.
        """
        layer, first_units = self.layers[layer_index], self.first_units[layer_index]
        self.ops.write_tokens(key, value, self.units, self.decode_of(layer_index), layer.hot, layer.host, first_units)

    def _plan(
        self, first_hot_block_ids: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor | None
    ) -> tuple[DecodeMetadata, ...]:
        units, by_head = self.units, slice(0, len(seq_lens) * self.requests.heads.num_heads)
        self._by_request = first_hot_block_ids, seq_lens, query_lens
        # NOTE: the new tokens may lie in fewer units than there are tokens; slots are reserved for these units only.
        return self._make_tables(
            units.first_hot_block_ids[by_head], units.num_units[by_head], units.num_new_units[by_head]
        )

    def _begin(self) -> None:
        assert self._by_request is not None
        self.ops.begin_units(*self._by_request, self.requests.seq_indices, self.units)

    def _finish(self) -> None:
        """Do nothing: every layer has written its tokens to the host before it attended."""
