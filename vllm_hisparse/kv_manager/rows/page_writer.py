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
    """A copy that was done when it returned."""

    def is_done(self) -> bool:
        return True


class PageWriter:
    """Copies pages from a buffer in host memory; the copy is done when `write` returns.

    Args:
        pages: [rows, page_bytes] uint8: main KV of the host pool, as the buffer's device sees it.
    """

    def __init__(self, pages: torch.Tensor):
        self._pages = pages

    def write(self, pages: torch.Tensor, rows: np.ndarray) -> Writing:
        """Copy pages.

        Args:
            pages: [pages, page_bytes] uint8, on the buffer's device; not changed before the copy is done.
            rows: [pages] int64: rows that get the pages.
        """
        _scatter(self._pages, pages, torch.from_numpy(rows))
        return Done()

    def close(self) -> None:
        """Wait until all copies are done."""


class StreamPageWriter(PageWriter):
    """Copies pages from a buffer in device memory, on a stream of its own, beside the forward."""

    def __init__(self, pages: torch.Tensor):
        super().__init__(pages)
        self._stream = torch.cuda.Stream(pages.device)

    def write(self, pages: torch.Tensor, rows: np.ndarray) -> Writing:
        with torch.cuda.stream(self._stream):
            ids = torch.from_numpy(rows).pin_memory().to(pages.device, non_blocking=True)
            _scatter(self._pages, pages, ids)
            return _StreamWriting(self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


class _StreamWriting:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def is_done(self) -> bool:
        return self._event.query()


def make_page_writer(pages: torch.Tensor) -> PageWriter:
    """Make the writer for a device.

    Args:
        pages: [rows, page_bytes] uint8: main KV of the host pool, as the buffer's device sees it.
    """
    return PageWriter(pages) if pages.device.type == "cpu" else StreamPageWriter(pages)


def _scatter(target: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    dtype = widest_word(target, pages)
    target.view(dtype).index_copy_(0, rows, pages.view(dtype))
