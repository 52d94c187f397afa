"""A simulated tensor parallel rank: device memory, tables, and a queue of work that the device does when it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from vllm_hisparse.layout import LEAST_EQUAL_ROWS_SHARE

from .checks import Finding, check
from .configuration import BLOCK_SIZE, FIXED_BUFFER_SIZE
from .texts import DRAFTED_AHEAD, NEVER_WRITTEN, ZEROED, Row, Text, undrafted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_hisparse.kv_manager.metadata import BlockPairs, HiSparseMetadata
    from vllm_hisparse.layout import KVLayout


class Memory(dict[int, Row]):
    """Rows by place: block * BLOCK_SIZE + offset."""

    def copy_block(self, block_id: int, source: Memory, source_id: int) -> None:
        self.write(block_id, source.read(source_id))

    def read(self, block_id: int) -> list[Row]:
        first = block_id * BLOCK_SIZE
        return [self.get(place, NEVER_WRITTEN) for place in range(first, first + BLOCK_SIZE)]

    def write(self, block_id: int, rows: Sequence[Row]) -> None:
        self.update(enumerate(rows, block_id * BLOCK_SIZE))


@dataclass
class HostMemory:
    """One host pool: main KV and the copies of what the device keeps of every token."""

    rows: Memory = field(default_factory=Memory)
    keys: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class BatchEntry:
    """The tokens of one request that a step computes: positions [first, last), over everything before them.

    Attributes:
        first_hot_block_id: its first hot block.
        device_ids: its device-resident blocks.
        text: its tokens as known when the step runs, then its drafts, continued to `last`.
        samples: whether the step yields a token.
        num_drafts: number of drafts among its tokens.
        num_undrafted: tokens that the scheduler has scheduled for drafts, but nothing was drafted.
        num_corrected: rejected drafts of the step before, which the scheduler counted as computed.
    """

    request_id: str
    first: int
    last: int
    first_hot_block_id: int
    device_ids: list[int]
    text: Text
    samples: bool
    num_drafts: int = 0
    num_undrafted: int = 0
    num_corrected: int = 0

    @property
    def num_rejected(self) -> int:
        """Tokens that the scheduler has scheduled and that it learns were not computed."""
        return self.num_undrafted + self.num_drafts + 1 - len(self.sampled()) if self.samples else 0

    def sampled(self) -> list[int]:
        """The tokens that the step yields: drafts that are the model's, and one more."""
        tokens = []
        for position in range(self.last - self.num_drafts, self.last + 1) if self.samples else ():
            tokens.append(self.text.next_token(position))
            if position < self.last and self.text.token_ids[position] != tokens[-1]:
                break
        return tokens


@dataclass
class Step:
    """A batch in flight."""

    number: int
    output: SchedulerOutput
    batch: list[BatchEntry]
    results: list[KVConnectorOutput] = field(default_factory=list)  # by rank, as polled when it was launched

    @property
    def metadata(self) -> HiSparseMetadata:
        return self.output.kv_connector_metadata

    def reads(self, entry: BatchEntry, rank: Rank) -> str:
        return f"step {self.number}, rank {rank.index}: {entry.request_id} computes [{entry.first}, {entry.last})"


