"""Swap-in operations as CUDA kernels: the library of csrc/cuda behind ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_hisparse.ops.base import HotRows, Residency, Resolved, StepTables, SwapInOps

LIBRARY = Path(__file__).parents[1] / "_kernels.so"
MAX_TOP_K, MAX_SLOTS, MAX_BATCH = 4096, 16384, 1024  # what one launch of csrc/cuda/{resolve,gather}.cu covers
MAX_LAYERS = 128  # of one launch of csrc/cuda/write_back.cu
VECTOR_BYTES = 16


# Mirrors of the structs in csrc/cuda/common.cuh and write_back.cu; shapes and meaning are documented there.
class _HotRows(Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("row_bytes", c_int64),
        ("block_stride_rows", c_int64),
        ("rows_per_block", c_int32),
    ]


class _HostRows(Structure):
    _fields_ = [("rows", c_void_p), ("num_rows", c_int64)]


class _Residency(Structure):
    _fields_ = [("slots", c_void_p), ("positions", c_void_p), ("num_requests", c_int32), ("num_slots", c_int32)]


class _StepTables(Structure):
    _fields_ = [
        ("state_rows", c_void_p),
        ("hot_tables", c_void_p),
        ("seq_lens", c_void_p),
        ("host_tables", c_void_p),
        ("hot_table_stride", c_int64),
        ("host_table_stride", c_int64),
        ("num_device_blocks", c_int32),
        ("num_hot_blocks", c_int32),
        ("num_requests", c_int32),
        ("num_host_blocks", c_int32),
        ("batch", c_int32),
        ("block_size", c_int32),
    ]


class _Resolved(Structure):
    _fields_ = [
        ("hot_rows", c_void_p),
        ("num_valid", c_void_p),
        ("miss_host_rows", c_void_p),
        ("miss_hot_rows", c_void_p),
        ("num_misses", c_void_p),
        ("top_k", c_int32),
    ]


class _LayerRows(Structure):
    _fields_ = [("hot", c_void_p * MAX_LAYERS), ("host", c_void_p * MAX_LAYERS)]


_HOT, _HOST, _TABLES = POINTER(_HotRows), POINTER(_HostRows), POINTER(_StepTables)
_RESIDENCY, _RESOLVED, _LAYERS = POINTER(_Residency), POINTER(_Resolved), POINTER(_LayerRows)
_ARGUMENTS = {  # of each launcher, before the stream
    "resolve": (_RESIDENCY, _TABLES, c_void_p, c_int64, _HOT, c_void_p, _RESOLVED, c_bool),
    "gather": (_HOST, _HOT, _RESOLVED, c_int32, c_bool),
    "swap_in": (_RESIDENCY, _TABLES, c_void_p, c_int64, _HOST, _HOT, c_void_p, _RESOLVED, c_bool),
    "newest_rows": (_TABLES, c_int32, _HOT, c_void_p),
    "write_back": (_LAYERS, c_int32, _HOT, c_int64, _TABLES, c_int32),
    "stage_rows": (_HOST, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64),
    "save_rows": (c_void_p, c_int32, c_int32, c_int64, _HOST, c_void_p, c_int32, c_int32),
}


@cache
def _load_library() -> ctypes.CDLL:
    """The kernels, with the types of every launcher."""
    if not LIBRARY.exists():
        raise RuntimeError(
            f"The CUDA kernels of vllm_hisparse are not built: {LIBRARY.name} is missing. Install the CUDA toolkit "
            "so that nvcc is on PATH, and install vllm_hisparse again: pip install --force-reinstall --no-deps ."
        )
    library = ctypes.CDLL(str(LIBRARY))
    for name, arguments in _ARGUMENTS.items():
        launcher = getattr(library, f"hisparse_{name}")
        launcher.argtypes, launcher.restype = (*arguments, c_void_p), c_int32
    library.hisparse_error_string.argtypes, library.hisparse_error_string.restype = (c_int32,), c_char_p
    return library


class CudaSwapInOps(SwapInOps):
    """Launches on the current stream; capturable in CUDA graphs, no scratch memory.

    The tensors' device must be the current one. Host rows are pinned memory, as a CPU tensor or as a device tensor
    over the same bytes.

    Args:
        refresh_hits: True for LRU eviction, False for FIFO.

    Raises:
        RuntimeError: the kernels were not built.
    """

    def __init__(self, refresh_hits: bool):
        self.refresh_hits = refresh_hits
        self._library = _load_library()
        self._launchers = {name: getattr(self._library, f"hisparse_{name}") for name in _ARGUMENTS}
        self._layers: tuple[tuple[int, ...], list[Any], Any] = ((), [], None)

    def resolve(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        _check_selection(residency, top_k, out)
        if not len(top_k):
            return
        selection = top_k.data_ptr(), top_k.stride(0)
        where = byref(_residency(residency)), byref(_step_tables(tables, len(top_k)))
        result = byref(_hot_rows(hot_rows)), counts.data_ptr(), byref(_resolved(out))
        self._launch("resolve", *where, *selection, *result, self.refresh_hits)

    def gather(self, host_rows: torch.Tensor, hot_rows: HotRows, resolved: Resolved, batch: int) -> None:
        host, hot = _host_rows(host_rows, hot_rows.rows), _hot_rows(hot_rows)
        self._launch("gather", byref(host), byref(hot), byref(_resolved(resolved)), batch, False)

    def swap_in(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        _check_selection(residency, top_k, out)
        if not len(top_k):
            return
        selection = top_k.data_ptr(), top_k.stride(0)
        where = byref(_residency(residency)), byref(_step_tables(tables, len(top_k)))
        rows = byref(_host_rows(host_rows, hot_rows.rows)), byref(_hot_rows(hot_rows))
        result = counts.data_ptr(), byref(_resolved(out))
        self._launch("swap_in", *where, *selection, *rows, *result, self.refresh_hits)

    def newest_rows(self, tables: StepTables, num_slots: int, hot_rows: HotRows, out: torch.Tensor) -> None:
        batch = len(tables.seq_lens)
        assert out.dtype == torch.int64 and out.is_contiguous() and len(out) >= batch
        if batch:
            where = byref(_step_tables(tables, batch)), num_slots, byref(_hot_rows(hot_rows))
            self._launch("newest_rows", *where, out.data_ptr())

    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], tables: StepTables, num_slots: int
    ) -> None:
        if not len(tables.seq_lens):
            return
        where = byref(_step_tables(tables, len(tables.seq_lens))), num_slots
        for layers, num_layers, hot, num_host_rows in self._layer_groups(hot_rows, host_rows):
            self._launch("write_back", byref(layers), num_layers, byref(hot), num_host_rows, *where)

    def _layer_groups(self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor]) -> list[tuple]:
        """Layers of each launch, as it takes them. Those of the last call are kept: layers stay where they are."""
        kept = (*hot_rows, *host_rows)
        key = tuple(map(id, kept))
        if key != self._layers[0]:
            pairs = list(zip(hot_rows, host_rows, strict=True))
            starts = range(0, len(pairs), MAX_LAYERS)
            self._layers = key, [_layer_rows(pairs[i : i + MAX_LAYERS]) for i in starts], kept
        return self._layers[1]

    def stage_rows(
        self, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        if len(staging):
            host, table = _host_rows(host_rows, staging), _host_table(host_table, block_size)
            self._launch("stage_rows", byref(host), *table, staging.data_ptr(), len(staging), _row_bytes(staging))

    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int
    ) -> None:
        if len(rows):
            source = rows.data_ptr(), first, len(rows), _row_bytes(rows)
            host, table = _host_rows(host_rows, rows), _host_table(host_table, block_size)
            self._launch("save_rows", *source, byref(host), *table)

    def _launch(self, name: str, *arguments: Any) -> None:
        error = self._launchers[name](*arguments, torch.cuda.current_stream().cuda_stream)
        if error:
            meaning = self._library.hisparse_error_string(error).decode()
            raise RuntimeError(f"hisparse_{name} failed: {meaning} (CUDA error {error})")


def _check_selection(residency: Residency, top_k: torch.Tensor, out: Resolved) -> None:
    batch, width = top_k.shape
    num_slots = residency.slots.shape[1]
    assert top_k.dtype == torch.int32 and top_k.stride(1) == 1, "top_k must be int32 with contiguous rows"
    assert out.hot_rows.shape[1] == width and len(out.hot_rows) >= batch, "the output is of another size"
    if width > min(num_slots, MAX_TOP_K) or num_slots > MAX_SLOTS or batch > MAX_BATCH:
        raise ValueError(
            f"The CUDA kernels resolve up to {MAX_TOP_K} rows of {MAX_BATCH} requests in buffers of up to {MAX_SLOTS} "
            f"slots; got top_k {width}, batch {batch} and {num_slots} slots. Lower device_buffer_size or the batch."
        )


def _row_bytes(rows: torch.Tensor) -> int:
    """Bytes of one of a tensor's contiguous rows."""
    row_bytes = rows.shape[-1] * rows.element_size()
    assert rows.is_contiguous() and row_bytes % VECTOR_BYTES == 0, "rows must be contiguous, a multiple of 16 bytes"
    return row_bytes


