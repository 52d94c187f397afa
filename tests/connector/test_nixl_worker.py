"""A rank uses no KV whose lease may be over, and survives what vLLM's NIXL code refuses; e2e tests pull."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from campaign.configuration import BLOCK_SIZE
from campaign.script import make_request
from test_leases import Clock, PrefillWorker
from test_nixl_scheduler import PROMPT, Engine, Worker, transfer
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker, pull_scheduler, pull_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vllm_hisparse.compat import nixl as compat_nixl
from vllm_hisparse.compat.nixl import PullHooks
from vllm_hisparse.connector import leases, nixl_scheduler, nixl_worker
from vllm_hisparse.connector.leases import Leases
from vllm_hisparse.connector.metadata import HiSparseWorkerMetadata
from vllm_hisparse.connector.nixl_worker import PullWorker
from vllm_hisparse.vllm_patches.unstated_leases import state_leases

CLOCK_OFFSET = 5000.0  # the prefill instance's clock is ahead
REQUEST, REMOTE = "cmpl-d-0-11111111", "cmpl-p-0-00000000"


class Nixl:
    """NIXL as a worker sees it: a read is done when the test says so, a message arrives or cannot be sent."""

    def __init__(self) -> None:
        self.state, self.messages, self.is_broken = "DONE", [], False

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("no connection")
        self.messages.append(notif_msg)

    def check_xfer_state(self, handle: int) -> str:
        return self.state

    def get_new_notifs(self) -> dict:
        return {}

    def get_xfer_telemetry(self, handle: int) -> None:
        """Return nothing: no test reads it."""

    def release_xfer_handle(self, handle: int) -> None:
        """Do nothing: the handle is gone."""

    def check_remote_metadata(self, agent_name: str) -> bool:
        return True


class Rank(PullWorker):
    """The only rank of a decode instance, connected to the prefill instance unless it is to begin with a handshake."""

    def __init__(self, is_connected: bool = True):
        Worker.__init__(self)
        self.nixl_wrapper = Nixl()
        self._install_hooks()
        self.leases = Leases()
        self._tokens_per_block, self._num_kv_heads, self._leases, self._expired = BLOCK_SIZE, 1, self.leases, set()
        self._only_rank_0_pulls, self._begun, self._pull_seconds, self._new = False, {}, {}, set()
        self._remote_agents = {"prefill": {(0, 0): "agent"}} if is_connected else {}
        self._engine_clock_offset, self._engine_last_active = {"prefill": CLOCK_OFFSET}, {}
        self._engine_ttl = 0
        self._replicated_pcp_done_sending, self._pending_recv_notifs, self.tp_rank = set(), {}, 0
        self._physical_blocks_per_logical_kv_block, self._group_spec_types, self.dcp_size = 1, (), 1
        self._failed_remote_engines, self._invalid_engine_backoff = set(), {}
        self._engine_by_address = {("127.0.0.1", 1): "prefill"}
        self.consumer_notification_counts_by_req, self.expected_consumer_notifications_by_req = {}, {}
        self.use_host_buffer = self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = False
        self._is_hma_required, self.use_mla, self._has_mamba, self._bidirectional_kv_xfer_enabled = (
            True,
            True,
            False,
            False,
        )
        self.xfer_stats = SimpleNamespace(
            record_transfer=lambda _: None, record_failed_handshake=lambda: None, record_failed_transfer=lambda: None
        )
        remote = SimpleNamespace(remote_block_size=BLOCK_SIZE, remote_physical_blocks_per_logical=1)
        self.transfer_topo = SimpleNamespace(get_engine_info=lambda _: remote, block_size_ratio=lambda _: 1)
        self.failures: list[BaseException] = []

    def _log_failure(self, error: BaseException | None = None, **_: Any) -> None:
        self.failures.append(error)


class Decode:
    """A decode instance: vLLM's scheduler, our halves, and vLLM's worker without its reads."""

    def __init__(self, engine: Engine, clock: Clock, warnings: list[str]):
        self.engine, self.clock, self.warnings, self.rank = engine, clock, warnings, Rank()
        self.prefill = PrefillWorker(30, clock.now)
        self.posted: list[str] = []
        self.counters: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def step(self) -> dict[str, int]:
        """One step a second; returns the tokens that it computes of each request."""
        output = self.engine.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.rank.begin_pulls(metadata.transport, metadata.leases)
        self.rank.start_load_kv(metadata.transport)
        for _ in range(len(self.rank.nixl_wrapper.messages)):
            if self.rank.nixl_wrapper.messages.pop().startswith(b"HB:"):
                self.prefill.heartbeat()
        self.rank.give_up(output.finished_req_ids)
        results = self.rank.get_transfer_results()
        seconds = self.rank.take_pull_seconds()
        self.seconds |= seconds
        reported = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=HiSparseWorkerMetadata([], self.rank.take_expired(), seconds),
        )
        self.engine.update(output, reported)
        self.clock.now += 1
        return output.num_scheduled_tokens

    def assert_computed_here(self) -> None:
        """The prompt is computed as a whole, whatever the policy, and what was read of it is not found by others."""
        for _ in range(3):
            if scheduled := self.step():
                break
        assert scheduled == {REQUEST: len(PROMPT)}
        assert self.counters["transfers_expired"] == 1 and self.counters["transfers"] == 0
        assert not self.seconds
        (warning,) = self.warnings
        assert REQUEST in warning and "kv_lease_duration" in warning


@pytest.fixture(params=["recompute", "fail"])
def policy_engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(policy=request.param, kv_lease_duration=300)


@pytest.fixture
def decode(policy_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    clock, warnings = Clock(), []
    own = leases, nixl_scheduler, nixl_worker, compat_nixl
    for module in (*own, base_scheduler, base_worker, pull_scheduler, pull_worker):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        nixl_scheduler, "logger", SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
    )
    decode = Decode(policy_engine, clock, warnings)
    counts, add = policy_engine.half.counts, policy_engine.half.counts.add
    monkeypatch.setattr(counts, "add", lambda **counters: (decode.counters.update(counters), add(**counters)))

    def read(worker: Rank, request_id: str, meta: ReqMeta) -> None:
        if not any(meta.local_block_ids):
            return
        decode.posted.append(request_id)
        meta.region_blocks_to_zero = []
        worker._recving_transfers.setdefault(request_id, []).append(7)

    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", read)
    yield decode
    decode.rank.nixl_wrapper.state = "DONE"
    for request in list(policy_engine.scheduler.requests.values()):
        policy_engine.abort(request)
    for _ in range(3):
        decode.step()
    policy_engine.half.reset_cache()
    policy_engine.scheduler.max_num_active_reqs = 8
    policy_engine.assert_empty()
    assert not decode.rank.leases.leftovers() and not decode.rank._recving_metadata
    assert not decode.rank._begun and not decode.rank._pull_seconds


def test_a_pull_takes_from_its_start_to_its_end(decode: Decode) -> None:
    """However long the request has waited before, and whatever other pulls do."""
    occupy_the_only_seat(decode)
    decode.engine.add(transfer())
    while not decode.posted:
        decode.step()
    decode.rank.nixl_wrapper.state = "PROC"
    other = "cmpl-e-0-22222222"
    decode.engine.scheduler.max_num_active_reqs = 8
    decode.engine.add(transfer(name="cmpl-q-0-00000000"), other, prompt=[7] * len(PROMPT))
    for _ in range(3):
        decode.step()
    decode.rank.nixl_wrapper.state = "DONE"
    decode.step()
    assert decode.seconds == {REQUEST: 0, other: 3}


def occupy_the_only_seat(decode: Decode) -> None:
    """Occupy the only seat for 56 steps, with two requests one after the other."""
    decode.engine.scheduler.max_num_active_reqs = 1
    for name in ("first", "second"):
        decode.engine.scheduler.add_request(make_request(name, [1, 2, 3], max_tokens=28))
    decode.step()


def test_lease_that_is_not_over_is_pulled(decode: Decode) -> None:
    decode.engine.add(transfer())
    assert decode.step() == {} and decode.posted == [REQUEST]
    assert decode.step() == {REQUEST: 1}, "all but the last token has been pulled"
    assert decode.counters["transfers"] == 1 and decode.counters["transfer_bytes_to_host"] > 0
    assert not decode.counters["transfers_expired"] and not decode.warnings


@pytest.mark.parametrize(("device", "expected"), [("cuda:3", 3), ("cpu", 0)])
def test_a_rank_connects_on_its_own_gpu(device: str, expected: int) -> None:
    """Also if it has registered host memory alone, by which vLLM cannot know the GPU."""
    connector = SimpleNamespace(connector_worker=SimpleNamespace(device_id=0))
    compat_nixl.connect_on(connector, torch.device(device))
    assert connector.connector_worker.device_id == expected


@pytest.mark.parametrize(("rank", "only_rank_0", "reads"), [(0, True, True), (1, True, False), (1, False, True)])
def test_ranks_that_share_all_that_is_received_pull_it_once(
    monkeypatch: pytest.MonkeyPatch, rank: int, only_rank_0: bool, reads: bool
) -> None:
    asked: list[ReqMeta] = []
    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", lambda _, name, meta: asked.append(meta))
    worker = Rank()
    worker.tp_rank, worker._only_rank_0_pulls = rank, only_rank_0
    remote = SimpleNamespace(engine_id="prefill", request_id=REMOTE, blocks_expiry_time=None)
    meta = ReqMeta(([3, 4], [3, 4]), ([3, 4], [3, 4]), 1, remote=remote, awaiting_kvs=True)
    worker._read_blocks_for_req(REQUEST, meta)
    (found,) = asked
    assert found.awaiting_kvs and found.remote is remote
    assert any(found.local_block_ids) == any(found.local_physical_block_ids) == reads


def test_lease_of_the_prefill_side_is_shorter(decode: Decode) -> None:
    """The decode side's is 300 s, for which vLLM sends a heartbeat every 50 s; the prefill side lets go after 30 s."""
    occupy_the_only_seat(decode)
    decode.engine.add(transfer())
    decode.prefill = PrefillWorker(30, decode.clock.now)
    while decode.clock.now < 1100 and not decode.posted:
        assert decode.prefill.holds
        decode.step()
    assert decode.clock.now > 1050
    assert decode.step() == {REQUEST: 1} and not decode.warnings


