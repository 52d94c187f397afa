import numpy as np
import pytest

from vllm_hisparse.kv_manager.tiers.transfer_buffer import ALIGNMENT, TransferBuffer, chunk_bytes

BLOCK = (np.arange(5000) % 251).astype(np.uint8)


@pytest.fixture
def buffer() -> TransferBuffer:
    buffer = TransferBuffer(block_bytes=5000, num_chunks=3)
    buffer.put(1, b"key", BLOCK)
    return buffer


def test_a_block_is_found_under_its_own_key_only(buffer: TransferBuffer) -> None:
    assert np.array_equal(buffer.get(1, b"key"), BLOCK)
    assert buffer.get(1, b"other") is None
    assert buffer.get(0, b"key") is None


def test_what_is_written_to_a_chunk_later_does_not_change_a_block(buffer: TransferBuffer) -> None:
    block = buffer.get(1, b"key")
    buffer.create_kv_memoryview().cast("B")[buffer.chunk_bytes] ^= 1
    assert np.array_equal(block, BLOCK)


@pytest.mark.parametrize("offset", [0, 4999, 5000, 5031])
def test_any_other_byte_breaks_it(buffer: TransferBuffer, offset: int) -> None:
    view = buffer.create_kv_memoryview().cast("B")
    view[buffer.chunk_bytes + offset] ^= 1
    assert buffer.get(1, b"key") is None


def test_chunks_are_as_vllm_wants_them(buffer: TransferBuffer) -> None:
    view = buffer.create_kv_memoryview()
    assert view.shape == (3, buffer.chunk_bytes) and view.strides[0] == buffer.chunk_bytes
    assert buffer.chunk_bytes == chunk_bytes(5000) == 2 * ALIGNMENT
    assert np.asarray(view).ctypes.data % ALIGNMENT == 0
    assert chunk_bytes(ALIGNMENT) == 2 * ALIGNMENT, "the digest needs room, too"
