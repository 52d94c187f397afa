"""Creates the tiers that the configuration names."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import vllm.envs as envs
from vllm.config.quantization import QuantSpec, resolve_quantization_config
from vllm.logger import init_logger
from vllm.transformers_utils.config import iter_rope_parameters
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
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError, takes_images
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
from vllm_hisparse.tier_config import FsTier, P2PTier, TierOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.multimodal import MultiModalConfig

FORMAT = 1  # version of the format of a stored block; a change makes old directories unreadable
IDENTITY = "hisparse.json"  # file in a directory of blocks, with their `BlockIdentity`
FIRST_PARTS = ("model", "dtype", "layout", "num_pools", "hash_algorithm", "hash_seed", "format")  # in every such file
LATER_PARTS = (  # only in files of later versions
    *("quantization", "hf_overrides", "load_format", "selection", "multimodal"),
    *("hf_config", "quantization_config", "long_rope"),
)
LOST_AND_FOUND = "lost+found"  # folder in the root of a file system
UNIMPORTANT = ("transformers_version", "_name_or_path")  # keys of a model's configuration that do not change KV
MIN_CHUNKS = 64

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

register_tier("hisparse_fs", "vllm_hisparse.kv_manager.tiers.fs_tier", "QuotaFileSystemTier")
register_tier("hisparse_p2p", "vllm_hisparse.kv_manager.tiers.p2p_tier", "PeerTier")
register_tier("hisparse_obj", "vllm_hisparse.kv_manager.tiers.obj_tier", "PausingObjectStoreTier")


@dataclass(frozen=True)
class BlockIdentity:
    """Identity of stored blocks. An engine uses only blocks whose identity is equal to that of its own.

    Attributes:
        model: name or path of the model, with its revision.
        dtype: dtype of the model and of its KV cache.
        layout: sizes of rows and blocks, full-KV layers of a dense model, and the draft model.
        num_pools: number of host pools, whose parts of a block lie side by side.
        hash_algorithm, hash_seed: hash of vLLM's prefix cache; the seed is PYTHONHASHSEED, or None if that is not set.
        quantization, hf_overrides, load_format: options of the model; None for vLLM's defaults.
        selection: algorithm of a dense model, its options and `top_k`, because a token's KV depends on the tokens that
            earlier layers attended to. None for a DSA model, which has one way to select.
        multimodal: the engine's options that change the embeddings of an image, a video or audio, but not its hash;
            None for vLLM's defaults, and for text alone.
        hf_config: hash of the model's configuration; None if it is the one beside the weights.
        quantization_config: options of the quantization; None if they are not given.
        long_rope: True if a model with LongRoPE computes keys for long contexts, which depends on `--max-model-len`.
            None for other models.
    """

    model: str
    dtype: str
    layout: dict[str, Any]
    num_pools: int
    hash_algorithm: str
    hash_seed: str | None = None
    format: int = FORMAT
    quantization: str | None = None
    hf_overrides: str | None = None
    load_format: str | None = None
    selection: dict[str, Any] | None = None
    multimodal: str | None = None
    hf_config: str | None = None
    quantization_config: str | None = None
    long_rope: bool | None = None

    @classmethod
    def of(cls, vllm_config: VllmConfig, layout: KVLayout, num_pools: int, config: HiSparseConfig) -> BlockIdentity:
        """The identity of an engine's blocks.

        Args:
            vllm_config: the engine's configuration.
            layout: layout of the engine's KV.
            num_pools: number of host pools.
            config: checked options, with defaults filled in.
        """
        model, cache = vllm_config.model_config, vllm_config.cache_config
        name = f"{model.model}@{model.revision}" if model.revision else model.model
        dtype = f"{model.dtype}, KV {cache.cache_dtype}".replace("torch.", "")
        seed = os.environ.get("PYTHONHASHSEED")
        sizes = asdict(layout)
        # NOTE: sizes of steps and of the device do not change blocks.
        del sizes["max_query_len"], sizes["state_entries"], sizes["row_shares"]
        if not layout.full_kv_row_bytes:
            del sizes["full_kv_row_bytes"]  # so that blocks of versions without it are found
        if layout.narrow_key_bytes is None:
            del sizes["narrow_key_bytes"]  # so that blocks of versions without it are found
        if not layout.draft_row_bytes:
            del sizes["draft_row_bytes"]
        else:
            drafts = vllm_config.speculative_config
            sizes["draft_model"] = [drafts.method, drafts.draft_model_config.model, drafts.draft_model_config.revision]
        if config.full_kv_layers:
            sizes["full_kv_layers"] = sorted(config.full_kv_layers)
        overrides, load_format = model.hf_overrides, str(vllm_config.load_config.load_format)
        selection = None
        if config.dense_unit is not None:
            options = config.parsed_options.model_dump(mode="json")
            selection = {"algorithm": config.algorithm, "top_k": config.top_k, **options}
        return cls(
            name,
            dtype,
            sizes,
            num_pools,
            cache.prefix_caching_hash_algo,
            seed,
            quantization=model.quantization,
            hf_overrides=json.dumps(overrides, sort_keys=True, default=_name_of) if overrides else None,
            load_format=None if load_format == "auto" else load_format,
            selection=selection,
            multimodal=_multimodal_options(model.multimodal_config) if takes_images(vllm_config) else None,
            hf_config=_hash_of_config(model) if model.hf_config_path else None,
            quantization_config=_quantization_options(model),
            long_rope=_has_long_rope(model),
        )

    @property
    def layer_name(self) -> str:
        """Name of the layers for vLLM's stores and peers, which compare it. It has every part that vLLM does not
        compare.

        Parts that are None are left out, so that blocks of versions without them are found.
        """
        parts = {name: getattr(self, name) for name in LATER_PARTS}
        return json.dumps(
            self.layout | {name: part for name, part in parts.items() if part is not None}, sort_keys=True
        )

    def known_to(self, found: dict[str, Any]) -> BlockIdentity:
        """Return this identity without the parts that a directory of an earlier version does not name."""
        return replace(self, **{part.name: None for part in fields(self) if part.name not in found})


def _multimodal_options(config: MultiModalConfig) -> str | None:
    """Return the options that change the embeddings of an image, but not its hash; None if no such option is set.

    NOTE: vLLM hashes the kwargs of a request, but not those of the engine.
    """
    options = {
        "mm_processor_kwargs": config.mm_processor_kwargs,
        "video_pruning": config.get_video_pruning_spec(),
        "mm_encoder_attn_dtype": config.mm_encoder_attn_dtype,
    }
    options = {name: value for name, value in options.items() if value}
    return json.dumps(options, sort_keys=True, default=str) if options else None


def _hash_of_config(model: ModelConfig) -> str:
    """Return a hash of a model's configuration that does not depend on the path of its file."""
    text = json.dumps(model.hf_config.to_dict(), default=str)
    parts = json.loads(text, object_hook=lambda part: {key: part[key] for key in part if key not in UNIMPORTANT})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _quantization_options(model: ModelConfig) -> str | None:
    """Return the options of the quantization; None if `--quantization` alone implies them."""
    options = resolve_quantization_config(model.quantization, model.quantization_config)
    if options is None or options == resolve_quantization_config(model.quantization, None):
        return None
    given = {name: value for name, value in vars(options).items() if value}
    # NOTE: kinds of numbers in these options are named by their strings.
    return json.dumps(given, sort_keys=True, default=lambda it: vars(it) if isinstance(it, QuantSpec) else str(it))


