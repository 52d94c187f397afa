"""Run the lives of one configuration and count what happened."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
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
    """A world that did not end well; `World(configuration, seed).run()` shows it again.

    NOTE: the order of sets is part of a world: `PYTHONHASHSEED=0` for those that `python -m tests.campaign` runs.
    """

    seed: int
    message: str
    where: str


@dataclass
class Result:
    """Events in the worlds of one configuration."""

    configuration: Configuration
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Events in other worlds."""
        self.counts += other.counts
        self.violations = sorted(self.violations + other.violations, key=lambda violation: violation.seed)

    def row(self) -> dict[str, Any]:
        counts = {name.replace(" ", "_"): self.counts[name] for name in COUNTS}
        return {"configuration": self.configuration.name, **counts, "violations": len(self.violations)}


def world_seeds(num_lives: int, seed: int = 0) -> range:
    """Seeds of as many worlds as `num_lives` requests need, if no world ends early."""
    first = seed * WORLDS_OF_A_SEED
    return range(first, first - (-num_lives // LIVES))


def run_lives(configuration: Configuration, num_lives: int, seed: int = 0) -> Result:
    """Run worlds one after the other."""
    result = Result(configuration)
    for world_seed in world_seeds(num_lives, seed):
        result.add(run_world(configuration, world_seed))
    return result


def run_world(configuration: Configuration, seed: int) -> Result:
    """Run one world; whatever would end an engine is a violation."""
    result = Result(configuration)
    with _quiet_log():
        world = World(configuration, seed)
        try:
            world.run(LIVES)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            result.violations.append(Violation(seed, f"{type(error).__name__}: {error}"[:500], where))
    result.counts += world.counts
    return result


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
