"""Run the lives of one configuration and count what happened."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .configuration import Configuration
from .world import LIVES, World

COUNTS = (
    "lives",
    "steps",
    "preemptions",
    "aborts",
    "failures",
    "transfers",
    "restores",
    "tail saves",
    "turns",
    "resets",
    "rejected drafts",
    "rejected in flight",
)
WORLDS_OF_A_SEED = 1_000_000


@dataclass
class Violation:
    """A world that did not end well; `World(configuration, seed).run()` shows it again."""

    seed: int
    message: str
    where: str


@dataclass
class Result:
    """What happened in the worlds of one configuration."""

    configuration: Configuration
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        counts = {name.replace(" ", "_"): self.counts[name] for name in COUNTS}
        return {"configuration": self.configuration.name, **counts, "violations": len(self.violations)}


def run_lives(
    configuration: Configuration,
    num_lives: int,
    seed: int = 0,
    on_world: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Run worlds until `num_lives` requests have lived.

    Args:
        on_world: called after each world.
    """
    result = Result(configuration)
    world_seed = seed * WORLDS_OF_A_SEED
    with _quiet_log():
        while result.counts["lives"] < num_lives:
            _run_world(result, world_seed)
            world_seed += 1
            on_world(result)
    return result


def _run_world(result: Result, seed: int) -> None:
    world = World(result.configuration, seed)
    try:
        world.run(LIVES)
    except Exception as error:  # whatever ends an engine is a finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        result.violations.append(Violation(seed, f"{type(error).__name__}: {error}"[:500], where))
    result.counts += world.counts


@contextmanager
def _quiet_log():
    """A world logs what an engine would: its start, its refusals."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