def _has_long_rope(model: ModelConfig) -> bool | None:
    """Return True if vLLM takes the factors for long contexts of a model with LongRoPE; None for other models."""
    lengths = [
        parameters["original_max_position_embeddings"]
        for parameters in iter_rope_parameters(model.hf_text_config)
        if parameters.get("rope_type") == "longrope"
    ]
    return any(model.max_model_len > length for length in lengths) if lengths else None


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function that is a value in a model's overrides."""
    return f"{function.__module__}.{function.__qualname__}"


@dataclass(frozen=True)
class TierSpec:
    """The part of an `OffloadingSpec` that vLLM's tiers read.

    Attributes:
        config: configuration of vLLM's offloading.
        max_stores: number of blocks that may be on their way to the tiers at once.
        blocks_per_chunk: blocks of a chunk of the transfer buffer.
        kv_events_config: events that vLLM's tiers publish: none.
    """

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
    identity = BlockIdentity.of(vllm_config, layout, len(files), config)
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
    """Create the tiers over any host blocks.

    Args:
        vllm_config: the engine's configuration.
        config: checked options.
        identity: identity of the blocks.
        hosts: reads and writes host blocks.
        block_bytes: bytes of a block.
        host_pool: the host pool.
        clock: clock of the loads, in seconds.
    """
    num_chunks = num_buffer_chunks(config, block_bytes, host_pool.num_blocks)
    buffer = TransferBuffer(block_bytes, num_chunks)
    primary = BufferTier(num_chunks, buffer)
    tiers = []
    for index, tier in enumerate(config.tiers):
        blocks = identity
        if isinstance(tier, FsTier):
            blocks = check_directory(Path(tier.path), identity, f"tiers.{index}.path")
        offloading = _offloading_config(vllm_config, blocks, block_bytes, host_pool.block_size)
        tiers.append(_make_tier(tier, index, TierSpec(offloading, int(num_chunks * STORE_SHARE)), primary))
    manager = HostTierManager(primary, tiers, host_pool, BlockCopier(hosts, buffer))
    for tier in config.tiers:
        logger.info(
            "HiSparse tier: %s. Blocks of %.2f MiB pass through a buffer of %d blocks.",
            tier,
            block_bytes / 2**20,
            num_chunks,
        )
    return Tiers(manager, host_pool, _sources(vllm_config, config), config.tier_timeout_s, clock)


