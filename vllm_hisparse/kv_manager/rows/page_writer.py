"""Copies pages that have been read into a buffer to their places in the host pool."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from vllm_hisparse.kv_manager.rows.host_kv_store import widest_word


class Writing(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Return True if the pages are in the host pool, and their buffer may be used again."""


class Done:
    """A copy that was done when `write` returned."""

    def is_done(self) -> bool:
        return True


class PageWriter:
    """Copies pages from a buffer in host memory; the copy is done when `write` returns.

    Args:
        pool: [bytes] uint8: the host pool, as the buffer's device sees it.
    """

    def __init__(self, pool: torch.Tensor):
        self._pool = pool

    def write(self, pages: torch.Tensor, places: np.ndarray) -> Writing:
        """Copy pages.

        Args:
            pages: [pages, page_bytes] uint8, on the buffer's device; not changed before the copy is done.
            places: [pages] int64: first byte of each page in the pool; pages do not overlap there.
        """
        rows, ids = _rows(self._pool, pages.shape[1], places)
        _scatter(rows, pages, torch.from_numpy(ids))
        return Done()

    def close(self) -> None:
        """Wait until all copies are done."""


class StreamPageWriter(PageWriter):
    """Copies pages from a buffer in device memory, on a stream of its own, beside the forward."""

    def __init__(self, pool: torch.Tensor):
        super().__init__(pool)
        self._stream = torch.cuda.Stream(pool.device)

    def write(self, pages: torch.Tensor, places: np.ndarray) -> Writing:
        rows, ids = _rows(self._pool, pages.shape[1], places)
        with torch.cuda.stream(self._stream):
            _scatter(rows, pages, torch.from_numpy(ids).pin_memory().to(pages.device, non_blocking=True))
            return _StreamWriting(self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


class _StreamWriting:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def is_done(self) -> bool:
        return self._event.query()


def make_page_writer(pool: torch.Tensor) -> PageWriter:
    """Make the writer for a device.

    Args:
        pool: [bytes] uint8: the host pool, as the buffer's device sees it.
    """
    return PageWriter(pool) if pool.device.type == "cpu" else StreamPageWriter(pool)


def _rows(pool: torch.Tensor, page_bytes: int, places: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """View a pool as rows of `page_bytes` bytes, so that a row begins at each place.

    NOTE: rows may overlap, because a row begins at every multiple of a common divisor of the places.

    Returns:
        The rows, [rows, page_bytes] uint8, and the id of the row at each place, [pages] int64.
    """
    step = int(np.gcd.reduce(places, initial=page_bytes))
    return pool.as_strided(((len(pool) - page_bytes) // step + 1, page_bytes), (step, 1)), places // step


def _scatter(rows: torch.Tensor, pages: torch.Tensor, ids: torch.Tensor) -> None:
    dtype = widest_word(rows, pages)
    rows.view(dtype).index_copy_(0, ids, pages.view(dtype))