def _hot_rows(hot: HotRows) -> _HotRows:
    rows = hot.rows
    return _HotRows(rows.data_ptr(), len(rows), _row_bytes(rows), hot.block_stride_rows, hot.rows_per_block)


def _host_rows(rows: torch.Tensor, device_rows: torch.Tensor) -> _HostRows:
    assert _row_bytes(rows) == _row_bytes(device_rows), "host and device rows are of different sizes"
    return _HostRows(rows.data_ptr(), len(rows))


def _residency(residency: Residency) -> _Residency:
    slots, positions = residency.slots, residency.positions
    assert slots.is_contiguous() and positions.is_contiguous(), "the residency must be contiguous"
    return _Residency(slots.data_ptr(), positions.data_ptr(), *slots.shape)


def _step_tables(tables: StepTables, batch: int) -> _StepTables:
    hot_tables, host_tables = tables.hot_tables, tables.host_tables
    assert hot_tables.stride(1) == host_tables.stride(1) == 1, "block tables must have contiguous rows"
    return _StepTables(
        tables.state_rows.data_ptr(),
        hot_tables.data_ptr(),
        tables.seq_lens.data_ptr(),
        host_tables.data_ptr(),
        hot_tables.stride(0),
        host_tables.stride(0),
        len(tables.state_rows),
        hot_tables.shape[1],
        *host_tables.shape,
        batch,
        tables.block_size,
    )


