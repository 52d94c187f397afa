"""The campaign notices planted damage."""

from collections.abc import Callable

import pytest

from vllm_hisparse.releases import serves
from vllm_hisparse.vllm_patches import drafting_sessions

from . import damage
from .configuration import CONFIGURATIONS
from .lives import run_lives, run_world, world_seeds

pytestmark = pytest.mark.long
LIVES = 6000  # at most, until the damage is found: one world in eight shows some kinds
LIVES_WITHOUT = 400  # of each configuration that cannot show the damage
BY_NAME = {configuration.name: configuration for configuration in CONFIGURATIONS}


@pytest.mark.parametrize(
    ("plant", "name", "message"),
    [
        (damage.no_deferral, "P/D", "host row"),
        (damage.early_publishing, "one instance", "host row"),
        (damage.no_news_of_taken_blocks, "spare blocks, sessions", "holds"),
        (damage.no_news_of_divisions, "spare blocks, P/D, rows by layer", "hot blocks"),
        (damage.no_preemption_save, "one instance", "indexer key"),
        (damage.another_transfer, "P/D, no prefix caching", "host row"),
        (damage.unclaimed_transfer, "P/D, data parallel", "host row"),
        (damage.long_sessions, "one instance, sessions", "Error"),
        (damage.ranks_apart, "one instance, sessions", "host row"),
        (damage.idle_state, "P/D, sessions, nothing resident, one rank", "there is room for"),
        (damage.damaged_blocks, "tier", "host row"),
        (damage.early_stores, "tier", "host row"),
        (damage.early_peers, "tier", "host row"),
        (damage.reused_blocks, "tier, nothing resident, sessions", "host row"),
        (damage.certain_drafts, "drafts, sync", "indexer key"),
        (damage.one_unsaved_block, "drafts, sync, P/D", "indexer key"),
        (damage.undrafted_saves, "draft layer, sync, sessions", "draft layer's row"),
        (damage.accepted_in_flight, "drafts", "indexer key"),
        (damage.accepted_in_flight, "draft layer", "draft layer's row"),
        pytest.param(
            *(damage.forgotten_placeholders, "draft layer, sessions, spare blocks", "host row"),
            marks=pytest.mark.skipif(not serves(drafting_sessions.RELEASES), reason="vLLM has no such defect"),
        ),
    ],
)
def test_damage_is_found(monkeypatch: pytest.MonkeyPatch, plant: Callable, name: str, message: str) -> None:
    plant(monkeypatch)
    worlds = (run_world(BY_NAME[name], seed) for seed in world_seeds(LIVES))
    assert any(message in violation.message for world in worlds for violation in world.violations)


@pytest.mark.parametrize("plant", [damage.accepted_in_flight, damage.forgotten_placeholders])
def test_only_drafts_in_flight_find_it(monkeypatch: pytest.MonkeyPatch, plant: Callable) -> None:
    plant(monkeypatch)
    for name in ("drafts, sync, sessions, tier", "draft layer, sync, sessions", "one instance, sessions"):
        assert not run_lives(BY_NAME[name], LIVES_WITHOUT).violations
