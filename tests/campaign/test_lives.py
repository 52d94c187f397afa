"""A part of the campaign: `python -m tests.campaign` runs more of it."""

import pytest

from .configuration import CONFIGURATIONS, Configuration
from .lives import run_lives
from .world import World

LIVES = 600


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_lives(configuration: Configuration) -> None:
    result = run_lives(configuration, LIVES)
    assert not result.violations
    happened = result.counts
    assert happened["preemptions"] > 30 and happened["aborts"] > 90 and happened["resets"] > 15
    assert bool(happened["restores"]) == bool(happened["tail saves"]) == configuration.has_resident_group
    assert not configuration.is_pd or happened["failures"] > 8
    assert not configuration.has_sessions or happened["turns"] > 90
    assert (happened["held back"] > 100) == configuration.limits_running
    assert bool(happened["loads"]) == bool(happened["stores"]) == configuration.has_tier
    assert not configuration.num_drafts or happened["rejected drafts"] > 300
    has_drafts_in_flight = bool(configuration.num_drafts and configuration.is_async)
    assert (happened["rejected in flight"] > 150) == has_drafts_in_flight == bool(happened["rejected in flight"])


def test_a_seed_names_a_world() -> None:
    def counts(seed: int) -> dict[str, int]:
        world = World(CONFIGURATIONS[0], seed)
        world.run()
        return world.counts

    assert counts(3) == counts(3) != counts(4)
