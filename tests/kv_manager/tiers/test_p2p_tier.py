"""Messages that anybody may send to the port for peers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq
from vllm.utils.network_utils import get_open_port
from vllm.v1.kv_offload.tiering.p2p.control.zmq import ZmqTransport

from vllm_hisparse.vllm_patches.strange_frames import drop_strange_frames

STRANGERS = (
    b"scanner",
    b"\xff\xfe",
    b"a:b",
    b"x:99999",
    b"x:0",
    b":5710",
    b"host:",
    b"*:5710",
    b"a b:5710",
    b"a\x01:5710",
    b"a/b:5710",
    b"x" * 250,
)
MESSAGE = msgspec.msgpack.encode({"type": "x"})


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    drop_strange_frames()
    port = get_open_port()
    transport = ZmqTransport(f"127.0.0.1:{port}", "127.0.0.1", port)
    yield transport
    transport.close()


def send(transport: ZmqTransport, identity: bytes, data: bytes) -> zmq.Socket:
    socket = transport._zmq_ctx.socket(zmq.DEALER)
    socket.identity = identity
    socket.linger = 0
    socket.connect(f"tcp://{transport._local_id}")
    socket.send(data)
    assert transport._router.poll(10_000), "nothing has arrived"
    return socket


@pytest.mark.parametrize("identity", STRANGERS, ids=repr)
def test_a_frame_of_a_stranger_is_dropped(transport: ZmqTransport, identity: bytes) -> None:
    with send(transport, identity, MESSAGE):
        assert not transport.poll()
    with send(transport, b"127.0.0.1:5999", MESSAGE):
        assert [connection.peer_id for connection in transport.poll()] == ["127.0.0.1:5999"], "a peer is still heard"


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode("x")])
def test_a_message_that_is_none_does_not_raise(transport: ZmqTransport, data: bytes) -> None:
    with send(transport, b"127.0.0.1:5999", data):
        transport.poll()
        transport.poll()
