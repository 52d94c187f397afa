"""Every page of a prompt lands once, through a buffer of any size, in any order, whatever fails; e2e tests use NIXL."""

from __future__ import annotations

import ctypes
import logging
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.connector.import_buffer import (
    HELD_UP_S,
    LONG_CALL_S,
    PART_BYTES,
    STUCK_S,
    ImportBuffer,
    Source,
    buffer_shape,
    check_buffer_size,
    pieces,
)
from vllm_hisparse.kv_manager.rows.page_writer import PageWriter, Writing

PAGE_BYTES, NUM_PAGES = 24, 60  # of a prefill instance; no power of two
UNWRITTEN = 255
SOURCE, OTHER = Source("prefill", 0), Source("other", 0)


class Prefill:
    """The memory of a prefill instance, and reads from it that end when the test says so.

    Args:
        rows: the host pool.
        seed: of the memory's bytes.
    """

    def __init__(self, rows: torch.Tensor, seed: int = 0):
        self.rows, self.num_bytes_to_host = rows, 0
        self.memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 200, (NUM_PAGES, PAGE_BYTES), np.uint8))
        self.open: list[Read] = []
        self.started: list[Read] = []
        self.released: list[Read] = []
        self.refuses = False

    def start_read(
        self, request_id: str, source: Source, local: np.ndarray, remote: np.ndarray
    ) -> tuple[Read | None, bool]:
        if self.refuses:
            return None, False
        read = Read(request_id, source, local, remote)
        self.open.append(read)
        self.started.append(read)
        return read, True

    def start_read_to_host(
        self, request_id: str, source: Source, places: np.ndarray, addresses: np.ndarray, sizes: np.ndarray
    ) -> tuple[Read | None, bool]:
        sides = (np.stack([starts, sizes], axis=1) for starts in (self.rows.data_ptr() + places, addresses))
        read, is_started = self.start_read(request_id, source, *sides)
        self.num_bytes_to_host += int(sizes.sum()) if is_started else 0
        return read, is_started

    def poll_read(self, request_id: str, read: Read) -> tuple[bool, bool]:
        assert read.request_id == request_id
        return read not in self.open, read.has_failed

    def release_read(self, request_id: str, read: Read) -> None:
        self.released.append(read)

    def finish(self, read: Read) -> None:
        read.copy()
        self.open.remove(read)

    def fail(self, read: Read, has_ended: bool = True) -> None:
        read.has_failed = True
        if has_ended:
            self.open.remove(read)

    @property
    def addresses(self) -> np.ndarray:
        return self.memory.data_ptr() + np.arange(NUM_PAGES) * PAGE_BYTES


@dataclass(eq=False)
class Read:
    request_id: str
    source: Source
    local: np.ndarray
    remote: np.ndarray
    has_failed: bool = field(default=False)

    def copy(self) -> None:
        """Move the bytes, as NIXL does."""
        assert (self.local[:, 1] == self.remote[:, 1]).all()
        for (to, num_bytes), (address, _) in zip(self.local.tolist(), self.remote.tolist(), strict=True):
            bytes_at(to, num_bytes)[:] = bytes_at(address, num_bytes)


class SlowWriter(PageWriter):
    """Copies when the test says so."""

    def __init__(self, pool: torch.Tensor):
        super().__init__(pool)
        self.open: list[SlowWriting] = []
        self.is_closed = False

    def write(self, pages: torch.Tensor, places: np.ndarray) -> Writing:
        self.open.append(SlowWriting(self, pages, places))
        return self.open[-1]

    def finish(self, writing: SlowWriting) -> None:
        super().write(writing.pages, writing.places)
        self.open.remove(writing)

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class SlowWriting:
    writer: SlowWriter
    pages: torch.Tensor
    places: np.ndarray

    def is_done(self) -> bool:
        return self not in self.writer.open