def check_directory(path: Path, identity: BlockIdentity, option: str) -> BlockIdentity:
    """Make a directory ready for blocks of `identity`, or check that its blocks have this identity.

    Returns:
        Identity by which blocks are found: `identity`, without parts that an earlier version did not write down.

    Raises:
        HiSparseConfigError: the directory has blocks of another identity, or other files, or cannot be written.
    """
    expected = asdict(identity)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # for the owner: prompts can be guessed from KV
        file = path / IDENTITY
        others = [entry.name for entry in path.iterdir() if not entry.name.startswith((IDENTITY, LOST_AND_FOUND))]
        if not file.exists():
            if others:
                raise HiSparseConfigError(
                    option,
                    str(path),
                    f"an empty directory, or one of blocks with {IDENTITY} in it; this one has {sorted(others)[0]!r}",
                    "Name an empty directory of its own.",
                )
            _write_once(file, json.dumps(expected, indent=2))
        found = json.loads(file.read_text())
        mode = path.stat().st_mode & 0o777
    except HiSparseConfigError:
        raise
    except OSError as error:
        raise HiSparseConfigError(
            option, str(path), f"a directory that can be written and read ({error})", "Correct it or its rights."
        ) from error
    except ValueError as error:
        raise HiSparseConfigError(
            option,
            str(path),
            f"a directory whose {IDENTITY} says which blocks it has; this file is damaged ({error})",
            "Delete all files in the directory, or name another one.",
        ) from error
    known = found if isinstance(found, dict) else {}
    # NOTE: an earlier version did not name all parts; a part that it did not name cannot be compared.
    different = [
        name for name in expected if (name in known or name in FIRST_PARTS) and known.get(name) != expected[name]
    ]
    if different:
        name = different[0]
        raise HiSparseConfigError(
            option,
            str(path),
            f"a directory of blocks with {name} {expected[name]!r}; its blocks have {known.get(name)!r}",
            "Name another directory for each model, dtype, layout and way to select.",
        )
    if mode & 0o077:
        logger.warning(
            "Directory %s of a tier has mode %o: others can read the prompts of all clients there, or change their KV. "
            "Close it with chmod 700, unless you trust them.",
            path,
            mode,
        )
    return identity.known_to(known)


def _write_once(file: Path, text: str) -> None:
    """Write a file that is complete once it exists, even after a power loss, unless another engine is faster."""
    temporary = file.with_name(f"{file.name}.{uuid4()}.tmp")
    try:
        with temporary.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(temporary, file)
        except FileExistsError:  # another engine was faster
            return
        except OSError:  # the file system may have no hard links
            if not file.exists():
                temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # not every file system can do this with a directory
        directory = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _make_tier(tier: TierOptions, index: int, spec: TierSpec, primary: BufferTier) -> GuardedTier:
    try:
        view = primary.get_kv_memoryview()
        return GuardedTier(SecondaryTierFactory.create_secondary_tier(tier.secondary_tier(), view, spec))
    except Exception as error:
        reason = tier.without_secrets(str(error))
        raise HiSparseConfigError(
            f"tiers.{index}", str(tier), f"a tier that can be opened ({reason})", "Correct its options, or remove it."
        ) from (error if reason == str(error) else None)


def num_buffer_chunks(config: HiSparseConfig, block_bytes: int, num_host_blocks: int) -> int:
    """Return the number of blocks that the transfer buffer can hold.

    Raises:
        HiSparseConfigError: `tier_buffer_gib` is too small.
    """
    num_chunks = config.tier_buffer_bytes(num_host_blocks * block_bytes) // chunk_bytes(block_bytes)
    if num_chunks < MIN_CHUNKS:
        raise HiSparseConfigError(
            "tier_buffer_gib",
            config.tier_buffer_gib,
            f"at least {MIN_CHUNKS * chunk_bytes(block_bytes) / 2**30:.3f}, {MIN_CHUNKS} blocks",
            "Set it to that, and reserve as much host memory beside the host pool.",
        )
    return num_chunks


def _offloading_config(
    vllm_config: VllmConfig, identity: BlockIdentity, block_bytes: int, block_size: int
) -> OffloadingConfig:
    parallel = vllm_config.parallel_config
    # NOTE: vLLM's stores and peers compare and hash these fields. Layer names stand for the layout.
    group = OffloadingGroupConfig(block_size, (identity.layer_name,), 0)
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


def _sources(vllm_config: VllmConfig, config: HiSparseConfig) -> Sources:
    stores = [str(tier) for tier in config.tiers if not isinstance(tier, P2PTier)]
    p2p = [tier for tier in config.tiers if isinstance(tier, P2PTier)]
    peers = None
    if p2p and p2p[0].peers:
        port = (p2p[0].port or envs.VLLM_P2P_SIDE_CHANNEL_PORT) + vllm_config.parallel_config.data_parallel_index
        peers = Peers(p2p[0].peers, (p2p[0].own_host, port))
    return Sources(vllm_config.kv_transfer_config.engine_id, stores, peers, isinstance(config.tiers[0], P2PTier))
