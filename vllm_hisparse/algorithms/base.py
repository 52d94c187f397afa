"""The interface of a sparse attention algorithm: three operations on its state, and facts that it declares.

An algorithm knows neither vLLM nor paged memory nor a device. It gets keys and queries, keeps state in static tensors,
and returns units of positions. The attention layers turn these into rows of the hot buffer.
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
    """Sizes of an attention layer.

    Attributes:
        num_heads, num_kv_heads: number of query heads and KV heads; the query heads of one KV head are neighbours and
            share a selection.
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
        shape: shape of one request's part, or of an entry if the field grows.
        dtype: element type.
        tokens_per_entry: tokens for each entry of a field that grows with the request (`PagedField`). None: the field
            has a fixed size, and is allocated for every request that can run.

    Raises:
        ValueError: a value is of another kind; an entry of a field that grows has no element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens_per_entry: int | None = None

    def __post_init__(self) -> None:
        tokens, least = self.tokens_per_entry, 0 if self.tokens_per_entry is None else 1
        has_sizes = isinstance(self.shape, tuple) and all(type(size) is int and size >= least for size in self.shape)
        is_real = isinstance(self.dtype, torch.dtype) and not (self.dtype.is_complex or "torch.q" in str(self.dtype))
        has_tokens = tokens is None or (type(tokens) is int and tokens >= 1)
        for name, fits, expected in (
            ("shape", has_sizes, f"a tuple of whole numbers from {least} on"),
            ("dtype", is_real, "a torch.dtype of real numbers"),
            ("tokens_per_entry", has_tokens, "None or a whole number from 1 on"),
        ):
            if not fits:
                raise ValueError(f"StateField {name}: got {getattr(self, name)!r}, expected {expected}")

    @property
    def num_bytes(self) -> int:
        """Bytes per request, or per entry."""
        return prod(self.shape) * self.dtype.itemsize

    def num_entries(self, num_tokens: int) -> int:
        """Entries of a request of `num_tokens` in a field that grows."""
        assert self.tokens_per_entry is not None
        return -(-num_tokens // self.tokens_per_entry)


class Selector:
    """A selector of positions, as far as the configuration knows it.

    Attributes:
        model_family: "mla": the model's own indexer selects rows for all heads; "msa": it selects blocks for each KV
            head; "gqa": a `SparseAlgorithm` selects.
        forgets_drafts: True if the state can forget rejected drafts, so that speculative decoding is possible.
        Options: class of the `algorithm_options`.
    """

    model_family: ClassVar[Literal["mla", "msa", "gqa"]]
    forgets_drafts: ClassVar[bool] = False
    Options: ClassVar[type[AlgorithmOptions]] = AlgorithmOptions

    @classmethod
    def unit_tokens(cls, options: AlgorithmOptions) -> int:
        """Number of neighbouring positions that are selected, copied and evicted together."""
        return 1


class SparseAlgorithm(Selector, ABC):
    """Selects units of neighbouring positions by keys and queries. One object serves all layers of one shape.

    Shapes are static: they depend only on the constructor's arguments. `retrieve_topk` never waits for the device, so
    that a `graph_capturable` algorithm can run inside a CUDA graph.

    Args:
        options: checked options.
        shape: sizes of the layers.
        budget: tokens that a query may attend to, at least `min_budget`, a multiple of `tokens_per_unit`.
        max_tokens: tokens of the longest request.
        max_query_len: new tokens of a request in a decode step: one and its drafts.

    Attributes:
        graph_capturable: True if a CUDA graph may capture `update_representations` and `retrieve_topk`.
        needs_whole_prompt: True if the keys of a prompt are represented all at once, not chunk by chunk.
        num_full_kv_layers: number of leading layers that have full attention in the paper; they are the default of
            `full_kv_layers`.
        tokens_per_unit: positions of a unit.
        max_units: units of the longest request.
        num_selected: largest number of units of a selection.
    """

    model_family: ClassVar[Literal["msa", "gqa"]] = "gqa"
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
        """Number of tokens that are selected for every query."""
        return cls.unit_tokens(options)

    @classmethod
    def refuse(cls, options: AlgorithmOptions, shape: AttentionShape) -> str | None:
        """Return the option values that these layers need, for an error message; None if the options fit."""
        return None

    def state_fields(self) -> dict[str, StateField]:
        """Return the fields of the state of one request in one layer.

        A request's part, and each entry that it gets, holds anything until the algorithm writes it. A call of
        `construct_representations` with `first` 0 starts a request.
        """
        return {}

    @property
    def growing_fields(self) -> dict[str, StateField]:
        """Fields that grow with a request."""
        return {name: field for name, field in self.state_fields().items() if field.tokens_per_entry is not None}

    @property
    def state_entries(self) -> tuple[tuple[int, int], ...]:
        """Tokens and bytes of an entry, for each field that grows."""
        fields = self.state_fields().values()
        return tuple((field.tokens_per_entry, field.num_bytes) for field in fields if field.tokens_per_entry)

    @property
    def fixed_fields(self) -> dict[str, StateField]:
        """Fields of a fixed size."""
        return {name: field for name, field in self.state_fields().items() if field.tokens_per_entry is None}

    # An algorithm without state does not override the next two methods.

    def construct_representations(self, state: State, request_index: int, keys: torch.Tensor, first: int) -> None:
        """Represent keys of a request that come from a prefill, a transfer or the host pool.

        The first call for a request has `first` 0, and perhaps no keys. A later call begins where the last one ended,
        or before the last represented token, at the start of a unit: if a session's next turn begins, or if a prompt
        goes on after a step that had few of its tokens. Then the tokens from `first` on must be forgotten, because they
        come again, or were rejected drafts. The result must not depend on how the keys are divided among calls.

        Args:
            state: state of one layer, updated in place.
            request_index: index of the request in the first dimension of every field of `state`.
            keys: [num_tokens, num_kv_heads, head_size] in `AttentionShape.dtype`: positions [first, first +
                num_tokens), with rotary embedding, as they are stored.
            first: 0, the end of the represented tokens, or the start of a unit before it. If the algorithm
                `needs_whole_prompt`, it is 0, or the end.
        """

    def update_representations(
        self, state: State, request_indices: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Represent one new token of each request.

        Args:
            state: state of one layer, updated in place.
            request_indices: [batch] int64 index of each request in the first dimension of every field of `state`;
                distinct, except for padding.
            keys: [batch, num_kv_heads, head_size] in `AttentionShape.dtype`.
            positions: [batch] int64 position of each new token: the first that is not represented yet. If the algorithm
                `forgets_drafts`, it may be up to `max_query_len` positions earlier; the tokens that were represented
                from there on were rejected and must be forgotten.
        """

    @abstractmethod
    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Select the units that a token attends to; the unit of the newest token is always among them.

        With a budget of all tokens, all units are selected.

        Args:
            state: state of one layer, not changed.
            request_indices: [batch] int64 index of each request, as in `update_representations`.
            query: [batch, num_heads, head_size] in `AttentionShape.dtype`.
            num_tokens: [batch] int64 represented tokens, the query's own included; 0: nothing is selected.

        Returns:
            [batch, num_kv_heads, num_selected] int32 distinct units: valid ones first, with the newest token's unit
            last among them, then -1.
        """

    def select(self, scores: torch.Tensor, num_tokens: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Select the units with the best scores, at most `num_selected`.

        Args:
            scores: [batch, num_kv_heads, max_units] of any float dtype; scores beyond a request's tokens are ignored. A
                unit with minus infinity or NaN is never selected, even if there is room.
            num_tokens: [batch] int64 tokens of each request.
            keep: [batch, max_units] or [batch, num_kv_heads, max_units] bool, True for units that are always selected;
                the first two sizes may be 1. None: no such units.

        Returns:
            The same as `retrieve_topk`.

        Raises:
            ValueError: an argument has another dtype or shape.
        """
        shape = len(num_tokens), self.shape.num_kv_heads, self.max_units
        if scores.shape != shape or not scores.is_floating_point():
            raise self._refusal("scores", scores, "float", shape)
        scores = scores.float()
        if keep is not None:
            by_head = keep[:, None] if keep.dim() == 2 else keep
            fits = by_head.dim() == 3 and by_head.shape[2] == shape[2]
            fits = fits and all(size in (1, most) for size, most in zip(by_head.shape, shape, strict=True))
            if keep.dtype != torch.bool or not fits:
                raise self._refusal("keep", keep, "bool", shape)
            scores = scores.masked_fill(by_head, float("inf"))
        return select_units(scores.contiguous(), num_tokens, self.tokens_per_unit, self.num_selected)

    def _refusal(self, name: str, given: torch.Tensor, kind: str, shape: tuple[int, ...]) -> ValueError:
        """Return the error of an argument of `select`."""
        return ValueError(
            f"{name} of select in {type(self).__qualname__}: got {given.dtype} {list(given.shape)}, expected {kind} "
            f"{list(shape)} (batch, KV heads, max_units)"
        )

    def group_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Group queries by KV head.

        Args:
            query: [batch, num_heads, head_size].

        Returns:
            [batch, num_kv_heads, heads per KV head, head_size] float32.
        """
        return query.float().view(len(query), self.shape.num_kv_heads, -1, self.shape.head_size)


def check_selection(algorithm: SparseAlgorithm, selection: object, batch: int) -> None:
    """Refuse a result of `retrieve_topk` that is no selection; its values are not read.

    Args:
        algorithm: the algorithm.
        selection: the result.
        batch: number of queries.

    Raises:
        ValueError: it is not a tensor, or has another dtype or shape.
    """
    expected, is_tensor = (batch, algorithm.shape.num_kv_heads, algorithm.num_selected), False
    if isinstance(selection, torch.Tensor):
        if (selection.dtype, tuple(selection.shape)) == (torch.int32, expected):
            return
        is_tensor = True
    got = f"{selection.dtype} {list(selection.shape)}" if is_tensor else type(selection).__name__
    wanted = f"torch.int32 {list(expected)} (batch, KV heads, num_selected)"
    raise ValueError(
        f"retrieve_topk of {type(algorithm).__qualname__} returned {got}, expected {wanted}. Return what "
        "self.select(...) returns."
    )