def test_lease_ends_while_no_heartbeat_can_be_sent(decode: Decode) -> None:
    occupy_the_only_seat(decode)
    decode.rank.nixl_wrapper.is_broken = True
    decode.engine.add(transfer())
    while decode.clock.now < 1200 and not decode.warnings:
        decode.step()
        assert not decode.posted
    decode.assert_computed_here()


def test_lease_ends_while_the_engine_takes_no_step(decode: Decode) -> None:
    occupy_the_only_seat(decode)
    decode.engine.add(transfer())
    for _ in range(3):
        decode.step()
    decode.clock.now += 60
    while decode.clock.now < 1200 and not decode.warnings:
        decode.step()
    assert not decode.posted
    decode.assert_computed_here()


@pytest.mark.parametrize("late_s", [-1.5, -0.5, 40])
def test_lease_had_ended_when_the_parameters_were_presented(decode: Decode, late_s: float) -> None:
    """The prefill instance says when, by its own clock."""
    end = decode.clock.now + CLOCK_OFFSET - late_s
    decode.engine.add(transfer(remote_blocks_expiry_time=end, kv_lease_duration=30))
    decode.step()
    assert decode.posted == ([REQUEST] if late_s == -1.5 else [])
    if late_s != -1.5:
        decode.assert_computed_here()


