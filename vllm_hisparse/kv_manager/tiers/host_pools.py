"""The host pools of an engine, seen from the scheduler's process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.layout import KVLayout


@dataclass(frozen=True)
class HostPoolFile:
    """The memory behind a worker's host pool, as a file that processes of the same user and container can map.

    Attributes:
        path: below /proc of the worker that created it.
        device, inode: what the path must lead to.
        num_bytes: of the pool.
    """

    path: str
    device: int
    inode: int
    num_bytes: int

    @classmethod
    def of(cls, descriptor: int, num_bytes: int) -> HostPoolFile:
        """Describe an open file of this process."""
        status = os.fstat(descriptor)
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino, num_bytes)

    def map(self) -> mmap.mmap:
        """Map the file.

        Raises:
            HiSparseConfigError: this process cannot open it, or it is another file.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != (self.device, self.inode):
                    raise FileNotFoundError(f"{self.path} is another file")
                return mmap.mmap(descriptor, self.num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise HiSparseConfigError(
                "tiers",
                f"workers whose host pool this process cannot map ({error})",
                "scheduler and workers of one user in one container",
                "Start all processes of the engine in one container, or remove tiers.",
            ) from error


class HostPools:
    """Reads and writes whole host blocks: main KV and device-resident KV of all layers, and of all pools.

    Args:
        files: one per pool, in the order of the ranks.
        layout: of each pool; `HostKVStore` has the same.
        num_blocks: of each pool.

    Attributes:
        block_bytes: of one block, in all pools together.
    """

    def __init__(self, files: Sequence[HostPoolFile], layout: KVLayout, num_blocks: int):
        self.block_bytes = layout.host_block_bytes * len(files)
        self._memories = [file.map() for file in files]
        self._parts: list[np.ndarray] = []  # each [blocks, ...] of uint8, in the order of a block's bytes
        main_bytes = layout.main_block_bytes * num_blocks
        for memory in self._memories:
            flat = np.frombuffer(memory, np.uint8, num_blocks * layout.host_block_bytes)
            main = flat[:main_bytes].reshape(layout.num_layers, num_blocks, -1).swapaxes(0, 1)
            self._parts += [main, flat[main_bytes:].reshape(num_blocks, layout.resident_block_bytes)]

    def read(self, block_id: int, block: np.ndarray) -> None:
        """Copy a host block.

        Args:
            block_id: which.
            block: [block_bytes] uint8, written.
        """
        for part, piece in self._pieces(block_id, block):
            piece[...] = part

    def write(self, block_id: int, block: np.ndarray) -> None:
        """Fill a host block.

        Args:
            block_id: which.
            block: [block_bytes] uint8.
        """
        for part, piece in self._pieces(block_id, block):
            part[...] = piece

    def close(self) -> None:
        """Unmap the pools."""
        self._parts.clear()
        for memory in self._memories:
            memory.close()

    def _pieces(self, block_id: int, block: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """A block's part of each array, and the bytes of `block` that belong to it."""
        pieces, first = [], 0
        for part in (array[block_id] for array in self._parts):
            pieces.append((part, block[first : first + part.size].reshape(part.shape)))
            first += part.size
        return pieces
