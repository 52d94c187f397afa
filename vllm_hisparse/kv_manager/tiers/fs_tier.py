"""vLLM's file system tier with a quota."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from vllm_hisparse.kv_manager.tiers.block_stores import key_of
from vllm_hisparse.kv_manager.tiers.directory_quota import DirectoryQuota
from vllm_hisparse.kv_manager.tiers.store_pause import StorePause
from vllm_hisparse.vllm_patches.temporary_names import draw_temporary_names


class QuotaFileSystemTier(FileSystemTierManager):
    """Counts the files that are written, and deletes the least recently used ones beyond the quota.

    Args:
        offloading_spec, primary_kv_view, tier_type: as in vLLM's tier.
        root_dir: the directory; blocks are in a subfolder that is named after their identity.
        quota_bytes: upper bound of the bytes of all block files in that folder, also those of other engines. Files that
            are being written count from the start.
        options: other options of vLLM's tier.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        quota_bytes: int,
        **options: Any,
    ):
        draw_temporary_names()
        options["backpressure_detector"] = self.pause = StorePause(root_dir)
        super().__init__(offloading_spec, primary_kv_view, "fs", root_dir, **options)  # NOTE: the name in metrics
        being_written = offloading_spec.max_stores * self.block_size_bytes
        self.quota = DirectoryQuota(self._folder(), max(quota_bytes - being_written, self.block_size_bytes))
        self._stores: dict[int, list[str]] = {}  # job -> paths
        self._loads: dict[int, list[str]] = {}  # job -> paths, in the order in which vLLM reads them

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._stores[job_metadata.job_id] = self._paths(job_metadata.keys)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loads[job_metadata.job_id] = self._paths(job_metadata.keys)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            written, read = self._stores.pop(result.job_id, None), self._loads.pop(result.job_id, None)
            if written is not None:
                self.quota.added(written)
                self.pause.job_ended(result.success)
            elif read is not None:
                self._mark_read(read, result)
        return results

    def _mark_read(self, paths: list[str], result: JobResult) -> None:
        """Record a load: vLLM reads the files in order, and ends the job at the first one that it cannot read."""
        num_read = len(paths) if result.success else len(result.successful_keys or ())
        self.quota.used(paths[:num_read])
        if not result.success:
            # NOTE: vLLM would ask for this file again and again, and store no block whose file exists.
            self.quota.unreadable(paths[num_read])

    def take_deleted(self) -> list[OffloadKey]:
        """Return the keys of the blocks whose files the quota has deleted, or a scan has missed, since the last call.

        NOTE: files that `discard` deletes are not among them.
        """
        keys = []
        for path in self.quota.take_deleted():
            with suppress(ValueError):  # not the name of a block
                keys.append(key_of(bytes.fromhex(Path(path).stem)))
        return keys

    def discard(self, key: OffloadKey) -> None:
        """Delete a damaged block.

        NOTE: the file is deleted at once, not in the quota's thread, because vLLM stores no block whose file exists.
        """
        path = self.file_mapper.get_file_name(key)
        with suppress(OSError):
            os.remove(path)
        self.quota.deleted(path)

    def shutdown(self) -> None:
        super().shutdown()
        self.quota.shutdown()

    def _folder(self) -> Path:
        """The folder of all block files, which lie two folders deeper."""
        return Path(self.file_mapper.get_file_name(OffloadKey(bytes(36)))).parents[2]

    def _paths(self, keys: Iterable[OffloadKey]) -> list[str]:
        return [self.file_mapper.get_file_name(key) for key in keys]
