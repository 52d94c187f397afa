"""Sources of a request's blocks, in the order in which they are asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from vllm.v1.kv_offload.base import Medium, ReqContext, TierFilter, TierMatcher
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_hisparse.kv_manager.tiers.peers import Peers
from vllm_hisparse.kv_manager.tiers.prefix_loads import Source

STORES_ONLY = TierFilter((TierMatcher(Medium.STORAGE),))
MAX_GONE = 256  # peers that are gone and remembered, because they may come back
PEERS_ONLY = TierFilter((TierMatcher(Medium.CPU),))


class Sources:
    """Contexts of a request for vLLM's tiers: one for all stores together, one for each peer.

    NOTE: vLLM's p2p tier asks one peer per request context, and finds the peer in the transfer parameters. The plugin
    makes these parameters; a client's are never used.

    Args:
        engine_id: id of this engine, by which peers distinguish requests of several engines.
        store_names: names of the tiers that are no peers; may be empty.
        peers: addresses of other instances, or None.
        peers_first: True if peers are asked before stores.

    Attributes:
        stores: source that stands for all stores together, or None.
    """

    def __init__(self, engine_id: str, store_names: Sequence[str], peers: Peers | None, peers_first: bool):
        self.engine_id, self.peers, self.peers_first = engine_id, peers, peers_first
        self.stores = Source(" and ".join(store_names), CacheHitSource.DISK) if store_names else None
        self._by_address: OrderedDict[tuple[str, int], Source] = OrderedDict()  # peers that are gone come first
        self._numbers = count()

    def contexts(self, request_id: str) -> list[tuple[Source, ReqContext]]:
        """Return a request's context with each source, in the order in which the sources are asked."""
        # NOTE: a number makes each context's id unique, because clients choose request ids.
        name = f"{next(self._numbers)}:{request_id}"
        stores = [(self.stores, ReqContext(name, load_tier_filter=STORES_ONLY))] if self.stores else []
        addresses = self.peers.addresses() if self.peers else []
        for address in addresses:
            self._by_address[address] = self._by_address.pop(address, None) or _source(address)
        while len(self._by_address) > len(addresses) + MAX_GONE:
            self._by_address.popitem(last=False)
        peers = [self._peer(name, address) for address in addresses]
        return [*peers, *stores] if self.peers_first else [*stores, *peers]

    def _peer(self, name: str, address: tuple[str, int]) -> tuple[Source, ReqContext]:
        host, port = address
        remote = {"kv_request_id": f"{self.engine_id}:{name}", "remote_host": host, "remote_port": port}
        context = ReqContext(f"{name}@{host}:{port}", {"remote_kv_source": remote}, load_tier_filter=PEERS_ONLY)
        return self._by_address[address], context


def _source(address: tuple[str, int]) -> Source:
    host, port = address
    return Source(f"peer {host}:{port}", CacheHitSource.P2P)
