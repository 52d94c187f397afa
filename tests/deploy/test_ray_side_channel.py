"""Ports of NIXL's side channels: no two replicas of a node get the same ones."""

from __future__ import annotations

import asyncio
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tools.harness.processes import free_ports

pytest.importorskip("ray.serve.llm", reason="Ray is not installed: pip install 'vllm-hisparse[ray]'")

from vllm_hisparse_ray.side_channel import SideChannel, reserve_ports

OPTION = "side_channel_port_base"


@pytest.fixture
def ports() -> range:
    (first,) = free_ports(1)
    return range(first, first + 12)


def test_replicas_that_start_together_get_ports_of_their_own(ports: range):
    with ThreadPoolExecutor(4) as executor:
        reserved = list(executor.map(lambda _: reserve_ports(OPTION, ports, 3), range(4)))
    assert sorted(first for first, _ in reserved) == list(ports[::3])
    with pytest.raises(RuntimeError, match=r"side_channel_port_base: .* has no 3 free ports"):
        reserve_ports(OPTION, ports, 3)
    first, reservation = reserved[2]
    reservation.close()
    assert reserve_ports(OPTION, ports, 3)[0] == first


def test_ports_of_others_are_left_alone(ports: range):
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[1]))
        other.listen()
        first, reservation = reserve_ports(OPTION, ports, 3)
        reservation.close()
    assert first == ports[3]


@pytest.mark.parametrize("options", [[OPTION], ["p2p_port_base"], []], ids=["prefill", "decode_with_peers", "decode"])
def test_a_replica_reserves_the_ports_of_its_role(ports: range, options: list[str], monkeypatch: pytest.MonkeyPatch):
    names = {f"VLLM_{name}_SIDE_CHANNEL_{part}" for name in ("NIXL", "P2P") for part in ("HOST", "PORT")}
    for name in names:
        monkeypatch.setenv(name, "unset")  # restored afterwards
        del os.environ[name]
    limits = dict.fromkeys(options, (ports.start, ports.start + 6))
    replica = SideChannel(None, ports=limits, num_ports=3)
    asyncio.run(replica.on_before_node_init())
    has_peers = "p2p_port_base" in options
    assert os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT") == (str(ports[0]) if OPTION in options else None)
    assert os.environ.get("VLLM_P2P_SIDE_CHANNEL_PORT") == (str(ports[0]) if has_peers else None)
    assert ("VLLM_P2P_SIDE_CHANNEL_HOST" in os.environ) == has_peers
    for option in options:
        with pytest.raises(RuntimeError, match=rf"{option}: .* has no 1 free ports"):
            reserve_ports(option, range(ports[0], ports[1]), 1)
