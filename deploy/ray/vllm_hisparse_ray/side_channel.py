"""Reserves the ports of a replica: of prefill for NIXL's side channels, of decode for peers that ask for prefixes."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import ray
from ray.llm._internal.common.callbacks.base import CallbackBase


class SideChannel(CallbackBase):
    """Callback of `ray.serve.llm`, run in every replica before its engine starts.

    NOTE: Ray derives the port from the replica's rank. After a rollout, ranks move between replicas while running
    engines keep their ports, so the next replica on the node would wait for its neighbour's port for ever.
    """

    async def on_before_node_init(self) -> None:
        """Set the engine's first ports; the ports stay reserved until this process ends."""
        ports = {option: range(*limits) for option, limits in self.kwargs["ports"].items()}
        if "side_channel_port_base" in ports:
            self._reserve("NIXL", "side_channel_port_base", ports["side_channel_port_base"], self.kwargs["num_ports"])
        if "p2p_port_base" in ports:
            self._reserve("P2P", "p2p_port_base", ports["p2p_port_base"], 1)
            os.environ["VLLM_P2P_SIDE_CHANNEL_HOST"] = ray.util.get_node_ip_address()

    def _reserve(self, name: str, option: str, ports: range, num_ports: int) -> None:
        port, reservation = reserve_ports(option, ports, num_ports)
        reservation.detach()  # stays open; the callback itself is pickled
        os.environ[f"VLLM_{name}_SIDE_CHANNEL_PORT"] = str(port)


def reserve_ports(option: str, ports: range, num_ports: int) -> tuple[int, socket.socket]:
    """Reserve `num_ports` consecutive ports on which no process listens.

    Args:
        option: option that sets the range, for the error message.
        ports: the range.
        num_ports: number of ports.

    Returns:
        The first port, and the socket that reserves the ports while it is open.

    Raises:
        RuntimeError: this node has no such ports.
    """
    for first in ports[::num_ports]:
        with ExitStack() as stack:
            reservation = stack.enter_context(socket.socket(socket.AF_UNIX))
            # An abstract socket name is unique on the node: replicas choose at the same time and listen much later.
            if can_bind(reservation, f"\0vllm-hisparse-side-channel-{first}") and are_free(first, num_ports):
                stack.pop_all()
                return first, reservation
    raise RuntimeError(
        f"{option}: {ports.start}-{ports[-1]} has no {num_ports} free ports in a row on this node; "
        f"set {option} to a range that nothing else uses"
    )


def are_free(first: int, num_ports: int) -> bool:
    """Return True if no process listens on these ports."""
    with ExitStack() as stack:
        for port in range(first, first + num_ports):
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's port is free
            if not can_bind(probe, ("", port)):
                return False
        return True


def can_bind(socket_: socket.socket, address: str | tuple[str, int]) -> bool:
    """Try to bind; return True if the address was free."""
    try:
        socket_.bind(address)
    except OSError:
        return False
    return True
