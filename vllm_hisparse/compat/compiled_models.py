"""vLLM's cache of compiled models on disk, which names an entry by a hash of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

RELEASES = ">=0.32"
VLLM = ("vllm.config.kv_transfer.KVTransferConfig.compute_hash",)


def separate_compiled_models(connector: str, options: Sequence[str]) -> None:
    """Give engines with a connector entries of their own in the cache of compiled models.

    vLLM assumes that a connector does not change a model's graph. But layers with hot buffers write KV themselves, so
    their graph lacks vLLM's update of the KV cache. An engine that found the entry of an engine with another connector,
    or with other full-KV layers, would give wrong tokens. vLLM uses the same hash to find the size of the KV cache that
    an earlier engine measured (`VLLM_ENABLE_STARTUP_PLAN`). A second call in a process changes nothing.

    Args:
        connector: name of the connector in `KVTransferConfig`.
        options: names of options of `kv_connector_extra_config` that change the graph, or the memory that is left for
            the KV cache.
    """
    from vllm.config import KVTransferConfig

    compute_hash = KVTransferConfig.compute_hash
    if hasattr(compute_hash, "hashes_options"):
        return

    @wraps(compute_hash)
    def hash_with_options(self: KVTransferConfig) -> str:
        from vllm.utils.hashing import safe_hash

        own_hash = compute_hash(self)
        if self.kv_connector != connector:
            return own_hash
        values = [self.kv_connector_extra_config.get(name) for name in options]
        return safe_hash(repr([own_hash, connector, values]).encode(), usedforsecurity=False).hexdigest()

    hash_with_options.hashes_options = True
    KVTransferConfig.compute_hash = hash_with_options
