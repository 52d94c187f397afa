"""A part of the campaign: `python -m tests.campaign` runs more of it."""

from collections import Counter

import pytest

from .configuration import CONFIGURATIONS, Configuration
from .lives import run_lives
from .world import World

pytestmark = pytest.mark.long
LIVES = 240
MOST_ROUNDS = 5  # of lives, until a rare event has happened: 240 lives have two to ten


# Other seeds in the slow tests, because these run beside the others.
@pytest.mark.parametrize(("num_lives", "seed"), [(LIVES, 0), pytest.param(360, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_lives(configuration: Configuration, num_lives: int, seed: int) -> None:
    result, num_rounds = run_lives(configuration, num_lives, seed), 1
    while configuration.has_resident_group and not result.counts["tail saves"] and num_rounds < MOST_ROUNDS:
        result.add(run_lives(configuration, num_lives, seed + 10 * num_rounds))
        num_rounds += 1
    assert not result.violations
    num_lives *= num_rounds
    happened = Counter({name: number * LIVES / num_lives for name, number in result.counts.items()})
    assert happened["preemptions"] > 5 and happened["aborts"] > 30 and happened["resets"] > 3
    assert bool(happened["restores"]) == bool(happened["tail saves"]) == configuration.has_resident_group
    assert not configuration.is_pd or happened["failures"] > 2
    assert not configuration.has_sessions or happened["turns"] > 30
    assert (happened["held back"] > 5) == configuration.limits_running
    assert bool(happened["loads"]) == bool(happened["stores"]) == configuration.has_tier
    assert not configuration.num_drafts or happened["rejected drafts"] > 100
    has_drafts_in_flight = bool(configuration.num_drafts and configuration.is_async)
    assert (happened["rejected in flight"] > 40) == has_drafts_in_flight == bool(happened["rejected in flight"])


def test_a_seed_names_a_world() -> None:
    def counts(seed: int) -> dict[str, int]:
        world = World(CONFIGURATIONS[0], seed)
        world.run()
        return world.counts

    assert counts(3) == counts(3) != counts(4)