class Rank:
    """Work enters the queue in the order of a stream; `run_some` decides how far the device has come.

    Args:
        index: its number.
        host: the host pool it reads and writes, shared or its own.
        num_tables: requests whose state the worker half has room for.
        max_model_len: tokens of a request.
        layout: rows of a layer in a hot block, tokens of a state block.
        zeroes_first: whether vLLM zeroes new blocks before the worker half's copies (Model Runner V2) or after (V1).
        num_draft_passes: runs of a draft layer after the forward and the saves; 0: there is no draft layer.
    """

    def __init__(
        self,
        index: int,
        host: HostMemory,
        num_tables: int,
        max_model_len: int,
        layout: KVLayout,
        zeroes_first: bool,
        num_draft_passes: int = 0,
    ):
        self.index, self.host, self.zeroes_first, self.num_draft_passes = index, host, zeroes_first, num_draft_passes
        self.num_tables, self.max_model_len, self.layout = num_tables, max_model_len, layout
        self.max_blocks = layout.num_blocks(max_model_len)
        self.keys = Memory()
        self.tables: dict[int, list[int]] = {}
        # first hot block id -> block -> whether the request has written it
        self.hot_block_tables: dict[int, dict[int, bool]] = {}
        self.with_equal_rows: set[int] = set()  # first hot block ids
        self.state_block_tables: dict[int, dict[int, bool]] = {}
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_forwards_queued = self.num_forwards_done = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def launch(self, step: Step, ranks: Sequence[Rank]) -> None:
        """Queue a step as the worker half does: changes, the forward, the saves."""
        metadata, new_ids = step.metadata, step.output.new_block_ids_to_zero or ()
        zero = partial(self._zero, new_ids)
        changes = [partial(self._copy_to_host, metadata.preemption_saves), partial(self._update_tables, metadata)]
        changes.append(partial(self._copy_to_device, metadata.restores))
        for work in [zero, *changes] if self.zeroes_first else [*changes, zero]:
            self._enqueue(step, work)
        if step.batch:
            # NOTE: all-reduces keep ranks together: none is in a forward before all have ended the one before.
            self._enqueue(step, partial(finish_forwards, ranks, self._num_forwards_queued))
            self._num_forwards_queued += 1
            self._enqueue(step, partial(self._read_rows, step))
            self._enqueue(step, partial(self._write, step))
            self._enqueue(step, partial(self._read_keys, step))
            self._enqueue(step, self._end_forward)
        self._enqueue(step, partial(self._copy_to_host, metadata.saves))
        if self.num_draft_passes:
            self._enqueue(step, partial(self._write_drafts, step))
            self._enqueue(step, partial(self._read_drafts, step))
            self._enqueue(step, partial(self._draft_ahead, step))

    def run_one(self) -> None:
        _, work = self._queue.popleft()
        work()

    def finish(self, number: int) -> None:
        """The device has done everything of this step."""
        while self._queue and self._queue[0][0] <= number:
            self.run_one()

    def _enqueue(self, step: Step, work: Callable[[], None]) -> None:
        self._queue.append((step.number, work))

    def _end_forward(self) -> None:
        self.num_forwards_done += 1

    def _zero(self, device_ids: Sequence[int]) -> None:
        for device_id in device_ids:
            self.keys.write(device_id, [ZEROED] * BLOCK_SIZE)

    def _copy_to_host(self, pairs: BlockPairs) -> None:
        for device_id, host_id in pairs:
            self.host.keys.copy_block(host_id, self.keys, device_id)

    def _copy_to_device(self, pairs: BlockPairs) -> None:
        for host_id, device_id in pairs:
            self.keys.copy_block(device_id, self.host.keys, host_id)

    def _update_tables(self, metadata: HiSparseMetadata) -> None:
        for first_hot_block_id in metadata.released:
            del self.tables[first_hot_block_id]
            self.hot_block_tables.pop(first_hot_block_id, None)
            self.with_equal_rows.discard(first_hot_block_id)
            self.state_block_tables.pop(first_hot_block_id, None)
        for first_hot_block_id, (first, host_ids) in metadata.host_block_tables.items():
            check((first_hot_block_id in self.tables) == (first > 0), "a table does not start at 0, or starts twice")
            table = self.tables.setdefault(first_hot_block_id, [])
            check(len(table) == first, "a change does not continue its table")
            table.extend(host_ids)
            check(len(table) <= self.max_blocks, f"a table of {len(table)} blocks, there is room for {self.max_blocks}")
        for first_hot_block_id, is_equal in metadata.equal_rows.items():
            check(is_equal == (first_hot_block_id not in self.with_equal_rows), "rows are divided as before")
            first, _ = metadata.hot_block_tables[first_hot_block_id]
            check(first == 0, "blocks are divided anew, but not sent again")
            (self.with_equal_rows.add if is_equal else self.with_equal_rows.discard)(first_hot_block_id)
        for first_hot_block_id, (first, block_ids) in metadata.hot_block_tables.items():
            check(first_hot_block_id in self.tables, "hot blocks of a request that the worker does not know")
            before = self.hot_block_tables.get(first_hot_block_id, {})
            check(first <= len(before), "hot blocks do not continue those of before")
            kept = [*before][:first]
            self.hot_block_tables[first_hot_block_id] = {
                block_id: before.get(block_id, False) for block_id in (*kept, *block_ids)
            }
            check(len(self.hot_block_tables[first_hot_block_id]) == first + len(block_ids), "a hot block twice")
            check(
                next(iter(self.hot_block_tables[first_hot_block_id])) == first_hot_block_id,
                "the table does not begin with the first hot block",
            )
        for first_hot_block_id, (first, block_ids) in metadata.state_block_tables.items():
            check(first_hot_block_id in self.tables, "state blocks of a request that the worker does not know")
            table = self.state_block_tables.setdefault(first_hot_block_id, {})
            check(first == len(table), "state blocks do not continue those of before")
            table.update(dict.fromkeys(block_ids, False))
            check(len(table) == first + len(block_ids), "a state block twice")
        num_tables = len(self.tables)
        check(num_tables <= self.num_tables, f"state of {num_tables} requests, there is room for {self.num_tables}")

    def _read_rows(self, step: Step) -> None:
        for entry in step.batch:
            self._use_blocks(step, entry)
            self._check(step, entry, "host row", self.host.rows, self.tables[entry.first_hot_block_id], entry.first)

    def _use_blocks(self, step: Step, entry: BatchEntry) -> None:
        """Whatever the request has written to its hot blocks and state blocks is there: nobody else writes there."""
        hot, state = (
            self.hot_block_tables.get(entry.first_hot_block_id, {}),
            self.state_block_tables.get(entry.first_hot_block_id, {}),
        )
        check(bool(hot), f"{step.reads(entry, self)}: without hot blocks")
        num_rows, rows_per_block = min(entry.last, FIXED_BUFFER_SIZE + 1), self.layout.fewest_rows
        if entry.first_hot_block_id in self.with_equal_rows:
            num_rows, rows_per_block = ceil(entry.last * LEAST_EQUAL_ROWS_SHARE), self.layout.equal_rows
        check(len(hot) * rows_per_block >= num_rows, f"{step.reads(entry, self)}: {len(hot)} hot blocks")
        num_state_blocks = self.layout.state.num_blocks(entry.last)
        check(len(state) >= num_state_blocks, f"{step.reads(entry, self)}: {len(state)} state blocks")
        for kind, blocks in (("hot rows", hot), ("state", state)):
            own = [f"{kind} of {entry.request_id}"] * BLOCK_SIZE
            for block_id, is_written in blocks.items():
                found = self.keys.read(block_id)
                if is_written and found != own:
                    raise Finding(f"{step.reads(entry, self)}: block {block_id} for {kind} holds {found}")
                self.keys.write(block_id, own)
                blocks[block_id] = True

    def _write(self, step: Step) -> None:
        for entry in step.batch:
            for position in range(entry.first, entry.last):
                row = entry.text.rows[position]
                self.host.rows[_place(self.tables[entry.first_hot_block_id], position)] = row
                if entry.device_ids:
                    self.keys[_place(entry.device_ids, position)] = undrafted(row) if self.num_draft_passes else row

    def _write_drafts(self, step: Step) -> None:
        for entry in step.batch:
            for position in range(entry.first, entry.last):
                self.keys[_place(entry.device_ids, position)] = entry.text.rows[position]

    def _draft_ahead(self, step: Step) -> None:
        """Passes after the first write beyond the tokens that are known by then."""
        for entry in step.batch:
            num_known = entry.last - (entry.num_drafts + 1 - len(entry.sampled()) if entry.samples else 0)
            for position in range(num_known, min(num_known + self.num_draft_passes - 1, self.max_model_len)):
                has_room = position < len(entry.device_ids) * BLOCK_SIZE
                check(has_room, f"{step.reads(entry, self)}: no block for the draft layer at {position}")
                self.keys[_place(entry.device_ids, position)] = DRAFTED_AHEAD

    def _read_keys(self, step: Step) -> None:
        """NOTE: after all of the step's keys are written: vLLM shares blocks within a step."""
        for entry in step.batch:
            if entry.device_ids:
                self._check(step, entry, "indexer key", self.keys, entry.device_ids, entry.last, is_drafted=False)

    def _read_drafts(self, step: Step) -> None:
        for entry in step.batch:
            self._check(step, entry, "draft layer's row", self.keys, entry.device_ids, entry.last)

    def _check(
        self,
        step: Step,
        entry: BatchEntry,
        what: str,
        memory: Memory,
        block_ids: list[int],
        num_rows: int,
        is_drafted: bool = True,
    ) -> None:
        for position in range(num_rows):
            row, expected = memory.get(_place(block_ids, position), NEVER_WRITTEN), entry.text.rows[position]
            if row != expected and (is_drafted or row != undrafted(expected)):
                block_id = block_ids[position // BLOCK_SIZE]
                whose = row if isinstance(row, str) else "another prefix's"
                raise Finding(f"{step.reads(entry, self)}: {what} {position} in block {block_id} is {whose}")


def finish_forwards(ranks: Sequence[Rank], num_forwards: int) -> None:
    for rank in ranks:
        while rank.num_forwards_done < num_forwards:
            rank.run_one()


def _place(block_ids: list[int], position: int) -> int:
    block, offset = divmod(position, BLOCK_SIZE)
    return block_ids[block] * BLOCK_SIZE + offset
