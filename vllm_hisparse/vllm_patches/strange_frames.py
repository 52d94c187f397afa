"""One frame from a program that is no peer ends vLLM's p2p tier.

The tier's control transport (`vllm/v1/kv_offload/tiering/p2p/control/zmq.py`) raises in `_open_connection` if the
sender's name is not host:port. It keeps the frame, so it raises again in every later step. A wrong message from a real
peer ends only that peer's connection.
"""

from __future__ import annotations

import re
from functools import wraps

RELEASES = ">=0.32"
DELETE = "kv_manager/tiers/p2p_tier.py, because vLLM's own tier will do; tests/kv_manager/tiers/test_p2p_tier.py"
VLLM = (
    "vllm.v1.kv_offload.tiering.p2p.control.zmq.ZmqTransport._recv_router",
    "vllm.v1.kv_offload.tiering.p2p.control.zmq.ZmqTransport.poll",
    "vllm.v1.kv_offload.tiering.p2p.control.zmq.ZmqTransport._open_connection",
)

_PEER_ID = re.compile(r"[A-Za-z0-9._-]+:(\d{1,5})")  # name of a peer: host:port


def drop_strange_frames() -> None:
    """Let the control transport of vLLM's p2p tier drop frames whose sender cannot be a peer."""
    from vllm.v1.kv_offload.tiering.p2p.control import zmq

    receive = zmq.ZmqTransport._recv_router
    if hasattr(receive, "__wrapped__"):
        return

    @wraps(receive)
    def receive_from_peers(self: zmq.ZmqTransport) -> None:
        while True:
            try:
                receive(self)
                break
            except UnicodeDecodeError:  # the frame has been removed; others may follow
                zmq.logger.warning("Dropped a frame of a sender whose name is no text.")
        senders = {sender for sender, _ in self._pending_inbound}
        for sender in sorted(senders):
            match = _PEER_ID.fullmatch(sender)
            if match is None or not 0 < int(match[1]) < 65536:
                zmq.logger.warning("Dropped a frame of %.100r, which is not host:port.", sender)
                senders.remove(sender)
        self._pending_inbound = [(sender, message) for sender, message in self._pending_inbound if sender in senders]

    zmq.ZmqTransport._recv_router = receive_from_peers
