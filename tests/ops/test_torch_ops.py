import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from buffer_model import BufferModel
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.ops.base import DecodeMetadata, HotRows, Residency, Resolved
from vllm_hisparse.ops.limits import MAX_AGE, MAX_BONUS
from vllm_hisparse.ops.registry import swap_in_ops
from vllm_hisparse.ops.torch_ops import TorchSwapInOps

ROW = 3  # elements of a row: request, position, a product of both


def expected_row(request: int, position: int) -> list[float]:
    return [float(request + 1), float(position), (request + 1) * 0.5 + position * 7.0]


@dataclass
class Shape:
    """Sizes of one simulation.

    Attributes:
        top_k: entries of a selection. extra_slots: hot slots beyond top_k.
        block_size: tokens per host block. rows_per_block: rows per hot block. gap: rows between two hot blocks.
        start: tokens on the host before the first step; seeded: also in the hot buffer.
        first_row: first row of the layer in a hot block, `pitch` rows before the next one. equal_rows: rows of a hot
            block of every second request, whose blocks are divided equally, from row `first_equal_row` on; 0: none's.
    """

    top_k: int
    extra_slots: int
    block_size: int
    rows_per_block: int
    gap: int
    start: int
    seeded: bool
    first_row: int = 0
    equal_rows: int = 0
    first_equal_row: int = 0
    pitch: int = 1

    @property
    def stride(self) -> int:
        """Rows from one hot block to the next."""
        own = self.first_row + self.rows_per_block * self.pitch
        return max(own, self.first_equal_row + self.equal_rows * self.pitch) + self.gap

    @property
    def num_slots(self) -> int:
        return self.top_k + self.extra_slots


SHAPES = st.builds(
    Shape,
    top_k=st.integers(1, 6),
    extra_slots=st.sampled_from([0, 0, 1, 3, 8]),
    block_size=st.sampled_from([1, 3, 4, 7]),
    rows_per_block=st.sampled_from([1, 2, 3, 5, 7]),
    gap=st.sampled_from([0, 1, 4]),
    start=st.sampled_from([0, 1, 5, 12, 20]),
    seeded=st.booleans(),
    first_row=st.sampled_from([0, 0, 2]),
    equal_rows=st.sampled_from([0, 0, 1, 3, 8]),
    first_equal_row=st.sampled_from([0, 1, 5]),
    pitch=st.sampled_from([1, 1, 2, 3]),
)


