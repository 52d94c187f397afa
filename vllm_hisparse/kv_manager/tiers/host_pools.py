"""The host pools of an engine, seen from the scheduler's process."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile, HostPoolLayout


class HostPools:
    """Reads and writes whole host blocks: main KV and device-resident KV of all layers, and of all pools.

    Args:
        files: one per pool, in the order of the ranks.
        layout: byte ranges of each pool.

    Attributes:
        block_bytes: bytes of one block, in all pools together.

    Raises:
        HiSparseConfigError: this process cannot map a pool.
    """

    def __init__(self, files: Sequence[HostPoolFile], layout: HostPoolLayout):
        self.block_bytes = layout.kv.host_block_bytes * len(files)
        self._memories = [_map(file) for file in files]
        self._parts: list[np.ndarray] = []  # each [blocks, ...] of uint8, in the order of a block's bytes
        for memory in self._memories:
            flat = np.frombuffer(memory, np.uint8, layout.num_bytes)
            main = flat[layout.main_kv].reshape(layout.main_shape).swapaxes(0, 1)
            self._parts += [main, flat[layout.resident_kv].reshape(layout.resident_shape)]

    def read(self, block_id: int, block: np.ndarray) -> None:
        """Copy a host block out of the pools.

        Args:
            block_id: host block.
            block: [block_bytes] uint8, written.
        """
        for part, piece in self._pieces(block_id, block):
            piece[...] = part

    def write(self, block_id: int, block: np.ndarray) -> None:
        """Fill a host block.

        Args:
            block_id: host block.
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
        """Pair the block's part of each array with the bytes of `block` that belong to it."""
        pieces, first = [], 0
        for part in (array[block_id] for array in self._parts):
            pieces.append((part, block[first : first + part.size].reshape(part.shape)))
            first += part.size
        return pieces


def _map(file: HostPoolFile) -> mmap.mmap:
    try:
        return file.map()
    except OSError as error:
        raise HiSparseConfigError(
            "tiers",
            f"workers whose host pool this process cannot map ({error})",
            "scheduler and workers of one user in one container",
            "Start all processes of the engine in one container, or remove tiers.",
        ) from error
