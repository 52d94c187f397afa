"""Creates the tiers that the configuration names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from vllm_hisparse.compat.registries import register_tier
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile, HostPoolLayout
from vllm_hisparse.kv_manager.tiers.block_copier import BlockCopier, HostBlocks
from vllm_hisparse.kv_manager.tiers.guarded_tier import GuardedTier
from vllm_hisparse.kv_manager.tiers.host_pools import HostPools
from vllm_hisparse.kv_manager.tiers.peers import Peers
from vllm_hisparse.kv_manager.tiers.prefix_loads import Clock
from vllm_hisparse.kv_manager.tiers.sources import Sources
from vllm_hisparse.kv_manager.tiers.tier_manager import STORE_SHARE, BufferTier, HostTierManager
from vllm_hisparse.kv_manager.tiers.tiers import Tiers
from vllm_hisparse.kv_manager.tiers.transfer_buffer import TransferBuffer, chunk_bytes
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.tier_config import BUFFER_SHARE, MAX_DEFAULT_BYTES, FsTier, P2PTier, TierOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMAT = 1  # of a stored block; a change makes old directories unreadable
IDENTITY = "hisparse.json"  # in a directory of block files: what they were made by
MIN_CHUNKS = 64

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

register_tier("hisparse_fs", "vllm_hisparse.kv_manager.tiers.fs_tier", "QuotaFileSystemTier")
register_tier("hisparse_p2p", "vllm_hisparse.kv_manager.tiers.p2p_tier", "PeerTier")
register_tier("hisparse_obj", "vllm_hisparse.kv_manager.tiers.obj_tier", "PausingObjectStoreTier")


@dataclass(frozen=True)
class BlockIdentity:
    """What must be equal for a stored block to be usable.

    Attributes:
        model: name or path, with its revision.
        dtype: of the model, and of its KV cache.
        layout: sizes of rows and blocks, which layers of a dense model keep full KV, and the draft model.
        num_pools: host pools, whose parts of a block lie side by side.
        hash_algorithm, hash_seed: of vLLM's prefix cache; the seed is PYTHONHASHSEED, if that is set.
    """

    model: str
    dtype: str
    layout: dict[str, Any]
    num_pools: int
    hash_algorithm: str
    hash_seed: str | None = None
    format: int = FORMAT

    @classmethod
    def of(
        cls, vllm_config: VllmConfig, layout: KVLayout, num_pools: int, full_kv_layers: Sequence[int] | None = None
    ) -> BlockIdentity:
        model, cache = vllm_config.model_config, vllm_config.cache_config
        name = f"{model.model}@{model.revision}" if model.revision else model.model
        dtype = f"{model.dtype}, KV {cache.cache_dtype}".replace("torch.", "")
        seed = os.environ.get("PYTHONHASHSEED")
        sizes = asdict(layout)
        del sizes["max_query_len"], sizes["state_entries"]  # of steps and of the device, not of blocks
        if not layout.draft_row_bytes:
            del sizes["draft_row_bytes"]  # so that blocks of versions without it are found
        else:
            drafts = vllm_config.speculative_config
            sizes["draft_model"] = [drafts.method, drafts.draft_model_config.model, drafts.draft_model_config.revision]
        if full_kv_layers:
            sizes["full_kv_layers"] = sorted(full_kv_layers)
        return cls(name, dtype, sizes, num_pools, cache.prefix_caching_hash_algo, seed)


@dataclass(frozen=True)
class TierSpec:
    """What vLLM's tiers read of an `OffloadingSpec`; and how many blocks may be on their way to them."""

    config: OffloadingConfig
    max_stores: int
    blocks_per_chunk: int = 1
    kv_events_config: OffloadingKVEventsConfig = field(default_factory=lambda: OffloadingKVEventsConfig(False, False))


def make_tiers(
    vllm_config: VllmConfig,
    config: HiSparseConfig,
    layout: KVLayout,
    host_pool: HostBlockPool,
    files: Sequence[HostPoolFile],
) -> Tiers:
    """Create the tiers; called once the workers have their host pools.

    Raises:
        HiSparseConfigError: a tier cannot be used.
    """
    identity = BlockIdentity.of(vllm_config, layout, len(files), config.full_kv_layers)
    for index, tier in enumerate(config.tiers):
        if isinstance(tier, FsTier):
            check_directory(Path(tier.path), identity, f"tiers.{index}.path")
    hosts = HostPools(files, HostPoolLayout(layout, host_pool.num_blocks))
    return build_tiers(vllm_config, config, identity, hosts, hosts.block_bytes, host_pool)


