"""A number in a request neither ends pulls nor moves a prefill instance; a listener that has other memory does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
from test_import_reads import DEVICE_IDS, HOST_IDS, LIVE, NOTICE, REMOTE_IDS, Side
from test_nixl_worker import CLOCK_OFFSET, REQUEST, agent_metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
    RemoteMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from tools.harness.processes import LOOPBACK, free_ports

OWN, FOREIGN = ("127.0.0.1", 1), ("forger", 7)
counts_registrations = pytest.mark.skipif(
    not hasattr(RemoteMeta, "registration_generation"), reason="vLLM < 0.33 counts no registrations"
)


class Later:
    """Runs what is submitted when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future, Callable, tuple]] = []

    def submit(self, function: Callable, *arguments: Any) -> Future:
        self.jobs.append((Future(), function, arguments))
        return self.jobs[-1][0]

    def run(self) -> None:
        while self.jobs:
            future, function, arguments = self.jobs.pop(0)
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)


class Decode(Side):
    """A decode rank, connected to a prefill instance with a listener."""

    claims, address = 0, OWN  # of the next requests

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self._handshake_initiation_executor = self.thread = Later()
        self.memory, self.is_listening, self.asked = b"first", True, []
        self.read_through_buffer(monkeypatch)
        names = [name for name in vars(self) if name.startswith("dst_")] + ["kv_caches_base_addr", "tp_mappings"]
        self.known = {name: dict(getattr(self, name)) for name in names}

    def shake_hands(self) -> None:
        memory = {"kv_caches_base_addr": self._bases, "block_strides": self._strides, "device_id": 0}
        self.add_remote_agent(agent_metadata(agent_metadata=self.memory, **memory), 0)

    def _nixl_handshake(self, host: str, port: int, *_: Any) -> tuple[dict, float]:
        self.asked.append((host, port))
        if not self.is_listening:
            raise RuntimeError("no answer")
        if "prefill" not in self._remote_agents:
            for name, value in self.known.items():
                getattr(self, name).update(value)
            self.dst_xfer_side_handles = {"prefill": {0: self.known["dst_xfer_side_handles"]["prefill"][0].copy()}}
            self.nixl_wrapper.agents.add("agent")
        self.shake_hands()
        return {(0, 0): "agent"}, CLOCK_OFFSET

    def claim(self, number: int, name: str = REQUEST, address: tuple[str, int] = OWN, block: int = 0) -> None:
        """Pull a prompt of two blocks, with a claim and an address that its client may have chosen."""
        self.claims, self.address = number, address
        self.pull([25, 26], [10 + block, 11 + block], [16, 17], name)
        self.claims, self.address = 0, OWN

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if not hasattr(meta.remote, "host"):
            meta.remote.registration_generation, (meta.remote.host, meta.remote.port) = self.claims, self.address
        super()._read_blocks_for_req(req_id, meta)

    def answer(self) -> None:
        """Let the handshake thread do its work, and the next step read the answers."""
        self.thread.run()
        self.start_load_kv(NixlConnectorMetadata())
        self.thread.run()
        self.start_load_kv(NixlConnectorMetadata())


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Decode:
    return Decode(monkeypatch)


@pytest.mark.parametrize("number", [1, 2**62])
def test_a_claim_that_is_wrong_ends_nothing_and_moves_nothing(decode: Decode, number: int) -> None:
    """The instance is asked at its own address, and not in a step; pulls go on, with both requests."""
    decode.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS, LIVE)
    running = decode.nixl_wrapper.open
    decode.claim(number, address=FOREIGN)
    assert not decode.asked and decode.nixl_wrapper.open == running
    decode.answer()
    assert decode.asked == [OWN]
    assert decode.finish_all() == {LIVE, REQUEST} and decode.nixl_wrapper.messages == [NOTICE] * 2
    assert decode._remote_registration_generations.get("prefill", 0) == 0 and not decode.failures
    decode.claim(number, "again")
    assert decode.asked == [OWN], "the number has been checked"
    assert decode.finish_all() == {"again"}


@counts_registrations
@pytest.mark.parametrize("forged", [None, 2**62])
def test_an_instance_that_has_registered_again_is_connected_to_again(decode: Decode, forged: int | None) -> None:
    """At its own address, whatever a client claims before or then; running pulls fail, because the memory is gone."""
    if forged is not None:
        decode.claim(forged, address=FOREIGN)
        decode.answer()
        assert decode.finish_all() == {REQUEST}
    decode.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS, LIVE)
    for number, memory in ((2, b"second"), (3, b"third")):
        decode.memory = memory
        decode.asked.clear()
        decode.claim(number, address=FOREIGN)
        decode.answer()
        assert decode.asked == [OWN, OWN] and decode._remote_registration_generations["prefill"] == number - 1
        ended, failed = set(), set()
        for _ in range(10):
            for handle in decode.nixl_wrapper.open:
                decode.nixl_wrapper.finish(handle)
            results = decode.get_transfer_results()
            ended |= results.finished_recving
            failed |= results.failed_recving
        assert REQUEST in ended and failed == ({LIVE} if number == 2 else set())


