"""Worker half of the P/D transport: vLLM's NIXL pull connector over host and device memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.compat.nixl import PullHooks, connect_on, copy_blocks_whole
from vllm_hisparse.connector.import_buffer import ImportBuffer, buffer_shape
from vllm_hisparse.connector.leases import Leases
from vllm_hisparse.connector.nixl_config import host_resident_config, leaves_pulls_to_rank_0
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.metadata import LeaseTerms
from vllm_hisparse.kv_manager.rows.page_writer import make_page_writer

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlAgentMetadata,
        NixlConnectorMetadata,
        ReqMeta,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PullWorker(PullHooks, NixlPullConnectorWorker):
    """vLLM's pull worker, except that it uses no KV that may have been read after its lease.

    Args:
        vllm_config: the engine's configuration.
        engine_id: id of this engine.
        kv_cache_config: the KV cache as NIXL sees it.
        block_size: tokens per block.
        num_kv_heads: KV heads of this rank; 1 if all ranks hold the same rows.
        only_rank_0_pulls: True if the other ranks only tell the prefill instance that they need nothing.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        block_size: int,
        num_kv_heads: int,
        only_rank_0_pulls: bool,
    ):
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._tokens_per_block, self._num_kv_heads = block_size, num_kv_heads
        self._only_rank_0_pulls = only_rank_0_pulls
        self._leases = Leases()
        self._expired: set[str] = set()
        self._begun: dict[str, float] = {}  # request id -> start of its pull, `time.perf_counter`
        self._pull_seconds: dict[str, float] = {}
        self._new: Set[str] = frozenset()  # requests whose pulls begin in the present step

    def begin_pulls(self, metadata: NixlConnectorMetadata, leases: Mapping[str, LeaseTerms]) -> None:
        """Record the start of a step's pulls, and their leases by request id, as the scheduler's side knows them."""
        now, self._new = time.perf_counter(), metadata.reqs_to_recv.keys()
        for request_id, terms in leases.items():
            self._begun[request_id] = now
            remote = metadata.reqs_to_recv[request_id].remote
            self._leases.begin(request_id, remote.engine_id, remote.request_id, terms)

    def give_up(self, request_ids: Set[str]) -> None:
        # NOTE: clients may choose request ids, so a new request may have the id of one that has just ended.
        super().give_up(request_ids - self._new)

    def may_pull(self, request_id: str, meta: ReqMeta, clock_offset: float) -> bool:
        if meta.remote.blocks_expiry_time is not None:
            self._leases.state_end(request_id, meta.remote.blocks_expiry_time - clock_offset)
        return not self._leases.is_over(request_id)

    def needs_blocks(self) -> bool:
        return self.tp_rank == 0 or not self._only_rank_0_pulls

    def heartbeats_due(self, request_ids: dict[str, set[str]]) -> None:
        self._leases.keep(request_ids)

    def heartbeats_sent(self, request_ids: dict[str, set[str]], sent_at: float) -> None:
        for engine_id, names in request_ids.items():
            self._leases.heartbeats_sent(engine_id, names, sent_at)

    def add_remote_agent(self, nixl_agent_meta: NixlAgentMetadata, *args: Any, **kwargs: Any) -> str:
        """Connect to a rank of a prefill instance.

        NOTE: vLLM does not compare layouts of blocks that are copied whole (`copy_blocks_whole`).

        Raises:
            RuntimeError: the instance's blocks have another size or layout; the handshake fails, and every request that
                waits for it fails as well.
        """
        size = nixl_agent_meta.block_size * nixl_agent_meta.physical_blocks_per_logical_kv_block
        if size != self._tokens_per_block:
            raise RuntimeError(
                f"--block-size of prefill engine {nixl_agent_meta.engine_id}: got {size}, expected "
                f"{self._tokens_per_block}, the decode side's. Start both sides with the same --block-size."
            )
        layout = nixl_agent_meta.kv_cache_layout
        fitting = [each.name for each in KVCacheLayout if each.is_block_contiguous]
        if self._num_kv_heads > 1 and layout not in fitting:
            raise RuntimeError(
                f"KV cache layout of prefill engine {nixl_agent_meta.engine_id}: got {layout}, expected "
                f"{' or '.join(fitting)}, in which a KV head's tokens follow each other. Remove VLLM_KV_CACHE_LAYOUT "
                "from the prefill side, or set it to one of these."
            )
        return super().add_remote_agent(nixl_agent_meta, *args, **kwargs)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return vLLM's results, and note the pulls that may have ended after their lease: their KV is not used."""
        results, now = super().get_transfer_results(), time.perf_counter()
        for request_id in results.finished_recving:
            begun = self._begun.pop(request_id, now)
            if request_id not in results.failed_recving:
                if self._leases.is_over(request_id):
                    self._expired.add(request_id)
                else:
                    self._pull_seconds[request_id] = now - begun
            self._leases.end(request_id)
        return results

    def take_expired(self) -> set[str]:
        """Return the ids of requests whose pull has ended since the last call, but perhaps after its lease."""
        expired, self._expired = self._expired, set()
        return expired

    def take_pull_seconds(self) -> dict[str, float]:
        """Return the seconds of the pulls that have ended since the last call and neither failed nor expired."""
        seconds, self._pull_seconds = self._pull_seconds, {}
        return seconds


