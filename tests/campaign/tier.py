"""A simulated tier below the host pool: slow, silent at times, forgetful, and sometimes wrong; with copies that take
their time, and a clock that runs as fast as the steps.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.tiers import prefix_loads
from vllm_hisparse.kv_manager.tiers.block_copier import BlockCopier
from vllm_hisparse.kv_manager.tiers.guarded_tier import GuardedTier
from vllm_hisparse.kv_manager.tiers.prefix_loads import RETRY_S
from vllm_hisparse.kv_manager.tiers.sources import Sources
from vllm_hisparse.kv_manager.tiers.tier_manager import BufferTier, HostTierManager
from vllm_hisparse.kv_manager.tiers.tiers import Tiers
from vllm_hisparse.kv_manager.tiers.transfer_buffer import TransferBuffer

from .checks import check
from .rank import HostMemory

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

BLOCK_BYTES = 2048
TIMEOUT_S = 1.0
SLOW_POLLS = 40  # looks at a slow copy after which it is done
MAX_POLLS = 3  # after which a healthy store has done what it was asked for
MAX_HELD_S = 7.5 * TIMEOUT_S  # of `looked_s`, for a request that waits for a tier


class Mood(Enum):
    """Behaviour of a store."""

    HEALTHY = auto()
    SILENT = auto()
    TRICKLING = auto()  # nearly as late as a source may be without being silent; most reads fail, and are tried again


class Store:
    """The store behind the tiers of all engines, its answers, and the time.

    Args:
        rng: random numbers of the world.

    Attributes:
        now: seconds since the world began.
        looked_s: those in which the engines have looked at the tier, a tenth of the timeout in each step at most.
        mood: its behaviour.
        since, step: when it began to, in seconds and in steps.
        blocks: stored blocks by key.
        troubles: when it has ceased to be silent or to trickle, once for each pause that it may cause.
    """

    def __init__(self, rng: random.Random):
        self.rng, self.blocks = rng, {}
        self.now, self.looked_s, self.step = 0.0, 0.0, 0
        self.mood, self.since, self.since_step = Mood.HEALTHY, 0.0, 0
        self.troubles: list[float] = []
        self._until = rng.uniform(0.0, 30.0)

    def clock(self) -> float:
        return self.now

    def tick(self) -> None:
        """The engines have made a step; some take long, and sometimes nobody makes any for a while."""
        kind = self.rng.random()
        step_s = self.rng.uniform(50, 100) if kind < 0.0005 else self.rng.uniform(0.01, 10 if kind < 0.01 else 0.15)
        self.now, self.looked_s = self.now + step_s, self.looked_s + min(step_s, TIMEOUT_S / 10)
        self.step += 1
        if self.now > self._until:
            if self.mood is not Mood.HEALTHY:
                self.troubles += [self.now] * self.num_pauses()
            self.mood = Mood.HEALTHY if self.mood is not Mood.HEALTHY else self.rng.choice(list(Mood)[1:])
            self.since, self.since_step = self.now, self.step
            # NOTE: a silence is over before a source is asked again that was left alone because of it.
            lengths = {Mood.HEALTHY: (5.0, 40.0), Mood.SILENT: (1.0, 0.9 * RETRY_S), Mood.TRICKLING: (10.0, 60.0)}
            self._until = self.now + self.rng.uniform(*lengths[self.mood])

    def num_pauses(self) -> int:
        """Number of pauses that the present trouble may cause: a long one is still there when a pause is over."""
        return 0 if self.mood is Mood.HEALTHY else 1 + int((self.now - self.since) / RETRY_S)

    def is_long_healthy(self) -> bool:
        """Return True if every question that was asked has an answer by now."""
        return self.mood is Mood.HEALTHY and self.now > self.since + TIMEOUT_S and self.step > self.since_step + 10

    def does(self, num_polls: int, since: float, share: float) -> bool:
        """Return True if the store ends a job now.

        Args:
            num_polls: number of checks whether it has ended.
            since: time at which the job began.
            share: share of jobs that are done at the first check.
        """
        if self.mood is Mood.TRICKLING:
            return self.now > since + 0.8 * TIMEOUT_S
        return self.mood is Mood.HEALTHY and (num_polls >= MAX_POLLS or self.rng.random() < share)


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
        self._work, self._rng, self._num_polls = work, rng, 0
        is_slow = rng.random() < 0.05
        self._share, self._max_polls = (0.03, SLOW_POLLS) if is_slow else (0.5, MAX_POLLS)
        if rng.random() < self._share:
            self._run()

    def done(self) -> bool:
        self._num_polls += 1
        if not super().done() and (self._num_polls >= self._max_polls or self._rng.random() < self._share):
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
        rng: random numbers of the world.
        store: store of the blocks, which engines share.
        counts: counts of the world's events, which are added to.
    """

    medium = Medium.STORAGE

    def __init__(self, view: memoryview, rng: random.Random, store: Store, counts: Counter[str]):
        super().__init__(SimpleNamespace(), view, "simulated")
        self.rng, self.store, self.blocks, self.counts = rng, store, store.blocks, counts
        self.wanted: deque[bytes] = deque(maxlen=50)
        self._chunks = np.asarray(view)
        self._jobs: list[tuple[TransferJob, Callable[[bytes, int], bool]]] = []
        self._polls: Counter[int | tuple[str, bytes]] = Counter()  # of jobs, and of a request's looks for a block
        self._began: dict[int | str, float] = {}  # when a job began, or a request got a block or asked for its first
        self._results: list[JobResult] = []
        self._asked: list[tuple[bytes, ReqContext]] = []  # by a simulated peer
        self._numbers = count()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        self.wanted.append(key)
        self._polls[req_context.req_id, key] += 1
        since = self._began.setdefault(req_context.req_id, self.store.now)
        if not self.store.does(self._polls[req_context.req_id, key], since, 0.8):
            return LookupResult.RETRY
        self._began[req_context.req_id] = self.store.now
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
            self._polls[job.job_id] += 1
            since = self._began.setdefault(job.job_id, self.store.now)
            if share < 1 and not self.store.does(self._polls[job.job_id], since, share):
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
        if key not in self.blocks or self.rng.random() < (0.9 if self.store.mood is Mood.TRICKLING else 0.1):
            return False
        self._chunks[chunk] = np.frombuffer(self.blocks[key], np.uint8)
        self.counts["loads"] += 1
        if self.rng.random() < 0.1:
            del self.blocks[key]
        return True


