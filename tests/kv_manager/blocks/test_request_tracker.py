"""The tracker alone: what it is told, and what it emits. `test_hot_block_manager.py` tests its part in a schedule."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from campaign.adapter import mla_spec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.blocks.request_tracker import Obstacle, RequestTracker
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.releases import serves
from vllm_hisparse.vllm_patches import drafting_sessions
from vllm_hisparse.vllm_patches.drafting_sessions import DraftingSession

BLOCK_SIZE = 4


class DevicePool:
    """Hands out the blocks that a test asks for."""

    num_gpu_blocks = 1000
    hash_block_size = BLOCK_SIZE

    def __init__(self) -> None:
        self.next_id = 0
        self.blocks = [KVCacheBlock(block_id) for block_id in range(self.num_gpu_blocks)]

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        first, self.next_id = self.next_id, self.next_id + num_blocks
        self.touch(self.blocks[first : self.next_id])
        return self.blocks[first : self.next_id]

    def touch(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_cached_block(self, *_: object) -> None:
        """There is no prefix cache on the device."""


class Tracked:
    """A tracker with what vLLM gives it.

    Attributes:
        hot: request id -> its own hot blocks, in vLLM's table.
        resident: request id -> its blocks of device-resident KV; None: there is none.
    """

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_num_running: int | None = None,
        enable_caching: bool = True,
        is_dense: bool = False,
        max_query_len: int = 1,
        has_draft_layers: bool = False,
    ):
        layout = KVLayout(
            *(24, 20, 2, 0 if is_dense else 2, BLOCK_SIZE),
            num_kv_heads=2 if is_dense else None,
            max_query_len=max_query_len,
            draft_row_bytes=8 * has_draft_layers,
        )
        spec = HotBufferSpec.from_mla_spec(mla_spec(12), layout, 5 if is_dense else 4, elastic=False)
        self.hot: dict[str, list[KVCacheBlock]] = defaultdict(list)
        self.resident: dict[str, list[KVCacheBlock]] | None = None if is_dense else {}
        managers = [SimpleNamespace(req_to_blocks=self.hot), SimpleNamespace(req_to_blocks=self.resident)]
        self.pool, self.host_pool, self.deferred = DevicePool(), HostBlockPool(32, BLOCK_SIZE), Deferred()
        kv_cache_manager = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=managers),
            block_pool=self.pool,
            max_model_len=64,
            watermark_blocks=0,
        )
        groups = SimpleNamespace(
            hot_group_id=0, resident_group_id=None if is_dense else 1, hot_spec=spec, layout=layout
        )
        limits = enable_caching, max_num_seqs, max_num_seqs if max_num_running is None else max_num_running, 64
        self.tracker = RequestTracker(self.host_pool, self.deferred, kv_cache_manager, groups, *limits)
        self.num_hot_blocks = spec.num_blocks(1)

    def arrive(self, request_id: str, num_tokens: int, resumable: bool = False) -> SimpleNamespace:
        """A request with the attributes that the tracker reads."""
        request = SimpleNamespace(
            request_id=request_id,
            num_tokens=num_tokens,
            num_computed_tokens=0,
            block_hashes=[(request_id, index) for index in range(num_tokens // BLOCK_SIZE)],
            resumable=resumable,
            skip_reading_prefix_cache=False,
            status=RequestStatus.RUNNING,
        )
        self.tracker.add(request)
        return request

    def admit(self, request: SimpleNamespace | Request, first_id: int, first_device_id: int = 100) -> None:
        """Give a request hot blocks from `first_id` on, and blocks of device-resident KV."""
        self.pool.next_id = first_id
        self.tracker.give_blocks(request.request_id, request.num_tokens)
        if self.resident is not None:
            num_blocks = -(-request.num_tokens // BLOCK_SIZE) + 4
            self.resident[request.request_id] = self.pool.blocks[first_device_id : first_device_id + num_blocks]

    def hot_ids(self, first_id: int) -> list[int]:
        return list(range(first_id, first_id + self.num_hot_blocks))

    def step(self, *scheduled: tuple[SimpleNamespace | Request, int]) -> HiSparseMetadata:
        """Schedule some tokens of some requests, and compute them."""
        self.tracker.step_starts()
        for request, num_tokens in scheduled:
            self.tracker.set_num_tokens(request.request_id, request.num_computed_tokens + num_tokens)
        metadata = self.tracker.diff({request.request_id: num_tokens for request, num_tokens in scheduled})
        for request, num_tokens in scheduled:
            request.num_computed_tokens += num_tokens
        return metadata


def test_a_prompt_in_chunks() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    host_ids = tracked.host_pool.block_ids("a")
    assert tracked.step((request, 3)) == HiSparseMetadata(
        host_block_tables={7: (0, host_ids)}, hot_block_tables={7: (0, tracked.hot_ids(7))}
    )
    assert tracked.tracker.admitted["a"].unsaved_blocks == {0: 100}
    assert tracked.step((request, 6)) == HiSparseMetadata(saves=[(100, host_ids[0]), (101, host_ids[1])])
    assert tracked.tracker.admitted["a"].unsaved_blocks == {2: 102}
    assert tracked.step((request, 1)) == HiSparseMetadata()


def test_blocks_are_published_in_the_step_that_saves_them() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    for num_tokens, num_published in ((3, 0), (4, 4), (1, 8)):
        tracked.step((request, num_tokens))
        assert tracked.host_pool.cached_prefix(request.block_hashes, 100).num_tokens == num_published


def test_nothing_is_published_without_prefix_caching() -> None:
    tracked = Tracked(enable_caching=False)
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    assert len(tracked.step((request, 10)).saves) == 2
    assert tracked.host_pool.cached_prefix(request.block_hashes, 100).num_tokens == 0


def test_a_match_is_neither_saved_nor_published_again() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    tracked.step((request, 10))
    other = tracked.arrive("b", 12)
    other.block_hashes[:2] = request.block_hashes
    assert tracked.tracker.find_match(other) == HostMatch(tracked.host_pool.block_ids("a")[:2], 8)
    tracked.admit(other, 19, first_device_id=200)
    other.num_computed_tokens = 8
    assert [device_id for device_id, _ in tracked.step((other, 4)).saves] == [202]
    assert tracked.tracker.admitted["b"].num_matched_tokens == 8
    assert tracked.tracker.match("b") == HostMatch(), "a match is used once"


def test_changes_wait_until_their_request_runs() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    tracked.tracker.set_num_tokens("a", 4)
    assert tracked.tracker.diff({}) == HiSparseMetadata()
    assert tracked.tracker.diff({"a": 4}).host_block_tables == {7: (0, tracked.host_pool.block_ids("a"))}


def test_released_requests_are_reported_once_and_only_if_the_worker_knew_them() -> None:
    tracked = Tracked()
    known, unknown = tracked.arrive("known", 10), tracked.arrive("unknown", 10)
    tracked.admit(known, 7)
    tracked.admit(unknown, 19)
    tracked.step((known, 10))
    for request in (known, unknown):
        tracked.tracker.remove(request)
        tracked.tracker.release(request.request_id, 0)
    assert tracked.tracker.release("known", 0) == []
    assert tracked.tracker.diff({}) == HiSparseMetadata(released=[7])
    assert tracked.tracker.diff({}) == HiSparseMetadata()
    assert tracked.host_pool.num_used == 0


def test_host_blocks_are_kept_until_the_steps_that_write_them_are_over() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    tracked.step((request, 10))
    for _ in range(2):
        tracked.deferred.step_scheduled()
    tracked.tracker.remove(request)
    tracked.tracker.release("a", last_step=2)
    for num_used in (3, 0):
        tracked.deferred.step_processed()
        assert tracked.host_pool.num_used == num_used


def test_unsaved_blocks_of_a_preempted_request_are_saved_once_and_kept_meanwhile() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    tracked.step((request, 10))
    tracked.deferred.step_scheduled()
    tracked.deferred.step_processed()
    host_ids = list(tracked.host_pool.block_ids("a"))
    tracked.tracker.step_starts()
    tracked.tracker.release("a", last_step=1)
    metadata = tracked.tracker.diff({})
    assert metadata.preemption_saves == [(102, host_ids[2])] and metadata.waits_for_preemption_saves
    assert tracked.tracker.diff({}) == HiSparseMetadata()
    tracked.deferred.step_scheduled()
    assert tracked.pool.blocks[102].ref_cnt == 1 and tracked.host_pool.num_used == 1
    tracked.deferred.step_processed()
    assert tracked.pool.blocks[102].ref_cnt == 0 and tracked.host_pool.num_used == 0
    assert tracked.host_pool.retained_prefix("a", 100).num_tokens == 10


@pytest.mark.parametrize("waits_first", [True, False])
def test_idle_requests_make_room_and_those_that_are_not_running_go_first(waits_first: bool) -> None:
    tracked = Tracked(max_num_seqs=2)
    requests = [tracked.arrive(name, 10) for name in "abc"]
    for index, request in enumerate(requests):
        tracked.admit(request, 10 * index)
    tracked.step((requests[0], 1), (requests[1], 1))
    session = requests[0 if waits_first else 1]
    session.status = RequestStatus.WAITING
    assert tracked.step((requests[2], 1)).released == [0 if waits_first else 10]
    table, first_id = tracked.host_pool.block_ids(session.request_id), 0 if waits_first else 10
    again = tracked.step((session, 1))
    assert again.host_block_tables == {first_id: (0, table)} and again.hot_block_tables == {
        first_id: (0, tracked.hot_ids(first_id))
    }
    assert len(again.released) == 1


def test_first_decodes_of_dense_models() -> None:
    """A request begins to decode after every step that was not one token, and again after a preemption."""
    tracked = Tracked(is_dense=True)
    request = tracked.arrive("a", 20)
    tracked.admit(request, 7)
    first_decodes = [tracked.step((request, num_tokens)).first_decodes for num_tokens in (5, 1, 1, 3, 1)]
    assert first_decodes == [[], [(7, 5)], [], [], [(7, 10)]]
    tracked.tracker.release("a", 0)
    tracked.hot.pop("a")
    tracked.admit(request, 19)
    assert tracked.step((request, 1)).first_decodes == [(19, 11)]


@pytest.mark.parametrize("max_query_len", [1, 4])
@pytest.mark.parametrize("is_dense", [False, True])
def test_prefills_of_dense_models_are_named(is_dense: bool, max_query_len: int) -> None:
    """Prefills are listed with their positions; steps that decode are not listed."""
    tracked = Tracked(is_dense=is_dense, max_query_len=max_query_len)
    first, second = tracked.arrive("a", 20), tracked.arrive("b", 20)
    tracked.admit(first, 7)
    tracked.admit(second, 19)
    prefills = [
        tracked.step((first, num_first), (second, num_second)).prefills
        for num_first, num_second in ((5, 6), (7, max_query_len), (1, 1))
    ]
    assert prefills == ([[(7, 0, 5), (19, 0, 6)], [(7, 5, 12)], []] if is_dense else [[], [], []])


def test_a_step_with_drafts_decodes() -> None:
    tracked = Tracked(is_dense=True, max_query_len=4)
    request = tracked.arrive("a", 20)
    tracked.admit(request, 7)
    first_decodes = [tracked.step((request, num_tokens)).first_decodes for num_tokens in (5, 4, 1, 5, 2)]
    assert first_decodes == [[], [(7, 5)], [], [], [(7, 15)]]


def test_a_request_that_lost_its_place_on_the_worker_begins_to_decode_again() -> None:
    tracked = Tracked(is_dense=True, max_num_seqs=1)
    session, other = tracked.arrive("session", 10), tracked.arrive("other", 10)
    tracked.admit(session, 7)
    tracked.admit(other, 19)
    tracked.step((session, 6))
    assert tracked.step((session, 1)).first_decodes == [(7, 6)]
    tracked.step((other, 6))
    assert tracked.step((session, 1)).first_decodes == [(7, 7)]


def test_nothing_is_left_of_a_request() -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10, resumable=True)
    assert tracked.tracker.sessions == {"a"}
    assert tracked.tracker.find_match(request) == HostMatch()
    tracked.tracker.set_obstacle("a", Obstacle.HOST_POOL_FULL)
    tracked.admit(request, 7)
    tracked.tracker.set_num_tokens("a", 3)
    tracked.tracker.check_integrity()
    tracked.tracker.pull_begins("a", "prefill")
    admitted = {"admitted", "were admitted", "changed", "pulls"}
    assert tracked.tracker.leftovers().keys() == {"requests", "sessions", "obstacles"} | admitted
    tracked.tracker.remove(request)
    tracked.tracker.release("a", 0)
    assert tracked.tracker.leftovers() == {}


@pytest.mark.parametrize("damage", ["shared", "twice", "other first", "only host", "only device"])
def test_check_integrity_finds(damage: str) -> None:
    tracked = Tracked()
    request = tracked.arrive("a", 10)
    tracked.admit(request, 7)
    tracked.tracker.check_integrity()
    admitted, own = tracked.tracker.admitted["a"], tracked.hot["a"]
    if damage == "shared":
        own[1].ref_cnt += 1
    elif damage == "twice":
        admitted.lent.append(own[1])
    elif damage == "other first":
        admitted.first_hot_block_id = 8
    elif damage == "only host":
        tracked.hot.pop("a")
    else:
        tracked.host_pool.free("a")
    with pytest.raises(AssertionError):
        tracked.tracker.check_integrity()


def test_drafts_are_saved_once_they_are_accepted() -> None:
    tracked = Tracked(max_query_len=2)
    request = tracked.arrive("a", 6)
    tracked.admit(request, 7)
    host_ids, admitted = tracked.host_pool.block_ids("a"), tracked.tracker.admitted["a"]
    assert tracked.step((request, 6)).saves == [(100, host_ids[0])]
    assert admitted.unsaved_blocks == {1: 101}

    def verify(num_drafts: int, num_accepted: int) -> HiSparseMetadata:
        """The newest token and drafts; those accepted and one more are then known."""
        request.num_tokens = request.num_computed_tokens + 1
        metadata = tracked.step((request, 1 + num_drafts))
        request.num_computed_tokens -= num_drafts - num_accepted
        return metadata

    assert verify(num_drafts=3, num_accepted=0).saves == [], "position 7 was drafted"
    assert admitted.unsaved_blocks == {1: 101, 2: 102}
    assert request.num_computed_tokens == 7
    metadata = verify(num_drafts=1, num_accepted=1)
    assert [device_id for device_id, _ in metadata.saves] == [101], "position 7 is known now"
    assert admitted.unsaved_blocks == {2: 102}
    assert verify(num_drafts=0, num_accepted=0).saves == []
    assert admitted.num_saved_blocks == 2


def test_a_turn_that_ends_at_a_draft_has_computed_no_more_than_it_keeps() -> None:
    tracked = Tracked(max_query_len=2)
    session = Request("a", [1, 2, 3, 4], SamplingParams(max_tokens=1), None, resumable=True)
    tracked.tracker.add(session)
    assert isinstance(session, DraftingSession) == serves(drafting_sessions.RELEASES)
    session.__class__ = DraftingSession
    session.status, session.num_computed_tokens = RequestStatus.RUNNING, 7
    assert session.num_computed_tokens == 7, "three drafts are being verified"
    session.append_output_token_ids(5)
    session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    assert session.num_computed_tokens == 4, "the last token is discarded, and the drafts with it"
    session.num_computed_tokens, session.num_output_placeholders = 10, 3
    assert session.num_computed_tokens - session.num_output_placeholders == 4, "vLLM takes a step in flight off itself"


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_turn_that_begins_before_a_step_in_flight_starts_anew_on_the_worker(is_dense: bool) -> None:
    """The step in flight treated dropped drafts as accepted: what it left hot, and in an algorithm's state, is of other
    tokens."""
    tracked = Tracked(is_dense=is_dense, max_query_len=3)
    session = Request("s", list(range(8)), SamplingParams(max_tokens=12), None, resumable=True)
    session.num_output_placeholders = 0
    tracked.tracker.add(session)
    session.status = RequestStatus.RUNNING
    tracked.admit(session, 7)
    tracked.host_pool.grow("s", 24)
    tracked.step((session, 8))
    for num_computed, is_behind in ((8, False), (11, False), (9, True), (12, False), (12, False)):
        session.num_computed_tokens = num_computed
        metadata = tracked.step((session, 3))
        assert metadata.released == ([7] if is_behind else [])
        assert metadata.host_block_tables.get(7, (-1,))[0] == (0 if is_behind else -1)
        if is_behind:
            assert metadata.hot_block_tables == {7: (0, tracked.hot_ids(7))}
            assert metadata.first_decodes == ([(7, 9)] if is_dense else [])


def test_a_block_is_saved_when_the_draft_layer_has_written_it() -> None:
    """The draft layer writes a step's rows after the forward, when the step's saves have been enqueued."""
    tracked = Tracked(max_query_len=2, has_draft_layers=True)
    request = tracked.arrive("a", 6)
    tracked.admit(request, 7)
    host_ids = tracked.host_pool.block_ids("a")
    assert tracked.step((request, 6)).saves == []
    assert tracked.tracker.admitted["a"].unsaved_blocks == {0: 100, 1: 101}
    request.num_tokens = 7
    assert tracked.step((request, 1)).saves == [(100, host_ids[0])]
    assert tracked.tracker.admitted["a"].unsaved_blocks == {1: 101}