class PullConnector(NixlPullConnector):
    """vLLM's pull connector with a worker half of our own."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *options: Any):
        NixlBaseConnector.__init__(self, vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.connector_worker = PullWorker(vllm_config, self.engine_id, kv_cache_config, *options)


class NixlWorkerTransport:
    """Registers host and device memory with NIXL, and pulls blocks into it."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
    ):
        config = host_resident_config(vllm_config, kv_cache_config, groups, num_host_blocks)
        only_rank_0_pulls = leaves_pulls_to_rank_0(vllm_config, groups)
        hot = groups.hot_spec
        self.connector = PullConnector(vllm_config, config, hot.block_size, hot.num_kv_heads, only_rank_0_pulls)
        copy_blocks_whole(self.connector)
        self._imports: ImportBuffer | None = None

    def register(
        self, main_kv: dict[str, torch.Tensor], resident_kv: dict[str, torch.Tensor], device: torch.device
    ) -> None:
        """Register memory.

        Args:
            main_kv: layer -> host pool, [num_host_blocks, block_size, row elements].
            resident_kv: layer -> device cache as vLLM allocated it, or its copies in the host pool, [num_blocks, 1,
                block_size, row bytes].
            device: device of this rank.
        """
        host = {name: tensor.unsqueeze(1) for name, tensor in main_kv.items()}
        self.connector.register_kv_caches({**host, **resident_kv})
        connect_on(self.connector, device)

    def read_through_buffer(self, pool: torch.Tensor, device_pool: torch.Tensor, num_bytes: int) -> None:
        """Read KV for the host pool through a buffer of device memory from now on, and other KV in pieces; called once,
        after `register`. Ranks that leave the host pool to rank 0 have no buffer.

        Args:
            pool: [bytes] uint8: the host pool.
            device_pool: the same bytes, as the device sees them.
            num_bytes: largest size of the buffer.
        """
        worker = self.connector.connector_worker
        if worker.reads_for_host:
            shape = buffer_shape(num_bytes)
            memory = torch.empty(shape, dtype=torch.uint8, device=device_pool.device)
            self._imports = ImportBuffer(memory, worker, make_page_writer(device_pool))
        worker.read_through(self._imports, range(pool.data_ptr(), pool.data_ptr() + pool.nbytes))
        if self._imports is None:
            return
        logger.info(
            "HiSparse: KV of prompts for the host pool comes through an import buffer of %.1f MiB on %s, in %d parts.",
            memory.nbytes / 2**20,
            memory.device,
            len(memory),
        )

    def bind_metadata(self, metadata: KVConnectorMetadata, leases: Mapping[str, LeaseTerms]) -> None:
        """Take a step's pulls, and their leases by request id."""
        self.connector.bind_connector_metadata(metadata)
        self.connector.connector_worker.begin_pulls(metadata, leases)

    def clear_metadata(self) -> None:
        self.connector.clear_connector_metadata()

    def start_load(self, forward_context: ForwardContext) -> None:
        self.connector.start_load_kv(forward_context)

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose pull finished or failed.

        Args:
            finished_req_ids: requests that have ended since the last call. Their pulls are given up.
        """
        self.connector.connector_worker.give_up(finished_req_ids)
        results = self.connector.get_transfer_results(finished_req_ids)
        # NOTE: the connector also names a failed request's blocks in the first group. They are dropped here, because
        # vLLM accepts block ids only from models with one group, and `failed_recving` is enough.
        self.connector.get_block_ids_with_load_errors()
        return results

    def take_expired(self) -> set[str]:
        """Return the requests whose pull has ended since the last call, but whose KV may be another prompt's."""
        return self.connector.connector_worker.take_expired()

    def take_pull_seconds(self) -> dict[str, float]:
        """Return the seconds of the pulls that have ended since the last call and are used, by request id."""
        return self.connector.connector_worker.take_pull_seconds()

    def take_stats(self) -> NixlKVConnectorStats | None:
        return self.connector.get_kv_connector_stats()

    def take_imported_bytes(self) -> int:
        """Return the bytes that have passed through the import buffer since the last call."""
        return self._imports.take_num_bytes() if self._imports else 0

    def take_num_waiting(self) -> int | None:
        """Return the number of prompts that wait for the import buffer; None if it has not changed since the last
        call.
        """
        return self._imports.take_num_waiting() if self._imports else None

    def shutdown(self) -> None:
        self.connector.shutdown()
