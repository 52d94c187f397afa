"""Swap-in operations as CUDA kernels: the library of csrc/cuda behind ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_hisparse.ops.base import HotRows, Residency, Resolved, StepTables, SwapInOps, UnitTables

LIBRARY = Path(__file__).parents[1] / "_kernels.so"

# NOTE: constants, structs and signatures are those of csrc/cuda, which documents shapes and meaning; a wheel has no
# sources to read them from. tests/ops/test_cuda_interface.py compares the two.
MAX_TOP_K = 4096  # positions of a selection in `resolve`
MAX_QUERY_LEN = 8  # selections of a request
MAX_COLUMNS = 8192  # of several selections
MAX_LAYERS = 128  # of one launch of `write_back`
VECTOR_BYTES = 16  # row sizes and head sizes are multiples
INTERFACE_VERSION = 2  # of all of them


class _HotRows(Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("row_bytes", c_int64),
        ("block_stride_rows", c_int64),
        ("rows_per_block", c_int32),
    ]


class _HostRows(Structure):
    _fields_ = [("rows", c_void_p), ("num_rows", c_int64), ("row_bytes", c_int64)]


class _Residency(Structure):
    _fields_ = [("entries", c_void_p), ("num_layers", c_int32)]


class _StepTables(Structure):
    _fields_ = [
        ("state_indices", c_void_p),
        ("handles", c_void_p),
        ("seq_lens", c_void_p),
        ("hot_tables", c_void_p),
        ("num_hot_rows", c_void_p),
        ("host_tables", c_void_p),
        ("query_lens", c_void_p),
        ("handle_stride", c_int64),
        ("hot_table_stride", c_int64),
        ("host_table_stride", c_int64),
        ("num_device_blocks", c_int32),
        ("num_hot_blocks", c_int32),
        ("num_states", c_int32),
        ("num_host_blocks", c_int32),
        ("batch", c_int32),
        ("block_size", c_int32),
        ("max_query_len", c_int32),
    ]


class _Resolved(Structure):
    _fields_ = [
        ("hot_row_ids", c_void_p),
        ("num_valid", c_void_p),
        ("miss_host_row_ids", c_void_p),
        ("miss_hot_row_ids", c_void_p),
        ("num_misses", c_void_p),
        ("num_columns", c_int32),
    ]


class _UnitTables(Structure):
    _fields_ = [
        ("request_indices", c_void_p),
        ("positions", c_void_p),
        ("num_tokens", c_void_p),
        ("tails", c_void_p),
        ("handles", c_void_p),
        ("num_units", c_void_p),
        ("num_new_units", c_void_p),
        ("max_batch", c_int32),
        ("max_query_len", c_int32),
        ("num_heads", c_int32),
        ("head_stride", c_int32),
        ("tokens_per_unit", c_int32),
    ]


class _NewTokens(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("num_tokens", c_void_p),
        ("max_batch", c_int32),
        ("max_query_len", c_int32),
        ("num_heads", c_int32),
        ("head_bytes", c_int32),
        ("tokens_per_unit", c_int32),
    ]


class PageBounds(Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("table", c_void_p),
        ("block_stride", c_int64),
        ("table_stride", c_int64),
        ("pages_per_block", c_int32),
        ("max_pages", c_int32),
        ("num_heads", c_int32),
        ("head_size", c_int32),
        ("page_size", c_int32),
    ]


class _LayerRows(Structure):
    _fields_ = [("hot", c_void_p * MAX_LAYERS), ("host", c_void_p * MAX_LAYERS)]


_HOT, _HOST, _TABLES = POINTER(_HotRows), POINTER(_HostRows), POINTER(_StepTables)
_RESIDENCY, _RESOLVED, _LAYERS = POINTER(_Residency), POINTER(_Resolved), POINTER(_LayerRows)
_UNITS, _TOKENS, _BOUNDS = POINTER(_UnitTables), POINTER(_NewTokens), POINTER(PageBounds)
_ARGUMENTS = {  # of each launcher, before the stream
    "resolve": (_RESIDENCY, _TABLES, c_void_p, c_int64, _HOT, c_void_p, _RESOLVED),
    "gather": (_HOST, _HOT, _RESOLVED, c_int32, c_bool, c_bool),
    "swap_in": (_RESIDENCY, _TABLES, c_void_p, c_int64, _HOST, _HOT, c_void_p, _RESOLVED, c_bool),
    "compact_rows": (c_void_p, c_void_p, c_int32, c_int32),
    "newest_row_ids": (_TABLES, _HOT, c_void_p),
    "write_back": (_LAYERS, c_int32, _HOT, c_int64, _TABLES),
    "stage_rows": (_HOST, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64),
    "save_rows": (c_void_p, c_int32, c_int32, c_int64, _HOST, c_void_p, c_int32, c_int32),
    "begin_units": (_TABLES, _UNITS),
    "write_tokens": (_TOKENS, _TABLES, _HOT, _HOST, c_void_p),
    "update_page_bounds": (
        *(_BOUNDS, c_void_p, c_int32),
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_bool),
    ),
    "select_units": (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p),
    "page_scores": (_BOUNDS, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_bool, c_void_p),
}


HOW_TO_BUILD = (
    "Install the CUDA toolkit so that nvcc is on PATH, and install vllm_hisparse again: "
    "pip install --force-reinstall --no-deps ."
)


def _interface_version(library: ctypes.CDLL) -> int:
    """Interface of a library; 1 of those that do not say."""
    try:
        return int(library.hisparse_interface_version())
    except AttributeError:
        return 1


@cache
def _load_library() -> ctypes.CDLL:
    """The kernels, with the types of every launcher."""
    if not LIBRARY.exists():
        raise RuntimeError(
            f"The CUDA kernels of vllm_hisparse are not built: {LIBRARY.name} is missing. {HOW_TO_BUILD}"
        )
    library = ctypes.CDLL(str(LIBRARY))
    if (version := _interface_version(library)) != INTERFACE_VERSION:
        raise RuntimeError(
            f"The CUDA kernels of vllm_hisparse are of another version: {LIBRARY.name} has interface {version}, this "
            f"code has {INTERFACE_VERSION}. {HOW_TO_BUILD}"
        )
    for name, arguments in _ARGUMENTS.items():
        launcher = getattr(library, f"hisparse_{name}")
        launcher.argtypes, launcher.restype = (*arguments, c_void_p), c_int32
    library.hisparse_error_string.argtypes, library.hisparse_error_string.restype = (c_int32,), c_char_p
    return library


def launch(name: str, *arguments: Any) -> None:
    """Enqueue a kernel on the current stream.

    Raises:
        RuntimeError: CUDA refused it.
    """
    library = _load_library()
    error = getattr(library, f"hisparse_{name}")(*arguments, torch.cuda.current_stream().cuda_stream)
    if error:
        meaning = library.hisparse_error_string(error).decode()
        raise RuntimeError(f"hisparse_{name} failed: {meaning} (CUDA error {error})")


class _Kept:
    """Arguments built for objects seen before: a step gets most of its tensors from the step before.

    NOTE: an object is known by its id, so it is kept alive here, and its tensors must stay where they are.

    Args:
        build: makes the argument for an object.
        capacity: objects kept; all are forgotten when another one comes.
    """

    def __init__(self, build: Callable[[Any], Structure], capacity: int):
        self._build, self._capacity = build, capacity
        self._kept: dict[int, tuple[Any, Structure]] = {}

    def __call__(self, given: Any) -> Structure:
        kept = self._kept.get(id(given))
        if kept is None:
            if len(self._kept) == self._capacity:
                self._kept.clear()
            kept = self._kept[id(given)] = given, self._build(given)
        return kept[1]


class CudaSwapInOps(SwapInOps):
    """Launches on the current stream; capturable in CUDA graphs, no scratch memory.

    The tensors' device must be the current one. Host rows are pinned memory, as a CPU tensor or as a device tensor
    over the same bytes.

    Raises:
        RuntimeError: the kernels were not built.
    """

    def __init__(self) -> None:
        _load_library()
        self._hot_rows, self._host_rows = _Kept(_hot_rows, 1024), _Kept(_host_rows, 1024)
        self._residency, self._resolved = _Kept(_residency, 1024), _Kept(_resolved, 8)
        self._tables, self._units = _Kept(_step_tables, 4), _Kept(_unit_tables, 1)
        self._layers: tuple[tuple[int, ...], list[tuple], Any] = ((), [], None)

    def resolve(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        launch(
            "resolve",
            *self._selection(residency, tables, top_k, out),
            self._hot_rows(hot_rows),
            counts.data_ptr(),
            self._resolved(out),
        )

    def gather(
        self,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        resolved: Resolved,
        batch: int,
        beside_others: bool = True,
    ) -> None:
        rows, resolution = self._rows(host_rows, hot_rows), self._resolved(resolved)
        launch("gather", *rows, resolution, batch, beside_others, False)

    def swap_in(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
        beside_others: bool = False,
    ) -> None:
        launch(
            "swap_in",
            *self._selection(residency, tables, top_k, out),
            *self._rows(host_rows, hot_rows),
            counts.data_ptr(),
            self._resolved(out),
            beside_others,
        )

    def compact(self, row_ids: torch.Tensor, num_valid: torch.Tensor) -> None:
        for tensor in (row_ids, num_valid):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous(), "ids and counts must be contiguous int32"
        launch("compact_rows", row_ids.data_ptr(), num_valid.data_ptr(), *row_ids.shape)

    def newest_row_ids(self, tables: StepTables, hot_rows: HotRows, out: torch.Tensor) -> None:
        num_rows = len(tables.seq_lens) * tables.max_query_len
        assert out.dtype == torch.int64 and out.is_contiguous() and len(out) >= num_rows
        launch("newest_row_ids", self._tables(tables), self._hot_rows(hot_rows), out.data_ptr())

    def write_back(self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], tables: StepTables) -> None:
        for layers in self._layer_groups(hot_rows, host_rows):
            launch("write_back", *layers, self._tables(tables))

    def stage_rows(
        self, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        host, row_bytes = self._host_rows(host_rows), _row_bytes(staging)
        assert host.row_bytes == row_bytes, "host and device rows are of different sizes"
        table = _host_table(host_table, block_size)
        launch("stage_rows", host, *table, staging.data_ptr(), len(staging), row_bytes)

    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int
    ) -> None:
        host, row_bytes = self._host_rows(host_rows), _row_bytes(rows)
        assert host.row_bytes == row_bytes, "host and device rows are of different sizes"
        table = _host_table(host_table, block_size)
        launch("save_rows", rows.data_ptr(), first, len(rows), row_bytes, host, *table)

    def begin_units(
        self,
        handles: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
        state_indices: torch.Tensor,
        out: UnitTables,
    ) -> None:
        tables = _request_tables(handles, seq_lens, query_lens, state_indices, out)
        launch("begin_units", tables, self._units(out))

    def write_tokens(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        units: UnitTables,
        tables: StepTables,
        hot_rows: HotRows,
        host_rows: torch.Tensor,
        first_units: torch.Tensor,
    ) -> None:
        host, hot = self._rows(host_rows, hot_rows)
        tokens = _new_tokens(key, value, units)
        launch("write_tokens", tokens, self._tables(tables), hot, host, first_units.data_ptr())

    def _selection(self, residency: Residency, tables: StepTables, top_k: torch.Tensor, out: Resolved) -> tuple:
        """The first arguments of both kinds of `resolve`, checked."""
        step = self._tables(tables)
        (batch, width), row_stride = top_k.shape, top_k.stride(0)
        assert top_k.dtype == torch.int32 and top_k.stride(1) == 1, "top_k must be int32 with contiguous rows"
        assert len(out.hot_row_ids) >= batch == step.batch and self._resolved(out).num_columns == width, "sizes differ"
        return self._residency(residency), step, top_k.data_ptr(), row_stride

    def _rows(self, host_rows: torch.Tensor, hot_rows: HotRows) -> tuple[_HostRows, _HotRows]:
        host, hot = self._host_rows(host_rows), self._hot_rows(hot_rows)
        assert host.row_bytes == hot.row_bytes, "host and device rows are of different sizes"
        return host, hot

    def _layer_groups(self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor]) -> list[tuple]:
        """Layers of each launch of `write_back`; those of the last call are kept."""
        given = (*hot_rows, *host_rows)
        key = tuple(map(id, given))
        if key != self._layers[0]:
            pairs = [self._rows(host, hot) for hot, host in zip(hot_rows, host_rows, strict=True)]
            groups = [_layer_rows(pairs[i : i + MAX_LAYERS]) for i in range(0, len(pairs), MAX_LAYERS)]
            self._layers = key, groups, given
        return self._layers[1]


def _row_bytes(rows: torch.Tensor) -> int:
    """Bytes of one of a tensor's contiguous rows."""
    row_bytes = rows.shape[-1] * rows.element_size()
    assert rows.is_contiguous() and row_bytes % VECTOR_BYTES == 0, "rows must be contiguous, a multiple of 16 bytes"
    return row_bytes


