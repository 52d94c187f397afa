"""The CUDA kernels against the torch reference, bit for bit; see tests/ops/test_torch_ops.py for the reference."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.ops.base import DecodeMetadata, HotRows, MovedRequests, Residency, Resolved
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.limits import MAX_BONUS, MAX_HOT_ROWS, MAX_QUERY_LEN
from vllm_hisparse.ops.registry import swap_in_ops
from vllm_hisparse.ops.torch_ops import TorchSwapInOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POISON = 0xFF  # NaN in every floating-point format
INVALID = (-1, -2, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison.

    Attributes:
        batch, top_k, row_bytes: sizes of the operations.
        num_slots: hot slots that a long request has at least, reserved ones not counted; `max_slots` are the most.
        block_size: tokens of a host block. rows_per_block: rows of a hot block. gap: rows between two hot blocks.
        shortest, longest: tokens of the requests before the first step.
        seeded: the buffers hold some rows before the first step.
        steps: decode steps, of up to `query_len` tokens each, of which some are rejected.
        first_row: first row of the layer in a hot block, `pitch` rows before the next one. equal_rows: rows of a hot
            block of some requests, whose blocks are divided equally, from row `first_equal_row` on; 0: none's.
    """

    batch: int
    top_k: int
    num_slots: int
    row_bytes: int = 16
    block_size: int = 64
    rows_per_block: int = 7
    gap: int = 0
    shortest: int = 1
    longest: int = 3000
    seeded: bool = True
    steps: int = 6
    max_slots: int = 0  # `num_slots` if that is more
    query_len: int = 1
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
    def equal_offset(self) -> int:
        return self.first_equal_row - self.first_row if self.equal_rows else 0

    @property
    def num_host_blocks(self) -> int:
        return -(-(self.longest + self.steps * self.query_len) // self.block_size)

    @property
    def max_hot_rows(self) -> int:
        return max(self.num_slots, self.max_slots) + self.query_len

    @property
    def num_hot_blocks(self) -> int:
        return -(-self.max_hot_rows // min(self.rows_per_block, self.equal_rows or self.rows_per_block))


CASES = [
    Case(1, 128, 128, longest=1),  # short sequences only
    Case(4, 128, 512, row_bytes=656, rows_per_block=12, gap=5, shortest=505, longest=511),  # short, then long
    Case(5, 200, 333, row_bytes=1152, block_size=16, gap=3),
    Case(5, 200, 333, row_bytes=1152, block_size=16, gap=3, seeded=False),
    Case(256, 128, 130, block_size=7, rows_per_block=1, gap=2, longest=500),
    Case(64, 256, 1024, row_bytes=48, rows_per_block=5, gap=1),
    Case(3, 1024, 1024, row_bytes=2064, block_size=1, rows_per_block=3),
    Case(2, 1000, 2500, row_bytes=1168, block_size=37, rows_per_block=64, seeded=False),
    Case(4, 2048, 4096, row_bytes=1152, shortest=4090, longest=20000),
    Case(4, 2048, 4096, row_bytes=656, rows_per_block=12, gap=20, shortest=3000, longest=4200),
    Case(2, 2048, 6144, row_bytes=656, rows_per_block=12, gap=11, longest=9000),
    Case(3, 2048, 8192, row_bytes=32, shortest=8190, longest=30000),
    Case(3, 4096, 4096, row_bytes=32, shortest=6000, longest=8000),
    Case(2, 4096, 16384, row_bytes=16, shortest=16380, longest=40000),
    Case(9, 128, 200, row_bytes=32, rows_per_block=11, gap=3, longest=900, max_slots=950, steps=9),
    Case(5, 512, 1024, row_bytes=656, rows_per_block=12, longest=5000, max_slots=3001),
    Case(3, 2048, 4096, row_bytes=32, rows_per_block=12, gap=4, shortest=4090, longest=40000, max_slots=16383),
    Case(3, 2048, 8192, row_bytes=32, rows_per_block=13, shortest=8000, longest=40000, max_slots=39999),  # partly hot
    Case(2, 4096, 4096, rows_per_block=64, gap=1, shortest=30000, longest=39996, max_slots=39999),  # fits, then not
    Case(2, 1024, 2048, shortest=3000, longest=39996, max_slots=39999, seeded=False),
    Case(6, 128, 300, first_row=9, equal_rows=5, first_equal_row=2, gap=1, longest=900, max_slots=920, steps=9),
    Case(5, 512, 1024, row_bytes=656, rows_per_block=4, equal_rows=6, first_equal_row=3, longest=5000, max_slots=3001),
    Case(3, 2048, 8192, row_bytes=32, rows_per_block=13, equal_rows=6, longest=40000, max_slots=20000, pitch=3),
    Case(3, 200, 400, first_row=4, equal_rows=9, gap=2, query_len=3, shortest=380, longest=450, max_slots=460),
]


def random_case(seed: int) -> Case:
    choice = random.Random(seed)
    top_k = choice.choice([128, 129, 255, 512, 1024, 1500])
    num_slots = choice.randint(top_k, 4 * top_k)
    return Case(
        batch=choice.choice([1, 2, 3, 9, 17]),
        top_k=top_k,
        num_slots=num_slots,
        row_bytes=16 * choice.randint(1, 130),
        block_size=choice.choice([1, 3, 16, 64, 100]),
        rows_per_block=choice.choice([1, 2, 7, 12, 33]),
        gap=choice.randint(0, 9),
        shortest=choice.choice([1, num_slots - 3]),
        longest=num_slots + choice.choice([-2, 3, 2000]),
        seeded=choice.random() < 0.5,
        max_slots=num_slots + choice.choice([0, 100, 2010]),
        first_row=choice.choice([0, 0, 3]),
        equal_rows=choice.choice([0, 0, 4, 9]),
        first_equal_row=choice.choice([0, 5]),
        pitch=choice.choice([1, 2]),
    )


@dataclass
class State:
    """Everything that the operations read and write, on one device."""

    host_rows: torch.Tensor
    hot_storage: torch.Tensor
    residency: Residency
    seq_indices: torch.Tensor
    hot_block_tables: torch.Tensor
    num_hot_rows: torch.Tensor
    host_block_tables: torch.Tensor
    counts: torch.Tensor
    out: Resolved
    newest_row_ids: torch.Tensor
    has_equal_rows: torch.Tensor
    case: Case

    @property
    def hot(self) -> HotRows:
        case = self.case
        rows = self.hot_storage[:, case.first_row :: case.pitch][:, : case.rows_per_block]
        return HotRows.from_cache(rows, case.equal_rows, case.equal_offset)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Values that must be equal, on the CPU."""
        named = {name: getattr(self, name) for name in ("host_rows", "hot_storage", "counts", "newest_row_ids")}
        positions, expiries = self.residency.positions, self.residency.expiries
        named |= {"positions": positions, "expiries": expiries.where(positions >= 0, -7)}
        named |= {name: getattr(self.out, name) for name in ("hot_row_ids", "num_valid", "num_misses")}
        columns = torch.arange(self.out.hot_row_ids.shape[1], device=self.out.num_misses.device)
        counted = columns < self.out.num_misses[:, None]
        for name in ("miss_host_row_ids", "miss_hot_row_ids"):
            named[name] = getattr(self.out, name).where(counted, -7)
        return {name: tensor.cpu() for name, tensor in named.items()}

    def to_cuda(self) -> "State":
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.cuda()

        return State(
            self.host_rows.clone().pin_memory(),
            move(self.hot_storage),
            Residency(move(self.residency.entries)),
            move(self.seq_indices),
            move(self.hot_block_tables),
            move(self.num_hot_rows),
            move(self.host_block_tables),
            move(self.counts),
            Resolved(*(move(getattr(self.out, name)) for name in self.out.__dataclass_fields__)),
            move(self.newest_row_ids),
            move(self.has_equal_rows),
            self.case,
        )


class Scenario:
    """Requests of a case with their selections, step by step; poison wherever no request's row belongs."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.random = case, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.hot_blocks = self.disjoint(case.num_hot_blocks)
        self.lengths = [self.random.randint(case.shortest, case.longest) for _ in range(case.batch)]
        self.lengths[0], self.lengths[-1] = case.longest, case.shortest
        self.final_lengths = [length + case.steps * case.query_len for length in self.lengths]
        self.padding = {batch_index for batch_index in range(1, case.batch) if self.random.random() < 0.15}
        self.last = [torch.zeros(0, dtype=torch.int32)] * case.batch
        self.state = self.initial_state()

    def disjoint(self, num_blocks: int) -> torch.Tensor:
        """Tables of all requests in random order; some blocks belong to nobody, and so does block 0."""
        num_used = self.case.batch * num_blocks
        block_ids = 1 + torch.randperm(num_used + 5, generator=self.generator)[:num_used]
        return block_ids.int().view(self.case.batch, num_blocks)

    def initial_state(self) -> State:
        case = self.case
        host_block_tables = self.disjoint(case.num_host_blocks)
        host_rows = torch.full(
            ((host_block_tables.max() + 2) * case.block_size, case.row_bytes), POISON, dtype=torch.uint8
        )
        hot = torch.full((self.hot_blocks.max() + 2, case.stride, case.row_bytes), POISON, dtype=torch.uint8)
        seq_indices = torch.full((len(hot),), -1, dtype=torch.int32)
        seq_indices[self.hot_blocks[:, 0].long()] = torch.randperm(case.batch, generator=self.generator).int()
        num_entries = len(hot) * max(case.rows_per_block, case.equal_rows)
        self.divides_equally = [case.equal_rows > 0 and self.random.random() < 0.5 for _ in self.lengths]
        positions, expiries = self.integers(-1, case.longest, 2, num_entries)  # what others left in their blocks
        state = State(
            host_rows,
            hot,
            Residency(torch.stack((positions, expiries), 1)),
            seq_indices,
            torch.full_like(self.hot_blocks, -1),
            torch.zeros(case.batch, dtype=torch.int32),
            torch.full_like(host_block_tables, -1),
            torch.zeros(case.batch, 2, dtype=torch.int64),
            Resolved.allocate(case.batch + 1, case.top_k * case.query_len, torch.device("cpu"), case.query_len),
            torch.full(((case.batch + 1) * case.query_len,), -5),
            torch.zeros(case.batch, dtype=torch.int32),
            case,
        )
        for batch_index, is_equal in enumerate(self.divides_equally):
            state.has_equal_rows[self.seq_index(state, batch_index)] = is_equal
        for batch_index, length in enumerate(self.lengths):
            state.host_block_tables[self.seq_index(state, batch_index)] = host_block_tables[batch_index]
            known = self.host_ids(host_block_tables[batch_index], torch.arange(length))
            host_rows[known] = self.bytes(len(known))
            num_rows = case.max_hot_rows if batch_index == 0 else self.some_num_rows(batch_index)
            self.resize(state, batch_index, num_rows)
            if case.seeded:
                self.seed(state, batch_index, num_rows, host_block_tables[batch_index])
        return state

    def seq_index(self, state: State, batch_index: int) -> int:
        return int(state.seq_indices[self.hot_blocks[batch_index, 0]])

    def least_rows(self, batch_index: int) -> int:
        """Hot rows that a request needs: all that it will have, or enough for a selection."""
        return min(self.case.num_slots + self.case.query_len, self.final_lengths[batch_index])

    def some_num_rows(self, batch_index: int) -> int:
        """The fewest hot rows possible, the most, enough for the next step to fit, or any number."""
        least, most = self.least_rows(batch_index), self.case.max_hot_rows
        fits = self.lengths[batch_index] + self.case.query_len
        num_rows = self.random.choice([least, most, fits, fits + 4, self.random.randint(least, max(least, most))])
        return max(min(num_rows, most), least)

    def resize(self, state: State, batch_index: int, num_rows: int) -> None:
        """Give a request more hot rows, which are empty, or take its last ones."""
        seq_index, device = self.seq_index(state, batch_index), state.hot_block_tables.device
        added = torch.arange(num_rows)[int(state.num_hot_rows[seq_index]) :]
        state.residency.positions[self.entries(batch_index, added).to(device)] = -1
        table = self.hot_blocks[batch_index].clone()
        table[-(-num_rows // self.rows_of(batch_index)) :] = -1
        state.hot_block_tables[seq_index], state.num_hot_rows[seq_index] = table.to(device), num_rows

    def seed(self, state: State, batch_index: int, num_rows: int, host_block_table: torch.Tensor) -> None:
        """Fill most of a request's hot rows, with random ages. A sequence that fits has most positions in their own
        slots; the others are where they were when it did not fit."""
        length, slots = self.lengths[batch_index], torch.arange(num_rows)
        entries = self.entries(batch_index, slots)
        state.residency.expiries[entries] = length - self.integers(-60, 1500, num_rows)
        held = torch.full((num_rows,), -1)
        held[:length] = torch.randperm(length, generator=self.generator)[:num_rows]
        if length < num_rows:
            held = slots.where((slots < length) & (self.integers(0, 10, num_rows) > 0), held)
        held[self.integers(0, 10, num_rows) == 0] = -1
        state.residency.positions[entries] = held.int()
        hot_ids, host_ids = (
            self.hot_ids(batch_index, slots[held >= 0]),
            self.host_ids(host_block_table, held[held >= 0]),
        )
        state.hot.rows[hot_ids] = state.host_rows[host_ids]

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, dtype=torch.int32, generator=self.generator)

    def bytes(self, num_rows: int) -> torch.Tensor:
        size = (num_rows, self.case.row_bytes)
        return torch.randint(0, POISON, size, dtype=torch.uint8, generator=self.generator)

    def host_ids(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table[positions // self.case.block_size].long() * self.case.block_size + positions % self.case.block_size

    def hot_ids(self, batch_index: int, slots: torch.Tensor) -> torch.Tensor:
        first = self.case.equal_offset if self.divides_equally[batch_index] else 0
        return first + self.ids(batch_index, slots, self.case.stride, self.case.pitch)

    def entries(self, batch_index: int, slots: torch.Tensor) -> torch.Tensor:
        return self.ids(batch_index, slots, max(self.case.rows_per_block, self.case.equal_rows))

    def ids(self, batch_index: int, slots: torch.Tensor, block_stride: int, pitch: int = 1) -> torch.Tensor:
        blocks = self.hot_blocks[batch_index, slots // self.rows_of(batch_index)].long()
        return blocks * block_stride + slots % self.rows_of(batch_index) * pitch

    def rows_of(self, batch_index: int) -> int:
        """Rows of the layer in a request's hot blocks."""
        return self.case.equal_rows if self.divides_equally[batch_index] else self.case.rows_per_block

    def selections(self, batch_index: int, query_len: int) -> torch.Tensor:
        """Rows of the new tokens side by side; nothing for tokens that the step does not have."""
        found = [self.selection(batch_index, offset) for offset in range(query_len)]
        none = torch.full(((self.case.query_len - query_len) * self.case.top_k,), -1, dtype=torch.int32)
        return torch.cat([*found, none])

    def selection(self, batch_index: int, offset: int) -> torch.Tensor:
        """Part of the last selection, other positions, most often the newest; invalid ids in any place."""
        newest, top_k = self.lengths[batch_index] + offset, self.case.top_k
        last = self.last[batch_index]
        kept = last[torch.rand(len(last), generator=self.generator) < self.random.choice([0.0, 0.5, 0.85, 1.0])]
        fresh = torch.randperm(newest + 1, generator=self.generator)[:top_k].int()
        parts = [torch.tensor([newest], dtype=torch.int32)] * (self.random.random() < 0.8) + [kept, fresh]
        ordered = list(dict.fromkeys(torch.cat(parts).tolist()))[: self.random.choice([top_k, top_k // 2, top_k, 0])]
        self.last[batch_index] = torch.tensor(ordered, dtype=torch.int32)
        invalid = (*INVALID, newest + self.case.query_len, newest + 100)
        ordered += [self.random.choice(invalid) for _ in range(top_k - len(ordered))]
        self.random.shuffle(ordered)
        return torch.tensor(ordered, dtype=torch.int32)

    def next_step(self) -> tuple[torch.Tensor, ...]:
        """Block tables as vLLM has them, sequence lengths, selections and numbers of new tokens of the next step.

        Padding is among them.
        """
        block_tables = self.hot_blocks[:, :3].clone()
        most = self.case.query_len
        num_new = [self.random.choice([most, self.random.randint(1, most)]) for _ in self.lengths]
        top_k = torch.stack([self.selections(*pair) for pair in enumerate(num_new)])
        query_lens = torch.tensor(num_new, dtype=torch.int32)
        seq_lens = torch.tensor(self.lengths, dtype=torch.int32) + query_lens
        for batch_index in self.padding:
            if self.random.random() < 0.5:
                seq_lens[batch_index] = self.random.choice([0, -4])
            else:
                block_tables[batch_index, 0] = self.random.choice([*INVALID, len(self.state.seq_indices)])
        for batch_index in set(range(self.case.batch)) - self.padding:
            self.lengths[batch_index] += self.random.randint(1, num_new[batch_index])
        return block_tables, seq_lens, top_k, query_lens


def assert_same(expected: State, found: State) -> None:
    torch.cuda.synchronize()
    others = found.tensors()
    for name, tensor in expected.tensors().items():
        assert torch.equal(tensor, others[name]), f"{name} differs"


def reset_out(out: Resolved) -> None:
    for name in out.__dataclass_fields__:
        getattr(out, name).fill_(-9)


def decode_metadata(
    state: State, case: Case, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor
) -> DecodeMetadata:
    by_seq = state.hot_block_tables, state.num_hot_rows, state.host_block_tables
    drafts = (query_lens, case.query_len) if case.query_len > 1 else (None, 1)
    has_equal_rows = state.has_equal_rows if case.equal_rows else None
    by_batch = state.seq_indices, block_tables[:, 0], seq_lens
    return DecodeMetadata(*by_batch, *by_seq, case.block_size, *drafts, has_equal_rows)


def run_step(ops, state: State, case: Case, inputs: tuple[torch.Tensor, ...], new_rows: torch.Tensor, fused: bool):
    """All operations of a decode step: newest rows, swap-in, write-back."""
    block_tables, seq_lens, top_k, query_lens = inputs
    decode = decode_metadata(state, case, block_tables, seq_lens, query_lens)
    ops.newest_row_ids(decode, state.hot, state.newest_row_ids)
    # Rows without a newest row overwrite one that no request owns.
    spare = len(state.hot_storage) * state.hot.block_stride_rows - state.hot.block_stride_rows
    newest = state.newest_row_ids[: case.batch * case.query_len]
    state.hot.rows[newest.where(newest >= 0, spare)] = new_rows
    state.hot.rows[spare] = 0
    if fused:
        ops.swap_in(state.residency, decode, top_k, state.host_rows, state.hot, state.counts, state.out)
    else:
        ops.resolve(state.residency, decode, top_k, state.hot, state.counts, state.out)
        ops.gather(state.host_rows, state.hot, state.out, case.batch)
    ops.write_back([state.hot], [state.host_rows], decode)


def check_newest_rows_of_layers(ops, state: State, case: Case, inputs: tuple[torch.Tensor, ...]) -> None:
    """In another layer, requests with equal rows have other newest rows than in this one, and all others the same."""
    block_tables, seq_lens, _, query_lens = inputs
    decode, distance = decode_metadata(state, case, block_tables, seq_lens, query_lens), 3
    by_layer = state.newest_row_ids.expand(2, -1).clone()
    offsets = torch.tensor([case.equal_offset + distance, case.equal_offset], dtype=torch.int32)
    ops.newest_row_ids(decode, state.hot, by_layer, offsets.to(by_layer.device))
    assert torch.equal(by_layer[1], state.newest_row_ids)
    is_moved = torch.zeros_like(state.newest_row_ids, dtype=torch.bool)
    if case.equal_rows:
        seqs = state.seq_indices[block_tables[:, 0].long().clamp(0, len(state.seq_indices) - 1)].long()
        of_requests = (state.has_equal_rows[seqs.clamp_min(0)] > 0).repeat_interleave(case.query_len)
        is_moved[: len(of_requests)] = of_requests & (state.newest_row_ids[: len(of_requests)] >= 0)
    assert torch.equal(by_layer[0] - by_layer[1], distance * is_moved)


def spare_block_is_free(scenario: Scenario) -> bool:
    return len(scenario.state.hot_storage) - 1 not in scenario.hot_blocks


def resize_some(scenario: Scenario, *states: State) -> None:
    """Give some requests more hot rows, or fewer."""
    for batch_index in range(scenario.case.batch):
        if scenario.random.random() < 0.6:
            num_rows = scenario.some_num_rows(batch_index)
            for state in states:
                scenario.resize(state, batch_index, num_rows)


def compare(case: Case, seed: int = 0, resizes: bool = False) -> None:
    """Run a case with both implementations. resizes: buffers grow and shrink between steps."""
    scenario = Scenario(case, seed)
    assert spare_block_is_free(scenario)
    reference, found = scenario.state, scenario.state.to_cuda()
    torch_ops, cuda_ops = TorchSwapInOps(), swap_in_ops(torch.device("cuda"))
    for step in range(case.steps):
        if resizes:
            resize_some(scenario, reference, found)
        inputs, new_rows = scenario.next_step(), scenario.bytes(case.batch * case.query_len)
        reset_out(reference.out)
        reset_out(found.out)
        run_step(torch_ops, reference, case, inputs, new_rows, fused=True)
        on_device = tuple(x.cuda() for x in inputs)
        run_step(cuda_ops, found, case, on_device, new_rows.cuda(), fused=step % 2 == 0)
        check_newest_rows_of_layers(torch_ops, reference, case, inputs)
        check_newest_rows_of_layers(cuda_ops, found, case, on_device)
        assert_same(reference, found)
    assert reference.counts.any() or case.longest < 8


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_agree(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("longest", [200, 600])
def test_a_selection_resolved_twice_hits(longest: int) -> None:
    case = Case(3, 128, 256, row_bytes=64, shortest=150, longest=longest)
    scenario = Scenario(case)
    reference, found = scenario.state, scenario.state.to_cuda()
    for _ in range(3):
        inputs, new_rows = scenario.next_step(), scenario.bytes(case.batch)
        moved, moved_rows = tuple(x.cuda() for x in inputs), new_rows.cuda()
        for _ in range(2):
            run_step(TorchSwapInOps(), reference, case, inputs, new_rows, fused=True)
            run_step(swap_in_ops(torch.device("cuda")), found, case, moved, moved_rows, fused=True)
            assert_same(reference, found)
        assert not reference.out.num_misses[: case.batch].any()


@pytest.mark.parametrize("longest", [200, 600])
@pytest.mark.parametrize("query_len", [1, 3])
def test_expiries_of_rows_that_are_used_again_and_again_agree(longest: int, query_len: int) -> None:
    """With a slot for every token and with fewer, up to the latest expiry that a row may have."""
    case = Case(3, 128, 400, row_bytes=16, shortest=150, longest=longest, steps=12, seeded=False, query_len=query_len)
    scenario = Scenario(case)
    scenario.padding = set()
    reference, found = scenario.state, scenario.state.to_cuda()
    kept = torch.arange(100, dtype=torch.int32)
    for step in range(case.steps):
        inputs, new_rows = scenario.next_step(), scenario.bytes(case.batch * query_len)
        inputs[2].view(case.batch, query_len, -1)[:] = -1
        inputs[2].view(case.batch, query_len, -1)[:, :, : len(kept)] = kept
        run_step(TorchSwapInOps(), reference, case, inputs, new_rows, fused=True)
        moved = tuple(x.cuda() for x in inputs)
        run_step(swap_in_ops(torch.device("cuda")), found, case, moved, new_rows.cuda(), fused=step % 2 == 0)
        assert_same(reference, found)
    now = (inputs[1] - inputs[3]).tolist()
    for batch_index, first in enumerate(now):
        slots = torch.arange(int(found.num_hot_rows[scenario.seq_index(found, batch_index)]))
        entries = found.residency.entries.cpu()[scenario.entries(batch_index, slots)]
        assert (entries[:, 1][(entries[:, 0] >= 0) & (entries[:, 0] < 100)] == first + MAX_BONUS).all()


DRAFT_CASES = [
    Case(3, 128, 256, query_len=2, longest=1),
    Case(
        5, 200, 900, row_bytes=656, rows_per_block=12, gap=5, query_len=4, shortest=880, longest=899
    ),  # fits, then not
    Case(64, 256, 1024, row_bytes=48, rows_per_block=5, gap=1, query_len=3, seeded=False),
    Case(9, 33, 200, rows_per_block=3, query_len=6, longest=900, max_slots=700, steps=9),  # selections begin anywhere
    Case(4, 2048, 4096, row_bytes=32, rows_per_block=12, query_len=2, shortest=4090, longest=20000),
    Case(2, 2048, 8192, row_bytes=32, query_len=4, shortest=8190, longest=30000),
    Case(2, 2048, 8192, row_bytes=32, query_len=4, shortest=8000, longest=39990, max_slots=39999),  # partly hot
    Case(2, 1024, 8192, query_len=8, shortest=9000, longest=20000),
]


@pytest.mark.parametrize("case", DRAFT_CASES, ids=str)
def test_steps_with_drafts_agree(case: Case) -> None:
    """Positions that several tokens select, and what was rejected."""
    compare(case)
    compare(replace(case, steps=9), seed=1, resizes=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_with_drafts_agree(seed: int) -> None:
    case, query_len = random_case(seed), 2 + seed % 4
    num_slots = query_len * case.top_k + seed
    longest = num_slots + random.Random(seed).choice([-2, 3, 2000])
    sizes = {"num_slots": num_slots, "max_slots": longest + 7, "shortest": longest // 3, "longest": longest}
    compare(replace(case, query_len=query_len, **sizes), seed, resizes=True)


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_agree(seed: int) -> None:
    compare(random_case(seed), seed)


@pytest.mark.parametrize("seed", range(12))
def test_steps_of_buffers_that_grow_and_shrink_agree(seed: int) -> None:
    """Steps agree when buffers grow and shrink, also from less than the sequence to all of it and back."""
    case = random_case(seed)
    length = case.num_slots + 1000
    compare(replace(case, shortest=1, longest=length, max_slots=length + 20, steps=12), seed, resizes=True)


@pytest.mark.parametrize(("longest", "num_slots"), [(16400, 4096), (40000, 8192)])
def test_large_buffers_that_grow_and_shrink_agree(longest: int, num_slots: int) -> None:
    case = Case(3, 2048, num_slots, row_bytes=32, rows_per_block=12, gap=1, shortest=3000, longest=longest, steps=8)
    compare(replace(case, max_slots=longest + 8), resizes=True)


def test_no_output_depends_on_what_was_there() -> None:
    """The comparison sees a single wrong byte, wherever it is."""
    case = Case(3, 128, 256, row_bytes=64, longest=600)
    scenario = Scenario(case)
    found = scenario.state.to_cuda()
    assert_same(scenario.state, found)
    residency = found.residency.positions, found.residency.expiries
    for tensor in (found.host_rows, found.hot_storage, *residency, found.counts, found.out.num_valid):
        value = tensor.view(-1)[-1].clone()
        tensor.view(-1)[-1] += 1
        with pytest.raises(AssertionError):
            assert_same(scenario.state, found)
        tensor.view(-1)[-1] = value


@pytest.mark.parametrize(("batch", "query_len"), [(1, 1), (64, 1), (17, 3)])
def test_graph_replays_agree_with_eager_steps(batch: int, query_len: int) -> None:
    sizes = {"row_bytes": 656, "rows_per_block": 12, "gap": 3, "shortest": 1000, "longest": 1100, "max_slots": 1200}
    case = Case(batch, 512 // query_len, 1024, **sizes, steps=8, query_len=query_len)
    scenario = Scenario(case)
    scenario.padding = set()
    reference, found = scenario.state, scenario.state.to_cuda()
    ops, torch_ops = swap_in_ops(torch.device("cuda")), TorchSwapInOps()
    inputs = scenario.next_step()
    static, static_rows = tuple(x.cuda() for x in inputs), scenario.bytes(batch * query_len)
    static_new = static_rows.cuda()
    untouched = found.tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_step(ops, found, case, static, static_new, fused=True)
    torch.cuda.synchronize()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in found.tensors().items()), "capture ran work"
    for _ in range(case.steps):
        run_step(torch_ops, reference, case, inputs, static_rows, fused=True)
        graph.replay()
        assert_same(reference, found)
        resize_some(scenario, reference, found)
        inputs, static_rows = scenario.next_step(), scenario.bytes(batch * query_len)
        static_new.copy_(static_rows)
        for target, source in zip(static, inputs, strict=True):
            target.copy_(source)


def test_the_current_stream_is_used() -> None:
    """Work queued on the current stream before an operation is done before it, and the other way round."""
    case = Case(8, 512, 1024, row_bytes=1152, shortest=2000, longest=4000, steps=1)
    scenario = Scenario(case)
    reference, found = scenario.state, scenario.state.to_cuda()
    inputs, new_rows = scenario.next_step(), scenario.bytes(case.batch)
    run_step(TorchSwapInOps(), reference, case, inputs, new_rows, fused=True)
    late = tuple(torch.full_like(x, -1, device="cuda") for x in inputs)
    moved = tuple(x.cuda() for x in inputs)
    new_rows = new_rows.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        for target, source in zip(late, moved, strict=True):
            target.copy_(source)
        run_step(swap_in_ops(torch.device("cuda")), found, case, late, new_rows, fused=True)
    assert_same(reference, found)


def test_resolved_rows_outside_the_pools_are_not_copied() -> None:
    case = Case(3, 128, 256, row_bytes=64, shortest=500, longest=600, seeded=False, steps=1)
    scenario = Scenario(case)
    scenario.padding = set()
    scenario.state.host_block_tables[:, ::2] = torch.tensor([-1, -9, 2**31 - 1], dtype=torch.int32)[:, None]
    reference, found = scenario.state, scenario.state.to_cuda()
    inputs, new_rows = scenario.next_step(), scenario.bytes(case.batch)
    run_step(TorchSwapInOps(), reference, case, inputs, new_rows, fused=True)
    run_step(swap_in_ops(torch.device("cuda")), found, case, tuple(x.cuda() for x in inputs), new_rows.cuda(), True)
    assert_same(reference, found)


def test_a_step_without_requests_does_nothing() -> None:
    case = Case(2, 128, 256, row_bytes=64, longest=600, steps=1)
    scenario = Scenario(case)
    found = scenario.state.to_cuda()
    block_tables, seq_lens, top_k, query_lens = (tensor[:0].cuda() for tensor in scenario.next_step())
    decode, ops = decode_metadata(found, case, block_tables, seq_lens, query_lens), swap_in_ops(torch.device("cuda"))
    ops.newest_row_ids(decode, found.hot, found.newest_row_ids)
    ops.swap_in(found.residency, decode, top_k, found.host_rows, found.hot, found.counts, found.out)
    ops.gather(found.host_rows, found.hot, found.out, 0)
    ops.write_back([found.hot], [found.host_rows], decode)
    assert_same(scenario.state, found)


def test_positions_given_twice_touch_no_memory_outside() -> None:
    case = Case(4, 256, 256, row_bytes=64, gap=2, shortest=100, longest=600, steps=1, max_slots=400)
    scenario = Scenario(case)
    scenario.padding = set()
    before, found = scenario.state.tensors(), scenario.state.to_cuda()
    inputs = tuple(x.cuda() for x in scenario.next_step())
    inputs[2][:] = 5
    for _ in range(2):
        run_step(swap_in_ops(torch.device("cuda")), found, case, inputs, scenario.bytes(case.batch).cuda(), True)
    torch.cuda.synchronize()
    after, state = found.tensors(), scenario.state
    slots = [torch.arange(int(state.num_hot_rows[scenario.seq_index(state, i)])) for i in range(case.batch)]
    entries = torch.cat([scenario.entries(*pair) for pair in enumerate(slots)])
    spare = torch.tensor([(len(state.hot_storage) - 1) * state.hot.block_stride_rows])
    hot_ids = torch.cat([scenario.hot_ids(*pair) for pair in enumerate(slots)] + [spare])
    for name, width, own in (
        ("positions", 1, entries),
        ("expiries", 1, entries),
        ("hot_storage", case.row_bytes, hot_ids),
    ):
        then, now = before[name].view(-1, width), after[name].view(-1, width)
        is_outside = torch.ones(len(then), dtype=torch.bool).index_fill_(0, own, False)
        assert torch.equal(then[is_outside], now[is_outside]), f"{name} of nobody changed"


@pytest.mark.parametrize(
    ("num_layers", "batch", "equal_rows"), [(1, 1, 0), (61, 64, 0), (130, 3, 0), (61, 64, 7), (130, 3, 20)]
)
def test_write_back_of_many_layers(num_layers: int, batch: int, equal_rows: int) -> None:
    """Layers begin at different rows of a block, and at others in a block with equal rows."""
    case = Case(batch, 128, 128, row_bytes=656, block_size=16, rows_per_block=12, gap=2, longest=300)
    cases = [case] * num_layers
    if equal_rows:
        starts = [{"first_row": 24 * (i % 3), "first_equal_row": 2 * equal_rows * (i % 3)} for i in range(num_layers)]
        cases = [replace(case, equal_rows=equal_rows, pitch=2, **start) for start in starts]
        cases = [replace(each, gap=130 - each.stride + each.gap) for each in cases]
    scenarios = [Scenario(each) for each in cases]
    case = cases[0]
    block_tables, seq_lens, _, query_lens = scenarios[0].next_step()
    references = [scenario.state for scenario in scenarios]
    for layer, state in enumerate(references):
        state.hot_storage.copy_(torch.randint(0, 255, state.hot_storage.shape, dtype=torch.uint8))
        state.hot_storage[0, 0, 0] = layer
    found = [state.to_cuda() for state in references]
    batch_tables = block_tables, seq_lens, query_lens
    for ops, states, given in (
        (TorchSwapInOps(), references, batch_tables),
        (swap_in_ops(torch.device("cuda")), found, [tensor.cuda() for tensor in batch_tables]),
    ):
        hots, hosts = [state.hot for state in states], [state.host_rows for state in states]
        decode = decode_metadata(states[0], case, *given)
        for part in (slice(1), slice(1, None)):
            ops.write_back(hots[part], hosts[part], decode)
    for pair in zip(references, found, strict=True):
        assert_same(*pair)


@pytest.mark.parametrize("row_bytes", [16, 656, 1152, 4112])
@pytest.mark.parametrize(("num_rows", "block_size"), [(0, 64), (1, 64), (63, 16), (777, 7), (3000, 64)])
def test_stage_and_save(row_bytes: int, num_rows: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    num_blocks = num_rows // block_size + 3
    table = torch.randperm(num_blocks + 4, generator=generator)[:num_blocks].int()
    table[1] = -1
    size = ((num_blocks + 4) * block_size, row_bytes)
    host = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
    rows = torch.randint(0, 255, (num_rows, row_bytes), dtype=torch.uint8, generator=generator)
    pinned, staging = host.clone().pin_memory(), torch.full_like(rows, POISON)
    cuda_staging, torch_ops, cuda_ops = staging.cuda(), TorchSwapInOps(), swap_in_ops(torch.device("cuda"))
    torch_ops.stage_rows(host, table, block_size, staging)
    cuda_ops.stage_rows(pinned, table.cuda(), block_size, cuda_staging)
    torch.cuda.synchronize()
    assert torch.equal(staging, cuda_staging.cpu())
    first = block_size + 1
    torch_ops.save_rows(rows, first, host, table, block_size)
    cuda_ops.save_rows(rows.cuda(), first, pinned, table.cuda(), block_size)
    torch.cuda.synchronize()
    assert torch.equal(host, pinned)


@dataclass
class Moved:
    """Requests whose blocks have moved, beside others; random positions everywhere.

    Attributes:
        entries: residency of all layers.
        hot_block_tables: parts of hot blocks, of every KV head; invalid ids beyond a request's blocks.
        heads: numbering of these parts.
        requests: the requests.
    """

    entries: torch.Tensor
    hot_block_tables: torch.Tensor
    heads: KVHeads
    requests: MovedRequests

    @classmethod
    def random(
        cls, seed: int, num_tables: int, block_entries: int, most_blocks: int, num_moved: int, most_positions: int
    ) -> "Moved":
        source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        head_stride = source.randint(1, 9)
        heads = KVHeads(source.randint(1, head_stride), head_stride)
        num_requests = num_moved + source.randint(0, 3)
        num_blocks = [source.choice([0, 1, most_blocks, source.randint(0, most_blocks)]) for _ in range(num_requests)]
        num_blocks[0] = most_blocks
        ids = torch.randperm(sum(num_blocks) + 5, generator=generator).split([*num_blocks, 5])
        size = num_requests * heads.num_heads + 1, most_blocks + source.choice([0, 1, 70])
        tables = torch.tensor(INVALID).repeat(size[0], size[1] // 4 + 1)[:, : size[1]].int().contiguous()
        for request, blocks in enumerate(ids[:num_requests]):
            tables[heads.seqs(request), : len(blocks)] = heads.parts_of(blocks).t().int()
        entries = torch.randint(
            -1, most_positions, (num_tables, sum(num_blocks) + 5, block_entries, 2), generator=generator
        )
        nothing = source.randrange(num_requests)
        entries[:, ids[nothing], :, 0] = -1  # a request that has nothing hot
        moved = source.sample(range(num_requests), num_moved)
        seqs = torch.tensor([request * heads.num_heads for request in moved])
        counts = torch.tensor([num_blocks[request] for request in moved])
        return cls(
            entries.int(), tables, heads, MovedRequests(seqs, counts, torch.full_like(seqs, -1), int(counts.max()))
        )

    def to_cuda(self) -> "Moved":
        requests = self.requests
        vectors = requests.seqs.cuda(), requests.num_blocks.cuda(), requests.latest.cuda()
        moved = MovedRequests(*vectors, requests.most_blocks)
        return Moved(self.entries.cuda(), self.hot_block_tables.cuda(), self.heads, moved)

    def empty_latest(self, ops, num_latest: int) -> None:
        ops.empty_latest(self.entries, self.hot_block_tables, self.heads.head_stride, self.requests, num_latest)


@pytest.mark.parametrize("num_tables", [1, 7, 8, 9, 61])
@pytest.mark.parametrize("block_entries", [1, 7, 64, 255, 256, 257, 1000])
def test_moved_requests_forget_the_same_positions(num_tables: int, block_entries: int) -> None:
    """Moved requests forget the same positions, whatever the sizes are; with as many drafts as there can be, too."""
    for seed in range(12):
        most_blocks, num_moved = (1, 2, 37, 300)[seed % 4], (1, 3, 20)[seed % 3]
        most_positions = (1, 3, 30, 5000)[(seed + num_tables) % 4]
        num_blocks = min(most_blocks, max(400_000 // (num_tables * block_entries * num_moved), 1))
        expected = Moved.random(seed, num_tables, block_entries, num_blocks, num_moved, most_positions)
        before, found = expected.entries.clone(), expected.to_cuda()
        num_latest = (1, 2, MAX_QUERY_LEN)[seed % 3]
        expected.empty_latest(TorchSwapInOps(), num_latest)
        found.empty_latest(swap_in_ops(torch.device("cuda")), num_latest)
        assert torch.equal(found.entries.cpu(), expected.entries)
        assert torch.equal(found.hot_block_tables.cpu(), expected.hot_block_tables)
        assert (before[..., 0] >= expected.entries[..., 0]).all()


def test_blocks_outside_the_residency_are_not_touched() -> None:
    """Neither are requests outside the tables, and entries of tables beyond a request's blocks."""
    case = Moved.random(0, 9, 7, 40, 3, 1000)
    width = case.hot_block_tables.shape[1]
    case.hot_block_tables[:] = torch.tensor(INVALID).repeat(width)[:width].int()
    found = case.to_cuda()
    ops = swap_in_ops(torch.device("cuda"))
    found.empty_latest(ops, 2)
    for seqs in (torch.full_like(found.requests.seqs, -1), torch.full_like(found.requests.seqs, 1 << 30)):
        found.requests = replace(found.requests, seqs=seqs)
        found.empty_latest(ops, 2)
    found.requests = replace(found.requests, seqs=seqs[:0], num_blocks=seqs[:0], latest=seqs[:0], most_blocks=0)
    found.empty_latest(ops, 2)
    torch.cuda.synchronize()
    assert torch.equal(found.entries.cpu(), case.entries)


@pytest.mark.parametrize("max_query_len", [1, 4])
def test_hot_blocks_come_and_go_as_on_the_cpu(max_query_len: int) -> None:
    """Tables and residency are the same after random changes of many requests; some layers share a residency."""
    source, names, most = random.Random(max_query_len), range(1, 57), 90
    shape = HotBufferShape(56, 56, 7, 128, 8, 64, 57 * most, most, 7, max_query_len)
    selects = [True, True, False, False, True, True, False]
    buffers = [MLAHotBuffer(shape, torch.device(device), selects) for device in ("cpu", "cuda")]
    blocks, free = {name: [name] for name in names}, set(range(57, shape.num_device_blocks))
    changes: dict[int, tuple[int, list[int]]] = {name: (0, [name]) for name in names}
    for buffer in buffers:
        buffer.extend_host_block_tables({name: (0, [0]) for name in names})
    for step in range(20):
        for buffer in buffers:
            buffer.change_hot_block_tables(changes)
        expected, found = ([*each.table.entries, each.requests.hot_block_tables] for each in buffers)
        expected.append(buffers[0].requests.num_hot_rows), found.append(buffers[1].requests.num_hot_rows)
        for tensor, other in zip(expected, found, strict=True):
            assert torch.equal(tensor, other.cpu())
        entries = torch.randint(-1, 5 + 700 * (step % 2), expected[0].shape, dtype=torch.int32)
        expected[0].copy_(entries), found[0].copy_(entries)
        changes = {}
        for name in source.sample(names, source.randint(1, 56)):
            first = source.randint(1, len(blocks[name]))
            free |= set(blocks[name][first:])
            changes[name] = first, []
        for name, (first, _) in changes.items():
            ids = source.sample(sorted(free), source.randint(0, most - first))
            free -= set(ids)
            changes[name], blocks[name] = (first, ids), [*blocks[name][:first], *ids]


def test_rows_of_a_prompt_become_hot_as_on_the_cpu_without_a_wait_for_the_device() -> None:
    shape, residencies = HotBufferShape(2, 2, 1, 4, 9, 64, 12, 3, 64), []
    for device in map(torch.device, ("cpu", "cuda")):
        buffer, block_id = MLAHotBuffer(shape, device), torch.tensor([5], dtype=torch.int32).to(device)
        buffer.add_layer(HotRows(torch.zeros(12 * 64, 16, device=device), 64, 64), torch.zeros(64, 16))
        buffer.extend_host_block_tables({5: (0, range(9))})
        buffer.change_hot_block_tables({5: (0, [5, 8])})
        torch.cuda.set_sync_debug_mode("error")
        try:
            for num_tokens in (100, 127, 300, 513):
                buffer.seed(0, buffer.seeds(block_id, num_tokens))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        residencies.append(buffer.residency[0].entries[64:].cpu())  # block 0 belongs to no request
    assert torch.equal(*residencies)


@pytest.mark.parametrize(
    ("top_k", "query_len", "num_hot_rows"),
    [(4097, 1, 5001), (2049, 4, 9001), (128, 9, 6001), (128, 1, MAX_HOT_ROWS + 1)],
)
def test_sizes_beyond_the_kernels_are_refused(top_k: int, query_len: int, num_hot_rows: int) -> None:
    """Too large a selection, too many, and a table of more hot rows than a request may have."""
    case = Case(1, top_k, 5000, rows_per_block=1, longest=200, query_len=query_len)
    scenario = Scenario(case)
    state = widened(scenario.state.to_cuda(), num_hot_rows)
    inputs, new_rows = tuple(x.cuda() for x in scenario.next_step()), scenario.bytes(query_len).cuda()
    with pytest.raises(RuntimeError, match="invalid argument"):
        run_step(swap_in_ops(torch.device("cuda")), state, case, inputs, new_rows, fused=True)


@pytest.mark.parametrize(("top_k", "query_len"), [(128, 1), (2048, 1), (4096, 1), (2048, 4)])
def test_the_widest_tables(top_k: int, query_len: int) -> None:
    sizes = {"rows_per_block": 32, "shortest": 8500, "longest": 9000, "steps": 1, "max_slots": 8400}
    case = Case(3, top_k, 8192, **sizes, query_len=query_len)
    scenario = Scenario(case)
    reference, found = scenario.state, widened(scenario.state.to_cuda(), MAX_HOT_ROWS)
    inputs, new_rows = scenario.next_step(), scenario.bytes(case.batch * query_len)
    run_step(TorchSwapInOps(), reference, case, inputs, new_rows, fused=True)
    moved = tuple(x.cuda() for x in inputs)
    run_step(swap_in_ops(torch.device("cuda")), found, case, moved, new_rows.cuda(), fused=True)
    assert_same(reference, found)


def widened(state: State, num_hot_rows: int) -> State:
    """The same with tables that have room for `num_hot_rows` of each request."""
    num_seqs, num_blocks = state.hot_block_tables.shape
    more = state.hot_block_tables.new_full((num_seqs, num_hot_rows // state.case.rows_per_block - num_blocks), -1)
    return replace(state, hot_block_tables=torch.cat((state.hot_block_tables, more), 1))


def test_every_operation_is_launched_in_microseconds() -> None:
    """No operation waits for the device: all return while it still sleeps."""
    case = Case(4, 128, 128, row_bytes=64, longest=300, steps=1)
    scenario = Scenario(case)
    state, ops = scenario.state.to_cuda(), swap_in_ops(torch.device("cuda"))
    inputs, rows = tuple(x.cuda() for x in scenario.next_step()), scenario.bytes(4).cuda()
    decode = decode_metadata(state, case, inputs[0], inputs[1], inputs[3])
    staging = torch.zeros(100, case.row_bytes, dtype=torch.uint8, device="cuda")
    moved = Moved.random(0, 9, 7, 40, 3, 1000).to_cuda()
    calls: list[Callable[[], None]] = [
        lambda: ops.newest_row_ids(decode, state.hot, state.newest_row_ids),
        lambda: ops.swap_in(state.residency, decode, inputs[2], state.host_rows, state.hot, state.counts, state.out),
        lambda: ops.write_back([state.hot], [state.host_rows], decode),
        lambda: ops.stage_rows(state.host_rows, state.host_block_tables[0], case.block_size, staging),
        lambda: ops.save_rows(rows, 0, state.host_rows, state.host_block_tables[0], case.block_size),
        lambda: moved.empty_latest(ops, 2),
    ]
    for call in calls:
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)
        call()
        done.record()
        assert not done.query()
    torch.cuda.synchronize()