def _resolved(out: Resolved) -> _Resolved:
    pointers = (out.hot_rows, out.num_valid, out.miss_host_rows, out.miss_hot_rows, out.num_misses)
    return _Resolved(*(tensor.data_ptr() for tensor in pointers), out.hot_rows.shape[1])


def _host_table(host_table: torch.Tensor, block_size: int) -> tuple[int, int, int]:
    """Address, number of blocks and block size."""
    assert host_table.dtype == torch.int32 and host_table.is_contiguous()
    return host_table.data_ptr(), len(host_table), block_size


def _layer_rows(pairs: list[tuple[HotRows, torch.Tensor]]) -> tuple[_LayerRows, int, _HotRows, int]:
    """Arguments of one launch of `write_back`: pointers, layers, the sizes that all of them have, host rows."""
    layers = _LayerRows()
    first = _hot_rows(pairs[0][0])
    for index, (hot, host) in enumerate(pairs):
        sizes = hot.block_stride_rows, hot.rows_per_block
        assert sizes == (first.block_stride_rows, first.rows_per_block), "layers have different hot blocks"
        assert _row_bytes(hot.rows) == first.row_bytes, "layers have different rows"
        layers.hot[index], layers.host[index] = hot.rows.data_ptr(), _host_rows(host, hot.rows).rows
        first.num_rows = min(first.num_rows, len(hot.rows))
    return layers, len(pairs), first, min(len(host) for _, host in pairs)