def _hot_rows(hot: HotRows) -> _HotRows:
    rows = hot.rows
    return _HotRows(rows.data_ptr(), len(rows), _row_bytes(rows), hot.block_stride_rows, hot.rows_per_block)


def _host_rows(rows: torch.Tensor) -> _HostRows:
    return _HostRows(rows.data_ptr(), len(rows), _row_bytes(rows))


def _residency(residency: Residency) -> _Residency:
    assert residency.entries.is_contiguous(), "the residency must be contiguous"
    return _Residency(residency.entries.data_ptr(), residency.num_layers)


def _step_tables(tables: StepTables) -> _StepTables:
    hot_tables, host_tables = tables.hot_tables, tables.host_tables
    query_lens = tables.query_lens
    assert query_lens is None or (query_lens.dtype == torch.int32 and query_lens.is_contiguous())
    assert hot_tables.stride(1) == host_tables.stride(1) == 1, "block tables must have contiguous rows"
    return _StepTables(
        tables.state_indices.data_ptr(),
        tables.handles.data_ptr(),
        tables.seq_lens.data_ptr(),
        hot_tables.data_ptr(),
        tables.num_hot_rows.data_ptr(),
        host_tables.data_ptr(),
        None if query_lens is None else query_lens.data_ptr(),
        tables.handles.stride(0),
        hot_tables.stride(0),
        host_tables.stride(0),
        len(tables.state_indices),
        hot_tables.shape[1],
        *host_tables.shape,
        len(tables.seq_lens),
        tables.block_size,
        tables.max_query_len,
    )