def test_lease_that_is_stated_is_believed(decode: Decode) -> None:
    """A stated lease is used without heartbeats, even if it is longer than an assumed one."""
    decode.rank.nixl_wrapper.is_broken = True
    occupy_the_only_seat(decode)
    end = decode.clock.now + CLOCK_OFFSET + 120
    decode.engine.add(transfer(remote_blocks_expiry_time=end, kv_lease_duration=120))
    while decode.clock.now < 1100 and not decode.posted:
        decode.step()
    assert decode.clock.now > 1050 and decode.step() == {REQUEST: 1} and not decode.warnings


@pytest.mark.parametrize("is_broken", [True, False])
def test_lease_ends_while_a_pull_is_in_flight(decode: Decode, is_broken: bool) -> None:
    """Heartbeats go on during a pull. If they cannot be sent, what has been read may be another prompt's."""
    decode.rank.nixl_wrapper.state, decode.rank.nixl_wrapper.is_broken = "PROC", is_broken
    decode.engine.add(transfer())
    for _ in range(45):
        assert decode.step() == {}
    assert decode.posted == [REQUEST] and decode.prefill.holds != is_broken
    decode.rank.nixl_wrapper.state = "DONE"
    assert decode.step() == {}
    if is_broken:
        decode.assert_computed_here()
    else:
        assert decode.step() == {REQUEST: 1} and not decode.warnings


