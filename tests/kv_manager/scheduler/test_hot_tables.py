"""What the worker has to be told of hot blocks."""

from types import SimpleNamespace

from vllm_hisparse.kv_manager.scheduler.hot_tables import HotTables


def test_blocks_travel_from_the_first_that_changed() -> None:
    blocks = {"a": [7, 8]}
    tables, known = HotTables(lambda name: [SimpleNamespace(block_id=block_id) for block_id in blocks[name]]), {"a": 7}

    def change(*block_ids: int) -> dict:
        blocks["a"] = list(block_ids)
        tables.change("a")
        return tables.take_changes(known)

    assert tables.take_changes(known) == {}
    assert change(7, 8) == {7: (0, [7, 8])}
    assert change(7, 8) == {}
    assert change(7, 8, 5, 6) == {7: (2, [5, 6])}
    assert change(7, 8, 6) == {7: (2, [6])}
    assert change(7, 8) == {7: (2, [])}
    assert change(7, 9, 8) == {7: (1, [9, 8])}
    tables.forget("a")
    assert len(tables) == 0
    assert change(7, 9, 8) == {7: (0, [7, 9, 8])}


def test_nothing_travels_of_a_request_that_the_worker_does_not_know() -> None:
    tables = HotTables(lambda name: [SimpleNamespace(block_id=3)])
    tables.change("a")
    assert tables.take_changes({}) == {}
    tables.change("a")
    assert tables.take_changes({"a": 3}) == {3: (0, [3])}