def _unit_tables(units: UnitTables) -> _UnitTables:
    by_token = units.request_indices, units.positions, units.num_tokens
    by_head = units.tails, units.handles, units.num_units, units.num_new_units
    heads = units.heads
    sizes = heads.num_heads, heads.head_stride, heads.tokens_per_unit
    pointers = (tensor.data_ptr() for tensor in (*by_token, *by_head))
    return _UnitTables(*pointers, units.positions.shape[1], units.max_query_len, *sizes)


def _request_tables(
    handles: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    state_indices: torch.Tensor,
    out: UnitTables,
) -> _StepTables:
    """Tables by request for `begin_units`, which looks for no rows: without blocks."""
    assert query_lens is None or (query_lens.dtype == torch.int32 and query_lens.is_contiguous())
    return _StepTables(
        state_indices=state_indices.data_ptr(),
        handles=handles.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_lens=None if query_lens is None else query_lens.data_ptr(),
        handle_stride=handles.stride(0),
        num_device_blocks=len(state_indices),
        num_states=out.num_requests * out.heads.num_heads + 1,  # as host tables have: the last is of no request
        batch=len(seq_lens),
    )


def _new_tokens(key: torch.Tensor, value: torch.Tensor, units: UnitTables) -> _NewTokens:
    _, num_heads, head_size = key.shape
    element_bytes = key.element_size()
    head_bytes = head_size * element_bytes
    for tokens in (key, value):
        assert tokens.stride(2) == 1 and tokens.stride(1) == head_size, "heads must lie side by side"
        assert head_bytes % VECTOR_BYTES == tokens.stride(0) * element_bytes % VECTOR_BYTES == 0, "16-byte heads only"
    strides = key.stride(0) * element_bytes, value.stride(0) * element_bytes
    places = units.num_tokens.data_ptr(), units.num_tokens.shape[1], units.max_query_len
    sizes = num_heads, head_bytes, units.heads.tokens_per_unit
    return _NewTokens(key.data_ptr(), value.data_ptr(), *strides, *places, *sizes)


