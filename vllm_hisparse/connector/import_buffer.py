"""The import buffer: device memory through which KV passes from prefill instances into the host pool.

A host without RDMA reads fast into device memory only, and small pieces of memory are read slowly. Pages that follow
each other in the prefill instance's memory are therefore read in one piece. The buffer is divided into parts. A prompt
fills one part after the other, with pages of one size at a time, in the order of the prefill instance's memory. When a
part has been read, its pages are copied to their places in the host pool; then the part is free again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from vllm.logger import init_logger

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.layout import IMPORT_ALIGNMENT_BYTES, MIN_IMPORT_PARTS, least_import_buffer_bytes

if TYPE_CHECKING:
    import torch

    from vllm_hisparse.kv_manager.rows.page_writer import PageWriter, Writing

Result = TypeVar("Result")

PART_BYTES = 64 << 20
# Seconds in which no part is given, read or freed, after which prompts that find no part are read without one.
STUCK_S = 10.0
# Calls of NIXL that take `LONG_CALL_S` seconds hold up the engine. With `HELD_UP_S` seconds of them, a prompt is
# reported.
LONG_CALL_S, HELD_UP_S = 0.05, 2.0

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


@dataclass(frozen=True)
class Source:
    """A rank of a prefill instance."""

    engine_id: str
    rank: int


class Reads(Protocol):
    """Starts and polls reads from prefill instances for an `ImportBuffer`, and records the reads that fail.

    After a failure, the buffer starts no more reads of the prompt, and does nothing else about it.
    """

    def start_read(
        self, request_id: str, source: Source, local: np.ndarray, remote: np.ndarray
    ) -> tuple[Any | None, bool]:
        """Start to read pieces.

        Args:
            request_id: request of the pieces.
            source: place of the pieces.
            local, remote: [pieces, 2] int64: address and bytes of each piece, in the buffer and at the source.

        Returns:
            The read, or None if nothing writes into the buffer; and False if the start has failed, else True.
        """

    def start_read_to_host(
        self, request_id: str, source: Source, places: np.ndarray, addresses: np.ndarray, sizes: np.ndarray
    ) -> tuple[Any | None, bool]:
        """Start to read pages straight into the host pool.

        Args:
            request_id: request of the pages.
            source: place of the pages.
            places: [pages] int64: first byte of each page in the host pool.
            addresses: [pages] int64: addresses of the pages at the source.
            sizes: [pages] int64: bytes of each page.

        Returns:
            The same as `start_read`.
        """

    def poll_read(self, request_id: str, read: Any) -> tuple[bool, bool]:
        """Poll a read.

        Returns:
            True if the read has ended, so that nothing writes into the buffer any more; and True if it has failed. A
            read that has failed may not have ended yet.
        """

    def release_read(self, request_id: str, read: Any) -> None:
        """End a read at shutdown."""


@dataclass
class _Import:
    """Pages of a prompt on their way, sorted by size and then by address.

    Attributes:
        request_id, source: request, and place of its pages.
        addresses: [pages] int64: addresses of the pages at their source.
        places: [pages] int64: first byte of each page in the host pool.
        sizes: [pages] int64: bytes of each page.
        then: called when all pages are in the host pool, or the request has been given up and no read of it runs; not
            if a read failed. None: nothing is left to do.
        num_started: pages whose read has been started.
        num_rounds: reads and copies that have not ended.
        has_failed: True if a read has failed; no more reads are started.
        is_given_up: True if nobody needs the pages any more; no more reads and copies are started.
        held_up_s: seconds of the long calls of NIXL for these pages.
    """

    request_id: str
    source: Source
    addresses: np.ndarray
    places: np.ndarray
    sizes: np.ndarray
    then: Callable[[], None] | None
    num_started: int = 0
    num_rounds: int = 0
    has_failed: bool = False
    is_given_up: bool = False
    held_up_s: float = 0.0

    @property
    def needs_part(self) -> bool:
        return not (self.has_failed or self.is_given_up) and self.num_started < len(self.addresses)


@dataclass
class _Part:
    """A part of the buffer in use.

    Attributes:
        number: number of the part.
        pages: [pages, page_bytes] uint8: memory of its pages.
        places: [pages] int64: first byte of each page in the host pool.
    """

    number: int
    pages: torch.Tensor
    places: np.ndarray


@dataclass
class _Round:
    """Pages of a prompt: first they are read (`read`), then copied to the host pool (`writing`).

    Attributes:
        owner: the prompt.
        part: holds the pages meanwhile; None: they are read straight into the host pool.
    """

    owner: _Import
    part: _Part | None
    read: Any | None
    writing: Writing | None = None


class ImportBuffer:
    """Reads KV of prompts through device memory.

    Prompts get parts in the order in which they came; a prompt that finds none waits. Reads from a prefill instance
    that hangs do not end. While several instances are known, an instance therefore gets another part only if more parts
    are free than it holds. An instance that is the only known one leaves one part free if the buffer has three or more.

    Instances that hang may nevertheless hold all parts together, and an instance that works may hold parts for ever,
    because NIXL does not release reads that have failed. A prompt that finds no part is therefore read straight into
    the host pool after `STUCK_S` seconds in which no part has changed (was given, read or freed). If the prompt's
    instance holds parts, only changes of these parts count.

    Args:
        memory: [parts, bytes of a part] uint8: the buffer, contiguous.
        reads: reads from prefill instances into `memory`.
        writer: copies pages to the host pool.
        clock: returns seconds.
    """

    def __init__(
        self, memory: torch.Tensor, reads: Reads, writer: PageWriter, clock: Callable[[], float] = time.perf_counter
    ):
        self.memory, self._reads, self._writer, self._clock = memory, reads, writer, clock
        self._free = list(reversed(range(len(memory))))
        self._imports: list[_Import] = []
        self._rounds: list[_Round] = []
        self._engine_ids: set[str] = set()  # instances that prompts came from, without abandoned ones
        self._num_bytes = self._last_num_waiting = 0
        self._last_change = 0.0  # time at which a part was given, read or freed
        self._changes: dict[str, float] = {}  # engine id -> the same for its parts, if it holds any
        self._named: set[str] = set()  # instances in a warning, until one of their parts changes
        self._slow: set[str] = set()  # instances whose reads have held up the engine

    @property
    def pending(self) -> set[str]:
        """The requests whose pages are not in the host pool yet."""
        return {each.request_id for each in self._imports}

    @property
    def num_waiting(self) -> int:
        """Number of prompts that need a part and have none."""
        return sum(each.needs_part and not each.num_rounds for each in self._imports)

    def add(
        self,
        request_id: str,
        source: Source,
        addresses: np.ndarray,
        places: np.ndarray,
        sizes: np.ndarray,
        then: Callable[[], None] | None,
    ) -> None:
        """Read pages of a prompt.

        Args:
            request_id: the request.
            source: place of its pages.
            addresses: [pages] int64: addresses of the pages there, each once.
            places: [pages] int64: first byte of each page in the host pool.
            sizes: [pages] int64: bytes of each page, at most those of a part.
            then: called when all pages are in the host pool, or the request has been given up and no read of it runs;
                not if a read fails. None: nothing is left to do.
        """
        order = np.lexsort((addresses, sizes))
        self._imports.append(_Import(request_id, source, addresses[order], places[order], sizes[order], then))
        self._engine_ids.add(source.engine_id)
        self._start_reads()

    def advance(self) -> None:
        """Copy parts that have been read, and read more pages into parts that have been copied. Never waits."""
        self._rounds = [each for each in self._rounds if not self._has_ended(each)]
        self._changes = {engine_id: self._changes[engine_id] for engine_id in self._holders()}
        self._start_reads()
        ended = [each for each in self._imports if not each.needs_part and not each.num_rounds]
        self._imports = [each for each in self._imports if each.needs_part or each.num_rounds]
        for each in ended:
            if each.then is not None and not each.has_failed:
                each.then()

    def give_up(self, request_id: str) -> None:
        """Start no more reads and copies of a request that has ended."""
        for each in self._imports:
            each.is_given_up |= each.request_id == request_id

    def abandon(self, engine_id: str) -> None:
        """Forget a prefill instance: start no more reads from it, as if a read of each of its prompts had failed."""
        self._engine_ids.discard(engine_id)
        self._slow.discard(engine_id)
        for each in self._imports:
            each.has_failed |= each.source.engine_id == engine_id

    def take_num_bytes(self) -> int:
        """Return the bytes that have passed through the buffer since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def take_num_waiting(self) -> int | None:
        """Return `num_waiting`; None if it is the same as at the last call."""
        last, self._last_num_waiting = self._last_num_waiting, self.num_waiting
        return None if self._last_num_waiting == last else self._last_num_waiting

    def close(self) -> None:
        """End all reads and copies."""
        for each in self._rounds:
            if each.read is not None:
                self._reads.release_read(each.owner.request_id, each.read)
        self._writer.close()
        self._imports, self._rounds = [], []

    def _has_ended(self, each: _Round) -> bool:
        owner, part = each.owner, each.part
        if each.read is not None:
            has_ended, has_failed = self._timed(owner, self._reads.poll_read, each.read)
            owner.has_failed |= has_failed
            if not has_ended:
                return False
            each.read = None
            if part is not None:
                self._part_changes(owner.source.engine_id)
                if not (owner.has_failed or owner.is_given_up):
                    each.writing = self._writer.write(part.pages, part.places)
        if each.writing is not None and not each.writing.is_done():
            return False
        owner.num_rounds -= 1
        if part is not None:
            self._num_bytes += part.pages.nbytes if each.writing is not None else 0
            self._free.append(part.number)
            self._part_changes(owner.source.engine_id)
        return True

    def _start_reads(self) -> None:
        for each in self._imports:
            while each.needs_part and self._may_take_part(each.source.engine_id):
                self._start_read(each)
        for each in self._imports:
            if each.needs_part and not each.num_rounds and self._is_stuck(each.source.engine_id):
                self._start_read_to_host(each)

    def _holders(self) -> list[str]:
        """Return the engine ids of the instances that hold parts, once for each part."""
        return [each.owner.source.engine_id for each in self._rounds if each.part is not None]

    def _may_take_part(self, engine_id: str) -> bool:
        num_held = self._holders().count(engine_id)
        if len(self._engine_ids) > 1:
            return len(self._free) > num_held
        return len(self._free) > (1 if num_held and len(self.memory) > MIN_IMPORT_PARTS else 0)

    def _is_stuck(self, engine_id: str) -> bool:
        """Return True if prompts of an instance that find no part are to be read without one.

        NOTE: an instance that holds parts may find none although some are free, so changes of others do not count.
        """
        return self._clock() - self._changes.get(engine_id, self._last_change) >= STUCK_S

    def _start_read(self, owner: _Import) -> None:
        first, page_bytes = owner.num_started, int(owner.sizes[owner.num_started])
        last = int(np.searchsorted(owner.sizes, page_bytes, "right"))
        pages = slice(first, min(first + self.memory.shape[1] // page_bytes, last))
        addresses, sizes, number = owner.addresses[pages], owner.sizes[pages], self._free.pop()
        memory = self.memory[number, : len(sizes) * page_bytes].view(-1, page_bytes)
        local, remote = pieces(memory.data_ptr() + np.arange(len(sizes)) * page_bytes, addresses, sizes)
        read, is_started = self._timed(owner, self._reads.start_read, owner.source, local, remote)
        self._part_changes(owner.source.engine_id)
        self._read_is_started(owner, pages.stop, _Part(number, memory, owner.places[pages]), read, is_started)
        if read is None:
            self._free.append(number)

    def _timed(self, owner: _Import, call: Callable[..., Result], *args: Any) -> Result:
        """Call NIXL for a prompt, and warn once per prefill instance if such calls hold up the engine.

        NOTE: where many engines shared a GPU, some made no step for more than a minute while such reads ran.
        """
        start, engine_id = self._clock(), owner.source.engine_id
        result = call(owner.request_id, *args)
        took = self._clock() - start
        owner.held_up_s += took if took >= LONG_CALL_S else 0.0
        if owner.held_up_s >= HELD_UP_S and engine_id not in self._slow:
            self._slow.add(engine_id)
            logger.warning(
                "HiSparse: NIXL held up the engine for %.1f s while it read a prompt of prefill instance %s into the "
                "import buffer. Remove import_buffer_gib if many engines share the GPU, or if `vllm-hisparse doctor` "
                "does not name CUDA IPC as UCX's transport.",
                owner.held_up_s,
                engine_id,
            )
        return result

    def _start_read_to_host(self, owner: _Import) -> None:
        """Read the rest of a prompt straight into the host pool."""
        hanging = {engine_id for engine_id in self._holders() if self._is_stuck(engine_id)}
        if hanging - self._named:
            self._named |= hanging
            logger.warning(
                "HiSparse: no read from some prefill instances into the import buffer has ended for %.0f s; prompts "
                "that find no part of it are read without it until one does. These prefill instances may hang: %s.",
                STUCK_S,
                ", ".join(sorted(hanging)),
            )
        rest = slice(owner.num_started, None)
        pages = owner.places[rest], owner.addresses[rest], owner.sizes[rest]
        read, is_started = self._reads.start_read_to_host(owner.request_id, owner.source, *pages)
        self._read_is_started(owner, len(owner.addresses), None, read, is_started)

    def _read_is_started(
        self, owner: _Import, num_started: int, part: _Part | None, read: Any | None, is_started: bool
    ) -> None:
        owner.num_started = num_started
        owner.has_failed |= not is_started
        if read is not None:
            owner.num_rounds += 1
            self._rounds.append(_Round(owner, part, read))

    def _part_changes(self, engine_id: str) -> None:
        """Record that a part is given to an instance, has been read from it, or is freed."""
        self._last_change = self._changes[engine_id] = self._clock()
        self._named.discard(engine_id)


def pieces(local: np.ndarray, remote: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join pages that follow each other in memory on both sides.

    Args:
        local, remote: [pages] int64: addresses of each page on this side and at its source.
        sizes: [pages] int64: bytes of each page.

    Returns:
        [pieces, 2] int64: address and bytes of each piece on this side, and the same at the source, in the order of the
        source's memory.
    """
    order = np.argsort(remote)
    local, remote, sizes = local[order], remote[order], sizes[order]
    continues = (local[1:] == local[:-1] + sizes[:-1]) & (remote[1:] == remote[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.concatenate([np.full(min(len(sizes), 1), True), ~continues]))
    piece_bytes = np.add.reduceat(sizes, starts) if len(starts) else sizes
    return np.stack([local[starts], piece_bytes], axis=1), np.stack([remote[starts], piece_bytes], axis=1)


def buffer_shape(buffer_bytes: int) -> tuple[int, int]:
    """Return the number of parts, and the bytes of each part, of a buffer of at most `buffer_bytes`."""
    num_parts = max(MIN_IMPORT_PARTS, buffer_bytes // PART_BYTES)
    return num_parts, buffer_bytes // num_parts // IMPORT_ALIGNMENT_BYTES * IMPORT_ALIGNMENT_BYTES


def check_buffer_size(buffer_gib: float, block_bytes: int) -> None:
    """Refuse a buffer whose parts are smaller than a block.

    Args:
        buffer_gib: size of the buffer; 0: there is none.
        block_bytes: bytes of a block that come through the buffer, in all layers.

    Raises:
        HiSparseConfigError: the buffer is too small.
    """
    least_gib = least_import_buffer_bytes(block_bytes) / 2**30
    if buffer_gib and buffer_gib < least_gib:
        raise HiSparseConfigError(
            "import_buffer_gib",
            buffer_gib,
            f"at least {math.ceil(least_gib * 1e6) / 1e6:.6f}, {MIN_IMPORT_PARTS} blocks of all layers",
            "Raise it, or remove it.",
        )
