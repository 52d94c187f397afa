"""Ports of NIXL's side channels: no two replicas of a node get the same ones."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_hisparse.cli.processes import free_ports

pytest.importorskip("ray.serve.llm", reason="Ray is not installed: pip install 'vllm-hisparse[ray]'")

from vllm_hisparse_ray.side_channel import reserve_ports


@pytest.fixture
def ports() -> range:
    (first,) = free_ports(1)
    return range(first, first + 12)


def test_replicas_that_start_together_get_ports_of_their_own(ports: range):
    with ThreadPoolExecutor(4) as executor:
        reserved = list(executor.map(lambda _: reserve_ports(ports, 3), range(4)))
    assert sorted(first for first, _ in reserved) == list(ports[::3])
    with pytest.raises(RuntimeError, match=r"side_channel_port_base: .* has no 3 free ports"):
        reserve_ports(ports, 3)
    first, reservation = reserved[2]
    reservation.close()
    assert reserve_ports(ports, 3)[0] == first


def test_ports_of_others_are_left_alone(ports: range):
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[1]))
        other.listen()
        first, reservation = reserve_ports(ports, 3)
        reservation.close()
    assert first == ports[3]
