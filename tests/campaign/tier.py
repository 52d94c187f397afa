"""A simulated tier below the host pool: slow, forgetful, and sometimes wrong; with copies that take their time."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.tiers.block_copier import BlockCopier
from vllm_hisparse.kv_manager.tiers.guarded_tier import GuardedTier
from vllm_hisparse.kv_manager.tiers.sources import Sources
from vllm_hisparse.kv_manager.tiers.tier_manager import BufferTier, HostTierManager
from vllm_hisparse.kv_manager.tiers.tiers import Tiers
from vllm_hisparse.kv_manager.tiers.transfer_buffer import TransferBuffer

from .rank import HostMemory

BLOCK_BYTES = 2048
NEVER_S = 1e9  # no load is given up because time has passed: the campaign has no clock


class SimulatedHosts:
    """Host blocks of simulated ranks as bytes.

    Args:
        memories: all host pools of an engine.
    """

    def __init__(self, memories: Sequence[HostMemory]):
        self.memories = memories

    def read(self, block_id: int, block: np.ndarray) -> None:
        rows = [(memory.rows.read(block_id), memory.keys.read(block_id)) for memory in self.memories]
        data = np.frombuffer(pickle.dumps(rows), np.uint8)
        block[: len(data)], block[len(data) :] = data, 0

    def write(self, block_id: int, block: np.ndarray) -> None:
        for memory, (rows, keys) in zip(self.memories, pickle.loads(block.tobytes()), strict=True):
            memory.rows.write(block_id, rows)
            memory.keys.write(block_id, keys)

    def close(self) -> None:
        pass


class SimulatedCopier(BlockCopier):
    """Copies that happen at any time before somebody sees that they are done."""

    def __init__(self, hosts: SimulatedHosts, buffer: TransferBuffer, rng: random.Random):
        super().__init__(hosts, buffer)
        self.rng = rng

    def save(self, block_id: int, chunk_id: int, key: bytes) -> Future:
        return _LateFuture(partial(self._save, block_id, chunk_id, key), self.rng)

    def load(self, chunk_id: int, block_id: int, key: bytes) -> Future:
        return _LateFuture(partial(self._load, chunk_id, block_id, key), self.rng)


class _LateFuture(Future):
    def __init__(self, work: Callable[[], Any], rng: random.Random):
        super().__init__()
        self._work, self._rng = work, rng
        if rng.random() < 0.3:
            self._run()

    def done(self) -> bool:
        if not super().done() and self._rng.random() < 0.5:
            self._run()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self._run()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run()
        return super().exception(timeout)

    def _run(self) -> None:
        if not super().done():
            self.set_result(self._work())


class SimulatedTier(SecondaryTierManager):
    """Blocks by key, in any number.

    Args:
        view: the transfer buffer.
        rng: of the world.
        blocks: what is stored; engines may share it.
        counts: what happened in the world; added to.
    """

    medium = Medium.STORAGE

    def __init__(self, view: memoryview, rng: random.Random, blocks: dict[bytes, bytes], counts: Counter[str]):
        super().__init__(SimpleNamespace(), view, "simulated")
        self.rng, self.blocks, self.counts = rng, blocks, counts
        self.wanted: deque[bytes] = deque(maxlen=50)
        self._chunks = np.asarray(view)
        self._jobs: list[tuple[TransferJob, Callable[[bytes, int], bool]]] = []
        self._results: list[JobResult] = []
        self._asked: list[tuple[bytes, ReqContext]] = []  # by a simulated peer
        self._numbers = count()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        self.wanted.append(key)
        if self.rng.random() < 0.2:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.append((job_metadata, self._store))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.append((job_metadata, self._load))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._run_jobs(0.5)
        results, self._results = self._results, []
        return results

    def serve_external_requests(self, parent: ParentManager) -> None:
        """A peer asks for blocks that somebody wanted lately; what it gets, others may load."""
        if self.wanted and self.rng.random() < 0.5:
            context = ReqContext(f"peer-{next(self._numbers)}")
            parent.on_new_request(context)
            self._asked.append((self.wanted.popleft(), context))
        asked, self._asked = self._asked, []
        for key, context in asked:
            result = parent.lookup(key, context)
            if result in (LookupResult.HIT_PENDING, LookupResult.RETRY) and self.rng.random() < 0.95:
                self._asked.append((key, context))
                continue
            if result is LookupResult.HIT:
                self._jobs.append((parent.create_store_job([key], context), self._store))
                self.counts["blocks for peers"] += 1
            parent.on_request_finished(context)

    def has_pending_work(self) -> bool:
        return bool(self._asked or self.wanted)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        self._run_jobs(1.0)

    def discard(self, key: bytes) -> None:
        self.blocks.pop(key, None)

    def _run_jobs(self, share: float) -> None:
        jobs, self._jobs = self._jobs, []
        for job, move in jobs:
            if self.rng.random() >= share:
                self._jobs.append((job, move))
                continue
            moved = [key for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True) if move(key, chunk)]
            self._results.append(JobResult(job.job_id, len(moved) == len(job.keys), tuple(moved) or None))

    def _store(self, key: bytes, chunk: int) -> bool:
        if self.rng.random() < 0.1:
            return False
        data = bytearray(self._chunks[chunk].tobytes())
        if self.rng.random() < 0.05:
            data[self.rng.randrange(BLOCK_BYTES)] ^= 1
        elif self.blocks and self.rng.random() < 0.05:
            data = self.rng.choice(list(self.blocks.values()))
        self.blocks[key] = bytes(data)
        self.counts["stores"] += 1
        return True

    def _load(self, key: bytes, chunk: int) -> bool:
        if key not in self.blocks or self.rng.random() < 0.1:
            return False
        self._chunks[chunk] = np.frombuffer(self.blocks[key], np.uint8)
        self.counts["loads"] += 1
        if self.rng.random() < 0.1:
            del self.blocks[key]
        return True


def simulated_tiers(
    host_pool: HostBlockPool,
    memories: Sequence[HostMemory],
    rng: random.Random,
    blocks: dict[bytes, bytes],
    counts: Counter[str],
) -> Tiers:
    """Tiers of one simulated engine.

    Args:
        host_pool: of its scheduler half.
        memories: of its ranks.
        rng: of the world.
        blocks: what the tier has.
        counts: of the world.
    """
    buffer = TransferBuffer(BLOCK_BYTES, rng.randint(8, 24))
    primary = BufferTier(buffer.num_chunks, buffer)
    tier = SimulatedTier(primary.get_kv_memoryview(), rng, blocks, counts)
    manager = HostTierManager(
        primary, [GuardedTier(tier)], host_pool, SimulatedCopier(SimulatedHosts(memories), buffer, rng)
    )
    return Tiers(manager, host_pool, Sources("engine", ["simulated"], None, False), NEVER_S)
