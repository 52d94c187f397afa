"""The scripted engine over the product's own tiers: rows of simulated host blocks are pickled on their way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

from campaign.rank import HostMemory
from campaign.script import ScriptedEngine
from campaign.tier import SimulatedHosts
from vllm.v1.request import Request

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.tiers.make_tiers import BlockIdentity, build_tiers
from vllm_hisparse.kv_manager.tiers.prefix_loads import Clock
from vllm_hisparse.kv_manager.tiers.tiers import Tiers
from vllm_hisparse.kv_manager.tiers.transfer_buffer import chunk_bytes

BLOCK_BYTES = 8192
IDENTITY = BlockIdentity("model", "float32", {"row_bytes": 24}, 1, "sha256")
BUFFER_GIB = 64 * chunk_bytes(BLOCK_BYTES) / 2**30
TIMEOUT_S = 60.0


def vllm_config(engine_id: str) -> SimpleNamespace:
    parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None)
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id), parallel_config=parallel)


class TieredEngine(ScriptedEngine):
    """A scripted engine with tiers, whose host pool is small; a context manager."""

    def __init__(
        self,
        tiers: Sequence[dict[str, Any]],
        engine_id: str = "engine",
        timeout_s: float = TIMEOUT_S,
        clock: Clock = time.monotonic,
        **options: Any,
    ):
        config = HiSparseConfig(
            host_pool_gib=1.0, tiers=list(tiers), tier_timeout_s=timeout_s, tier_buffer_gib=BUFFER_GIB
        )

        def make_tiers(host_pool: HostBlockPool, memories: Sequence[HostMemory]) -> Tiers:
            hosts = SimulatedHosts(memories)
            return build_tiers(vllm_config(engine_id), config, IDENTITY, hosts, BLOCK_BYTES, host_pool, clock)

        options = {"num_host_blocks": 12, **options}
        super().__init__(make_tiers=make_tiers, options={"tiers": list(tiers)}, **options)
        self.tiers = self.half.tiers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def run(self) -> None:
        """Run all requests to their end."""
        self.wait_until(lambda: not (self.running or self.waiting))

    def settle(self) -> None:
        """Wait until everything that can be stored is."""
        self.wait_until(lambda: not self.half.has_pending_work())

    def forget_buffer(self) -> None:
        """Empty the transfer buffer, which nothing is on its way to: vLLM 0.33 loads nothing before it is told so."""
        self.tiers.manager.reset_cache()
        getattr(self.tiers.manager, "on_reset_flushed", lambda: None)()

    def answer(self, request_id: str, prompt: list[int], max_tokens: int = 2) -> tuple[Request, dict[str, int]]:
        """Run one request; returns it, and what was counted meanwhile."""
        self.take_counters()
        request = self.ask(request_id, prompt, max_tokens)
        self.run()
        return request, self.take_counters()

    def fill(self, seed: int = 0, num_requests: int = 3) -> None:
        """Let other requests take the whole host pool."""
        for index in range(num_requests):
            self.ask(f"filler-{seed}-{index}", [1000 + 100 * seed + 10 * index + i for i in range(24)], 2)
        self.run()

    def wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "no progress"
            if not self.turn().host_block_tables:
                time.sleep(0.001)
