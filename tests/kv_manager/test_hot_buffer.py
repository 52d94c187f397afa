import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.kv_manager.hot_buffer import DecodeBatch, HotBuffer

NUM_REQUESTS, NUM_SLOTS, NUM_LAYERS, MAX_BLOCKS = 4, 6, 2, 9


def make_buffer(refresh_hits: bool = True) -> HotBuffer:
    return HotBuffer(NUM_REQUESTS, NUM_SLOTS, NUM_LAYERS, MAX_BLOCKS, refresh_hits)


def make_batch(buffer: HotBuffer, handles: list[int], newest: list[int]) -> DecodeBatch:
    requests = torch.tensor(buffer.rows_of(handles))
    tables = buffer.host_tables[requests]
    return DecodeBatch(torch.arange(len(handles)), requests, torch.tensor(newest), tables, tables, buffer.next_step())


def select(buffer: HotBuffer, layer: int, batch: DecodeBatch, *selections: list[int]):
    buffer.admit(layer, batch)
    return buffer.resolve(layer, batch, torch.tensor(selections, dtype=torch.int32))


def test_tables_grow_by_deltas() -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [7, 3])
    buffer.extend_table(41, 0, [5])
    buffer.extend_table(40, 2, [8])
    buffer.check_integrity()
    first, second = buffer.rows_of([40, 41])
    assert buffer.host_tables[first].tolist() == [7, 3, 8] + [-1] * 6
    assert buffer.host_tables[second].tolist() == [5] + [-1] * 8


def test_handles_of_no_request_have_no_row() -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [7])
    assert buffer.rows_of([0, 40, 99])[::2] == [-1, -1]


def test_as_many_requests_as_rows_and_reuse_after_release() -> None:
    buffer = make_buffer()
    for handle in range(NUM_REQUESTS):
        buffer.extend_table(handle, 0, [handle])
    assert sorted(buffer.rows_of(range(NUM_REQUESTS))) == list(range(NUM_REQUESTS))
    with pytest.raises(IndexError):
        buffer.extend_table(99, 0, [1])
    buffer.release(2)
    buffer.extend_table(99, 0, [1])
    buffer.check_integrity()


def test_a_released_row_is_empty_for_its_next_request() -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [1, 2, 3])
    row = buffer.rows_of([40])[0]
    batch = make_batch(buffer, [40], [10])
    for layer in range(NUM_LAYERS):
        select(buffer, layer, batch, [2, 5, -1])
    assert buffer.release(40) == (0, 4)
    buffer.check_integrity()
    buffer.extend_table(40, 0, [4])
    assert buffer.rows_of([40]) == [row]
    assert buffer.host_tables[row].tolist() == [4] + [-1] * 8
    for residency in buffer.residency:
        assert (residency.positions[row] == -1).all() and not residency.last_used[row].any()
    assert buffer.release(40) == (0, 0)


def test_layers_are_independent() -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [1, 2, 3])
    batch = make_batch(buffer, [40], [10])
    select(buffer, 0, batch, [2, 5])
    assert select(buffer, 1, batch, [2, 4]).num_misses.tolist() == [2]
    assert select(buffer, 0, make_batch(buffer, [40], [11]), [2, 5]).num_misses.tolist() == [0]


def test_counts_hits_and_misses_by_request_and_in_all() -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [1, 2, 3])
    buffer.extend_table(50, 0, [4, 5, 6])
    select(buffer, 0, make_batch(buffer, [40, 50], [10, 8]), [2, 5, 10], [1, 2, 3])
    assert buffer.take_counts() == (0, 5)
    select(buffer, 0, make_batch(buffer, [50], [9]), [1, 2, 7])
    assert buffer.take_counts() == (2, 1)
    assert buffer.take_counts() == (0, 0)
    assert buffer.release(40) == (0, 2)
    assert buffer.release(50) == (2, 4)


@pytest.mark.parametrize(
    ("first", "last", "fits"), [(0, 3, 3), (2, 6, 4), (4, 9, 2), (6, 9, 0), (8, 20, 0), (0, 20, 6)]
)
def test_prefill_seeds_the_slots_of_its_positions(first: int, last: int, fits: int) -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [1, 2])
    row = buffer.rows_of([40])[0]
    assert buffer.admit_prefill(1, row, first, last, buffer.next_step()) == fits
    expected = [slot if first <= slot < last else -1 for slot in range(NUM_SLOTS)]
    assert buffer.residency[1].positions[row].tolist() == expected
    assert buffer.residency[1].last_used[row].tolist() == [int(position >= 0) for position in expected]
    assert (buffer.residency[0].positions == -1).all()
    buffer.check_integrity()


@pytest.mark.parametrize("refresh_hits", [True, False])
def test_eviction_policy_reaches_resolve(refresh_hits: bool) -> None:
    buffer = make_buffer(refresh_hits)
    buffer.extend_table(40, 0, [1, 2, 3])
    for newest, selection in enumerate([[0, 1], [2, 3], [4, 5], [0, 1], [6, 7]], start=20):
        select(buffer, 0, make_batch(buffer, [40], [newest]), selection)
    hot = set(buffer.residency[0].positions[buffer.rows_of([40])[0]].tolist())
    assert hot == ({0, 1, 4, 5, 6, 7} if refresh_hits else {2, 3, 4, 5, 6, 7})


@given(seed=st.integers(0, 2**32), refresh_hits=st.booleans())
def test_random_requests_never_share_or_lose_rows(seed: int, refresh_hits: bool) -> None:
    source, buffer = random.Random(seed), make_buffer(refresh_hits)
    lengths: dict[int, int] = {}
    for _ in range(30):
        if len(lengths) < NUM_REQUESTS and source.random() < 0.3:
            handle = source.choice([h for h in range(20) if h not in lengths])
            buffer.extend_table(handle, 0, [handle])
            lengths[handle] = source.randint(0, 12)
        elif lengths and source.random() < 0.2:
            handle = source.choice(list(lengths))
            buffer.release(handle)
            del lengths[handle]
        elif lengths:
            handles = source.sample(list(lengths), source.randint(1, len(lengths)))
            batch = make_batch(buffer, handles, [lengths[handle] for handle in handles])
            selections = []
            for handle in handles:
                chosen = source.sample(range(lengths[handle] + 1), min(lengths[handle] + 1, 4))
                selections.append(chosen + [-1] * (4 - len(chosen)))
                lengths[handle] += 1
            for layer in range(NUM_LAYERS):
                select(buffer, layer, batch, *selections)
        buffer.check_integrity()
        assert set(buffer._row_by_handle) == set(lengths)


@pytest.mark.parametrize(
    "damage",
    [
        lambda buffer: buffer._free_rows.pop(),
        lambda buffer: buffer._free_rows.append(buffer.rows_of([40])[0]),
        lambda buffer: buffer.residency[1].positions[buffer.rows_of([40])[0], :2].fill_(3),
        lambda buffer: buffer.residency[0].positions[buffer._free_rows[0], 0].fill_(3),
    ],
)
def test_check_integrity_finds_damage(damage) -> None:
    buffer = make_buffer()
    buffer.extend_table(40, 0, [1])
    damage(buffer)
    with pytest.raises(AssertionError):
        buffer.check_integrity()
