import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.ops import swap_in
from vllm_hisparse.ops.swap_in import Residency, Resolved

ROW = 3  # elements of a row: request, position, a product of both


def expected_row(request: int, position: int) -> list[float]:
    return [float(request + 1), float(position), (request + 1) * 0.5 + position * 7.0]


@dataclass
class Shape:
    """Sizes of one simulation.

    Attributes:
        top_k: entries of a selection. extra_slots: hot slots beyond top_k.
        block_size: tokens per host block. rows_per_block: rows per hot block. stride: rows from block to block.
        refresh_hits: LRU or FIFO. start: tokens on the host before the first step; seeded: also in the hot buffer.
    """

    top_k: int
    extra_slots: int
    block_size: int
    rows_per_block: int
    stride: int
    refresh_hits: bool
    start: int
    seeded: bool

    @property
    def num_slots(self) -> int:
        return self.top_k + self.extra_slots


SHAPES = st.builds(
    Shape,
    top_k=st.integers(1, 6),
    extra_slots=st.sampled_from([0, 0, 1, 3, 8]),
    block_size=st.sampled_from([1, 3, 4, 7]),
    rows_per_block=st.sampled_from([1, 2, 3, 5, 7]),
    stride=st.sampled_from([0, 1, 4]),
    refresh_hits=st.booleans(),
    start=st.sampled_from([0, 1, 5, 12, 20]),
    seeded=st.booleans(),
)


class Model:
    """One request's hot buffer as dicts: slot -> position, slot -> step of the last use."""

    def __init__(self, num_slots: int, refresh_hits: bool):
        self.num_slots, self.refresh_hits = num_slots, refresh_hits
        self.positions: dict[int, int] = {}
        self.last_used = dict.fromkeys(range(num_slots), 0)

    def put(self, slot: int, position: int, step: int) -> None:
        self.positions[slot] = position
        self.last_used[slot] = step

    def slot_of(self, position: int) -> int | None:
        return next((slot for slot, hot in self.positions.items() if hot == position), None)

    def resolve(self, selected: list[int], newest: int, step: int, slots: list[int]) -> tuple[list[int], int]:
        """Check and apply one selection; `slots` are the ones chosen. Returns the missed positions and the hits."""
        wanted = [position for position in selected if position not in (-1, newest)]
        missed = [position for position in wanted if self.slot_of(position) is None]
        hits = {position: self.slot_of(position) for position in wanted if position not in missed}
        in_use = set(hits.values()) | ({newest} if newest < self.num_slots else set())
        candidates = sorted(self.last_used[slot] for slot in range(self.num_slots) if slot not in in_use)
        chosen = dict(zip(selected, slots, strict=True))
        victims = [chosen[position] for position in missed]
        assert {position: chosen[position] for position in hits} == hits, "a hit moved"
        assert len(set(victims)) == len(victims) and not set(victims) & in_use, "a victim is in use"
        ages = sorted(self.last_used[slot] for slot in victims)
        assert ages == candidates[: len(victims)], "a victim was used later than a slot that stayed"
        for slot in in_use if self.refresh_hits else ():
            self.last_used[slot] = step
        for position, slot in zip(missed, victims, strict=True):
            self.put(slot, position, step)
        return missed, len(hits)


