"""The interface of a sparse attention algorithm: three duties over state in static tensors, and the facts it declares.

Nothing here knows vLLM, paged memory or a device: an algorithm sees keys, queries and its own state, and answers with
logical positions. The backend adaptors turn those into rows of the hot buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict

from vllm_hisparse.ops.paged_field import PagedField
from vllm_hisparse.ops.select_units import select_units

# State of one layer: field name -> [num_requests, *shape], or [num_requests, num_entries, *shape] if the field grows
State = dict[str, torch.Tensor | PagedField]


class AlgorithmOptions(BaseModel):
    """Options of an algorithm, with defaults and ranges; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer.

    Attributes:
        num_heads, num_kv_heads: query and KV heads; query heads of one KV head are neighbours and share a selection.
        head_size: elements of a key.
        dtype: element type of keys and queries.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StateField:
    """One tensor of an algorithm's state, on the device of the hot buffer.

    Attributes:
        shape: of a request, or of an entry.
        dtype: element type.
        tokens_per_entry: a request has an entry for every so many tokens, in memory that it gets as it grows
            (`PagedField`). None: a request has one of fixed size, allocated for every request that can run.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens_per_entry: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes per request, or per entry."""
        return prod(self.shape) * self.dtype.itemsize

    def num_entries(self, num_tokens: int) -> int:
        """Entries of a request of `num_tokens`; one if the size is fixed."""
        return 1 if self.tokens_per_entry is None else -(-num_tokens // self.tokens_per_entry)


class Selector:
    """A selector of the positions that a decoding token attends to: the facts that the configuration needs.

    Attributes:
        name: what users write in `algorithm`.
        model_family: "mla" models have an indexer that selects; in "gqa" models a `SparseAlgorithm` does.
        forgets_drafts: whether drafts may be verified: what they leave in a state is undone when they were rejected.
        Options: what `algorithm_options` may hold.
    """

    name: ClassVar[str]
    model_family: ClassVar[Literal["mla", "gqa"]]
    forgets_drafts: ClassVar[bool] = False
    Options: ClassVar[type[AlgorithmOptions]] = AlgorithmOptions

    @classmethod
    def unit_tokens(cls, options: AlgorithmOptions) -> int:
        """Neighbouring positions that are selected, moved and evicted together."""
        return 1


class SparseAlgorithm(Selector, ABC):
    """Selects by keys and queries, units of neighbouring positions; one object serves all layers of one shape.

    Shapes are static: they depend on the constructor's arguments alone. `retrieve_topk` never waits for the device, so
    that a `graph_capturable` algorithm can run inside a CUDA graph.

    Args:
        options: checked options.
        shape: the layers it serves.
        budget: tokens a query may attend to, at least `min_budget`, a multiple of `tokens_per_unit`.
        max_tokens: tokens of the longest request.
        max_query_len: new tokens of a decode step: one, and those drafted.

    Attributes:
        graph_capturable: whether update and retrieval of a decode step may be captured in a CUDA graph.
        needs_whole_prompt: representations are built once, from all keys of the prompt, not chunk by chunk.
        num_full_kv_layers: leading layers that the paper leaves with full attention; the default of `full_kv_layers`.
        tokens_per_unit: positions of a unit.
        max_units: units of the longest request.
        num_selected: units of a selection, at most.
    """

    model_family = "gqa"
    graph_capturable: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[bool] = False
    num_full_kv_layers: ClassVar[int] = 0

    def __init__(
        self, options: AlgorithmOptions, shape: AttentionShape, budget: int, max_tokens: int, max_query_len: int = 1
    ):
        self.options, self.shape, self.max_tokens, self.max_query_len = options, shape, max_tokens, max_query_len
        self.tokens_per_unit = self.unit_tokens(options)
        self.max_units = -(-max_tokens // self.tokens_per_unit)
        self.num_selected = min(budget // self.tokens_per_unit, self.max_units)

    @classmethod
    def min_budget(cls, options: AlgorithmOptions) -> int:
        """Tokens that are selected whatever the query is."""
        return cls.unit_tokens(options)

    @classmethod
    def refuse(cls, options: AlgorithmOptions, shape: AttentionShape) -> str | None:
        """The values that the options would need for these layers; None if they fit."""
        return None

    def state_fields(self) -> dict[str, StateField]:
        """The state of one request in one layer. A request's part, and each entry that it gets, holds anything until
        the algorithm writes it; `construct_representations` starts a request at 0."""
        return {}

    @property
    def growing_fields(self) -> dict[str, StateField]:
        """Fields that grow with a request."""
        return {name: field for name, field in self.state_fields().items() if field.tokens_per_entry is not None}

    @property
    def state_entries(self) -> tuple[tuple[int, int], ...]:
        """Tokens and bytes of an entry of each field that grows."""
        fields = self.state_fields().values()
        return tuple((field.tokens_per_entry, field.num_bytes) for field in fields if field.tokens_per_entry)

    @property
    def fixed_fields(self) -> dict[str, StateField]:
        """Fields of a fixed size."""
        return {name: field for name, field in self.state_fields().items() if field.tokens_per_entry is None}

    @property
    def state_bytes_per_token(self) -> float:
        """Device bytes of state per token and layer, of a request of `max_tokens`."""
        fields = self.state_fields().values()
        return sum(field.num_bytes * field.num_entries(self.max_tokens) for field in fields) / self.max_tokens

    # An algorithm without state keeps the next two as they are.

    def construct_representations(self, state: State, request_index: int, keys: torch.Tensor, first: int) -> None:
        """Represent keys that a prefill, an import or the host pool has brought.

        Called with growing `first`, starting a request at 0, perhaps without keys; the result does not depend on where
        chunks are cut.

        Args:
            state: one layer's, updated in place.
            request_index: of the request, in the first dimension of every field of `state`.
            keys: [num_tokens, num_kv_heads, head_size] of `AttentionShape.dtype`; positions [first, first +
                num_tokens).
            first: 0, or what an earlier call ended with.
        """

    def update_representations(
        self, state: State, request_indices: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Represent one new token per request.

        Args:
            state: one layer's, updated in place.
            request_indices: [batch] int64, distinct but for padding, in the first dimension of every field of `state`.
            keys: [batch, num_kv_heads, head_size] of `AttentionShape.dtype`.
            positions: [batch] int64, the first position that is not represented yet. If the algorithm `forgets_drafts`,
                it may be up to `max_query_len` positions earlier: what was represented from there on was rejected, and
                counts for nothing.
        """

    @abstractmethod
    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Select the units that a token attends to; the unit of the newest token is always among them.

        Args:
            state: one layer's, read.
            request_indices: [batch] int64, as in `update_representations`.
            query: [batch, num_heads, head_size] of `AttentionShape.dtype`.
            num_tokens: [batch] int64 represented tokens, the query's own included; 0: selects nothing.

        Returns:
            [batch, num_kv_heads, num_selected] int32 distinct units; valid ones first, the newest token's last of them,
            then -1.
        """

    def select(self, scores: torch.Tensor, num_tokens: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """The best units by score, at most `num_selected`.

        Args:
            scores: [batch, num_kv_heads, max_units] of any float dtype; anything beyond a request's tokens.
            num_tokens: [batch] int64.
            keep: [batch, max_units] or [batch, num_kv_heads, max_units] bool units to select in any case, or None.

        Returns:
            The same as `retrieve_topk`.
        """
        scores = scores.float()
        if keep is not None:
            scores = scores.masked_fill(keep.view(len(keep), -1, self.max_units), float("inf"))
        return select_units(scores.contiguous(), num_tokens, self.tokens_per_unit, self.num_selected)

    def group_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries by KV head.

        Args:
            query: [batch, num_heads, head_size].

        Returns:
            [batch, num_kv_heads, heads per KV head, head_size] float32.
        """
        return query.float().view(len(query), self.shape.num_kv_heads, -1, self.shape.head_size)