class Host:
    """An import buffer between a prefill instance and a host pool, whose rows have room for a page."""

    def __init__(self, num_parts: int = 2, pages_per_part: int = 5, slow: bool = False):
        self.rows, self.now = torch.full((100, PAGE_BYTES), UNWRITTEN, dtype=torch.uint8), 1000.0
        self.prefill = Prefill(self.rows)
        self.writer = SlowWriter(self.rows.view(-1)) if slow else PageWriter(self.rows.view(-1))
        memory = torch.full((num_parts, pages_per_part * PAGE_BYTES + PAGE_BYTES - 1), 7, dtype=torch.uint8)
        self.buffer = ImportBuffer(memory, self.prefill, self.writer, clock=lambda: self.now)
        self.arrived: list[str] = []

    def add(
        self,
        name: str,
        pages: list[int],
        rows: list[int],
        source: Source = SOURCE,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Import pages into rows, or the first bytes of the pages (`sizes`) into the first bytes of the rows."""
        addresses, places = self.prefill.addresses[pages], np.array(rows, np.int64) * PAGE_BYTES
        num_bytes = np.array(sizes or [PAGE_BYTES] * len(pages), np.int64)
        self.buffer.add(name, source, addresses, places, num_bytes, lambda: self.arrived.append(name))

    def run(self) -> None:
        for _ in range(100):
            for read in list(self.prefill.open):
                self.prefill.finish(read)
            if isinstance(self.writer, SlowWriter):
                for writing in list(self.writer.open):
                    self.writer.finish(writing)
            self.buffer.advance()
        assert not self.buffer.pending and not self.buffer.num_waiting

    def assert_holds(self, expected: dict[int, int], sizes: dict[int, int] | None = None) -> None:
        """Compare all rows: row -> page, and row -> bytes if they are not whole pages; the others are as before."""
        for row, found in enumerate(self.rows):
            page, num_bytes = torch.full_like(found, UNWRITTEN), PAGE_BYTES if sizes is None else sizes.get(row, 0)
            if row in expected:
                page[:num_bytes] = self.prefill.memory[expected[row], :num_bytes]
            assert torch.equal(found, page), row


def bytes_at(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


# Pieces

PLACE = st.integers(0, 20)


@pytest.mark.long
@given(st.lists(st.tuples(PLACE, PLACE), unique_by=(itemgetter(0), itemgetter(1)), max_size=20), st.data())
def test_pieces_are_maximal_and_cover_each_page_once(pages: list[tuple[int, int]], data: st.DataObject) -> None:
    """Pages of two sizes, at any distances on both sides."""
    units = {here: data.draw(st.sampled_from([1, 2])) for here, _ in pages}
    sizes = np.array([3 * units[here] for here, _ in pages], np.int64)
    local, remote = np.array(pages, np.int64).reshape(-1, 2).T * 6 + [[2**40], [2**41]]
    found = [side.tolist() for side in pieces(local, remote, sizes)]
    assert [size for _, size in found[0]] == [size for _, size in found[1]]
    assert [start for start, _ in found[1]] == sorted(start for start, _ in found[1])
    covered = {
        (here + byte, there + byte) for (here, size), (there, _) in zip(*found, strict=True) for byte in range(size)
    }
    assert covered == {
        (here + byte, there + byte)
        for here, there, size in zip(local.tolist(), remote.tolist(), sizes.tolist(), strict=True)
        for byte in range(size)
    }
    assert sum(size for _, size in found[0]) == sizes.sum()
    ends = [(here + size, there + size) for (here, size), (there, _) in zip(*found, strict=True)]
    starts = [(here, there) for (here, _), (there, _) in zip(*found, strict=True)]
    assert not set(ends) & set(starts), "two neighbours are one piece"


def test_layers_of_a_block_are_one_piece_where_blocks_are_outermost() -> None:
    """Prefill instances with VLLM_KV_CACHE_LAYOUT=BLHNC keep all layers of a block side by side."""
    layers, row_bytes = np.arange(4) * PAGE_BYTES, 4 * PAGE_BYTES + 30  # device-resident KV comes behind them
    remote = (np.array([[3], [9], [10]]) * row_bytes + layers).ravel()
    local, sizes = 1000 + np.arange(12) * PAGE_BYTES, np.full(12, PAGE_BYTES)
    order = np.random.default_rng(0).permutation(12)
    _, found = pieces(local[order], remote[order], sizes)
    assert found.tolist() == [[block * row_bytes, 4 * PAGE_BYTES] for block in (3, 9, 10)]


@pytest.mark.parametrize("num_bytes", [PART_BYTES // 8, PART_BYTES, 5 * PART_BYTES + 3])
def test_parts_fit_into_the_buffer(num_bytes: int) -> None:
    num_parts, part_bytes = buffer_shape(num_bytes)
    assert num_parts == max(2, num_bytes // PART_BYTES) and part_bytes % 256 == 0
    assert num_parts * part_bytes <= num_bytes < num_parts * (part_bytes + 256)


def test_a_buffer_holds_two_blocks_of_all_layers() -> None:
    """Then a part holds all that a prefill instance may have side by side, and a page of any size."""
    for block_bytes in (61 * 64 * 656, 61 * 64 * 656 + 1):
        for size in (0, 2 * block_bytes + 510, 100 * block_bytes):
            check_buffer_size(size / 2**30, block_bytes)
        assert buffer_shape(2 * block_bytes + 510)[1] >= block_bytes
    expected = r"^import_buffer_gib: got 0\.004, expected at least 0\.004771, 2 blocks of all layers\. Raise it"
    with pytest.raises(HiSparseConfigError, match=expected):
        check_buffer_size(0.004, 61 * 64 * 656)


# Rounds


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_page_lands_once(data: st.DataObject) -> None:
    """Several prompts, from two prefill instances, with pages of several sizes; reads and copies end in any order, and
    some take so long that other prompts are read straight into the host pool."""
    host = Host(data.draw(st.integers(2, 4)), data.draw(st.integers(1, 9)), slow=True)
    rows, expected, sizes = data.draw(st.permutations(range(100))), {}, {}
    for index in range(data.draw(st.integers(1, 4))):
        pages = data.draw(st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=25, unique=True))
        own, rows = rows[: len(pages)], rows[len(pages) :]
        own_sizes = [data.draw(st.sampled_from([PAGE_BYTES, 8, 7])) for _ in own]
        expected |= dict(zip(own, pages, strict=True))
        sizes |= dict(zip(own, own_sizes, strict=True))
        host.add(str(index), pages, own, data.draw(st.sampled_from([SOURCE, OTHER])), own_sizes)
    num_prompts = index + 1
    for _ in range(data.draw(st.integers(0, 20))):
        if moves := [*host.prefill.open, *host.writer.open]:
            move = data.draw(st.sampled_from(moves))
            (host.prefill if isinstance(move, Read) else host.writer).finish(move)
        host.now += data.draw(st.sampled_from([0, STUCK_S]))
        host.buffer.advance()
    host.run()
    host.assert_holds(expected, sizes)
    assert sorted(host.arrived) == [str(index) for index in range(num_prompts)]
    assert host.buffer.take_num_bytes() + host.prefill.num_bytes_to_host == sum(sizes.values())


def test_a_prompt_larger_than_the_buffer_comes_in_several_rounds() -> None:
    host = Host(num_parts=2, pages_per_part=5)
    host.add("long", list(range(23)), list(range(40, 63)))
    assert [read.remote.tolist() for read in host.prefill.started] == [
        [[host.prefill.addresses[first], 5 * PAGE_BYTES]] for first in (0, 5)
    ]
    host.run()
    assert len(host.prefill.started) == 5 and host.arrived == ["long"]
    host.assert_holds({40 + page: page for page in range(23)})


def test_prompts_wait_in_order() -> None:
    host = Host(num_parts=2, pages_per_part=5)
    for name, pages in (("a", range(15)), ("b", range(15, 20)), ("c", range(20, 25))):
        host.add(name, list(pages), list(pages))
    assert (host.buffer.take_num_bytes(), host.buffer.take_num_waiting()) == (0, 2)
    assert host.buffer.take_num_waiting() is None, "nothing has changed"
    first, second = host.prefill.open
    host.prefill.finish(second)
    host.buffer.advance()
    assert host.prefill.open[-1].request_id == "a", "its third part comes first"
    host.prefill.finish(first)
    host.buffer.advance()
    assert host.prefill.open[-1].request_id == "b"
    assert (host.buffer.take_num_bytes(), host.buffer.take_num_waiting()) == (10 * PAGE_BYTES, 1)
    assert host.buffer.take_num_bytes() == 0
    host.run()
    assert host.arrived == ["a", "b", "c"]


def test_a_part_is_not_read_into_while_it_is_copied() -> None:
    host = Host(num_parts=2, pages_per_part=5, slow=True)
    host.add("a", list(range(20)), list(range(20)))
    for read in list(host.prefill.open):
        host.prefill.finish(read)
    for _ in range(3):
        host.buffer.advance()
    assert not host.prefill.open and len(host.writer.open) == 2
    host.writer.finish(host.writer.open[0])
    host.buffer.advance()
    assert len(host.prefill.open) == 1
    host.run()
    host.assert_holds({page: page for page in range(20)})


def test_instances_that_hang_leave_a_part_to_others() -> None:
    """Among four parts, one instance holds two, another one, and the fourth part is for any other."""
    host = Host(num_parts=4, pages_per_part=5)
    host.add("first", [50], [90], OTHER)
    host.run()
    host.add("hangs", list(range(30)), list(range(30)))
    host.add("hangs too", list(range(30)), list(range(30, 60)), OTHER)
    stuck = list(host.prefill.open)
    assert [read.request_id for read in stuck] == ["hangs", "hangs", "hangs too"]
    host.add("goes on", list(range(30, 48)), list(range(60, 78)), Source("third", 0))
    for _ in range(10):
        for read in set(host.prefill.open) - set(stuck):
            host.prefill.finish(read)
        host.buffer.advance()
    assert host.arrived == ["first", "goes on"] and host.buffer.pending == {"hangs", "hangs too"}
    host.run()
    assert sorted(host.arrived[2:]) == ["hangs", "hangs too"]


def test_an_instance_that_came_alone_and_hangs_leaves_a_part_to_the_next_one() -> None:
    host = Host(num_parts=3, pages_per_part=5)
    host.add("hangs", list(range(30)), list(range(30)))
    stuck = list(host.prefill.open)
    assert len(stuck) == 2
    host.add("goes on", list(range(30, 48)), list(range(60, 78)), OTHER)
    for _ in range(10):
        for read in set(host.prefill.open) - set(stuck):
            host.prefill.finish(read)
        host.buffer.advance()
    assert host.arrived == ["goes on"]
    host.run()


def test_the_only_instance_that_is_left_has_all_parts_but_one() -> None:
    host = Host(num_parts=4, pages_per_part=5)
    host.add("first", [50], [90], OTHER)
    host.run()
    host.add("alone", list(range(40)), list(range(40)))
    assert len(host.prefill.open) == 2
    host.buffer.abandon(OTHER.engine_id)
    host.buffer.advance()
    assert len(host.prefill.open) == 3
    host.run()
    host.assert_holds({90: 50} | {page: page for page in range(40)})


def hang_in_both_parts(host: Host) -> list[Read]:
    """Let two instances hold both parts of a buffer; returns their reads, which do not end."""
    host.add("first", [50], [97], OTHER)
    host.run()
    host.add("hangs", list(range(15)), list(range(15)))
    host.add("hangs too", list(range(15)), list(range(15, 30)), OTHER)
    assert [read.source for read in host.prefill.open] == [SOURCE, OTHER]
    host.arrived.clear()
    return list(host.prefill.open)


def finish_others(host: Host, stuck: list[Read]) -> None:
    for _ in range(10):
        for read in set(host.prefill.open) - set(stuck):
            host.prefill.finish(read)
        host.buffer.advance()


def test_instances_that_hang_in_all_parts_stop_no_others() -> None:
    """After a while, other prompts are read straight into the host pool; then through the buffer again."""
    host, third = Host(num_parts=2, pages_per_part=5), Source("third", 0)
    stuck = hang_in_both_parts(host)
    host.add("goes on", list(range(30, 48)), list(range(60, 78)), third)
    host.now += STUCK_S - 1
    finish_others(host, stuck)
    assert host.prefill.open == stuck and host.buffer.num_waiting == 1, "an instance may be slow"
    host.now += 2
    with unittest.TestCase().assertLogs("vllm.vllm_hisparse.connector.import_buffer", logging.WARNING) as logs:
        finish_others(host, stuck)
        host.add("at once", [59], [99], third)
        finish_others(host, stuck)
    (message,) = [record.getMessage() for record in logs.records]
    assert "has ended for 10 s" in message and message.endswith("These prefill instances may hang: other, prefill.")
    assert host.arrived == ["goes on", "at once"] and host.prefill.num_bytes_to_host == 19 * PAGE_BYTES
    host.prefill.fail(stuck[1])
    host.buffer.advance()
    host.add("later", list(range(40, 50)), list(range(80, 90)), third)
    finish_others(host, stuck)
    assert host.arrived[2:] == ["later"] and host.prefill.num_bytes_to_host == 19 * PAGE_BYTES
    host.run()
    assert host.arrived[3:] == ["hangs"]
    pages = {97: 50} | {page: page for page in range(15)} | {60 + page: 30 + page for page in range(18)}
    host.assert_holds(pages | {99: 59} | {80 + page: 40 + page for page in range(10)})


def test_reads_that_hold_up_the_engine_are_reported_once_per_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    host, call_s = Host(num_parts=2, pages_per_part=1), 0.9 * LONG_CALL_S
    start_read = host.prefill.start_read

    def start_slowly(*args: Any) -> tuple[Read | None, bool]:
        host.now += call_s
        return start_read(*args)

    def messages_of(request_id: str, source: Source, num_pages: int) -> list[str]:
        with unittest.TestCase().assertLogs("vllm.vllm_hisparse.connector.import_buffer", logging.WARNING) as logs:
            logging.getLogger("vllm.vllm_hisparse.connector.import_buffer").warning("no other")
            host.add(request_id, list(range(num_pages)), list(range(num_pages)), source)
            host.run()
        return [record.getMessage() for record in logs.records][1:]

    monkeypatch.setattr(host.prefill, "start_read", start_slowly)
    assert not messages_of("quick", SOURCE, 60)
    call_s = HELD_UP_S / 2
    assert not messages_of("short", SOURCE, 1)
    (message,) = messages_of("long", SOURCE, 4)
    assert "held up the engine for 2.0 s while it read a prompt of prefill instance prefill" in message
    assert not messages_of("again", SOURCE, 4)
    (message,) = messages_of("from another", OTHER, 4)
    assert "prefill instance other" in message
    assert host.arrived == ["quick", "short", "long", "again", "from another"]


@pytest.mark.parametrize("knows_others", [False, True])
def test_reads_that_nixl_does_not_release_stop_no_prompts_of_their_instance(knows_others: bool) -> None:
    """Their parts are lost, and the parts that are free are for other instances, which go on."""
    host, third = Host(num_parts=6, pages_per_part=5), Source("third", 0)
    if knows_others:
        host.add("first", [50], [90], OTHER)
        host.run()
    num_stuck = 3 if knows_others else 5
    for index in range(num_stuck):
        host.add(f"bad {index}", [index], [index])
    stuck = list(host.prefill.open)
    assert len(stuck) == num_stuck
    for read in stuck:
        host.prefill.fail(read, has_ended=False)
    host.buffer.advance()
    host.add("good", list(range(20, 38)), list(range(60, 78)))
    host.now += STUCK_S - 1
    finish_others(host, stuck)
    assert host.prefill.open == stuck and host.buffer.num_waiting == 1
    if knows_others:
        host.add("of another", [40], [40], OTHER)
        finish_others(host, stuck)
        assert host.arrived == ["first", "of another"]
    host.now += 2
    with unittest.TestCase().assertLogs("vllm.vllm_hisparse.connector.import_buffer", logging.WARNING) as logs:
        finish_others(host, stuck)
        host.add("at once", [59], [99])
        finish_others(host, stuck)
    assert len(logs.records) == 1 and logs.records[0].getMessage().endswith("may hang: prefill.")
    assert host.arrived[-2:] == ["good", "at once"] and host.prefill.num_bytes_to_host == 19 * PAGE_BYTES
    host.add("through the buffer", [58], [98], third)
    finish_others(host, stuck)
    assert host.arrived[-1] == "through the buffer" and host.prefill.num_bytes_to_host == 19 * PAGE_BYTES
    host.run()


def test_prompts_wait_as_long_as_parts_are_read() -> None:
    """Here they are copied slowly, too."""
    host = Host(num_parts=2, pages_per_part=5, slow=True)
    host.add("first", list(range(40)), list(range(40)))
    host.add("second", list(range(40, 50)), list(range(40, 50)))
    for _ in range(8):
        host.now += STUCK_S - 1
        host.prefill.finish(host.prefill.open[0])
        host.buffer.advance()
        host.now += STUCK_S - 1
        host.writer.finish(host.writer.open[0])
        host.buffer.advance()
    assert host.prefill.num_bytes_to_host == 0
    host.run()
    assert host.arrived == ["first", "second"]


@pytest.mark.parametrize("is_started", [True, False])
def test_a_read_past_the_buffer_that_fails_ends_its_prompt_alone(is_started: bool) -> None:
    host = Host(num_parts=2, pages_per_part=5)
    stuck = hang_in_both_parts(host)
    host.now += STUCK_S
    host.prefill.refuses = not is_started
    host.add("bad", list(range(30, 48)), list(range(60, 78)), Source("third", 0))
    if is_started:
        host.prefill.fail(host.prefill.open[-1])
    host.prefill.refuses = False
    host.buffer.advance()
    assert host.buffer.pending == {"hangs", "hangs too"} and host.prefill.open == stuck
    host.run()
    assert sorted(host.arrived) == ["hangs", "hangs too"]
    host.assert_holds({97: 50} | {page: page % 15 for page in range(30)})


# Failures


@pytest.mark.parametrize("first_ends", [True, False])
def test_a_read_that_fails_ends_its_prompt_alone(first_ends: bool) -> None:
    """Nothing of it is copied any more, and its part is used again only when nothing writes into it."""
    host = Host(num_parts=2, pages_per_part=5)
    host.add("bad", list(range(20)), list(range(20)))
    host.add("good", list(range(40, 52)), list(range(40, 52)))
    first, second = host.prefill.open
    host.prefill.fail(first, has_ended=first_ends)
    host.prefill.finish(second)
    host.buffer.advance()
    assert (host.buffer.pending == {"good"}) == first_ends
    for _ in range(10):
        for read in set(host.prefill.open) - {first}:
            host.prefill.finish(read)
        host.buffer.advance()
    assert host.arrived == ["good"]
    if not first_ends:
        assert host.buffer.pending == {"bad"}, "its request must keep its blocks"
        used = {read.local[0, 0] for read in host.prefill.started[2:]}
        assert first.local[0, 0] not in used
        host.prefill.open.remove(first)
        host.buffer.advance()
    assert not host.buffer.pending
    host.assert_holds({row: row for row in range(40, 52)})
    host.add("later", list(range(20)), list(range(60, 80)))
    host.run()
    assert host.arrived == ["good", "later"]


def test_a_read_that_cannot_be_started_ends_its_prompt() -> None:
    host = Host(num_parts=2, pages_per_part=5)
    host.prefill.refuses = True
    host.add("bad", list(range(20)), list(range(20)))
    assert host.buffer.pending == {"bad"}
    host.buffer.advance()
    assert not host.buffer.pending and not host.arrived
    host.prefill.refuses = False
    host.add("good", list(range(20)), list(range(20)))
    host.run()
    host.assert_holds({page: page for page in range(20)})


def test_a_request_that_is_given_up_reads_no_more() -> None:
    """Its parts are free when its reads have ended, without a copy; the prompts behind it go on."""
    host = Host(num_parts=2, pages_per_part=5)
    host.add("ends", list(range(20)), list(range(20)))
    host.add("waits and ends", list(range(20, 40)), list(range(20, 40)))
    host.add("good", list(range(40, 52)), list(range(40, 52)))
    reading = list(host.prefill.open)
    for name in ("ends", "waits and ends", "is unknown"):
        host.buffer.give_up(name)
    assert host.buffer.num_waiting == 1
    host.buffer.advance()
    assert host.arrived == ["waits and ends"] and host.buffer.pending == {"ends", "good"}
    for read in reading:
        host.prefill.finish(read)
    host.buffer.advance()
    assert host.arrived == ["waits and ends", "ends"] and {read.request_id for read in host.prefill.open} == {"good"}
    host.run()
    assert host.arrived[2:] == ["good"]
    host.assert_holds({row: row for row in range(40, 52)})


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_read_that_fails_after_its_request_was_given_up(has_ended: bool) -> None:
    """NIXL may still write into the part, so the request keeps its blocks as long as the part."""
    host = Host(num_parts=2, pages_per_part=5)
    host.add("bad", list(range(5)), list(range(5)))
    host.buffer.give_up("bad")
    (read,) = host.prefill.open
    host.prefill.fail(read, has_ended)
    host.buffer.advance()
    assert host.buffer.pending == (set() if has_ended else {"bad"}) and not host.arrived
    host.run()


def test_shutdown_ends_reads_and_copies() -> None:
    host = Host(num_parts=2, pages_per_part=5, slow=True)
    host.add("a", list(range(20)), list(range(20)))
    reading, copying = host.prefill.open
    host.prefill.finish(copying)
    host.buffer.advance()
    host.buffer.close()
    assert host.prefill.released == [reading] and host.writer.is_closed and not host.buffer.pending
