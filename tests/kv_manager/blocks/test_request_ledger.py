"""The ledger alone: what it is told, and what it emits. `test_hot_block_manager.py` tests its part in a schedule."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.blocks.hot_tables import HotTables
from vllm_hisparse.kv_manager.blocks.request_ledger import Obstacle, RequestChanges, RequestLedger
from vllm_hisparse.releases import serves
from vllm_hisparse.vllm_patches import drafting_sessions
from vllm_hisparse.vllm_patches.drafting_sessions import DraftingSession

BLOCK_SIZE = 4


def nothing(_: str) -> list:
    """State blocks of a request."""
    return []


def make_ledger(
    max_num_running: int = 8, enable_caching: bool = True, is_dense: bool = False, **options: int
) -> RequestLedger:
    pool = HostBlockPool(32, BLOCK_SIZE)
    ledger = RequestLedger(pool, max_num_running, enable_caching, tracks_decodes=is_dense, **options)
    hot_tables = HotTables(lambda name: [SimpleNamespace(block_id=ledger.admitted[name].handle)], nothing)
    ledger.bind(None if is_dense else {}, hot_tables)
    return ledger


def arrive(ledger: RequestLedger, request_id: str, num_tokens: int, resumable: bool = False) -> SimpleNamespace:
    """A request, of which the ledger reads these."""
    request = SimpleNamespace(
        request_id=request_id,
        num_tokens=num_tokens,
        num_computed_tokens=0,
        block_hashes=[(request_id, index) for index in range(num_tokens // BLOCK_SIZE)],
        resumable=resumable,
        skip_reading_prefix_cache=False,
        status=RequestStatus.RUNNING,
    )
    ledger.add(request)
    return request


def admit(ledger: RequestLedger, request: SimpleNamespace, handle: int, first_device_id: int = 100) -> None:
    """Calls of the manager."""
    name, num_tokens = request.request_id, request.num_tokens
    ledger.host_pool.allocate(name, num_tokens, ledger.match(name))
    ledger.admit(name, handle)
    if ledger._device_blocks is not None:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        ledger._device_blocks[name] = [SimpleNamespace(block_id=first_device_id + i) for i in range(num_blocks)]


def step(ledger: RequestLedger, *scheduled: tuple[SimpleNamespace, int]) -> RequestChanges:
    """Schedule some tokens of some requests, and compute them."""
    for request, num_tokens in scheduled:
        ledger.give_room(request.request_id, request.num_computed_tokens + num_tokens)
    changes = ledger.take_changes({request.request_id: num_tokens for request, num_tokens in scheduled})
    for request, num_tokens in scheduled:
        request.num_computed_tokens += num_tokens
    return changes


def test_a_prompt_in_chunks() -> None:
    ledger = make_ledger()
    request = arrive(ledger, "a", 10)
    admit(ledger, request, handle=7)
    host_ids = ledger.host_pool.block_ids("a")
    assert step(ledger, (request, 3)) == RequestChanges(
        started=[(7, "a")], tables={7: (0, host_ids)}, hot_tables={7: (0, [7])}
    )
    assert ledger.admitted["a"].unsaved_blocks == {0: 100}
    assert step(ledger, (request, 6)) == RequestChanges(saves=[(100, host_ids[0]), (101, host_ids[1])])
    assert ledger.admitted["a"].unsaved_blocks == {2: 102}
    assert step(ledger, (request, 1)) == RequestChanges()


def test_hot_blocks_travel_of_requests_that_the_worker_knows() -> None:
    """Also if they do not run; the whole table of one that it forgot."""
    ledger, blocks = make_ledger(), {"a": [7, 8], "b": [9]}
    ledger.bind({}, HotTables(lambda name: [SimpleNamespace(block_id=block_id) for block_id in blocks[name]], nothing))
    first, second = arrive(ledger, "a", 10), arrive(ledger, "b", 10)
    admit(ledger, first, handle=7)
    admit(ledger, second, handle=9)
    assert step(ledger, (first, 3)).hot_tables == {7: (0, [7, 8])}
    for name, change in (("a", [7, 8, 5, 6]), ("b", [9, 10])):
        blocks[name] = change
        ledger.hot_tables.change(name)
    assert ledger.take_changes({}).hot_tables == {7: (2, [5, 6])}
    assert step(ledger, (second, 3)).hot_tables == {9: (0, [9, 10])}
    ledger._drop_state("a")
    assert step(ledger, (first, 1)).hot_tables == {7: (0, [7, 8, 5, 6])}


def test_hot_blocks_do_not_travel_of_a_request_that_the_worker_forgets_in_this_step() -> None:
    ledger, blocks = make_ledger(max_num_running=1), {"a": [7, 8], "b": [9]}
    ledger.bind({}, HotTables(lambda name: [SimpleNamespace(block_id=block_id) for block_id in blocks[name]], nothing))
    first, second = arrive(ledger, "a", 10), arrive(ledger, "b", 10)
    admit(ledger, first, handle=7)
    step(ledger, (first, 3))
    admit(ledger, second, handle=9)
    blocks["a"] = [7]
    ledger.hot_tables.change("a")
    changes = step(ledger, (second, 3))
    assert (changes.released, changes.hot_tables) == ([7], {9: (0, [9])})
    assert step(ledger, (first, 1)).hot_tables == {7: (0, [7])}


def test_blocks_are_published_in_the_step_that_saves_them() -> None:
    ledger = make_ledger()
    request = arrive(ledger, "a", 10)
    admit(ledger, request, handle=7)
    for num_tokens, num_published in ((3, 0), (4, 4), (1, 8)):
        step(ledger, (request, num_tokens))
        assert ledger.host_pool.cached_prefix(request.block_hashes, 100).num_tokens == num_published


def test_nothing_is_published_without_prefix_caching() -> None:
    ledger = make_ledger(enable_caching=False)
    request = arrive(ledger, "a", 10)
    admit(ledger, request, handle=7)
    assert len(step(ledger, (request, 10)).saves) == 2
    assert ledger.host_pool.cached_prefix(request.block_hashes, 100).num_tokens == 0


def test_a_match_is_neither_saved_nor_published_again() -> None:
    ledger = make_ledger()
    request = arrive(ledger, "a", 10)
    admit(ledger, request, handle=7)
    step(ledger, (request, 10))
    other = arrive(ledger, "b", 12)
    other.block_hashes[:2] = request.block_hashes
    assert ledger.find_match(other) == HostMatch(ledger.host_pool.block_ids("a")[:2], 8)
    admit(ledger, other, handle=9, first_device_id=200)
    other.num_computed_tokens = 8
    assert [device_id for device_id, _ in step(ledger, (other, 4)).saves] == [202]
    assert ledger.admitted["b"].num_matched_tokens == 8
    assert ledger.match("b") == HostMatch(), "a match is used once"


def test_changes_wait_until_their_request_runs() -> None:
    ledger = make_ledger()
    request = arrive(ledger, "a", 10)
    admit(ledger, request, handle=7)
    ledger.give_room("a", 4)
    assert ledger.take_changes({}) == RequestChanges()
    assert ledger.take_changes({"a": 4}).started == [(7, "a")]


def test_released_requests_are_reported_once_and_only_if_the_worker_knew_them() -> None:
    ledger = make_ledger()
    known, unknown = arrive(ledger, "known", 10), arrive(ledger, "unknown", 10)
    admit(ledger, known, handle=7)
    admit(ledger, unknown, handle=9)
    step(ledger, (known, 10))
    for request in (known, unknown):
        ledger.remove(request)
        assert ledger.release(request.request_id) is not None
    assert ledger.release("known") is None
    assert ledger.take_changes({}) == RequestChanges(released=[7])
    assert ledger.take_changes({}) == RequestChanges()


def test_tail_saves_are_reported_once() -> None:
    ledger = make_ledger()
    ledger.save_tail(5, 6)
    assert ledger.take_changes({}) == RequestChanges(tail_saves=[(5, 6)])
    assert ledger.take_changes({}) == RequestChanges()


@pytest.mark.parametrize("waits_first", [True, False])
def test_idle_requests_make_room_and_those_that_are_not_running_go_first(waits_first: bool) -> None:
    ledger = make_ledger(max_num_running=2)
    requests = [arrive(ledger, name, 10) for name in "abc"]
    for index, request in enumerate(requests):
        admit(ledger, request, handle=10 * index)
    step(ledger, (requests[0], 1), (requests[1], 1))
    session = requests[0 if waits_first else 1]
    session.status = RequestStatus.WAITING
    assert step(ledger, (requests[2], 1)).released == [0 if waits_first else 10]
    table = ledger.host_pool.block_ids(session.request_id)
    again = step(ledger, (session, 1))
    assert again.tables == {ledger.admitted[session.request_id].handle: (0, table)}
    assert len(again.started) == len(again.released) == 1


def test_first_decodes_of_dense_models() -> None:
    """A request begins to decode after every step that was not one token, and again after a preemption."""
    ledger = make_ledger(is_dense=True)
    request = arrive(ledger, "a", 20)
    admit(ledger, request, handle=7)
    first_decodes = [step(ledger, (request, num_tokens)).first_decodes for num_tokens in (5, 1, 1, 3, 1)]
    assert first_decodes == [[], [(7, 5)], [], [], [(7, 10)]]
    ledger.release("a")
    ledger.host_pool.free("a")
    admit(ledger, request, handle=9)
    assert step(ledger, (request, 1)).first_decodes == [(9, 11)]


@pytest.mark.parametrize("max_query_len", [1, 4])
@pytest.mark.parametrize("is_dense", [False, True])
def test_prefills_of_dense_models_are_named(is_dense: bool, max_query_len: int) -> None:
    """With their positions; steps that decode are none."""
    ledger = make_ledger(is_dense=is_dense, max_query_len=max_query_len)
    first, second = arrive(ledger, "a", 20), arrive(ledger, "b", 20)
    admit(ledger, first, handle=7)
    admit(ledger, second, handle=9)
    prefills = [
        step(ledger, (first, num_first), (second, num_second)).prefills
        for num_first, num_second in ((5, 6), (7, max_query_len), (1, 1))
    ]
    assert prefills == ([[(7, 0, 5), (9, 0, 6)], [(7, 5, 12)], []] if is_dense else [[], [], []])


def test_a_step_with_drafts_decodes() -> None:
    ledger = make_ledger(is_dense=True, max_query_len=4)
    request = arrive(ledger, "a", 20)
    admit(ledger, request, handle=7)
    first_decodes = [step(ledger, (request, num_tokens)).first_decodes for num_tokens in (5, 4, 1, 5, 2)]
    assert first_decodes == [[], [(7, 5)], [], [], [(7, 15)]]


def test_a_request_that_lost_its_place_on_the_worker_begins_to_decode_again() -> None:
    ledger = make_ledger(is_dense=True, max_num_running=1)
    session, other = arrive(ledger, "session", 10, resumable=True), arrive(ledger, "other", 10)
    admit(ledger, session, handle=7)
    admit(ledger, other, handle=9)
    step(ledger, (session, 6))
    assert step(ledger, (session, 1)).first_decodes == [(7, 6)]
    step(ledger, (other, 6))
    assert step(ledger, (session, 1)).first_decodes == [(7, 7)]


def test_nothing_is_left_of_a_request() -> None:
    ledger = make_ledger()
    request = arrive(ledger, "a", 10, resumable=True)
    assert ledger.sessions == {"a"}
    assert ledger.find_match(request) == HostMatch()
    ledger.set_obstacle("a", Obstacle.HOST_POOL_FULL)
    admit(ledger, request, handle=7)
    ledger.give_room("a", 3)
    ledger.remove(request)
    ledger.release("a")
    for leftover in (ledger.requests, ledger.sessions, ledger.admitted, ledger.obstacles):
        assert not leftover
    assert not ledger._matches and not ledger._changed and not ledger._released


def test_drafts_are_saved_once_they_are_accepted() -> None:
    ledger = make_ledger(max_query_len=2)
    request = arrive(ledger, "a", 6)
    admit(ledger, request, handle=7)
    host_ids = ledger.host_pool.block_ids("a")
    ledger._device_blocks["a"] += [SimpleNamespace(block_id=102)]
    assert step(ledger, (request, 6)).saves == [(100, host_ids[0])]
    assert ledger.admitted["a"].unsaved_blocks == {1: 101}

    def verify(num_drafts: int, num_accepted: int) -> RequestChanges:
        """The newest token and drafts; those accepted and one more are then known."""
        request.num_tokens = request.num_computed_tokens + 1
        ledger.host_pool.grow("a", request.num_tokens + num_drafts)
        changes = step(ledger, (request, 1 + num_drafts))
        request.num_computed_tokens -= num_drafts - num_accepted
        return changes

    assert verify(num_drafts=3, num_accepted=0).saves == [], "position 7 was drafted"
    assert ledger.admitted["a"].unsaved_blocks == {1: 101, 2: 102}
    assert request.num_computed_tokens == 7
    changes = verify(num_drafts=1, num_accepted=1)
    assert [device_id for device_id, _ in changes.saves] == [101], "position 7 is known now"
    assert ledger.admitted["a"].unsaved_blocks == {2: 102}
    assert verify(num_drafts=0, num_accepted=0).saves == []
    assert ledger.admitted["a"].num_saved_blocks == 2


def test_a_turn_that_ends_at_a_draft_has_computed_no_more_than_it_keeps() -> None:
    ledger = make_ledger(max_query_len=2)
    session = Request("a", [1, 2, 3, 4], SamplingParams(max_tokens=1), None, resumable=True)
    ledger.add(session)
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
    ledger = make_ledger(is_dense=is_dense, max_query_len=3)
    session = Request("s", list(range(8)), SamplingParams(max_tokens=12), None, resumable=True)
    session.num_output_placeholders = 0
    ledger.add(session)
    session.status = RequestStatus.RUNNING
    admit(ledger, session, handle=7)
    ledger.host_pool.grow("s", 24)
    if not is_dense:
        ledger._device_blocks["s"] = [SimpleNamespace(block_id=100 + i) for i in range(6)]
    step(ledger, (session, 8))
    for num_computed, is_behind in ((8, False), (11, False), (9, True), (12, False), (12, False)):
        session.num_computed_tokens = num_computed
        changes = step(ledger, (session, 3))
        assert changes.released == ([7] if is_behind else [])
        assert changes.tables.get(7, (-1,))[0] == (0 if is_behind else -1)
        if is_behind:
            assert (changes.started, changes.hot_tables) == ([(7, "s")], {7: (0, [7])})
            assert changes.first_decodes == ([(7, 9)] if is_dense else [])


def test_a_block_is_saved_when_the_draft_layer_has_written_it() -> None:
    """It writes the rows of a step's tokens after the forward, when the step's saves have been enqueued."""
    ledger = make_ledger(max_query_len=2, has_draft_layers=True)
    request = arrive(ledger, "a", 6)
    admit(ledger, request, handle=7)
    host_ids = ledger.host_pool.block_ids("a")
    assert step(ledger, (request, 6)).saves == []
    assert ledger.admitted["a"].unsaved_blocks == {0: 100, 1: 101}
    request.num_tokens = 7
    assert step(ledger, (request, 1)).saves == [(100, host_ids[0])]
    assert ledger.admitted["a"].unsaved_blocks == {1: 101}
