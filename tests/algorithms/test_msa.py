"""MSA: blocks that the model's indexer selected become units."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import AlgorithmOptions, AttentionShape
from vllm_hisparse.algorithms.msa import MSA
from vllm_hisparse.layout import MSA_BLOCK_SIZE, MSA_UNIT

PER_BLOCK = MSA_BLOCK_SIZE // MSA_UNIT
SHAPE = AttentionShape(num_heads=32, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)


def retrieve(blocks: list[list[list[int]]], num_tokens: list[int], max_tokens: int = 1 << 17) -> list[list[list[int]]]:
    algorithm = MSA(AlgorithmOptions(), SHAPE, 4 * MSA_BLOCK_SIZE, max_tokens)
    selected = algorithm.retrieve_topk({}, torch.zeros(1), torch.tensor(blocks).int(), torch.tensor(num_tokens))
    assert selected.shape == (len(blocks), 2, algorithm.num_selected) and selected.dtype == torch.int32
    return selected.tolist()


def units_of(*blocks: int) -> list[int]:
    return [block * PER_BLOCK + i for block in blocks for i in range(PER_BLOCK)]


def test_blocks_become_units_in_order_and_the_newest_unit_is_the_last() -> None:
    num_tokens = 9 * MSA_BLOCK_SIZE + 2 * MSA_UNIT + 5  # three units of block 9 have tokens
    newest = [9 * PER_BLOCK + i for i in range(3)]
    first, second = retrieve([[[9, 4, 0, 7], [1, 9, 8, 2]]], [num_tokens])[0]
    assert first == units_of(0, 4, 7) + newest + [-1] * 5
    assert second == units_of(1, 2, 8) + newest + [-1] * 5


def test_a_whole_newest_block_and_the_first_token_of_the_next() -> None:
    whole = retrieve([[[2, 0, 1, -1]] * 2], [3 * MSA_BLOCK_SIZE])[0][0]
    assert whole == units_of(0, 1, 2) + [-1] * PER_BLOCK
    begun = retrieve([[[3, 0, 1, 2]] * 2], [3 * MSA_BLOCK_SIZE + 1])[0][0]
    assert begun == units_of(0, 1, 2) + [3 * PER_BLOCK] + [-1] * (PER_BLOCK - 1)


def test_blocks_are_missing_anywhere_in_a_short_sequence() -> None:
    assert retrieve([[[-1, 0, -1, -1], [0, -1, -1, -1]]], [17])[0] == [[0, 1] + [-1] * 30] * 2


def test_padding_selects_nothing_whatever_the_indexer_left() -> None:
    """The indexer writes nothing for padding, so its memory holds anything."""
    left = [[[1 << 30, (1 << 31) - 1, -7, 0], [5, 5, 5, 5]]]
    assert retrieve(left, [0])[0] == [[-1] * 32] * 2


def test_a_sequence_of_fewer_units_than_a_selection_has() -> None:
    assert retrieve([[[0, -1, -1, -1]] * 2], [100], max_tokens=100)[0] == [list(range(7))] * 2


def test_nothing_is_kept() -> None:
    assert MSA(AlgorithmOptions(), SHAPE, 2048, 4096).state_fields() == {}