class WatchedTiers(Tiers):
    """Tiers that notice whom they hold for how long, and whom they blame.

    Args:
        store: the tier's.
        counts: counts of the world's events.
        args: those of `Tiers`.
    """

    def __init__(self, store: Store, counts: Counter[str], manager: HostTierManager, host_pool: HostBlockPool):
        self._sources = Sources("engine", ["simulated"], None, False)
        super().__init__(manager, host_pool, self._sources, TIMEOUT_S, store.clock)
        self.store, self.counts = store, counts
        self._held: dict[str, tuple[float, float, int]] = {}  # request -> for how long, until when, in which step
        self._retry_at = 0.0

    def is_loading(self, request: Request, match: HostMatch) -> bool:
        if not super().is_loading(request, match):
            self._held.pop(request.request_id, None)
            return False
        looked_s, step = self.store.looked_s, self.store.step
        held_s, until_s, last_step = self._held.get(request.request_id, (0.0, looked_s, step))
        if step == last_step + 1:  # else it has waited for a seat meanwhile
            held_s += looked_s - until_s
        self._held[request.request_id] = held_s, looked_s, step
        check(held_s < MAX_HELD_S, f"{request.request_id} has waited for a tier for {held_s:.1f} s")
        return True

    def forget(self, request_id: str) -> Counter[CacheHitSource]:
        self._held.pop(request_id, None)
        return super().forget(request_id)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._held.clear()

    def step_scheduled(self, deferred: Deferred) -> None:
        super().step_scheduled(deferred)
        source, store = self._sources.stores, self.store
        if source.retry_at != self._retry_at:
            self._retry_at = source.retry_at
            self.counts["pauses"] += 1
            check(not store.is_long_healthy(), f"a store is blamed that has been well for {store.now - store.since} s")
        num_troubles = sum(ended > source.answered_at for ended in store.troubles) + store.num_pauses()
        check(
            source.pause_s <= RETRY_S * 2**num_troubles, f"a pause of {source.pause_s} s after {num_troubles} troubles"
        )

    def take_counters(self) -> dict[str, int]:
        counters = super().take_counters()
        self.counts["slow loads"] += counters["tier_slow_loads"]
        self.counts["skipped loads"] += counters["tier_skipped_loads"]
        return counters


def simulated_tiers(
    host_pool: HostBlockPool,
    memories: Sequence[HostMemory],
    rng: random.Random,
    store: Store,
    counts: Counter[str],
) -> Tiers:
    """Tiers of one simulated engine, in which a few prefixes or many short parts of them are loaded at once.

    Args:
        host_pool: host pool of its scheduler half.
        memories: memory of each rank.
        rng: random numbers of the world.
        store: store of the tier.
        counts: counts of the world's events.
    """
    buffer = TransferBuffer(BLOCK_BYTES, rng.randint(8, 24))
    primary = BufferTier(buffer.num_chunks, buffer)
    tier = SimulatedTier(primary.get_kv_memoryview(), rng, store, counts)
    manager = HostTierManager(
        primary, [GuardedTier(tier)], host_pool, SimulatedCopier(SimulatedHosts(memories), buffer, rng)
    )
    with patch.object(prefix_loads, "MAX_WINDOW", rng.choice((1, 2, 32))):
        return WatchedTiers(store, counts, manager, host_pool)