def _resolved(out: Resolved) -> _Resolved:
    pointers = (out.hot_row_ids, out.num_valid, out.miss_host_row_ids, out.miss_hot_row_ids, out.num_misses)
    return _Resolved(*(tensor.data_ptr() for tensor in pointers), out.hot_row_ids.shape[1])


def _host_table(host_table: torch.Tensor, block_size: int) -> tuple[int, int, int]:
    """Address, number of blocks and block size."""
    assert host_table.dtype == torch.int32 and host_table.is_contiguous()
    return host_table.data_ptr(), len(host_table), block_size


def _layer_rows(pairs: list[tuple[_HostRows, _HotRows]]) -> tuple[_LayerRows, int, _HotRows, int]:
    """Arguments of one launch of `write_back`: pointers, layers, the sizes that all of them have, host rows."""
    layers, sizes = _LayerRows(), _HotRows.from_buffer_copy(pairs[0][1])
    for index, (host, hot) in enumerate(pairs):
        blocks = hot.row_bytes, hot.block_stride_rows, hot.rows_per_block
        assert blocks == (sizes.row_bytes, sizes.block_stride_rows, sizes.rows_per_block), "layers are of unequal sizes"
        layers.hot[index], layers.host[index] = hot.rows, host.rows
        sizes.num_rows = min(sizes.num_rows, hot.num_rows)
    return layers, len(pairs), sizes, min(host.num_rows for host, _ in pairs)
