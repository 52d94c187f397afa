"""The memory that blocks pass through between the host pool and a tier."""

from __future__ import annotations

import mmap

import numpy as np
from blake3 import blake3

DIGEST_BYTES = 32
ALIGNMENT = 4096  # bytes; a chunk is aligned, for direct I/O


class TransferBuffer:
    """Chunks, each with room for one host block and its digest. vLLM's tiering decides which block is in which chunk.

    The digest covers the block's key and its bytes, so `get` does not return a chunk that was cut off, overwritten, or
    stored for another block.

    NOTE: a tier never gets the host pool itself, because a tier that hangs would keep host blocks for ever. Also, tiers
    need the bytes of a block side by side, but the host pool orders them layer by layer.

    Args:
        block_bytes: bytes of a host block.
        num_chunks: number of blocks that can be on their way at once.

    Attributes:
        chunk_bytes: bytes of a block, its digest and padding.
    """

    def __init__(self, block_bytes: int, num_chunks: int):
        self.block_bytes, self.num_chunks = block_bytes, num_chunks
        self.chunk_bytes = chunk_bytes(block_bytes)
        self._memory = mmap.mmap(-1, num_chunks * self.chunk_bytes)
        self._chunks = np.frombuffer(self._memory, np.uint8).reshape(num_chunks, self.chunk_bytes)

    def put(self, chunk_id: int, key: bytes, block: np.ndarray) -> None:
        """Fill a chunk with a block and its digest.

        NOTE: the digest is computed from `block`, not from the chunk, because a peer that gave up a transfer may still
        write to the chunk.

        Args:
            chunk_id: id of the chunk.
            key: key of the block.
            block: [block_bytes] uint8 bytes of the block, which nobody else writes.
        """
        self._chunks[chunk_id, : self.block_bytes] = block
        self._digest_of(chunk_id)[...] = np.frombuffer(_digest(key, block), np.uint8)

    def get(self, chunk_id: int, key: bytes) -> np.ndarray | None:
        """Return a copy of a chunk's block, [block_bytes] uint8; None if it is damaged, or another block."""
        chunk = self._chunks[chunk_id].copy()
        block, digest = chunk[: self.block_bytes], chunk[self.block_bytes : self.block_bytes + DIGEST_BYTES]
        return block if self.is_intact(digest.tobytes(), key, block) else None

    def is_intact(self, digest: bytes, key: bytes, block: np.ndarray) -> bool:
        """Return True if a digest matches a block, [block_bytes] uint8, and its key."""
        return digest == _digest(key, block)

    def create_kv_memoryview(self) -> memoryview:
        """Return the chunks for vLLM's tiering: [num_chunks, chunk_bytes] bytes."""
        return memoryview(self._chunks)

    def cleanup(self) -> None:
        """Release the memory; called by vLLM's tiering."""
        self._chunks = np.empty((0, self.chunk_bytes), np.uint8)

    def _digest_of(self, chunk_id: int) -> np.ndarray:
        return self._chunks[chunk_id, self.block_bytes : self.block_bytes + DIGEST_BYTES]


def _digest(key: bytes, block: np.ndarray) -> bytes:
    return blake3(key).update(memoryview(block)).digest()


def chunk_bytes(block_bytes: int) -> int:
    """Return the bytes of a chunk for a host block of `block_bytes`."""
    return -(-(block_bytes + DIGEST_BYTES) // ALIGNMENT) * ALIGNMENT