@pytest.mark.parametrize("state", ["DONE", "PROC"])
def test_a_request_that_ends_during_its_pull_is_given_up(decode: Decode, state: str) -> None:
    """Its blocks come back, nothing of its prompt is found by others, and no bytes are counted."""
    decode.rank.nixl_wrapper.state = "PROC"
    request = decode.engine.add(transfer())
    decode.step()
    assert decode.posted == [REQUEST]
    decode.rank.nixl_wrapper.state = state
    decode.engine.abort(request)
    decode.step()
    assert (decode.engine.half.host_pool.num_used == 0) == (state == "DONE"), "NIXL may still write"
    decode.rank.nixl_wrapper.state = "DONE"
    decode.step()
    assert decode.engine.half.host_pool.num_used == 0 and not decode.rank._recving_metadata
    decode.engine.scheduler.add_request(make_request("other", PROMPT, max_tokens=2))
    assert decode.step() == {"other": len(PROMPT)}
    names = ("host_prefix_tokens", "transfers", "transfer_bytes_to_host", "transfer_failures")
    assert not any(decode.counters[name] for name in names)


def test_lease_that_ended_leaves_nothing_in_the_prefix_cache(decode: Decode) -> None:
    """Neither if the request ends before its prompt has been computed."""
    late = transfer(remote_blocks_expiry_time=decode.clock.now, kv_lease_duration=30)
    request = decode.engine.add(late)
    decode.step()
    decode.engine.abort(request)
    other = make_request("other", PROMPT, max_tokens=2)
    decode.engine.scheduler.add_request(other)
    assert decode.step() == {"other": len(PROMPT)}
    assert decode.counters["host_prefix_tokens"] == 0


