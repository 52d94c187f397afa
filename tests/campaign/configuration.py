"""Configuration of lives: the settings that all worlds of one row of the result share."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
DEVICE_BUFFER_SIZE = 11  # hot tokens of a long sequence, whose hot blocks grow with it
STATE_ENTRIES = ((2, 10), (5, 16))  # an algorithm's state: 5 blocks of the longest sequence
FIXED_BUFFER_SIZE = 5  # where they do not grow; no sequence has fewer


@dataclass(frozen=True)
class Configuration:
    """Options that the worlds of one row share; pool sizes, policy and budget are drawn for each world.

    Attributes:
        name: name in rows of the result.
        role: "kv_both": one instance; "kv_consumer": prompts come from a prefill instance, too.
        is_async: whether two batches are in flight.
        has_resident_group: whether the device keeps KV of every token (indexer keys, layers with full KV).
        is_elastic: whether hot buffers grow with their sequences.
        device_buffer_size: hot tokens of a long sequence.
        max_model_len: tokens of the longest sequence.
        enable_caching: vLLM's prefix caching.
        has_sessions: whether some requests are streaming sessions.
        num_engines: data parallel engines.
        num_ranks: tensor parallel ranks of an engine.
        shares_host_pool: one host pool for all ranks of an engine, or one each.
        sibling_share: share of remote prompts that come with the transfer parameters of another prompt.
        malformed_share: share of remote prompts whose transfer parameters are damaged.
        has_tier: whether there is a tier below the host pool; engines share it.
        lends_blocks: whether there are more device blocks than requests need, at times.
        num_drafts: tokens that are drafted at most for a request's next step, and verified there. With two batches in
            flight, the scheduler schedules placeholders, and learns later which were rejected.
        has_draft_layer: whether a layer with KV of its own on the device drafts them, after a step's forward.
        is_draft_model: whether this layer is a model of its own: vLLM then takes both groups for drafting ones.
        state_entries: tokens and bytes of each entry of an algorithm's state in a layer; empty: it keeps none.
        limits_running: whether requests are held back, by measurements that are drawn.
        tokens_per_unit: tokens that are selected together; above 1, each of two KV heads selects for itself.
        has_narrow_keys: whether the device keeps keys in fewer bits than the host, so that pulls bring them there.
        row_shares: shares of the two layers' hot rows, as in `KVLayout`; empty: both have as many.
    """

    name: str
    role: str = "kv_both"
    is_async: bool = True
    has_resident_group: bool = True
    is_elastic: bool = True
    device_buffer_size: int = DEVICE_BUFFER_SIZE
    max_model_len: int = MAX_MODEL_LEN
    enable_caching: bool = True
    has_sessions: bool = False
    num_engines: int = 1
    num_ranks: int = 2
    shares_host_pool: bool = True
    sibling_share: float = 0.0
    malformed_share: float = 0.0
    has_tier: bool = False
    lends_blocks: bool = False
    num_drafts: int = 0
    has_draft_layer: bool = False
    is_draft_model: bool = False
    state_entries: tuple[tuple[int, int], ...] = ()
    limits_running: bool = False
    tokens_per_unit: int = 1
    has_narrow_keys: bool = False
    row_shares: tuple[tuple[float, int], ...] = ()

    @property
    def has_state(self) -> bool:
        return bool(self.state_entries)

    @property
    def is_pd(self) -> bool:
        return self.role == "kv_consumer"


def _pd(name: str, **options) -> Configuration:
    return Configuration(name, role="kv_consumer", **options)


# An algorithm's state, and pools of KV heads, one per rank
_DENSE = {"has_resident_group": False, "shares_host_pool": False, "state_entries": STATE_ENTRIES}
# Indexers that select blocks for each KV head: keys and full layers on the device, pools of KV heads
_UNITS = {"tokens_per_unit": 2, "shares_host_pool": False, "device_buffer_size": 12}
_FIXED = {"is_elastic": False, "device_buffer_size": FIXED_BUFFER_SIZE}

CONFIGURATIONS = (
    Configuration("one instance"),
    Configuration("one instance, sync", is_async=False),
    Configuration("one instance, no prefix caching", enable_caching=False),
    Configuration("one instance, nothing resident", **_DENSE),
    Configuration("one instance, sessions", has_sessions=True),
    _pd("P/D"),
    _pd("P/D, sync", is_async=False),
    _pd("P/D, no prefix caching", enable_caching=False),
    _pd("P/D, nothing resident", **_DENSE),
    _pd("P/D, sessions", has_sessions=True),
    _pd("P/D, sessions, nothing resident, one rank", has_sessions=True, num_ranks=1, **_FIXED, **_DENSE),
    _pd("spare blocks, P/D, nothing resident", lends_blocks=True, **_DENSE),
    _pd("P/D, several prompts, malformed parameters", sibling_share=0.2, malformed_share=0.2),
    _pd("P/D, data parallel", num_engines=2, sibling_share=0.2),
    _pd("P/D, narrow keys, spare blocks", has_narrow_keys=True, lends_blocks=True, sibling_share=0.2),
    _pd(
        "P/D, narrow keys, sessions, own pools",
        has_narrow_keys=True,
        has_sessions=True,
        shares_host_pool=False,
    ),
    Configuration("spare blocks, sessions", lends_blocks=True, has_sessions=True, state_entries=STATE_ENTRIES),
    _pd("spare blocks, P/D", lends_blocks=True),
    _pd("spare blocks, P/D, rows by layer", lends_blocks=True, row_shares=((1.0, 1), (3.0, 1))),
    Configuration("held back, sessions, tier", limits_running=True, has_sessions=True, has_tier=True),
    _pd("held back, spare blocks, P/D", limits_running=True, lends_blocks=True, sibling_share=0.2),
    Configuration("tier", has_tier=True),
    Configuration("units, sessions, tier", has_sessions=True, has_tier=True, **_UNITS),
    _pd("units, spare blocks, P/D", lends_blocks=True, sibling_share=0.2, **_UNITS),
    Configuration("tier, nothing resident, sessions", has_tier=True, has_sessions=True, **_FIXED, **_DENSE),
    _pd("tier, P/D, data parallel", has_tier=True, num_engines=2),
    Configuration("drafts, sync", is_async=False, num_drafts=3),
    Configuration("drafts, sync, sessions, tier", is_async=False, num_drafts=2, has_sessions=True, has_tier=True),
    _pd("drafts, sync, P/D", is_async=False, num_drafts=3, sibling_share=0.2),
    Configuration("draft layer, sync, sessions", is_async=False, num_drafts=2, has_draft_layer=True, has_sessions=True),
    _pd("draft layer, sync, P/D, tier", is_async=False, num_drafts=3, has_draft_layer=True, has_tier=True),
    Configuration("units, drafts", num_drafts=3, **_UNITS),
    _pd("draft layer, P/D, narrow keys, tier", num_drafts=2, has_draft_layer=True, has_narrow_keys=True, has_tier=True),
    Configuration("drafts", num_drafts=3, state_entries=STATE_ENTRIES),
    Configuration("drafts, sessions, tier", num_drafts=2, has_sessions=True, has_tier=True),
    _pd("drafts, P/D", num_drafts=3, sibling_share=0.2),
    Configuration("draft layer", num_drafts=3, has_draft_layer=True),
    Configuration(
        "draft layer, sessions, spare blocks", num_drafts=2, has_draft_layer=True, has_sessions=True, lends_blocks=True
    ),
    Configuration("draft model, tier", num_drafts=3, has_draft_layer=True, is_draft_model=True, has_tier=True),
    _pd("draft layer, P/D, data parallel, tier", num_drafts=3, has_draft_layer=True, has_tier=True, num_engines=2),
)
