"""Copies blocks between the host pool and the transfer buffer, in threads of the scheduler's process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np

from vllm_hisparse.kv_manager.tiers.transfer_buffer import TransferBuffer

NUM_THREADS = 4  # they run side by side, because numpy and blake3 release the interpreter's lock


class HostBlocks(Protocol):
    """Host blocks that are copied: `HostPools`, or the rows of a simulated worker."""

    def read(self, block_id: int, block: np.ndarray) -> None:
        """Copy a host block to `block`, [block_bytes] uint8."""

    def write(self, block_id: int, block: np.ndarray) -> None:
        """Fill a host block with `block`, [block_bytes] uint8."""

    def close(self) -> None:
        """Release the memory; nothing is read or written afterwards."""


class BlockCopier:
    """Copies blocks in both directions, with their digests.

    Args:
        hosts: the host blocks.
        buffer: the transfer buffer.
    """

    def __init__(self, hosts: HostBlocks, buffer: TransferBuffer):
        self.hosts, self.buffer = hosts, buffer
        self._threads = ThreadPoolExecutor(NUM_THREADS, "hisparse_tier_copy")

    def save(self, block_id: int, chunk_id: int, key: bytes) -> Future[None]:
        """Copy a host block to a chunk."""
        return self._threads.submit(self._save, block_id, chunk_id, key)

    def load(self, chunk_id: int, block_id: int, key: bytes) -> Future[bool]:
        """Copy a chunk to a host block. If the chunk is not intact, nothing is copied, and the result is False."""
        return self._threads.submit(self._load, chunk_id, block_id, key)

    def shutdown(self) -> None:
        """Wait for the running copies, and unmap the host blocks."""
        self._threads.shutdown(cancel_futures=True)
        with suppress(BufferError):  # the traceback of a copy that failed may still refer to the memory
            self.hosts.close()

    def _save(self, block_id: int, chunk_id: int, key: bytes) -> None:
        block = np.empty(self.buffer.block_bytes, np.uint8)
        self.hosts.read(block_id, block)
        self.buffer.put(chunk_id, key, block)

    def _load(self, chunk_id: int, block_id: int, key: bytes) -> bool:
        block = self.buffer.get(chunk_id, key)
        if block is not None:
            self.hosts.write(block_id, block)
        return block is not None