def test_a_pull_goes_on_whose_request_has_the_id_of_one_that_has_just_ended(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients choose ids if vLLM makes none of its own (`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`)."""
    given_up: list[set[str]] = []
    monkeypatch.setattr(PullHooks, "give_up", lambda self, request_ids: given_up.append(set(request_ids)))
    decode.rank.nixl_wrapper.state = "PROC"
    first = make_request(REQUEST, PROMPT, max_tokens=2)
    decode.engine.scheduler.add_request(first)
    decode.engine.abort(first)
    second = decode.engine.add(transfer())
    decode.step()
    assert decode.posted == [REQUEST] and given_up == [set()]
    decode.engine.abort(second)
    decode.step()
    assert given_up[1:] == [{REQUEST}]


# Refusals and errors of vLLM's NIXL code


def raising(error: Exception) -> Callable[..., None]:
    def raise_error(*_: Any, **__: Any) -> None:
        raise error

    return raise_error


@pytest.mark.parametrize("error", [NotImplementedError("block sizes"), AssertionError(), KeyError("engine")])
def test_what_a_pull_raises_fails_its_request(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    read = NixlPullConnectorWorker._read_blocks_for_req
    engine, good = decode.engine, "cmpl-e-0-22222222"

    def read_or_raise(worker: Rank, request_id: str, meta: ReqMeta) -> None:
        if request_id == REQUEST:
            raise error
        read(worker, request_id, meta)

    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", read_or_raise)
    bad = engine.add(transfer())
    engine.add(transfer(name="cmpl-q-0-00000000"), good, prompt=[7] * len(PROMPT))
    assert decode.step() == {} and decode.posted == [good] and decode.rank.failures == [error]
    scheduled = decode.step()
    assert decode.seconds.keys() == {good}
    recomputes = engine.scheduler.recompute_kv_load_failures
    assert scheduled == {good: 1, **({REQUEST: len(PROMPT)} if recomputes else {})}
    assert recomputes or bad.status == RequestStatus.FINISHED_ERROR


def test_a_request_comes_while_a_handshake_ends(decode: Decode) -> None:
    """The prefill instance is known a moment before its clock is."""
    rank = decode.rank
    offset = rank._engine_clock_offset.pop("prefill")

    class Lock:
        """The handshake's thread has it first, and completes what it has begun."""

        def __enter__(self) -> None:
            rank._engine_clock_offset["prefill"] = offset

        def __exit__(self, *_: object) -> None:
            """Do nothing: no other thread waits."""

    rank._handshake_lock = Lock()
    decode.engine.add(transfer(remote_blocks_expiry_time=decode.clock.now + CLOCK_OFFSET + 30, kv_lease_duration=30))
    assert decode.step() == {} and decode.posted == [REQUEST] and not rank.failures
    assert decode.step() == {REQUEST: 1}


def test_what_heartbeats_raise_ends_no_engine(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.rank, "_ensure_handshake", raising(RuntimeError("cannot schedule new futures")))
    decode.engine.add(transfer())
    decode.step()
    assert decode.posted == [REQUEST] and len(decode.rank.failures) == 1


def agent_metadata(**changes: Any) -> SimpleNamespace:
    """A description that a rank of a prefill instance gives of itself in a handshake."""
    same = {"engine_id": "prefill", "block_size": BLOCK_SIZE, "physical_blocks_per_logical_kv_block": 1}
    memory = {"agent_metadata": b"", "kv_caches_base_addr": []}
    return SimpleNamespace(**{**same, **memory, "kv_cache_layout": "LBHNC", **changes})


@pytest.mark.parametrize(
    ("block_size", "per_block", "is_refused"), [(8, 1, True), (2, 1, True), (2, 2, False), (4, 2, True)]
)
def test_block_sizes_differ(monkeypatch: pytest.MonkeyPatch, block_size: int, per_block: int, is_refused: bool) -> None:
    """Other block sizes are refused even if the prompt fills equally many blocks; kernels may divide blocks."""
    monkeypatch.setattr(NixlPullConnectorWorker, "add_remote_agent", lambda *args: "agent")
    rank, metadata = Rank(), agent_metadata(block_size=block_size, physical_blocks_per_logical_kv_block=per_block)
    if not is_refused:
        assert rank.add_remote_agent(metadata, 0, 1, 1) == "agent"
        return
    expected = rf"--block-size .*: got {block_size * per_block}, expected {BLOCK_SIZE}.*same --block-size"
    with pytest.raises(RuntimeError, match=expected):
        rank.add_remote_agent(metadata, 0, 1, 1)


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC", "LHBNC", "BHLNC", "a new one"])
def test_layouts_of_blocks_differ(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Blocks are copied as they are, so several KV heads must come in the order of this side: all tokens of a head."""
    monkeypatch.setattr(NixlPullConnectorWorker, "add_remote_agent", lambda *args: "agent")
    rank = Rank()
    assert rank.add_remote_agent(agent_metadata(kv_cache_layout=layout), 0, 1, 1) == "agent", "one head has one order"
    rank._num_kv_heads = 2
    with pytest.raises(
        RuntimeError, match=f"layout of prefill engine prefill: got {layout}, expected .*LBHNC or BLHNC"
    ):
        rank.add_remote_agent(agent_metadata(kv_cache_layout=layout), 0, 1, 1)
    for fitting in ("LBHNC", "BLHNC"):
        assert rank.add_remote_agent(agent_metadata(kv_cache_layout=fitting), 0, 1, 1) == "agent"


# The prefill side


def test_prefill_side_states_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any engine that has the plugin, with vLLM's own connector."""
    for name in ("NixlConnector", "NixlPullConnector"):
        monkeypatch.setitem(KVConnectorFactory._registry, name, KVConnectorFactory._registry[name])
    monkeypatch.setattr(NixlPullConnectorScheduler, "request_finished", NixlPullConnectorScheduler.request_finished)
    state_leases()
    state_leases()  # of a second engine in the process
    KVConnectorFactory._registry["NixlConnector"]()
    KVConnectorFactory._registry["NixlConnector"]()
    clock = Clock()
    for module in (pull_scheduler, base_scheduler):
        monkeypatch.setattr(module, "time", clock)
    scheduler = NixlPullConnectorScheduler.__new__(NixlPullConnectorScheduler)
    scheduler._kv_lease_duration, scheduler._reqs_need_send, scheduler._heartbeat_req_engine = 120, {}, {}
    scheduler.is_bidirectional_kv_xfer_enabled, scheduler.engine_id = False, "prefill"
    scheduler._registration_generation = 0  # since vLLM 0.33
    scheduler.side_channel_host, scheduler.side_channel_port, scheduler.transfer_tp_size = "127.0.0.1", 1, 1
    scheduler.get_exchange_clipped_blocks = lambda block_ids: block_ids
    parallel = SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
    scheduler.vllm_config = SimpleNamespace(parallel_config=parallel)
    request = make_request("p", PROMPT, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    is_kept, params = scheduler.request_finished(request, ([1, 2, 3],))
    assert is_kept
    assert (params["remote_blocks_expiry_time"], params["kv_lease_duration"]) == (clock.now + 120, 120)
    assert scheduler._reqs_need_send == {"p": clock.now + 120}
    request.kv_transfer_params = None
    assert scheduler.request_finished(request, ([1],)) == (False, None)


def test_metadata_of_a_step_without_pulls(decode: Decode) -> None:
    decode.rank.begin_pulls(NixlConnectorMetadata(), {})
    assert decode.step() == {}
