import pytest
import torch

from vllm_hisparse.cpu.take_rows import PagedRows, take_rows, without_gaps


def test_rows_of_any_shape_of_ids() -> None:
    rows, ids = torch.arange(30.0).view(10, 3), torch.tensor([[1, 9, 1], [0, 4, 5]])
    assert torch.equal(take_rows(rows, ids), rows[ids])


@pytest.mark.parametrize(("block_stride", "row_stride"), [(12, 3), (13, 3), (16, 4), (24, 3)])
def test_rows_of_blocks_that_lie_apart(block_stride: int, row_stride: int) -> None:
    """Blocks of all layers may be side by side, and rows padded; each line has a table, or all have one."""
    memory = torch.arange(6.0 * block_stride)
    cache = memory.as_strided((5, 4, 3), (block_stride, row_stride, 1), storage_offset=1)
    paged, tables, positions = PagedRows(cache), torch.tensor([[3, 0, 4], [2, 1, 0]]).int(), torch.tensor([[11, 0, 6]])
    own = paged.ids(tables, positions.expand(2, 3))
    assert torch.equal(take_rows(paged.rows, own), cache[[[4, 3, 0], [0, 2, 1]], [3, 0, 2]])
    assert torch.equal(paged.ids(tables[0], positions), own[:1])
    assert paged.ids(tables[1], torch.tensor([-1, 4])).tolist() == [-1, paged.ids(tables[1, 1:], torch.tensor([0]))]


def test_gaps_get_another_id_of_their_line() -> None:
    ids = torch.tensor([[3, -1, 7, -1], [-1, -1, -1, -1], [0, 2, 1, 5]])
    filled = without_gaps(ids)
    assert filled.tolist() == [[3, 7, 7, 7], [0, 0, 0, 0], [0, 2, 1, 5]]
