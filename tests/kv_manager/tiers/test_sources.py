import socket

import pytest
from servers import wait_for
from vllm.v1.kv_offload.base import Locality, Medium
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_hisparse.kv_manager.tiers import peers
from vllm_hisparse.kv_manager.tiers import sources as sources_module
from vllm_hisparse.kv_manager.tiers.peers import Peers
from vllm_hisparse.kv_manager.tiers.prefix_loads import MAX_RETRY_S, RETRY_S, Source
from vllm_hisparse.kv_manager.tiers.sources import Sources

KNOWN = {"decode": ["10.0.0.1", "10.0.0.2"], "10.0.0.3": ["10.0.0.3"]}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    known = {name: list(addresses) for name, addresses in KNOWN.items()}

    def resolve(host: str, port: int, *_: object) -> list[tuple]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(peers.socket, "getaddrinfo", resolve)
    return known


def test_a_name_stands_for_all_its_addresses_but_ones_own() -> None:
    found = Peers(["decode:5710", "10.0.0.3:5711", "nobody:1"], ("10.0.0.2", 5710))
    assert found.addresses() == [("10.0.0.1", 5710), ("10.0.0.3", 5711)]
    assert Peers(["10.0.0.3:5711"], ("10.0.0.3", 5710)).addresses() == [("10.0.0.3", 5711)]


def test_new_replicas_are_found(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Peers(["decode:5710"], ("10.0.0.2", 5710))
    names["decode"].append("10.0.0.9")
    assert found.addresses() == [("10.0.0.1", 5710)]
    monkeypatch.setattr(peers, "RESOLVE_S", -1.0)
    wait_for(lambda: ("10.0.0.9", 5710) in found.addresses())


@pytest.mark.parametrize("peers_first", [False, True])
def test_stores_and_peers_are_asked_in_order(peers_first: bool) -> None:
    sources = Sources("engine", ["fs at /x"], Peers(["decode:5710"], ("10.0.0.2", 5710)), peers_first)
    found = sources.contexts("r")
    expected = ["fs at /x", "peer 10.0.0.1:5710"]
    assert [source.name for source, _ in found] == (expected[::-1] if peers_first else expected)
    contexts = {source.name: context for source, context in found}
    stores, peer = contexts[expected[0]], contexts[expected[1]]
    assert stores.kv_transfer_params is None
    assert stores.load_tier_filter.allows(Medium.STORAGE, Locality.LOCAL)
    assert not peer.load_tier_filter.allows(Medium.STORAGE, None)
    assert peer.load_tier_filter.allows(None, None), "vLLM's p2p tier has no medium"
    remote = peer.kv_transfer_params["remote_kv_source"]
    assert (remote["remote_host"], remote["remote_port"]) == ("10.0.0.1", 5710)


def test_no_two_requests_share_an_id_with_a_peer() -> None:
    engines = [Sources(name, [], Peers(["decode:5710"], ("10.0.0.2", 5710)), False) for name in ("one", "two")]
    contexts = [context for engine in engines for _ in range(2) for _, context in engine.contexts("r")]
    ids = [context.kv_transfer_params["remote_kv_source"]["kv_request_id"] for context in contexts]
    assert len(set(ids)) == len(ids) == 4


def test_peers_outlast_a_resolver_that_fails(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Peers(["decode:5710", "10.0.0.3:5711"], ("10.0.0.2", 5710))
    before = found.addresses()
    asked: list[str] = []
    resolve = peers.socket.getaddrinfo

    def note(host: str, *others: object) -> list[tuple]:
        asked.append(host)
        return resolve(host, *others)

    monkeypatch.setattr(peers.socket, "getaddrinfo", note)
    monkeypatch.setattr(peers, "RESOLVE_S", -1.0)
    del names["decode"]
    for _ in range(2):
        asked.clear()
        wait_for(lambda: found.addresses() == before and "10.0.0.2" in asked)
    names["decode"] = ["10.0.0.7"]
    wait_for(lambda: found.addresses() == [("10.0.0.7", 5710), ("10.0.0.3", 5711)])


def test_an_instance_whose_own_name_is_known_later_does_not_ask_itself(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Peers(["decode:5710"], ("pod-2", 5710))
    assert ("10.0.0.2", 5710) in found.addresses()
    monkeypatch.setattr(peers, "RESOLVE_S", -1.0)
    names["pod-2"] = ["10.0.0.2"]
    wait_for(lambda: found.addresses() == [("10.0.0.1", 5710)])


@pytest.mark.parametrize("is_remembered", [True, False])
def test_peers_that_come_back_are_known(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, is_remembered: bool
) -> None:
    """Or else a silent peer would be asked again whenever it has been away for a moment."""
    found = Peers(["decode:5710"], ("10.0.0.2", 5710))
    sources = Sources("engine", [], found, False)
    ((first, _),) = sources.contexts("r")
    ((again, _),) = sources.contexts("r")
    assert first is again, "it is known whether a peer has answered"
    monkeypatch.setattr(peers, "RESOLVE_S", -1.0)
    if not is_remembered:
        monkeypatch.setattr(sources_module, "MAX_GONE", 0)
    names["decode"] = ["10.0.0.7"]
    wait_for(lambda: [source.name for source, _ in sources.contexts("r")] == ["peer 10.0.0.7:5710"])
    names["decode"] = ["10.0.0.1"]
    wait_for(lambda: [source.name for source, _ in sources.contexts("r")] == [first.name])
    ((new, _),) = sources.contexts("r")
    assert (new is first) == is_remembered


def silence(source: Source, now: float) -> float:
    """Tell a source at a time that a load which began then has waited in vain; returns how long it is left alone."""
    source.mark_silent(now, now)
    return source.retry_at - now


def test_a_source_is_left_alone_for_longer_each_time() -> None:
    source, pauses, now = Source("peer", CacheHitSource.P2P), [], 1000.0
    for _ in range(7):
        pauses.append(silence(source, now))
        now = source.retry_at
    assert pauses[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and pauses[-1] == MAX_RETRY_S
    source.mark_answered(now)
    assert silence(source, now + 1) == RETRY_S


def test_a_late_tier_is_left_alone_once_for_all_loads_of_one_silence() -> None:
    source = Source("peer", CacheHitSource.P2P)
    for since in range(8):
        source.mark_silent(1000.0 + since, 1005.0 + since)
    assert source.retry_at == 1005.0 + RETRY_S
    assert source.pause_s == 2 * RETRY_S


def test_a_source_that_has_delivered_to_others_is_no_late_tier() -> None:
    source = Source("peer", CacheHitSource.P2P)
    source.mark_answered(1003.0)
    source.mark_silent(1000.0, 1005.0)
    assert source.retry_at == 0.0
    source.mark_silent(1003.0, 1008.0)
    assert source.retry_at == 1008.0 + RETRY_S, "nothing has come since"
