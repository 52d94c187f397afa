"""A world: engines, a prefill instance and clients, all drawn from one seed."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

from .adapter import Sizes
from .checks import check, check_idle
from .clients import Clients
from .configuration import Configuration
from .engine import Engine
from .nixl import Prefill
from .tier import Store, simulated_tiers

LIVES = 120  # of a world
MAX_DRAIN_STEPS = 3000


class World:
    """Many lives in the same pools.

    Args:
        configuration: settings that are not drawn.
        seed: seed of everything that is drawn.
    """

    def __init__(self, configuration: Configuration, seed: int):
        self.rng, self.is_hot_first = random.Random(seed), seed % 2 == 1
        self.counts: Counter[str] = Counter()
        self.prefill = Prefill()
        sizes, self.store = self._sizes(configuration), Store(self.rng)
        tiers = partial(simulated_tiers, rng=self.rng, store=self.store, counts=self.counts)
        make_tiers = tiers if configuration.has_tier else None
        self.engines = [
            Engine(configuration, sizes, self.rng, self.prefill, self.counts, make_tiers=make_tiers)
            for _ in range(configuration.num_engines)
        ]
        self.clients = Clients(configuration, self.rng, self.engines, self.prefill, self.counts)

    def run(self, num_lives: int = LIVES) -> None:
        """Live `num_lives` lives to their ends.

        Raises:
            Exception: the first finding, or whatever would have ended an engine.
        """
        try:
            while self.counts["lives"] < num_lives:
                self._step()
            self.clients.stop()
            self._drain()
        finally:
            self.counts["failures"] = sum(engine.nixl.num_failures for engine in self.engines)
            self.counts["transfers"] = sum(engine.nixl.num_transfers for engine in self.engines)
            for engine in self.engines:
                engine.shutdown()

    def _step(self) -> None:
        self.clients.act()
        for engine in self.engines:
            engine.step(partial(self.clients.leave, engine))
        self.store.tick()

    def _drain(self) -> None:
        num_steps = 0
        while not all(engine.is_idle for engine in self.engines):
            check(num_steps < MAX_DRAIN_STEPS, f"no progress: {[engine.product.progress() for engine in self.engines]}")
            self._step()
            num_steps += 1
        for engine in self.engines:
            engine.flush()
            check_idle(engine)

    def _sizes(self, configuration: Configuration) -> Sizes:
        """NOTE: where both pools are scarce, the host pool makes vLLM preempt long before the device does."""
        rng = self.rng
        is_host_scarce = rng.random() < 0.6
        num_device_blocks = rng.randint(20, 48) if is_host_scarce else rng.randint(18, 26)
        if configuration.lends_blocks:
            num_device_blocks = 3 * num_device_blocks
        return Sizes(
            num_device_blocks=num_device_blocks + 5 * configuration.has_state,
            num_host_blocks=rng.randint(12, 26) if is_host_scarce else rng.randint(26, 60),
            max_num_seqs=rng.randint(2, 6),
            token_budget=rng.randint(8, 40),
            policy="priority" if rng.random() < 0.3 else "fcfs",
            recomputes_failures=rng.random() < 0.5,
            is_hot_first=self.is_hot_first,
        )