def test_requests_share_an_answer_and_fail_without_one(decode: Decode) -> None:
    """The next request asks again."""
    decode.is_listening = False
    for block, name in enumerate("abc"):
        decode.claim(5, name, block=2 * block)
    decode.answer()
    assert len(decode.asked) == 1 and not decode.nixl_wrapper.started
    assert decode.get_transfer_results().failed_recving == set("abc")
    decode.is_listening = True
    decode.claim(5)
    decode.answer()
    assert len(decode.asked) == 2 and decode.finish_all() == {REQUEST}


def test_a_request_waits_for_two_answers_at_most(decode: Decode) -> None:
    """Also if other requests, which a client may send without end, claim other numbers."""
    decode.claim(99, "forged")
    decode.claim(1, "true", block=2)
    for step in range(2):
        decode.thread.run()
        decode.claim(100 + step, f"forged {step}", block=4 + 2 * step)
        decode.start_load_kv(NixlConnectorMetadata())
    decode.thread.run()
    decode.start_load_kv(NixlConnectorMetadata())
    assert "true" in decode.finish_all()
    for block, number in enumerate((1, 99, 100)):
        decode.claim(number, f"again {number}", block=2 * block)
    assert not decode.thread.jobs, "these numbers have been checked"


def test_the_handshake_of_a_connection_is_a_check(decode: Decode) -> None:
    """So the next requests need no listener."""
    decode.forget()
    decode.claim(1, "first")
    decode.answer()
    assert decode.asked == [OWN] and decode.finish_all() == {"first"}
    decode.is_listening = False
    decode.claim(1, "second")
    assert not decode.thread.jobs and decode.finish_all() == {"second"}


@counts_registrations
def test_an_answer_from_before_a_connection_says_nothing_of_it(decode: Decode) -> None:
    decode.claim(5)
    decode.thread.run()  # answers with the first memory
    decode.forget()
    decode.memory = b"second"
    decode.answer()
    assert decode.finish_all() == {REQUEST}
    decode.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS, LIVE)
    decode.claim(5, "again")
    assert not decode.thread.jobs and decode.finish_all() == {LIVE, "again"}


def test_an_instance_that_is_forgotten_meanwhile_is_connected_to_again(decode: Decode) -> None:
    decode.claim(5)
    decode.forget()
    decode.answer()
    assert len(decode.asked) == 2 and decode.finish_all() == {REQUEST} and not decode.failures


def test_an_instance_in_whose_place_another_one_listens_is_not_asked(decode: Decode) -> None:
    """It has ended, and what it says of its memory is said by nobody."""
    decode._engine_by_address = {OWN: "newer"}
    decode.claim(5)
    assert not decode.thread.jobs and decode.finish_all() == {REQUEST}


@pytest.fixture
def listener() -> Iterator[tuple[int, dict]]:
    """Port of the listener of a prefill instance, vLLM's own, and what it answers, by ranks."""
    (port,), answers, is_ready, ends = free_ports(1), {}, Event(), Event()
    listen = NixlPullConnectorScheduler._nixl_handshake_listener
    thread = Thread(target=listen, args=(answers, is_ready, ends, LOOPBACK, port), daemon=True)
    thread.start()
    assert is_ready.wait(30)
    yield port, answers
    ends.set()
    thread.join()


def test_vllms_listener_is_asked_and_nothing_is_connected(listener: tuple[int, dict]) -> None:
    """With vLLM's own handshake, for each rank of the instance that this rank reads from."""

    def payload(agent: bytes) -> bytes:
        sizes = {"device_id": 0, "num_blocks": 1, "block_lens": [1], "block_strides": [1], "block_size": 4}
        about = {"kv_cache_layout": "LBHNC", "ssm_sizes": (0, 0), "attn_backend_name": ""}
        addresses = {"kv_caches_base_addr": [1, 2], "physical_blocks_per_logical_kv_block": 1}
        metadata = NixlAgentMetadata("prefill", agent_metadata=agent, **sizes, **about, **addresses)
        return msgspec.msgpack.encode(NixlHandshakePayload("same", msgspec.msgpack.encode(metadata)))

    port, answers = listener
    answers |= {(0, rank): payload(b"agent %d" % rank) for rank in (0, 1)}
    side = Side()
    side.install_checks()
    side._is_csa_linear, side.use_host_buffer, side.pcp_size, side.dcp_size = False, True, 1, 1
    side.compat_hash, side.enforce_compat_hash = "same", True
    side.transfer_topo.handshake_target_ranks = lambda *sizes: [0, 1]
    first = side.find_registered(LOOPBACK, port, 2, "prefill", 1, 1)
    assert first == side.find_registered(LOOPBACK, port, 2, "prefill", 1, 1) and len(set(first.values())) == 2
    answers[0, 1] = payload(b"another agent")
    again = side.find_registered(LOOPBACK, port, 2, "prefill", 1, 1)
    assert again[0] == first[0] and again[1] != first[1]
    assert side.nixl_wrapper.agents == {"agent"} and not side.registered_memory and side.found_memory is None
    with pytest.raises(RuntimeError, match="engine ID mismatch"):
        side.find_registered(LOOPBACK, port, 2, "another", 1, 1)
