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

    vLLM takes for granted that a connector does not change a model's graph. Layers with hot buffers write KV on their
    own, and so their graph lacks vLLM's update of the KV cache: the engine that finds the entry of an engine with
    another connector, or with other layers that keep full KV, would give wrong tokens. A second call in a process
    changes nothing.

    Args:
        connector: its name in `KVTransferConfig`.
        options: those of `kv_connector_extra_config` that change the graph.
    """
    from vllm.config import KVTransferConfig

    compute_hash = KVTransferConfig.compute_hash
    if hasattr(compute_hash, "__wrapped__"):
        return

    @wraps(compute_hash)
    def hash_with_options(self: KVTransferConfig) -> str:
        from vllm.utils.hashing import safe_hash

        own_hash = compute_hash(self)
        if self.kv_connector != connector:
            return own_hash
        values = [self.kv_connector_extra_config.get(name) for name in options]
        return safe_hash(repr([own_hash, connector, values]).encode(), usedforsecurity=False).hexdigest()

    KVTransferConfig.compute_hash = hash_with_options
