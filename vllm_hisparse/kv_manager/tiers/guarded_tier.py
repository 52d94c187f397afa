"""Keeps a tier's failures from the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class GuardedTier(SecondaryTierManager):
    """A tier that raises is not used again: it has no block any more, and what is to be stored there is dropped.

    Its jobs end with it, as failed ones. NOTE: it may still write their chunks of the transfer buffer, which a block's
    digest shows.

    Args:
        tier: one of vLLM's.
    """

    def __init__(self, tier: SecondaryTierManager):
        # NOTE: not vLLM's: what it keeps is the tier's.
        self.tier, self.has_failed = tier, False
        self.tier_type, self.locality, self.medium = tier.tier_type, tier.locality, tier.medium
        self.cache_hit_source = tier.cache_hit_source
        self._refused: list[JobResult] = []
        self._jobs: set[int] = set()

    @property
    def block_size_bytes(self) -> int:
        return self.tier.block_size_bytes

    @property
    def bp_detector(self) -> Any:
        return self.tier.bp_detector

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._guard(LookupResult.MISS, self.tier.lookup, key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self.tier.submit_store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self.tier.submit_load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = self._guard((), lambda: list(self.tier.get_finished_jobs()))
        self._jobs -= {result.job_id for result in finished}
        refused, self._refused = self._refused, []
        return [*refused, *finished]

    def has_pending_work(self) -> bool:
        return self._guard(False, self.tier.has_pending_work)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._guard(RequestOffloadingContext(), self.tier.on_new_request, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._guard(None, self.tier.on_request_finished, req_context)

    def serve_external_requests(self, parent: ParentManager) -> None:
        self._guard(None, self.tier.serve_external_requests, parent)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._guard(None, self.tier.on_schedule_end, context)

    def discard(self, key: OffloadKey) -> None:
        """Delete a damaged block, if the tier can."""
        if hasattr(self.tier, "discard"):
            self._guard(None, self.tier.discard, key)

    def drain_jobs(self) -> None:
        self._guard(None, self.tier.drain_jobs)

    def shutdown(self) -> None:
        self.tier.shutdown()

    def _submit(self, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        if self.has_failed:
            self._refused.append(JobResult(job.job_id, success=False))
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
            self._refused += [JobResult(job_id, success=False) for job_id in self._jobs]
            self._jobs.clear()
            return default
