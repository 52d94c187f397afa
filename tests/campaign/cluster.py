"""A prefill and a decode engine on this machine's CPU; either may be killed and started again, within seconds."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import requests

from tests.e2e.forks import forked
from tests.servers import DO_PREFILL, Server, completion
from tools.harness.deployment import MODEL_NAME, PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

from .adapter import MODEL

# After which the prefill engine takes back blocks that nobody came for.
# NOTE: what is pulled after it may be another's, and on a busy machine heartbeats come late.
LEASE_S = 30
START_TIMEOUT_S = 500
SETTLE_TIMEOUT_S = 60
HOST_POOL_GIB = 0.12  # about one and a half requests of the longest length
VOCABULARY = range(3, 500)
TIE_MARGIN = 0.5  # between the two best tokens: other batches round differently and may swap them
OPTIONS = {"host_pool_gib": HOST_POOL_GIB, "device_buffer_size": 320, "kv_lease_duration": LEASE_S}
ENGINE_ARGS = ("--max-num-batched-tokens", "512", "--max-num-seqs")


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(num_tokens * 100_000 + seed).choices(VOCABULARY, k=num_tokens)


def differs(got: dict[str, Any], full: dict[str, Any]) -> bool:
    """True if tokens differ from full KV's other than by a tie; the text after a tie is another one."""
    same = sum(1 for _ in takewhile(bool, map(int.__eq__, got["tokens"], full["tokens"])))
    return same < len(full["tokens"]) and full["margins"][same] > TIE_MARGIN


@dataclass
class HostPool:
    """Contents of a host pool.

    Attributes:
        num_refused: requests that it could not take in the last step.
        num_queued: requests that wait, these and those behind them.
        num_used: blocks of requests.
        num_empty: blocks that hold nothing.
        num_blocks: all of them.
    """

    num_refused: int
    num_queued: int
    num_used: int
    num_empty: int
    num_blocks: int


class Cluster:
    """Asks as the router does: the prefill engine first, then the decode engine with the transfer parameters.

    Args:
        group: the engines' processes.
        log_dir: gets one log file per engine.
    """

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir = group, log_dir
        self.servers = {name: self._start(name) for name in ("prefill", "decode")}
        self._settle()

    @property
    def decode(self) -> Server:
        return self.servers["decode"]

    @property
    def prefill(self) -> Server:
        return self.servers["prefill"]

    def full_kv(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """The answer of the prefill engine itself, which has full KV."""
        return completion(self.prefill.complete(prompt, num_tokens))

    def transfer(self, prompt: list[int]) -> dict[str, Any]:
        """Transfer parameters of a prompt that the prefill engine has computed."""
        return self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]

    def ask(self, prompt: list[int], num_tokens: int, transfer: dict[str, Any] | None) -> dict[str, Any] | None:
        """The decode engine's answer; None: there is none, or an error."""
        try:
            reply = self.decode.complete(prompt, num_tokens, transfer)
        except (requests.RequestException, ValueError):
            return None
        if "choices" not in reply or reply["choices"][0]["finish_reason"] == "error":
            return None
        return completion(reply)

    def leave(self, prompt: list[int], transfer: dict[str, Any] | None, num_chunks: int) -> None:
        """Ask for a stream and disconnect after some chunks of it."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        body["kv_transfer_params"] = transfer
        with requests.post(f"{self.decode.url}/v1/completions", json=body, stream=True, timeout=60) as stream:
            for _ in zip(range(num_chunks), stream.iter_lines(), strict=False):
                continue

    def kill(self, name: str) -> None:
        process = self.servers[name].process
        process.send_signal(signal.SIGKILL)
        while not process.is_gone():
            time.sleep(0.05)

    def restart(self, name: str) -> None:
        """Start a killed engine anew."""
        self.group.processes.remove(self.servers[name].process)
        self.servers[name] = self._start(name)
        self._settle()

    def host_pool(self) -> HostPool:
        """The decode engine's host pool, as it was a few steps ago."""
        names = ("requests_waiting_for_host_memory", "host_blocks_used", "host_blocks_free", "host_blocks_cached")
        refused, used, empty, cached = (round(self.decode.metric(f"hisparse_{name}")) for name in names)
        queued = round(self.decode.metric("num_requests_waiting"))
        return HostPool(refused, queued, used, empty, used + empty + cached)

    def num_preemptions(self) -> int:
        return round(self.decode.metric("num_preemptions"))

    def lost_blocks(self, name: str) -> int:
        """Blocks of an engine without requests that are not back in time.

        NOTE: an idle engine reports nothing, and its leases do not run out, so a tiny request stirs it.
        """
        server, deadline = self.servers[name], time.monotonic() + SETTLE_TIMEOUT_S + LEASE_S
        while True:
            server.complete(make_prompt(3, 0), 2)
            time.sleep(0.3)
            num_blocks = self._used_blocks(server, has_host_pool=name == "decode")
            if not num_blocks or time.monotonic() > deadline:
                return num_blocks

    def _used_blocks(self, server: Server, has_host_pool: bool) -> int:
        text = requests.get(f"{server.url}/metrics", timeout=30).text
        num_device_blocks = int(re.search(r'cache_config_info\{.*num_gpu_blocks="(\d+)"', text)[1])
        num_used = round(server.metric("kv_cache_usage_perc") * num_device_blocks)
        return num_used + int(has_host_pool and server.metric("hisparse_host_blocks_used"))

    def _start(self, name: str) -> Server:
        port, side_port = free_ports(2)
        connector, args = self._options(name)
        core = int(name == "decode")
        process = vllm_engine(name, MODEL, self.log_dir, port, connector, side_port, [core], args)
        return Server(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")

    def _options(self, name: str) -> tuple[dict[str, Any], Sequence[str]]:
        if name == "decode":
            return {**hisparse_connector(**OPTIONS), "kv_load_failure_policy": "recompute"}, (*ENGINE_ARGS, "12")
        # One request at a time and no prefix caching: it is the reference, too.
        lease = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
        return {**PREFILL_CONNECTOR, **lease}, (*ENGINE_ARGS, "1", "--no-enable-prefix-caching")

    def _settle(self) -> None:
        self.group.wait_healthy(START_TIMEOUT_S)
