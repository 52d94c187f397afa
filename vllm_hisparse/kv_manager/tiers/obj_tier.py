"""vLLM's object store tier, with a pause after a store has failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

from vllm_hisparse.kv_manager.tiers.store_pause import StorePause
from vllm_hisparse.vllm_patches.object_telemetry import tolerate_missing_telemetry


class PausingObjectStoreTier(ObjectStoreSecondaryTierManager):
    """Stores nothing for a while after a store has failed.

    Args:
        args, options: as in vLLM's tier.
    """

    def __init__(self, *args: Any, **options: Any):
        options["backpressure_detector"] = self.pause = StorePause(options["store_config"]["bucket"])
        super().__init__(*args, **(options | {"tier_type": "obj"}))  # NOTE: the name in metrics
        tolerate_missing_telemetry(self)
        self._stores: set[int] = set()

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._stores.add(job_metadata.job_id)
        super().submit_store(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            if result.job_id in self._stores:
                self._stores.remove(result.job_id)
                self.pause.job_ended(result.success)
        return results
