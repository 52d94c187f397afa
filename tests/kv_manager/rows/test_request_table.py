"""Requests by their first hot block: their indices, their blocks, and the tables on the device."""

import random

import pytest
import torch

from vllm_hisparse.kv_manager.rows.request_table import RequestTable
from vllm_hisparse.kv_manager.rows.row_classes import RowClasses
from vllm_hisparse.ops.kv_heads import KVHeads

NUM_REQUESTS, MAX_BLOCKS, MAX_HOT_BLOCKS, ROWS_PER_HOT_BLOCK, NUM_DEVICE_BLOCKS = 4, 9, 5, 7, 60
STATE_COLUMNS = [0, 2, 3, 1, 4]
ONE_HEAD, TWO_HEADS = KVHeads(), KVHeads(num_heads=2, head_stride=6, tokens_per_unit=4)


@pytest.fixture(params=[ONE_HEAD, TWO_HEADS])
def table(request: pytest.FixtureRequest) -> RequestTable:
    sizes = MAX_BLOCKS, MAX_HOT_BLOCKS, RowClasses.of([ROWS_PER_HOT_BLOCK]), NUM_DEVICE_BLOCKS
    return RequestTable(NUM_REQUESTS, *sizes, request.param, torch.device("cpu"), STATE_COLUMNS)


def tensor(*first_hot_block_ids: int) -> torch.Tensor:
    return torch.tensor(first_hot_block_ids, dtype=torch.int32)


def test_host_blocks_come_in_pieces(table: RequestTable) -> None:
    for first_hot_block_id, first, ids in ((40, 0, [7, 3]), (41, 0, [5]), (40, 2, [8])):
        if first == 0:
            table.add(first_hot_block_id)
        table.extend({first_hot_block_id: (first, ids)})
    table.check_integrity()
    assert table.host_block_table(table.index_of(40)).tolist() == [7, 3, 8] + [-1] * 6
    assert table.host_block_table(table.find(tensor(41, 40))).tolist() == [[5] + [-1] * 8, [7, 3, 8] + [-1] * 6]


def test_every_head_finds_its_parts_of_host_blocks(table: RequestTable) -> None:
    for first_hot_block_id in (9, 40):
        table.add(first_hot_block_id)
        table.extend({first_hot_block_id: (0, [7, 3])})
    states = table.find_seqs(tensor(40))
    num_heads = table.heads.num_heads
    assert table.host_block_tables[states, :2].tolist() == [
        [7 * num_heads + h, 3 * num_heads + h] for h in range(num_heads)
    ]


def test_hot_blocks_come_and_go(table: RequestTable) -> None:
    """Every head has its parts of them; blocks that a request did not have are told."""
    table.add(40)
    assert table.change_hot({40: (0, [40, 7, 3])}).added.tolist() == [40, 7, 3]
    assert table.change_hot({40: (3, [9, 5])}).added.tolist() == [9, 5]
    assert table.change_hot({40: (1, [5, 8])}).added.tolist() == [8]
    table.check_integrity()
    states = table.find_seqs(tensor(40))
    parts = [[block * table.heads.head_stride + head for block in (40, 5, 8)] for head in range(len(states))]
    assert table.hot_block_tables[states, :3].tolist() == parts
    beyond = table.hot_block_tables[states, 3:] // table.heads.head_stride
    assert not beyond.any(), "blocks that it gave back are still in its table"
    assert table.num_hot_rows[0, states].tolist() == [3 * ROWS_PER_HOT_BLOCK] * len(states)
    assert table.hot_blocks_of(table.index_of(40)).tolist() == [40, 5, 8]
    table.remove(40)
    table.check_integrity()
    assert not table.num_hot_rows[0, :-1].any()


