"""Steps in which requests compute several tokens, of which some are rejected: against a model in plain Python."""

import random

import pytest
import torch
from buffer_model import BufferModel
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.ops.base import DecodeMetadata, HotRows, Residency, Resolved
from vllm_hisparse.ops.torch_ops import TorchSwapInOps

NUM_REQUESTS, BLOCK_SIZE, ROWS_PER_BLOCK, MAX_TOKENS = 3, 4, 3, 60


class Buffer(BufferModel):
    """One request, and its text."""

    def __init__(self, num_slots: int, query_len: int):
        super().__init__(num_slots + query_len, query_len)
        self.length, self.tokens = 0, []  # position -> what was last computed there
        self.num_hits = self.num_misses = 0

    def run(self, selected: list[int], num_new: int) -> tuple[dict[int, int], list[int]]:
        slots, missed = self.resolve(selected, self.length, num_new)
        num_wanted = len({position for position in selected if 0 <= position < self.length})
        self.num_hits, self.num_misses = self.num_hits + num_wanted - len(missed), self.num_misses + len(missed)
        return slots, missed


class Simulation:
    """Several requests of random texts; a row is (request, position, token), NaN where nothing was written."""

    def __init__(self, query_len: int, top_k: int, extra_slots: int, seed: int):
        self.random, self.query_len, self.top_k = random.Random(seed), query_len, top_k
        self.num_slots, self.ops = query_len * top_k + extra_slots, TorchSwapInOps()
        self.buffers = [Buffer(self.num_slots, query_len) for _ in range(NUM_REQUESTS)]
        self.host_block_tables = self._tables(-(-MAX_TOKENS // BLOCK_SIZE))
        self.hot_block_tables = self._tables(-(-(self.num_slots + query_len) // ROWS_PER_BLOCK))
        self.host_blocks, self.hot_blocks = self.host_block_tables.tolist(), self.hot_block_tables.tolist()
        self.host_rows = torch.full((int(self.host_block_tables.max() + 1) * BLOCK_SIZE, 3), float("nan"))
        cache = torch.full((int(self.hot_block_tables.max()) + 1, ROWS_PER_BLOCK, 3), float("nan"))
        self.hot_rows = HotRows.from_cache(cache)
        self.seq_indices = torch.full((len(cache),), -1, dtype=torch.int32)
        self.seq_indices[self.hot_block_tables[:, 0].long()] = torch.arange(NUM_REQUESTS, dtype=torch.int32)
        self.num_hot_rows = torch.full((NUM_REQUESTS,), self.num_slots + query_len, dtype=torch.int32)
        self.residency = Residency.allocate(len(cache) * ROWS_PER_BLOCK, torch.device("cpu"))
        self.counts = torch.zeros(NUM_REQUESTS, 2, dtype=torch.int64)
        self.out = Resolved.allocate(NUM_REQUESTS, query_len * top_k, torch.device("cpu"), query_len)

    def _tables(self, num_blocks: int) -> torch.Tensor:
        blocks = self.random.sample(range(NUM_REQUESTS * num_blocks), NUM_REQUESTS * num_blocks)
        return torch.tensor(blocks, dtype=torch.int32).view(NUM_REQUESTS, num_blocks)

    def random_step(self) -> None:
        requests = self.random.sample(range(NUM_REQUESTS), self.random.randint(1, NUM_REQUESTS))
        num_new = [self.random.randint(1, self.query_len) for _ in requests]
        selections = [self._selections(*pair) for pair in zip(requests, num_new, strict=True)]
        self.step(requests, num_new, selections, [self.random.randint(1, count) for count in num_new])

    def step(
        self, requests: list[int], num_new: list[int], selections: list[list[list[int]]], num_accepted: list[int]
    ) -> None:
        """Compute `num_new` tokens of each request, each with a selection; all but `num_accepted` are rejected."""
        query_lens = torch.tensor(num_new, dtype=torch.int32)
        decode = DecodeMetadata(
            self.seq_indices,
            self.hot_block_tables[requests, 0],
            torch.tensor([self.buffers[request].length for request in requests], dtype=torch.int32) + query_lens,
            self.hot_block_tables,
            self.num_hot_rows,
            self.host_block_tables,
            BLOCK_SIZE,
            query_lens,
            self.query_len,
        )
        self._write_new(requests, num_new, decode)
        top_k = torch.tensor(selections, dtype=torch.int32).flatten(1)
        swap_in = (top_k, self.host_rows, self.hot_rows, self.counts, self.out)
        self.ops.swap_in(self.residency, decode, *swap_in)
        for row, (request, count) in enumerate(zip(requests, num_new, strict=True)):
            self._check(row, request, count, top_k[row].tolist())
        self.ops.write_back([self.hot_rows], [self.host_rows], decode)
        for request, count, accepted in zip(requests, num_new, num_accepted, strict=True):
            self._check_host(request, count)
            self.buffers[request].length += accepted

    def _write_new(self, requests: list[int], num_new: list[int], decode: DecodeMetadata) -> None:
        row_ids = torch.full((NUM_REQUESTS * self.query_len,), 77)
        self.ops.newest_row_ids(decode, self.hot_rows, row_ids)
        by_request = row_ids.view(NUM_REQUESTS, self.query_len)
        for row, (request, count) in enumerate(zip(requests, num_new, strict=True)):
            buffer = self.buffers[request]
            del buffer.tokens[buffer.length :]
            assert (by_request[row, count:] == -1).all()
            for index in range(count):
                position = buffer.length + index
                buffer.tokens.append(self.random.randrange(2**24))  # exact in fp32
                assert by_request[row, index] == self._hot_id(request, buffer.slot_of_new(position, buffer.length))
                self.hot_rows.rows[by_request[row, index]] = torch.tensor(self._row(request, position))

    def _selections(self, request: int, num_new: int) -> list[list[int]]:
        """Select positions up to each new token's own; other entries are -1 or invalid."""
        selections, length = [], self.buffers[request].length
        for index in range(self.query_len):
            newest = length + index if index < num_new else -1
            first = max(newest - 2 * self.top_k, 0) if self.random.random() < 0.6 else 0
            pool = range(first, newest + 1)
            selected = self.random.sample(pool, min(self.random.randint(0, self.top_k), len(pool)))
            padding = [self.random.choice((-1, -9, length + num_new, 2**31 - 1)) for _ in range(self.top_k)]
            selected = (selected + padding)[: self.top_k]
            self.random.shuffle(selected)
            selections.append(selected)
        return selections

    def _check(self, row: int, request: int, num_new: int, selected: list[int]) -> None:
        buffer = self.buffers[request]
        slots, missed = buffer.run(selected, num_new)
        hot_ids, positions = self.out.hot_row_ids[row].tolist(), range(buffer.length + num_new)
        assert hot_ids == [self._hot_id(request, slots[it]) if it in positions else -1 for it in selected]
        found = self.hot_rows.rows[[hot_id for hot_id in hot_ids if hot_id >= 0]]
        assert found.tolist() == [self._row(request, it) for it in selected if it in positions]
        assert self.out.num_misses[row] == len(missed)
        by_token = torch.tensor(hot_ids).view(self.query_len, -1)
        for index, num_valid in enumerate(self.out.num_valid.view(-1, self.query_len)[row].tolist()):
            assert (by_token[index, num_valid:] == -1).all() and (num_valid == 0 or by_token[index, num_valid - 1] >= 0)
        homes = self.out.miss_host_row_ids[row, : len(missed)].tolist()
        assert homes == [self._host_id(request, position) for position in missed]
        entries = [self._hot_id(request, slot) for slot in range(len(buffer.positions))]  # no rows between blocks
        assert self.residency.positions[entries].tolist() == buffer.positions
        assert self.residency.expiries[entries].tolist() == buffer.expiries
        assert self.counts[request].tolist() == [buffer.num_hits, buffer.num_misses]

    def _check_host(self, request: int, num_new: int) -> None:
        positions = range(self.buffers[request].length + num_new)
        rows = self.host_rows[[self._host_id(request, position) for position in positions]]
        assert rows.tolist() == [self._row(request, position) for position in positions]

    def _row(self, request: int, position: int) -> list[float]:
        return [float(request), float(position), float(self.buffers[request].tokens[position])]

    def _hot_id(self, request: int, slot: int) -> int:
        return self.hot_blocks[request][slot // ROWS_PER_BLOCK] * ROWS_PER_BLOCK + slot % ROWS_PER_BLOCK

    def _host_id(self, request: int, position: int) -> int:
        return self.host_blocks[request][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.long
@settings(max_examples=settings().max_examples // 3)  # of many steps each
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 7), st.integers(0, 2**32))
def test_many_steps_agree_with_the_model(query_len: int, top_k: int, extra_slots: int, seed: int) -> None:
    simulation = Simulation(query_len, top_k, extra_slots, seed)
    while max(buffer.length for buffer in simulation.buffers) < MAX_TOKENS - query_len:
        simulation.random_step()


@pytest.mark.parametrize("extra_slots", [0, 40])
def test_a_row_that_several_tokens_select_is_used_once(extra_slots: int) -> None:
    """In a buffer that evicts, and in one that holds all: up to the latest expiry that a row may have."""
    simulation = Simulation(3, 2, extra_slots, seed=0)
    simulation.step([0], [3], [[[-1, -1]] * 3], [3])
    expiries = []
    while (length := simulation.buffers[0].length) < 40:
        simulation.step([0], [3], [[[0, -1], [1, 0], [-1, 0]]], [2])
        slot = simulation.buffers[0].positions.index(0)
        expiries.append(int(simulation.residency.expiries[simulation._hot_id(0, slot)]) - length)
    # Tokens 0 to 2 are new in the first step, and hot from then on if there is a slot for each.
    assert expiries[:4] == [8, 14, 20, 26] and expiries[-3:] == [48, 48, 48]