class Simulation:
    """Tensors of several requests, poisoned with NaN wherever no request's row belongs."""

    NUM_REQUESTS = 4

    def __init__(self, shape: Shape, seed: int, num_tokens: int = 48):
        self.shape, self.random = shape, random.Random(seed)
        num_host_blocks = -(-num_tokens // shape.block_size)
        num_hot_blocks = -(-(shape.num_slots + 1) // shape.rows_per_block)
        self.host_tables = self.tables(num_host_blocks, torch.int32)
        self.hot_tables = self.tables(num_hot_blocks, torch.int32)
        self.host_rows = torch.full((self.host_tables.max() + 4, shape.block_size, ROW), float("nan"))
        storage = torch.full((self.hot_tables.max() + 4, shape.rows_per_block + shape.stride, ROW), float("nan"))
        self.hot_storage, self.hot_rows = storage, storage[:, : shape.rows_per_block]
        self.residency = Residency(
            torch.full((self.NUM_REQUESTS, shape.num_slots), -1, dtype=torch.int32),
            torch.zeros((self.NUM_REQUESTS, shape.num_slots), dtype=torch.int32),
        )
        self.models = [Model(shape.num_slots, shape.refresh_hits) for _ in range(self.NUM_REQUESTS)]
        self.lengths = [min(max(shape.start - 2 * i, 0), num_tokens - 1) for i in range(self.NUM_REQUESTS)]
        self.step = 1
        for request, length in enumerate(self.lengths):
            for position in range(length):
                self.host_row(request, position).copy_(torch.tensor(expected_row(request, position)))
                if shape.seeded and position < shape.num_slots:
                    self.hot_row(request, position).copy_(torch.tensor(expected_row(request, position)))
                    self.residency.positions[request, position] = position
                    self.residency.last_used[request, position] = self.step
                    self.models[request].put(position, position, self.step)

    def tables(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        """Disjoint tables in random order; some blocks belong to nobody."""
        num_used = self.NUM_REQUESTS * num_blocks
        block_ids = self.random.sample(range(num_used + 5), num_used)
        return torch.tensor(block_ids, dtype=dtype).view(self.NUM_REQUESTS, num_blocks)

    def host_row(self, request: int, position: int) -> torch.Tensor:
        block, offset = divmod(position, self.shape.block_size)
        return self.host_rows[self.host_tables[request, block], offset]

    def hot_row(self, request: int, slot: int) -> torch.Tensor:
        block, offset = divmod(slot, self.shape.rows_per_block)
        return self.hot_rows[self.hot_tables[request, block], offset]

    def selection(self, newest: int) -> list[int]:
        """Distinct positions up to `newest`, the newest in or out, -1 in any place."""
        num_selected = min(self.random.randint(0, self.shape.top_k), newest + 1)
        recent = list(range(max(newest - 5, 0), newest + 1))
        pool = recent if self.random.random() < 0.4 else list(range(newest + 1))
        selected = self.random.sample(pool, min(num_selected, len(pool)))
        selected += [-1] * (self.shape.top_k - len(selected))
        self.random.shuffle(selected)
        return selected

    def run_step(self, requests: list[int], selections: list[list[int]] | None = None) -> Resolved:
        """One decode step of some requests, checked against the model."""
        self.step += 1
        newest = [self.lengths[request] for request in requests]
        selections = selections or [self.selection(position) for position in newest]
        batch, positions = torch.tensor(requests), torch.tensor(newest)
        self.admit(requests, newest, batch, positions)
        hot_before, host_before = self.hot_storage.clone(), self.host_rows.clone()
        positions_before, last_used_before = self.residency.positions.clone(), self.residency.last_used.clone()

        top_k = torch.tensor(selections, dtype=torch.int32)
        resolved = swap_in.resolve(self.residency, batch, top_k, positions, self.step, self.shape.refresh_hits)
        swap_in.gather(self.hot_rows, self.hot_tables[batch], self.host_rows, self.host_tables[batch], resolved)

        self.check_resolved(requests, selections, newest, resolved)
        self.check_copies(requests, resolved, hot_before)
        others = [r for r in range(self.NUM_REQUESTS) if r not in requests]
        assert torch.equal(self.residency.positions[others], positions_before[others])
        assert torch.equal(self.residency.last_used[others], last_used_before[others])
        self.write_back(requests, newest, batch, positions, host_before)
        return resolved

    def admit(self, requests: list[int], newest: list[int], batch: torch.Tensor, positions: torch.Tensor) -> None:
        swap_in.admit_newest(self.residency, batch, positions, self.step)
        slots = swap_in.newest_slot(positions, self.shape.num_slots).tolist()
        for request, position, slot in zip(requests, newest, slots, strict=True):
            assert slot == (position if position < self.shape.num_slots else self.shape.num_slots)
            self.hot_row(request, slot).copy_(torch.tensor(expected_row(request, position)))
            if slot < self.shape.num_slots:
                self.models[request].put(slot, position, self.step)

    def check_resolved(
        self, requests: list[int], selections: list[list[int]], newest: list[int], resolved: Resolved
    ) -> None:
        misses = []
        for row, request in enumerate(requests):
            slots = resolved.slots[row].tolist()
            model = self.models[request]
            missed, num_hits = model.resolve(selections[row], newest[row], self.step, slots)
            chosen = dict(zip(selections[row], slots, strict=True))
            misses += [(row, position, chosen[position]) for position in missed]
            assert (resolved.num_hits[row], resolved.num_misses[row]) == (num_hits, len(missed))
            for position, slot in zip(selections[row], slots, strict=True):
                assert (slot == -1) == (position == -1)
                if position >= 0:
                    assert self.hot_row(request, slot).tolist() == expected_row(request, position)
            assert self.residency.positions[request].tolist() == [
                model.positions.get(slot, -1) for slot in range(self.shape.num_slots)
            ]
            assert self.residency.last_used[request].tolist() == list(model.last_used.values())
        copied = zip(
            resolved.miss_rows.tolist(), resolved.miss_positions.tolist(), resolved.miss_slots.tolist(), strict=True
        )
        assert sorted(copied) == sorted(misses), "a hit was copied or a miss was not"

    def check_copies(self, requests: list[int], resolved: Resolved, hot_before: torch.Tensor) -> None:
        """Nothing but the missed slots changed, gaps between hot blocks and other requests included."""
        for row, slot in zip(resolved.miss_rows.tolist(), resolved.miss_slots.tolist(), strict=True):
            block, offset = divmod(slot, self.shape.rows_per_block)
            block_id = self.hot_tables[requests[row], block]
            hot_before[block_id, offset] = self.hot_storage[block_id, offset]
        assert torch.equal(self.hot_storage.nan_to_num(-1), hot_before.nan_to_num(-1))

    def write_back(
        self,
        requests: list[int],
        newest: list[int],
        batch: torch.Tensor,
        positions: torch.Tensor,
        host_before: torch.Tensor,
    ) -> None:
        tables = self.hot_tables[batch], self.host_rows, self.host_tables[batch]
        swap_in.write_back(self.hot_rows, *tables, positions, self.shape.num_slots)
        for request, position in zip(requests, newest, strict=True):
            block, offset = divmod(position, self.shape.block_size)
            host_before[self.host_tables[request, block], offset] = torch.tensor(expected_row(request, position))
            self.lengths[request] += 1
        assert torch.equal(self.host_rows.nan_to_num(-1), host_before.nan_to_num(-1))

    def some_requests(self) -> list[int]:
        return self.random.sample(range(self.NUM_REQUESTS), self.random.randint(1, self.NUM_REQUESTS))


@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_many_steps_agree_with_the_model(shape: Shape, seed: int) -> None:
    simulation = Simulation(shape, seed)
    for _ in range(24):
        simulation.run_step(simulation.some_requests())


@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_a_sequence_that_fits_never_misses(shape: Shape, seed: int) -> None:
    shape.seeded, shape.start = True, min(shape.start, shape.num_slots)
    simulation = Simulation(shape, seed)
    while max(simulation.lengths) < shape.num_slots:
        resolved = simulation.run_step(simulation.some_requests())
        assert not resolved.num_misses.any() and not len(resolved.miss_slots)


@given(seed=st.integers(0, 2**32), top_k=st.integers(1, 6), refresh_hits=st.booleans())
def test_a_buffer_of_top_k_slots_can_be_replaced_whole(seed: int, top_k: int, refresh_hits: bool) -> None:
    shape = Shape(top_k, 0, 4, 3, 1, refresh_hits, start=30, seeded=True)
    simulation = Simulation(shape, seed)
    even, odd = list(range(0, 2 * top_k, 2)), list(range(1, 2 * top_k, 2))
    simulation.run_step([0], [even])
    for selection in (odd, even, odd):
        resolved = simulation.run_step([0], [selection])
        assert resolved.num_misses.tolist() == [top_k]


def test_only_the_newest_and_nothing_at_all() -> None:
    simulation = Simulation(Shape(3, 0, 4, 3, 0, True, start=10, seeded=True), 0)
    resolved = simulation.run_step([0, 1], [[-1, simulation.lengths[0], -1], [-1, -1, -1]])
    assert resolved.slots.tolist() == [[-1, 3, -1], [-1, -1, -1]]
    assert resolved.num_hits.tolist() == resolved.num_misses.tolist() == [0, 0]


@pytest.mark.parametrize(("refresh_hits", "evicted"), [(True, 1), (False, 0)])
def test_lru_keeps_what_a_hit_refreshed_and_fifo_does_not(refresh_hits: bool, evicted: int) -> None:
    simulation = Simulation(Shape(2, 1, 4, 3, 0, refresh_hits, start=20, seeded=False), 0)
    for selection in ([0, -1], [1, -1], [2, -1], [0, -1], [5, -1]):
        simulation.run_step([0], [selection])
    assert sorted(simulation.models[0].positions.values()) == sorted({0, 1, 2, 5} - {evicted})


def test_the_newest_row_takes_its_own_slot_from_another_position() -> None:
    """A request that resumes with an empty buffer fills slots in any order, its newest row's included."""
    simulation = Simulation(Shape(4, 4, 4, 3, 0, True, start=4, seeded=False), 0)
    for _ in range(10):
        newest = simulation.lengths[0]
        simulation.run_step([0], [[newest - 1, newest - 2, newest - 3, newest - 4]])


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("position", [0, 3, 4, 5, 1000])
def test_newest_slot_is_the_position_or_the_reserved_slot(position: int, num_slots: int) -> None:
    assert swap_in.newest_slot(torch.tensor([position]), num_slots).item() == min(position, num_slots)


def test_gather_keeps_the_bits_of_every_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        size = dtype.itemsize
        host = torch.randint(0, 256, (3, 4, 6 * size), dtype=torch.uint8, generator=generator).view(dtype)
        hot = torch.zeros(2, 5, 6, dtype=dtype)
        miss = torch.tensor([0, 0]), torch.tensor([2, 9]), torch.tensor([6, 1])
        resolved = Resolved(torch.empty(0), *miss, torch.empty(0), torch.empty(0))
        swap_in.gather(hot, torch.tensor([[1, 0]]), host, torch.tensor([[2, 0, 1]]), resolved)
        assert torch.equal(hot[0, 1].view(torch.uint8), host[2, 2].view(torch.uint8))
        assert torch.equal(hot[1, 1].view(torch.uint8), host[1, 1].view(torch.uint8))
