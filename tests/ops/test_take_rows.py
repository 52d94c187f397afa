import pytest
import torch

from vllm_hisparse.ops.take_rows import take_paged_rows, take_rows, without_gaps


def test_rows_of_any_shape_of_ids() -> None:
    rows, ids = torch.arange(30.0).view(10, 3), torch.tensor([[1, 9, 1], [0, 4, 5]])
    assert torch.equal(take_rows(rows, ids), rows[ids])


@pytest.mark.parametrize(("block_stride", "row_stride"), [(12, 3), (13, 3), (16, 4), (24, 3)])
def test_rows_of_blocks_that_lie_apart(block_stride: int, row_stride: int) -> None:
    """Blocks of all layers may be side by side, and rows padded."""
    memory = torch.arange(6.0 * block_stride)
    cache = memory.as_strided((5, 4, 3), (block_stride, row_stride, 1), storage_offset=1)
    blocks, offsets = torch.tensor([[0, 4], [3, 3]]), torch.tensor([[3, 3], [0, 2]])
    assert torch.equal(take_paged_rows(cache, blocks, offsets), cache[blocks, offsets])


def test_gaps_get_another_id_of_their_line() -> None:
    ids = torch.tensor([[3, -1, 7, -1], [-1, -1, -1, -1], [0, 2, 1, 5]])
    filled = without_gaps(ids)
    assert filled.tolist() == [[3, 7, 7, 7], [0, 0, 0, 0], [0, 2, 1, 5]]