def test_state_blocks_have_their_places(table: RequestTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """State blocks are in the table in order, after one copy for all requests; an ended request leaves none."""
    table.add(40), table.add(41)
    copied, to_device = [], table.to_device
    monkeypatch.setattr(table, "to_device", lambda tensor: (copied.append(tensor), to_device(tensor))[1])
    table.extend_state({40: (0, [7, 3, 9]), 41: (0, [8])})
    table.extend_state({40: (3, [5])})
    assert len(copied) == 2
    table.extend_state({})
    table.check_integrity()
    assert table.state_block_tables[[table.index_of(40), table.index_of(41)]].tolist() == [
        [7, 5, 3, 9, 0],
        [8, 0, 0, 0, 0],
    ]
    table.remove(40)
    table.check_integrity()
    assert table.state_block_tables.sum() == 8
    assert not table.state_block_tables[NUM_REQUESTS].any()


def test_changes_of_many_requests_are_one_copy_per_table(table: RequestTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy per request takes longer than a decode step of hundreds of requests."""
    for first_hot_block_id in (10, 20, 30):
        table.add(first_hot_block_id)
    copied, to_device = [], table.to_device
    monkeypatch.setattr(table, "to_device", lambda tensor: (copied.append(tensor), to_device(tensor))[1])
    table.extend({10: (0, [3, 4]), 30: (0, [5]), 20: (0, [6, 7, 8])})
    assert len(copied) == 1
    changed = table.change_hot({20: (0, [20, 2]), 10: (0, [10]), 30: (0, [30, 1, 4])})
    assert changed.added.tolist() == [20, 2, 10, 30, 1, 4]
    assert changed.moved[0].seqs.tolist() == [] and changed.moved[0].most_blocks == 0
    table.extend({30: (1, [9]), 10: (2, [1, 2])})
    changed = table.change_hot({30: (1, [4]), 10: (1, [50])})
    assert changed.added.tolist() == [50]
    assert changed.moved[0].seqs.tolist() == [table.index_of(30) * table.heads.num_heads]
    assert changed.moved[0].num_blocks.tolist() == [2] and changed.moved[0].most_blocks == 2
    assert len(copied) == 4
    host_block_tables = table.host_block_table(table.find(tensor(10, 20, 30)))
    assert host_block_tables[:, :4].tolist() == [[3, 4, 1, 2], [6, 7, 8, -1], [5, 9, -1, -1]]
    for first_hot_block_id, blocks in {10: [10, 50], 20: [20, 2], 30: [30, 4]}.items():
        for head, state in enumerate(table.find_seqs(tensor(first_hot_block_id)).tolist()):
            parts = [block * table.heads.head_stride + head for block in blocks]
            assert table.hot_block_tables[state, : len(blocks)].tolist() == parts
            assert table.num_hot_rows[0, state] == len(blocks) * ROWS_PER_HOT_BLOCK


def test_a_block_changes_hands_among_requests_that_change_together(table: RequestTable) -> None:
    """Its new owner did not have it before, whoever is listed first."""
    for order in ((40, 50), (50, 40)):
        for first_hot_block_id in (40, 50):
            table.add(first_hot_block_id)
        table.change_hot({40: (0, [40, 7, 3]), 50: (0, [50])})
        changes = {40: (1, [3]), 50: (1, [7])}
        assert table.change_hot({name: changes[name] for name in order}).added.tolist() == [7]
        for first_hot_block_id in (40, 50):
            table.remove(first_hot_block_id)


def test_changes_that_leave_a_gap_or_exceed_the_table_are_errors(table: RequestTable) -> None:
    table.add(40)
    table.change_hot({40: (0, [40, 7])})
    with pytest.raises(ValueError):
        table.change_hot({40: (3, [9])})
    with pytest.raises(IndexError):
        table.change_hot({40: (1, range(1, MAX_HOT_BLOCKS + 1))})


def test_nobodys_hot_rows_are_those_of_the_null_block(table: RequestTable) -> None:
    nobody = table.find_seqs(tensor(39))
    assert (table.hot_block_tables[nobody] == 0).all()
    assert (table.num_hot_rows[0, nobody] == MAX_HOT_BLOCKS * ROWS_PER_HOT_BLOCK).all()


def test_handles_of_no_request_share_an_index_without_blocks(table: RequestTable) -> None:
    table.add(40)
    assert table.find(tensor(0, 40, 59))[::2].tolist() == [NUM_REQUESTS] * 2
    assert table.find_seqs(tensor(39)).tolist() == [table.num_seqs] * (table.heads.num_heads)
    assert table.host_block_table(NUM_REQUESTS).tolist() == [-1] * MAX_BLOCKS


def test_as_many_requests_as_indices_and_reuse(table: RequestTable) -> None:
    indices = [table.add(first_hot_block_id) for first_hot_block_id in range(NUM_REQUESTS)]
    assert table.find(tensor(*range(NUM_REQUESTS))).tolist() == indices
    assert sorted(indices) == list(range(NUM_REQUESTS)) and len(table) == NUM_REQUESTS
    with pytest.raises(IndexError):
        table.add(50)
    table.extend({2: (0, [1, 2])})
    assert table.remove(2) == indices[2]
    assert table.add(50) == indices[2]
    assert table.host_block_table(indices[2]).tolist() == [-1] * MAX_BLOCKS
    table.check_integrity()


def test_random_requests_keep_their_blocks(table: RequestTable) -> None:
    source, blocks = random.Random(0), {}
    for _ in range(200):
        first_hot_block_id = source.randrange(NUM_DEVICE_BLOCKS)
        if first_hot_block_id in blocks and source.random() < 0.5:
            table.remove(first_hot_block_id)
            del blocks[first_hot_block_id]
        elif first_hot_block_id in blocks and len(blocks[first_hot_block_id]) < MAX_BLOCKS:
            table.extend({first_hot_block_id: (len(blocks[first_hot_block_id]), [first_hot_block_id])})
            blocks[first_hot_block_id].append(first_hot_block_id)
        elif first_hot_block_id not in blocks and len(blocks) < NUM_REQUESTS:
            table.add(first_hot_block_id)
            table.extend({first_hot_block_id: (0, [first_hot_block_id + 1])})
            blocks[first_hot_block_id] = [first_hot_block_id + 1]
        table.check_integrity()
        for known, ids in blocks.items():
            assert table.host_block_table(int(table.find(tensor(known)))).tolist() == ids + [-1] * (
                MAX_BLOCKS - len(ids)
            )


def test_a_prefilling_request_is_found_by_its_positions(table: RequestTable) -> None:
    """Once per step, and only if it is the only one with these."""
    for first_hot_block_id in (40, 41, 42):
        table.add(first_hot_block_id)
    table.expect_prefills([(41, 0, 7), (40, 16, 20), (42, 0, 7)])
    assert table.take_prefill(16, 20) == table.index_of(40)
    assert table.take_prefill(16, 20) is None
    assert table.take_prefill(0, 7) is None and table.take_prefill(16, 21) is None
    table.expect_prefills([(42, 0, 7)])
    table.expect_prefills([])
    assert table.take_prefill(0, 7) is None
