"""Keeps a tier's failures from the scheduler, and remembers which blocks the tier has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

T = TypeVar("T")


class _WatchedParent(ParentManager):
    """vLLM's tiering as a tier sees it. Notes the jobs and requests that the tier begins for others.

    Args:
        parent: vLLM's tiering.
        jobs: job -> number of chunks that the tier reads for others; new jobs are added.
        requests: request id -> context of the requests that the tier has begun and not yet ended.
    """

    def __init__(self, parent: ParentManager, jobs: dict[int, int], requests: dict[str, ReqContext]):
        self._parent, self._jobs, self._requests = parent, jobs, requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = req_context
        return self._parent.on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._parent.lookup(key, req_context)

    def create_store_job(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TransferJob:
        job = self._parent.create_store_job(keys, req_context)
        self._jobs[job.job_id] = len(job.keys)
        return job

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        self._parent.on_request_finished(req_context)


class GuardedTier(SecondaryTierManager):
    """Wraps a tier. After the tier has raised, it is not used again: no block is found or stored there.

    The jobs of such a tier fail, and the requests that it has begun for other instances end. NOTE: it may still write
    to the jobs' chunks of the transfer buffer; a block's digest shows that.

    A store job names all blocks that some tier lacks; this tier gets only those that it lacks itself, as far as is
    known.

    Args:
        tier: a tier of vLLM.
    """

    # NOTE: vLLM 0.33 polls a tier in a thread if this is True, under a lock that the connector's scheduler half does
    # not take. With False, no tier is polled between steps, as in vLLM 0.32.
    tolerates_off_thread_polling = False

    def __init__(self, tier: SecondaryTierManager):
        # NOTE: vLLM's constructor is not called, because the wrapped tier has its state.
        self.tier, self.has_failed = tier, False
        self.tier_type, self.locality, self.medium = tier.tier_type, tier.locality, tier.medium
        self.cache_hit_source = tier.cache_hit_source
        self._own_results: list[JobResult] = []  # results of jobs that the tier never got, or did not end
        self._jobs: set[int] = set()
        self._peer_jobs: dict[int, int] = {}  # jobs that the tier has begun for other instances -> chunks
        self._requests: dict[str, ReqContext] = {}  # requests that the tier has begun for other instances
        self._has: set[OffloadKey] = set()  # blocks that the tier has, or is storing; forgotten with the host block
        self._stores: dict[int, Sequence[OffloadKey]] = {}  # job -> blocks that the tier is storing

    @property
    def block_size_bytes(self) -> int:
        return self.tier.block_size_bytes

    @property
    def bp_detector(self) -> Any:
        return self.tier.bp_detector

    @property
    def num_peer_reads(self) -> int:
        """Number of chunks that the tier is reading for other instances."""
        return sum(self._peer_jobs.values())

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._guard(LookupResult.MISS, self.tier.lookup, key, req_context)

    def lacks(self, key: OffloadKey) -> bool:
        """Return True if the tier takes blocks now and, as far as is known, does not have this one."""
        is_taking = not self.has_failed and (self.bp_detector is None or not self.bp_detector.is_under_pressure())
        return is_taking and key not in self._has

    def mark_stored(self, key: OffloadKey) -> None:
        """Record that the tier has a block."""
        self._has.add(key)

    def forget(self, key: OffloadKey) -> None:
        """Record that the tier may no longer have a block."""
        self._has.discard(key)

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        missing = [index for index, key in enumerate(job.keys) if key not in self._has]
        if not missing:
            self._own_results.append(JobResult(job.job_id, success=True, transfer_bytes=0))
            return
        keys = list(job.keys)
        if len(missing) < len(keys):
            keys = [keys[index] for index in missing]
            job = replace(job, keys=keys, chunk_ids=job.chunk_ids[missing])
        self._has.update(keys)
        self._stores[job.job_id] = keys
        self._submit(self.tier.submit_store, job)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self.tier.submit_load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = self._guard(list[JobResult](), lambda: list(self.tier.get_finished_jobs()))
        self._jobs -= {result.job_id for result in finished}
        results, self._own_results = [*self._own_results, *finished], []
        for result in results:
            self._peer_jobs.pop(result.job_id, None)
            keys = self._stores.pop(result.job_id, ())
            if not result.success:
                self._has.difference_update(keys)
        if hasattr(self.tier, "take_deleted"):
            self._has.difference_update(self._guard([], self.tier.take_deleted))
        return results

    def has_pending_work(self) -> bool:
        return self._guard(False, self.tier.has_pending_work)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._guard(RequestOffloadingContext(), self.tier.on_new_request, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._guard(None, self.tier.on_request_finished, req_context)

    def serve_external_requests(self, parent: ParentManager) -> None:
        watched = _WatchedParent(parent, self._peer_jobs, self._requests)
        self._guard(None, self.tier.serve_external_requests, watched)
        for context in list(self._requests.values()) if self.has_failed else ():
            watched.on_request_finished(context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._guard(None, self.tier.on_schedule_end, context)

    def discard(self, key: OffloadKey) -> None:
        """Delete a damaged block, if the tier can."""
        self._has.discard(key)
        if hasattr(self.tier, "discard"):
            self._guard(None, self.tier.discard, key)

    def drain_jobs(self) -> None:
        self._guard(None, self.tier.drain_jobs)

    def shutdown(self) -> None:
        self.tier.shutdown()

    def _submit(self, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        if self.has_failed:
            self._own_results.append(JobResult(job.job_id, success=False))
        else:
            self._jobs.add(job.job_id)
            self._guard(None, submit, job)

    def _guard(self, default: T, call: Callable[..., T], *args: Any) -> T:
        if self.has_failed:
            return default
        try:
            return call(*args)
        except Exception:
            logger.exception("Tier %s failed and is not used any more; restart the engine to use it.", self.tier_type)
            self.has_failed = True
            self._own_results += [JobResult(job_id, success=False) for job_id in self._jobs | self._peer_jobs.keys()]
            self._jobs.clear()
            return default
