"""The memory that blocks pass through between the host pool and a tier."""

from __future__ import annotations

import mmap

import numpy as np
from blake3 import blake3

DIGEST_BYTES = 32
ALIGNMENT = 4096  # of a chunk, for direct I/O


class TransferBuffer:
    """Chunks of one host block and a digest each. vLLM's tiering manages which block is in which chunk.

    The digest covers the block's key and its bytes: a chunk that was cut off, overwritten or stored for another block
    is not `intact`.

    NOTE: a tier never gets the host pool itself: one that hangs would keep host blocks for ever, and tiers want the
    bytes of a block side by side, which the host pool has layer by layer.

    Args:
        block_bytes: bytes of a host block.
        num_chunks: blocks that can be on their way at once.

    Attributes:
        chunk_bytes: of a block, its digest and padding.
    """

    def __init__(self, block_bytes: int, num_chunks: int):
        self.block_bytes, self.num_chunks = block_bytes, num_chunks
        self.chunk_bytes = chunk_bytes(block_bytes)
        self._memory = mmap.mmap(-1, num_chunks * self.chunk_bytes)
        self._chunks = np.frombuffer(self._memory, np.uint8).reshape(num_chunks, self.chunk_bytes)

    def block(self, chunk_id: int) -> np.ndarray:
        """[block_bytes] uint8 of a chunk."""
        return self._chunks[chunk_id, : self.block_bytes]

    def seal(self, chunk_id: int, key: bytes) -> None:
        """Write the digest of a block that has been copied in."""
        self._digest_of(chunk_id)[...] = np.frombuffer(self._compute(chunk_id, key), np.uint8)

    def is_intact(self, chunk_id: int, key: bytes) -> bool:
        """Whether a chunk holds the block that was sealed under this key."""
        return self._digest_of(chunk_id).tobytes() == self._compute(chunk_id, key)

    def create_kv_memoryview(self) -> memoryview:
        """[num_chunks, chunk_bytes] of bytes, for vLLM's tiering."""
        return memoryview(self._chunks)

    def cleanup(self) -> None:
        """Release the memory; called by vLLM's tiering."""
        self._chunks = np.empty((0, self.chunk_bytes), np.uint8)

    def _digest_of(self, chunk_id: int) -> np.ndarray:
        return self._chunks[chunk_id, self.block_bytes : self.block_bytes + DIGEST_BYTES]

    def _compute(self, chunk_id: int, key: bytes) -> bytes:
        return blake3(key).update(memoryview(self.block(chunk_id))).digest()


def chunk_bytes(block_bytes: int) -> int:
    """Bytes of a chunk for a host block of `block_bytes`."""
    return -(-(block_bytes + DIGEST_BYTES) // ALIGNMENT) * ALIGNMENT
