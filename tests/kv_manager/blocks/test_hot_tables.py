"""Changes of hot blocks and state blocks that the worker must be told."""

from types import SimpleNamespace

from vllm_hisparse.kv_manager.blocks.hot_tables import HotTables


def blocks_of(block_ids: list[int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(block_id=block_id) for block_id in block_ids]


def test_blocks_travel_from_the_first_that_changed() -> None:
    blocks, state, known = {"a": [7, 8]}, {"a": []}, {"a": 7}
    tables = HotTables(lambda name: blocks_of(blocks[name]), lambda name: blocks_of(state[name]))

    def change(*block_ids: int) -> dict:
        blocks["a"] = list(block_ids)
        tables.change("a")
        changes, state_changes = tables.take_changes(known)
        assert not state_changes
        return changes

    assert tables.take_changes(known) == ({}, {})
    assert change(7, 8) == {7: (0, [7, 8])}
    assert change(7, 8) == {}
    assert change(7, 8, 5, 6) == {7: (2, [5, 6])}
    assert change(7, 8, 6) == {7: (2, [6])}
    assert change(7, 8) == {7: (2, [])}
    assert change(7, 9, 8) == {7: (1, [9, 8])}
    tables.forget("a")
    assert len(tables) == 0
    assert change(7, 9, 8) == {7: (0, [7, 9, 8])}


def test_state_blocks_travel_apart_from_hot_blocks() -> None:
    state, known = {"a": [5]}, {"a": 7}
    tables = HotTables(lambda name: blocks_of([7]), lambda name: blocks_of(state[name]))
    tables.change("a")
    assert tables.take_changes(known) == ({7: (0, [7])}, {7: (0, [5])})
    state["a"] += [9, 2]
    tables.change("a")
    assert tables.take_changes(known) == ({}, {7: (1, [9, 2])})
    tables.forget("a")
    tables.change("a")
    assert tables.take_changes(known) == ({7: (0, [7])}, {7: (0, [5, 9, 2])})


def test_nothing_travels_of_a_request_that_the_worker_does_not_know() -> None:
    tables = HotTables(lambda name: blocks_of([3]), lambda name: blocks_of([4]))
    tables.change("a")
    assert tables.take_changes({}) == ({}, {})
    tables.change("a")
    assert tables.take_changes({"a": 3}) == ({3: (0, [3])}, {3: (0, [4])})