class Simulation:
    """Tensors of several requests, poisoned with NaN wherever no request's row belongs."""

    NUM_REQUESTS = 4

    def __init__(self, shape: Shape, seed: int, num_tokens: int = 48):
        self.shape, self.random = shape, random.Random(seed)
        self.ops = TorchSwapInOps()
        self.host_block_tables = self.tables(-(-num_tokens // shape.block_size))
        self.hot_block_tables = self.tables(-(-(num_tokens + 1) // min(shape.rows_per_block, shape.equal_rows or 64)))
        self.has_equal_rows = torch.arange(self.NUM_REQUESTS, dtype=torch.int32) % 2 * (shape.equal_rows > 0)
        self.num_hot_rows = torch.full((self.NUM_REQUESTS,), shape.num_slots + 1, dtype=torch.int32)
        self.host_rows = torch.full(((self.host_block_tables.max() + 4) * shape.block_size, ROW), float("nan"))
        self.hot_storage = torch.full((self.hot_block_tables.max() + 4, shape.stride, ROW), float("nan"))
        own_rows = self.hot_storage[:, shape.first_row :: shape.pitch][:, : shape.rows_per_block]
        equal = shape.equal_rows, (shape.first_equal_row - shape.first_row) * (shape.equal_rows > 0)
        self.hot_rows = HotRows.from_cache(own_rows, *equal)
        self.seq_indices = torch.full((len(self.hot_storage),), -1, dtype=torch.int32)
        self.seq_indices[self.hot_block_tables[:, 0].long()] = torch.arange(self.NUM_REQUESTS, dtype=torch.int32)
        num_entries = len(self.hot_storage) * self.hot_rows.entries_per_block
        self.residency = Residency.allocate(num_entries, torch.device("cpu"))
        self.counts = torch.zeros(self.NUM_REQUESTS, 2, dtype=torch.int64)
        self.expected_counts = self.counts.clone()
        self.out = Resolved.allocate(self.NUM_REQUESTS + 1, shape.top_k, torch.device("cpu"))
        self.models = [BufferModel(shape.num_slots + 1) for _ in range(self.NUM_REQUESTS)]
        self.lengths = [min(max(shape.start - 2 * i, 0), num_tokens - 1) for i in range(self.NUM_REQUESTS)]
        for request, length in enumerate(self.lengths):
            self.seed(request, length)

    def seed(self, request: int, length: int) -> None:
        for position in range(length):
            self.host_row(request, position).copy_(torch.tensor(expected_row(request, position)))
            if self.shape.seeded and position < self.shape.num_slots:
                self.hot_row(request, position).copy_(torch.tensor(expected_row(request, position)))
                self.residency.positions[self.entry(request, position)] = position
                self.models[request].positions[position] = position

    def tables(self, num_blocks: int) -> torch.Tensor:
        """Disjoint tables in random order; some blocks belong to nobody, and so does block 0."""
        num_used = self.NUM_REQUESTS * num_blocks
        block_ids = self.random.sample(range(1, num_used + 6), num_used)
        return torch.tensor(block_ids, dtype=torch.int32).view(self.NUM_REQUESTS, num_blocks)

    def host_row(self, request: int, position: int) -> torch.Tensor:
        return self.host_rows[self.host_index(request, position)]

    def host_index(self, request: int, position: int) -> int:
        block, offset = divmod(position, self.shape.block_size)
        return self.host_block_tables[request, block].item() * self.shape.block_size + offset

    def hot_row(self, request: int, slot: int) -> torch.Tensor:
        return self.hot_storage.flatten(0, 1)[self.hot_index(request, slot) + self.shape.first_row]

    def hot_index(self, request: int, slot: int) -> int:
        """Flat row id, which counts from the first row of the layer in block 0."""
        block, offset = self.place(request, slot)
        moved = self.shape.first_equal_row - self.shape.first_row if self.has_equal_rows[request] else 0
        return block * self.shape.stride + offset * self.shape.pitch + moved

    def entry(self, request: int, slot: int) -> int:
        block, offset = self.place(request, slot)
        return block * max(self.shape.rows_per_block, self.shape.equal_rows) + offset

    def place(self, request: int, slot: int) -> tuple[int, int]:
        """Block of a slot, and the number of its row among the layer's in the block."""
        is_equal = self.has_equal_rows[request]
        index, offset = divmod(slot, self.shape.equal_rows if is_equal else self.shape.rows_per_block)
        return self.hot_block_tables[request, index].item(), offset

    def resize(self, request: int, num_rows: int) -> None:
        """Give a request more hot rows, which are empty, or take its last ones."""
        model, num_before = self.models[request], len(self.models[request].positions)
        for slot in range(num_before, num_rows):
            self.residency.positions[self.entry(request, slot)] = -1
            self.residency.expiries[self.entry(request, slot)] = 0
        model.positions = (model.positions + [-1] * num_rows)[:num_rows]
        model.expiries = (model.expiries + [0] * num_rows)[:num_rows]
        self.num_hot_rows[request] = num_rows

    def set_expiry(self, request: int, slot: int, expiry: int) -> None:
        self.residency.expiries[self.entry(request, slot)] = self.models[request].expiries[slot] = expiry

    def selection(self, newest: int) -> list[int]:
        """Distinct positions up to `newest`, the newest in or out, -1 in any place."""
        num_selected = min(self.random.randint(0, self.shape.top_k), newest + 1)
        recent = list(range(max(newest - 5, 0), newest + 1))
        pool = recent if self.random.random() < 0.4 else list(range(newest + 1))
        selected = self.random.sample(pool, min(num_selected, len(pool)))
        selected += [-1] * (self.shape.top_k - len(selected))
        self.random.shuffle(selected)
        return selected

    def invalid(self, selected: list[int], newest: int) -> list[int]:
        """The same selection with other ids that mean nothing."""
        invalid = [-1, -2, newest + 1, newest + 1000, 2**31 - 1, -(2**31)]
        return [self.random.choice(invalid) if position < 0 else position for position in selected]

    def decode_metadata(self, requests: list[int]) -> DecodeMetadata:
        """Tables of a batch with one row of padding at its end."""
        seq_lens = [self.lengths[request] + 1 for request in requests]
        nobody = torch.tensor([self.random.choice([-1, 2**31 - 1, len(self.seq_indices)])], dtype=torch.int32)
        return DecodeMetadata(
            self.seq_indices,
            torch.cat((self.hot_block_tables[requests, 0], nobody)),
            torch.tensor([*seq_lens, self.random.choice([0, 5])], dtype=torch.int32),
            *self.state_args,
        )

    def run_step(self, requests: list[int], selections: list[list[int]] | None = None) -> list[list[int]]:
        """One decode step of some requests, checked against the model; returns each request's missed positions."""
        newest = [self.lengths[request] for request in requests]
        selections = selections or [self.selection(position) for position in newest]
        decode = self.decode_metadata(requests)
        self.write_newest(requests, decode)
        hot_before, host_before = self.hot_storage.clone(), self.host_rows.clone()
        given = [self.invalid(*pair) for pair in zip(selections, newest, strict=True)]
        top_k = torch.tensor([*given, [0] * self.shape.top_k], dtype=torch.int32)
        self.out.hot_row_ids.fill_(77)
        self.out.num_valid.fill_(77)
        self.out.num_misses.fill_(77)
        self.ops.swap_in(self.residency, decode, top_k, self.host_rows, self.hot_rows, self.counts, self.out)

        missed = self.check_resolved(requests, selections, newest)
        for row, request in enumerate(requests):
            for index in self.out.miss_hot_row_ids[row, : len(missed[row])].tolist():
                block, offset = divmod(index + self.shape.first_row, self.hot_storage.shape[1])
                hot_before[block, offset] = self.hot_storage[block, offset]
            self.check_rows(request, selections[row], self.out.hot_row_ids[row].tolist())
        assert torch.equal(self.hot_storage.nan_to_num(-1), hot_before.nan_to_num(-1)), "another row changed"
        self.write_back(requests, decode, host_before)
        return missed

    def write_newest(self, requests: list[int], decode: DecodeMetadata) -> None:
        newest = torch.full((len(requests) + 2,), 77)
        self.ops.newest_row_ids(decode, self.hot_rows, newest)
        for row, request in enumerate(requests):
            position = self.lengths[request]
            assert newest[row] == self.hot_index(request, self.models[request].slot_of_new(position, position))
            self.hot_rows.rows[newest[row]] = torch.tensor(expected_row(request, position))
        assert newest[-2:].tolist() == [-1, 77]

    @property
    def state_args(self) -> tuple[Any, ...]:
        """Tables by state, the size of host blocks, one new token for each request, and the division of blocks."""
        tables = self.hot_block_tables, self.num_hot_rows, self.host_block_tables
        has_equal_rows = self.has_equal_rows if self.shape.equal_rows else None
        return *tables, self.shape.block_size, None, 1, has_equal_rows

    def check_resolved(self, requests: list[int], selections: list[list[int]], newest: list[int]) -> list[list[int]]:
        all_missed = []
        for row, request in enumerate(requests):
            model = self.models[request]
            by_position, missed = model.resolve(selections[row], newest[row])
            slots = [by_position.get(position, -1) for position in selections[row]]
            hot_rows = [-1 if slot < 0 else self.hot_index(request, slot) for slot in slots]
            num_valid = max((i + 1 for i, slot in enumerate(slots) if slot >= 0), default=0)
            miss_hot_row_ids = [self.hot_index(request, by_position[position]) for position in missed]
            assert self.out.hot_row_ids[row].tolist() == hot_rows
            assert self.out.num_valid[row] == num_valid
            assert self.out.num_misses[row] == len(missed)
            assert self.out.miss_hot_row_ids[row, : len(missed)].tolist() == miss_hot_row_ids
            assert self.out.miss_host_row_ids[row, : len(missed)].tolist() == [
                self.host_index(request, position) for position in missed
            ]
            num_wanted = sum(position not in (-1, newest[row]) for position in selections[row])
            self.expected_counts[request] += torch.tensor([num_wanted - len(missed), len(missed)])
            all_missed.append(missed)
        self.check_untouched(len(requests))
        return all_missed

    def check_untouched(self, batch: int) -> None:
        """The padding row means nothing, no row after it is written, and no other request's state changed."""
        assert self.out.hot_row_ids[batch].tolist() == [-1] * self.shape.top_k
        assert self.out.num_valid[batch] == self.out.num_misses[batch] == 0
        assert (self.out.hot_row_ids[batch + 1 :] == 77).all() and (self.out.num_misses[batch + 1 :] == 77).all()
        assert torch.equal(self.counts, self.expected_counts)
        for request, model in enumerate(self.models):
            entries = [self.entry(request, slot) for slot in range(len(model.positions))]
            assert self.residency.positions[entries].tolist() == model.positions
            assert self.residency.expiries[entries].tolist() == model.expiries

    def check_rows(self, request: int, selected: list[int], hot_rows: list[int]) -> None:
        for position, index in zip(selected, hot_rows, strict=True):
            if position >= 0:
                assert self.hot_rows.rows[index].tolist() == expected_row(request, position)

    def write_back(self, requests: list[int], decode: DecodeMetadata, host_before: torch.Tensor) -> None:
        layers = [self.hot_rows], [self.host_rows]
        self.ops.write_back(*layers, decode)
        for request in requests:
            newest = self.lengths[request]
            host_before[self.host_index(request, newest)] = torch.tensor(expected_row(request, newest))
            self.lengths[request] += 1
        assert torch.equal(self.host_rows.nan_to_num(-1), host_before.nan_to_num(-1)), "another row was written back"

    def some_requests(self) -> list[int]:
        return self.random.sample(range(self.NUM_REQUESTS), self.random.randint(1, self.NUM_REQUESTS))


@pytest.mark.long
@settings(max_examples=settings().max_examples // 3)  # of 24 steps each
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_many_steps_agree_with_the_model(shape: Shape, seed: int) -> None:
    simulation = Simulation(shape, seed)
    for _ in range(24):
        simulation.run_step(simulation.some_requests())


@pytest.mark.long
@settings(max_examples=settings().max_examples // 3)  # of 24 steps each
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_buffers_that_grow_and_shrink_agree_with_the_model(shape: Shape, seed: int) -> None:
    """Steps agree when buffers grow and shrink, also from less than the sequence to all of it and back."""
    simulation = Simulation(shape, seed)
    for _ in range(24):
        for request in simulation.some_requests():
            fits = simulation.lengths[request] + 1
            sizes = shape.num_slots + 1, fits, fits + 4, shape.num_slots + 1 + simulation.random.randint(0, 6)
            simulation.resize(request, max(simulation.random.choice(sizes), shape.num_slots + 1))
        simulation.run_step(simulation.some_requests())


@pytest.mark.parametrize(("age", "is_told_apart"), [(MAX_AGE, True), (MAX_AGE + 1, False)])
def test_ages_beyond_the_highest_are_equal(age: int, is_told_apart: bool) -> None:
    """The victim of two rows, one of a given age, the other a token younger."""
    simulation = Simulation(Shape(2, 0, 64, 3, 0, start=20, seeded=False), 0, num_tokens=1100)
    newest = simulation.lengths[0] = 1050
    simulation.run_step([0], [[3, 4]])
    simulation.lengths[0] = newest + 1
    for slot, expiry in enumerate((newest + 2 + MAX_BONUS - age, newest + 1 + MAX_BONUS - age)):
        simulation.set_expiry(0, slot, expiry)
    simulation.run_step([0], [[5, -1]])
    assert simulation.models[0].positions[:2] == ([3, 5] if is_told_apart else [5, 4])


@pytest.mark.parametrize("num_slots", [2, 40])
def test_a_use_moves_the_expiry_on(num_slots: int) -> None:
    """In a buffer that evicts, and in one that holds all: 8 more with each use, from the step on if it is later, and at
    most 48 after the step."""
    simulation = Simulation(Shape(num_slots, 0, 64, 3, 0, start=20, seeded=False), 0)

    def use(expiry: int | None = None) -> int:
        if expiry is not None:
            simulation.set_expiry(0, slot, expiry)
        now = simulation.lengths[0]
        simulation.run_step([0], [[3] + [-1] * (num_slots - 1)])
        return int(simulation.residency.expiries[simulation.entry(0, slot)]) - now

    slot = 3 if num_slots > 20 else 0
    assert use() == 8
    assert [use() for _ in range(6)] == [15, 22, 29, 36, 43, 48]
    assert use() == 48
    now = simulation.lengths[0]
    assert use(now - 1000) == 8 and use(now) == 8 and use(now + 4) == 10
    assert use(10_000) == 48, "a session's turn dropped tokens"


def test_rows_of_many_uses_stay_longer() -> None:
    """A row that is used twice stays; a row that is used once, and later, goes first."""
    simulation = Simulation(Shape(2, 0, 4, 3, 0, start=20, seeded=False), 0)
    for selection in ([0, -1], [0, -1], [1, -1], [2, -1]):
        simulation.run_step([0], [selection])
    assert simulation.models[0].positions[:-1] == [0, 2]


@pytest.mark.long
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_a_sequence_that_fits_never_misses(shape: Shape, seed: int) -> None:
    shape.seeded, shape.start = True, min(shape.start, shape.num_slots)
    simulation = Simulation(shape, seed)
    while max(simulation.lengths) < shape.num_slots:
        assert not any(simulation.run_step(simulation.some_requests()))


@pytest.mark.long
@given(seed=st.integers(0, 2**32), top_k=st.integers(1, 6))
def test_a_buffer_of_top_k_slots_can_be_replaced_whole(seed: int, top_k: int) -> None:
    simulation = Simulation(Shape(top_k, 0, 4, 3, 1, start=30, seeded=True), seed)
    even, odd = list(range(0, 2 * top_k, 2)), list(range(1, 2 * top_k, 2))
    simulation.run_step([0], [even])
    for selection in (odd, even, odd):
        assert simulation.run_step([0], [selection]) == [selection]


def test_only_the_newest_and_nothing_at_all() -> None:
    simulation = Simulation(Shape(3, 0, 4, 3, 0, start=10, seeded=True), 0)
    newest = simulation.lengths[0]
    assert simulation.run_step([0, 1], [[-1, newest, -1], [-1, -1, -1]]) == [[], []]
    assert simulation.out.hot_row_ids[0].tolist() == [-1, simulation.hot_index(0, 3), -1]
    assert simulation.out.num_valid[:2].tolist() == [2, 0]


def test_a_hit_keeps_a_row_from_eviction() -> None:
    simulation = Simulation(Shape(2, 1, 4, 3, 0, start=20, seeded=False), 0)
    for selection in ([0, -1], [1, -1], [2, -1], [0, -1], [5, -1]):
        simulation.run_step([0], [selection])
    assert sorted(simulation.models[0].positions[:-1]) == [0, 2, 5]


def test_a_request_that_resumes_with_an_empty_buffer_fills_the_slots_of_its_selections() -> None:
    simulation = Simulation(Shape(4, 4, 4, 3, 0, start=4, seeded=False), 0)
    for _ in range(10):
        newest = simulation.lengths[0]
        simulation.run_step([0], [[newest - 1, newest - 2, newest - 3, newest - 4]])


def test_unknown_host_blocks_and_rows_outside_are_not_copied() -> None:
    simulation = Simulation(Shape(3, 0, 4, 3, 0, start=20, seeded=False), 0)
    simulation.host_block_tables[0, 0] = -1
    simulation.host_block_tables[0, 1] = 2**30
    decode = simulation.decode_metadata([0])
    hot_before = simulation.hot_storage.clone()
    top_k = torch.tensor([[2, 5, -1], [-1, -1, -1]], dtype=torch.int32)
    args = simulation.host_rows, simulation.hot_rows, simulation.counts, simulation.out
    simulation.ops.swap_in(simulation.residency, decode, top_k, *args)
    assert simulation.out.num_misses.tolist()[:2] == [2, 0]
    assert simulation.out.miss_host_row_ids[0, :2].tolist() == [-1, 2**32 + 1]
    assert torch.equal(simulation.hot_storage.nan_to_num(-1), hot_before.nan_to_num(-1))


@pytest.mark.parametrize(("seq_len", "has_request"), [(0, True), (-3, True), (5, False), (6, True)])
def test_newest_rows_of_padding(seq_len: int, has_request: bool) -> None:
    simulation = Simulation(Shape(3, 0, 4, 3, 0, start=20, seeded=False), 0)
    decode = DecodeMetadata(
        simulation.seq_indices if has_request else torch.full_like(simulation.seq_indices, -1),
        simulation.hot_block_tables[:1, 0],
        torch.tensor([seq_len], dtype=torch.int32),
        *simulation.state_args,
    )
    if seq_len == 6:
        simulation.num_hot_rows[0] = 0
    out = torch.full((2,), 77)
    simulation.ops.newest_row_ids(decode, simulation.hot_rows, out)
    assert out.tolist() == [-1, 77]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_rows_keep_their_bits(dtype: torch.dtype) -> None:
    """Staged and saved rows keep their bits, whatever dtype says that they are."""
    generator = torch.Generator().manual_seed(0)
    host = torch.randint(0, 256, (5 * 4, 6 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    table, ops = torch.tensor([3, 0, 4], dtype=torch.int32), TorchSwapInOps()
    staging = torch.zeros(10, 6, dtype=dtype)
    ops.stage_rows(host, table, 4, staging)
    order = [12, 13, 14, 15, 0, 1, 2, 3, 16, 17]
    assert torch.equal(staging.view(torch.uint8), host[order].view(torch.uint8))
    saved = torch.zeros_like(host)
    ops.save_rows(staging[3:], 3, saved, table, 4)
    assert torch.equal(saved[order[3:]].view(torch.uint8), host[order[3:]].view(torch.uint8))
    assert not saved[order[:3]].view(torch.uint8).any()


def test_the_cpu_gets_the_torch_operations() -> None:
    assert isinstance(swap_in_ops(torch.device("cpu")), TorchSwapInOps)


def test_compact_moves_valid_ids_to_the_front() -> None:
    """Valid ids keep their order, and ids behind the leading ones do not change."""
    row_ids = torch.tensor([[7, -1, 3, -5, 9, 4], [-1, -1, -1, 8, 8, 8], [1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    num_valid = torch.tensor([5, 3, 0], dtype=torch.int32)
    TorchSwapInOps().compact(row_ids, num_valid)
    assert row_ids.tolist() == [[7, 3, 9, -1, -1, 4], [-1, -1, -1, 8, 8, 8], [1, 2, 3, 4, 5, 6]]
    assert num_valid.tolist() == [3, 0, 0]