def build_tiers(
    vllm_config: VllmConfig,
    config: HiSparseConfig,
    identity: BlockIdentity,
    hosts: HostBlocks,
    block_bytes: int,
    host_pool: HostBlockPool,
    clock: Clock = time.monotonic,
) -> Tiers:
    """`make_tiers` over any host blocks.

    Args:
        vllm_config: the engine's configuration.
        config: checked options.
        identity: of the blocks.
        hosts: reads and writes them.
        block_bytes: of one.
        host_pool: the host pool.
        clock: tells the time to loads.
    """
    num_chunks = _num_chunks(config, block_bytes, host_pool.num_blocks)
    buffer = TransferBuffer(block_bytes, num_chunks)
    primary = BufferTier(num_chunks, buffer)
    spec = TierSpec(
        _offloading_config(vllm_config, identity, block_bytes, host_pool.block_size), int(num_chunks * STORE_SHARE)
    )
    tiers = [_make_tier(tier, index, spec, primary) for index, tier in enumerate(config.tiers)]
    manager = HostTierManager(primary, tiers, host_pool, BlockCopier(hosts, buffer))
    for tier in config.tiers:
        logger.info(
            "HiSparse tier: %s. Blocks of %.2f MiB pass through a buffer of %d.", tier, block_bytes / 2**20, num_chunks
        )
    return Tiers(manager, host_pool, _sources(vllm_config, config, spec), config.tier_timeout_s, clock)


def check_directory(path: Path, identity: BlockIdentity, option: str) -> None:
    """Make a directory one of blocks of `identity`.

    Raises:
        HiSparseConfigError: it has blocks of something else, or cannot be written.
    """
    expected = asdict(identity)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts can be guessed from KV
        file = path / IDENTITY
        if not file.exists():
            temporary = path / f"{IDENTITY}.{uuid4()}.tmp"
            temporary.write_text(json.dumps(expected, indent=2))
            with suppress(FileExistsError):  # another engine was faster
                os.link(temporary, file)
            temporary.unlink()
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise HiSparseConfigError(
            option, str(path), f"a directory that can be written and read ({error})", "Correct it or its rights."
        ) from error
    different = [name for name in expected if not isinstance(found, dict) or found.get(name) != expected[name]]
    if different:
        name = different[0]
        got = found.get(name) if isinstance(found, dict) else found
        raise HiSparseConfigError(
            option,
            str(path),
            f"a directory of blocks with {name} {expected[name]!r}; its blocks have {got!r}",
            "Name another directory for each model, dtype and layout.",
        )


def _make_tier(tier: TierOptions, index: int, spec: TierSpec, primary: BufferTier) -> GuardedTier:
    try:
        view = primary.get_kv_memoryview()
        return GuardedTier(SecondaryTierFactory.create_secondary_tier(tier.secondary_tier(), view, spec))
    except Exception as error:
        raise HiSparseConfigError(
            f"tiers.{index}", str(tier), f"a tier that can be opened ({error})", "Correct its options, or remove it."
        ) from error


def _num_chunks(config: HiSparseConfig, block_bytes: int, num_host_blocks: int) -> int:
    if config.tier_buffer_gib is None:
        num_bytes = min(num_host_blocks * block_bytes * BUFFER_SHARE, MAX_DEFAULT_BYTES)
        return max(int(num_bytes) // chunk_bytes(block_bytes), MIN_CHUNKS)
    num_chunks = int(config.tier_buffer_gib * 2**30) // chunk_bytes(block_bytes)
    if num_chunks < MIN_CHUNKS:
        raise HiSparseConfigError(
            "tier_buffer_gib",
            config.tier_buffer_gib,
            f"at least {MIN_CHUNKS * chunk_bytes(block_bytes) / 2**30:.3f}, {MIN_CHUNKS} blocks",
            "Raise it, or remove it for the default.",
        )
    return num_chunks


def _offloading_config(
    vllm_config: VllmConfig, identity: BlockIdentity, block_bytes: int, block_size: int
) -> OffloadingConfig:
    parallel = vllm_config.parallel_config
    # NOTE: vLLM's stores and peers compare and hash these fields. Layer names stand for the layout.
    group = OffloadingGroupConfig(block_size, (json.dumps(identity.layout, sort_keys=True),), 0)
    return OffloadingConfig(
        groups=(group,),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=vllm_config.kv_transfer_config.engine_id,
        model=OffloadingModelConfig(identity.model, identity.dtype),
        cache=OffloadingCacheConfig(block_size, 1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=identity.num_pools,
            tp_size=identity.num_pools,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_rank_local=parallel.data_parallel_rank_local,
            is_parallelism_agnostic=False,
        ),
    )


def _sources(vllm_config: VllmConfig, config: HiSparseConfig, spec: TierSpec) -> Sources:
    stores = [str(tier) for tier in config.tiers if not isinstance(tier, P2PTier)]
    p2p = [tier for tier in config.tiers if isinstance(tier, P2PTier)]
    peers = None
    if p2p and p2p[0].peers:
        host = p2p[0].host or envs.VLLM_P2P_SIDE_CHANNEL_HOST
        port = (p2p[0].port or envs.VLLM_P2P_SIDE_CHANNEL_PORT) + spec.config.parallel.data_parallel_index
        peers = Peers(p2p[0].peers, (host, port))
    return Sources(vllm_config.kv_transfer_config.engine_id, stores, peers, isinstance(config.tiers[0], P2PTier))
