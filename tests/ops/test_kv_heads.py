"""Numbers of heads' states and parts of blocks, against loops over heads."""

import pytest
import torch

from vllm_hisparse.ops.kv_heads import KVHeads

HEADS = KVHeads(num_heads=3, head_stride=7, tokens_per_unit=4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_request_owns_consecutive_sequence_indices(dtype: torch.dtype) -> None:
    indices = torch.tensor([4, 0, 9], dtype=dtype)
    states = HEADS.seq_indices(indices)
    assert states.dtype == dtype
    assert states.tolist() == [request * 3 + head for request in (4, 0, 9) for head in range(3)]
    assert HEADS.request_indices(states).tolist() == [4, 4, 4, 0, 0, 0, 9, 9, 9]
    assert list(range(30))[HEADS.seqs(4)] == states[:3].tolist()


def test_parts_of_device_blocks_are_a_stride_apart() -> None:
    blocks = torch.tensor([5, 1, 2], dtype=torch.int32)
    parts = HEADS.parts_of(blocks)
    assert parts.tolist() == [[block * 7 + head for head in range(3)] for block in (5, 1, 2)]
    assert HEADS.first_parts(blocks).tolist() == parts[:, 0].tolist()
    assert list(range(100))[HEADS.device_parts(5)] == parts[0].tolist()


def test_parts_of_host_blocks_have_no_gaps() -> None:
    parts = HEADS.host_parts(torch.tensor([6, 0], dtype=torch.int32))
    assert parts.tolist() == [[18, 0], [19, 1], [20, 2]]
    assert HEADS.host_blocks(parts).tolist() == [[6, 0]] * 3
    assert HEADS.heads_of(parts).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert HEADS.host_blocks(torch.tensor([-1])).tolist() == [-1]


def test_with_one_head_parts_are_blocks() -> None:
    one, tables = KVHeads(), torch.tensor([[5, 1]])
    assert torch.equal(one.parts_of(tables[0])[:, 0], tables[0])
    assert torch.equal(one.seq_indices(tables[0]), tables[0])
    assert torch.equal(one.host_parts(tables[0])[0], tables[0])
