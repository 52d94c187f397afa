import numpy as np
import pytest

from vllm_hisparse.kv_manager.tiers.transfer_buffer import ALIGNMENT, TransferBuffer, chunk_bytes


@pytest.fixture
def buffer() -> TransferBuffer:
    buffer = TransferBuffer(block_bytes=5000, num_chunks=3)
    buffer.block(1)[...] = np.arange(5000) % 251
    buffer.seal(1, b"key")
    return buffer


def test_a_sealed_chunk_is_intact_under_its_own_key_only(buffer: TransferBuffer) -> None:
    assert buffer.is_intact(1, b"key")
    assert not buffer.is_intact(1, b"other")
    assert not buffer.is_intact(0, b"key")


@pytest.mark.parametrize("offset", [0, 4999, 5000, 5031])
def test_any_other_byte_breaks_it(buffer: TransferBuffer, offset: int) -> None:
    view = buffer.create_kv_memoryview().cast("B")
    view[buffer.chunk_bytes + offset] ^= 1
    assert not buffer.is_intact(1, b"key")


def test_chunks_are_as_vllm_wants_them(buffer: TransferBuffer) -> None:
    view = buffer.create_kv_memoryview()
    assert view.shape == (3, buffer.chunk_bytes) and view.strides[0] == buffer.chunk_bytes
    assert buffer.chunk_bytes == chunk_bytes(5000) == 2 * ALIGNMENT
    assert buffer.block(2).ctypes.data % ALIGNMENT == 0
    assert chunk_bytes(ALIGNMENT) == 2 * ALIGNMENT, "the digest needs room, too"
