"""Whose prompts are pulled: vLLM's scheduler and both halves of its NIXL pull connector; tests/e2e/test_pd.py pulls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from campaign.adapter import Product, Sizes
from campaign.configuration import BLOCK_SIZE, Configuration
from campaign.script import MAX_MODEL_LEN, make_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tools.harness.processes import free_ports
from vllm_hisparse.connector import nixl_scheduler
from vllm_hisparse.connector.nixl_scheduler import NixlSchedulerTransport
from vllm_hisparse.connector.transfer_params import TransferParams, TransferRefused

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 60, 40
PROMPT = list(range(10, 20))
MISSING = object()


def transfer(prompt: list[int] = PROMPT, name: str = "cmpl-p-0-00000000", **changes: Any) -> dict[str, Any]:
    """The prefill side's answer, with changes."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(-(-len(prompt) // BLOCK_SIZE)))],
        "remote_engine_id": "prefill",
        "remote_request_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(prompt),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        **changes,
    }
    return {key: value for key, value in params.items() if value is not MISSING}


class Engine:
    """A decode instance without a model: every pull fails, because its prefill instance is gone."""

    def __init__(self, role: str = "kv_consumer", policy: str = "recompute", **more_options: Any):
        configuration = Configuration("pulls", role, is_elastic=False, max_model_len=MAX_MODEL_LEN)
        sizes = Sizes(NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, 8, 64, "fcfs", policy == "recompute")
        self.scheduler = Product(configuration, sizes, options=more_options).scheduler
        self.half = self.scheduler.connector.scheduler
        self.transport: NixlSchedulerTransport = self.half.transport
        self.num_refused = 0  # as the counter says
        self.num_free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self, params: Any, request_id: str = "cmpl-d-0-11111111", prompt: list[int] = PROMPT, **sampling
    ) -> Request:
        return self.add_request(make_request(request_id, prompt, extra_args={"kv_transfer_params": params}, **sampling))

    def add_request(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        self.num_refused += self.half.take_stats().data["counters"].get("transfers_refused", 0)
        return request

    def step(self, worker: Worker | None = None) -> NixlConnectorMetadata:
        """Schedule, run, and report the pulls of the step as failed; returns what NIXL's worker half is told."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata.transport
        failed = (worker or Worker()).run(metadata)
        assert failed == {name for name, meta in metadata.reqs_to_recv.items() if meta.awaiting_kvs}
        self.update(output, KVConnectorOutput(finished_recving=failed or None, failed_recving=failed))
        return metadata

    def update(self, output: SchedulerOutput, kv_output: KVConnectorOutput) -> None:
        names = list(output.num_scheduled_tokens)
        tokens = [[5] for _ in names]
        index = {name: i for i, name in enumerate(names)}
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names, req_id_to_index=index, sampled_token_ids=tokens, kv_connector_output=kv_output
            ),
        )

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def assert_empty(self) -> None:
        """Every block is back, and nothing is remembered of a request."""
        assert self.half.host_pool.num_used == 0
        self.half.host_pool.check_integrity()
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.num_free
        assert not self.scheduler.requests
        assert not self.half.leftovers()


class Worker(NixlPullConnectorWorker):
    """NIXL's worker half up to the handshake, which fails."""

    def __init__(self):
        self.engine_id, self._physical_blocks_per_logical_kv_block, self.pcp_rank = "decode", 1, 0
        self.pcp_dcp_sharded = False
        self._recving_metadata, self._recving_transfers, self._remote_agents, self._handshake_futures = {}, {}, {}, {}
        self._invalid_remote_engines, self._recv_failures, self._reqs_to_process = set(), set(), set()
        self._reqs_to_send: dict[str, float] = {}
        self._remote_registration_generations: dict[str, int] = {}
        self._ready_requests, self._failed_recv_reqs = queue.Queue(), queue.Queue()
        self._handshake_lock = threading.RLock()
        self._handshake_initiation_executor = Immediately()
        self._hb_handshake_notif_only = False
        self.xfer_stats = SimpleNamespace(record_failed_handshake=lambda: None)
        self.transfer_topo = SimpleNamespace()

    def __del__(self) -> None:
        """Nothing was opened."""

    def _evict_stale_engines(self) -> None:
        """None is known."""

    def _nixl_handshake(self, host, port, remote_tp_size, expected_engine_id, dcp_size=1, pp_size=1, only=False):
        assert (remote_tp_size, dcp_size, pp_size) == (1, 1, 1), "the prefill instance has one rank"
        raise RuntimeError("prefill instance is gone")

    def _log_failure(self, **_: Any) -> None:
        """Expected."""

    def run(self, metadata: NixlConnectorMetadata) -> set[str]:
        """Start the pulls of a step; returns the requests reported as failed."""
        self.start_load_kv(metadata)
        return {self._failed_recv_reqs.get_nowait() for _ in range(self._failed_recv_reqs.qsize())} & set(
            self._recving_metadata
        )


class AskingWorker(Worker):
    """The only rank of a decode instance; asks the prefill side's listener, whose answer it cannot read."""

    _nixl_handshake = NixlPullConnectorWorker._nixl_handshake

    def __init__(self):
        super().__init__()
        self._is_csa_linear, self.use_host_buffer = False, True
        self.transfer_topo = TransferTopology(0, 1, BLOCK_SIZE, "decode", True, False, 1, [])


class Immediately:
    """Runs what is submitted at once."""

    def submit(self, fn, *args) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args))
        except RuntimeError as error:
            future.set_exception(error)
        return future


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    warnings: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(nixl_scheduler, "logger", logger)
    engine = Engine()
    engine.warnings = warnings
    yield engine
    for request in list(engine.scheduler.requests.values()):
        engine.abort(request)
    engine.step()
    engine.assert_empty()


def pulled(metadata: NixlConnectorMetadata) -> dict[str, str]:
    """Requests that pull KV, and whose."""
    return {name: meta.remote.request_id for name, meta in metadata.reqs_to_recv.items() if meta.awaiting_kvs}


def released(metadata: NixlConnectorMetadata) -> list[str]:
    """Requests of the prefill side that are let go without a pull."""
    return [meta.remote.request_id for meta in metadata.reqs_to_recv.values() if not meta.awaiting_kvs]


# Whose a transfer is


@pytest.mark.long
def test_a_prompt_is_pulled_and_the_request_stays_as_it_was(engine: Engine) -> None:
    request = engine.add(transfer())
    assert engine.transport.is_remote(request)
    assert pulled(engine.step()) == {request.request_id: "cmpl-p-0-00000000"}
    assert not engine.transport.is_remote(request)
    assert request.kv_transfer_params == transfer()
    assert engine.num_refused == 0 and not engine.warnings


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_prompts_of_one_http_request(engine: Engine, order: tuple[int, ...]) -> None:
    """Equal lengths, other tokens; a rank of a data parallel engine may see a later prompt first, or alone."""
    prompts = [[index + 1] * 10 for index in range(3)]
    requests = {index: engine.add(transfer(), f"cmpl-d-{index}-1111111{index}", prompts[index]) for index in order}
    assert [index for index in order if engine.transport.is_remote(requests[index])] == [0]
    metadata = engine.step()
    assert list(pulled(metadata)) == ["cmpl-d-0-11111110"] and not released(metadata)
    assert engine.num_refused == 2
    (warning,) = engine.warnings
    assert "remote_request_id: got 'cmpl-p-0-00000000'" in warning


def test_samples_of_one_prompt(engine: Engine) -> None:
    requests = [engine.add(transfer(), f"{index}_cmpl-d-0-11111111") for index in (2, 0, 1)]
    assert [engine.transport.is_remote(request) for request in requests] == [False, True, False]
    assert list(pulled(engine.step())) == ["0_cmpl-d-0-11111111"]


def test_a_transfer_is_used_once(engine: Engine) -> None:
    """A second use is refused even after the first user has ended, because the blocks may have another prompt's KV."""
    first = engine.add(transfer())
    second = engine.add(transfer(), "cmpl-e-0-22222222")
    assert engine.transport.is_remote(first) and not engine.transport.is_remote(second)
    engine.step()
    engine.abort(first)
    assert not engine.transport.is_remote(engine.add(transfer(), "cmpl-f-0-33333333"))
    assert engine.transport.is_remote(engine.add(transfer(name="cmpl-q-0-00000000"), "cmpl-g-0-44444444"))
    assert engine.num_refused == 2 and len(engine.warnings) == 1


def test_only_the_latest_transfers_are_remembered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_scheduler, "MAX_CLAIMS", 2)
    for index in range(4):
        engine.add(transfer(name=f"cmpl-{index}-0-00000000"), f"cmpl-d{index}-0-11111111")
    again = [
        engine.add(transfer(name=f"cmpl-{index}-0-00000000"), f"cmpl-e{index}-0-22222222") for index in (3, 2, 0, 1)
    ]
    assert [engine.transport.is_remote(request) for request in again] == [False, False, True, True]


# Messages to the prefill side


def test_aborted_before_its_pull_began(engine: Engine) -> None:
    engine.abort(engine.add(transfer()))
    assert released(engine.step()) == ["cmpl-p-0-00000000"]


def test_a_refused_request_releases_nothing(engine: Engine) -> None:
    """The transfer may be another's, who still needs it."""
    for index, changes in enumerate(({}, {"remote_num_tokens": 9}, {"remote_block_ids": 7})):
        engine.abort(engine.add(transfer(**changes), f"cmpl-d-{int(not index)}-1111111{index}"))
    assert not engine.step().reqs_to_recv
    assert engine.num_refused == 3


def notice(params: Any, name: str = "8b9414439ef443b5") -> Request:
    """The message of `AsyncLLM.notify_kv_transfer_request_rejected`: a request of one token that ends at once."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, [0], sampling, None, abort_immediately=True)


def test_rejected_by_the_api_server(engine: Engine) -> None:
    """The prefill side's blocks are released."""
    engine.abort(engine.add_request(notice(transfer())))
    assert released(engine.step()) == ["cmpl-p-0-00000000"]
    assert engine.num_refused == 0 and not engine.warnings


@pytest.mark.parametrize("is_pulled", [True, False])
def test_a_notice_of_a_request_that_was_here_is_no_refusal(engine: Engine, is_pulled: bool) -> None:
    """vLLM sends it for every request that failed or was aborted, too."""
    request = engine.add(transfer())
    if is_pulled:
        engine.step()
    engine.abort(request)
    engine.abort(engine.add_request(notice(transfer())))
    assert released(engine.step()) == ([] if is_pulled else ["cmpl-p-0-00000000"])
    assert engine.num_refused == 0 and not engine.warnings


@pytest.mark.parametrize(
    "params", [7, transfer(remote_block_ids=7), transfer(remote_num_tokens=-1), transfer(tp_size=2)]
)
def test_a_notice_of_a_request_that_was_refused_is_not_counted_again(engine: Engine, params: Any) -> None:
    engine.abort(engine.add(params))
    engine.abort(engine.add_request(notice(params)))
    assert not engine.step().reqs_to_recv
    assert engine.num_refused == len(engine.warnings) == 1


def test_a_prompt_that_looks_like_a_notice_is_pulled(engine: Engine) -> None:
    request = engine.add(transfer([0]), prompt=[0], max_tokens=1)
    assert list(pulled(engine.step())) == [request.request_id]
    assert not engine.transport.is_remote(
        engine.add(transfer(name="cmpl-q-0-00000000"), "cmpl-e-0-2", [0], max_tokens=1)
    )
    assert engine.num_refused == 1


@pytest.mark.parametrize("answered", [0, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_samples_that_nobody_pulls_are_released(engine: Engine, order: tuple[int, ...], answered: int) -> None:
    """The prefill side has computed each sample, hands over one, and would keep the others until their leases end."""
    for index in order:
        engine.add(transfer(name=f"{answered}_cmpl-p-0-00000000"), f"{index}_cmpl-d-0-11111111")
    metadata = engine.step()
    assert pulled(metadata) == {"0_cmpl-d-0-11111111": f"{answered}_cmpl-p-0-00000000"}
    assert sorted(released(metadata)) == [f"{index}_cmpl-p-0-00000000" for index in range(3) if index != answered]
    assert engine.num_refused == 2


def test_a_sample_is_released_once_and_by_its_own_prompt(engine: Engine) -> None:
    engine.add(transfer(name="0_cmpl-p-0-00000000"), "1_cmpl-d-1-22222222")
    engine.add(transfer(), "1_cmpl-d-0-11111111")
    assert not engine.step().reqs_to_recv, "another prompt's sample, and a prefill side with one sample"
    for suffix in ("33333333", "44444444"):
        engine.add(transfer(name="0_cmpl-p-0-00000000"), f"1_cmpl-d-0-{suffix}")
    assert released(engine.step()) == ["1_cmpl-p-0-00000000"]


# Parameters that cannot be


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("remote_num_tokens", {"remote_num_tokens": 9}),
        ("remote_block_ids", {"remote_block_ids": [[1, 2]]}),
        ("remote_block_ids", {"remote_block_ids": [[1, 2, 3, 4]]}),
        ("remote_block_ids", {"remote_block_ids": [1, 2, 3]}),
        ("tp_size", {"tp_size": 2}),
        ("pp_size", {"pp_size": 2}),
        ("dcp_size", {"dcp_size": 2}),
        ("do_remote_decode", {"do_remote_prefill": False, "do_remote_decode": True}),
        ("remote_host", {"remote_host": MISSING}),
    ],
)
def test_unsound_parameters_are_computed_here(engine: Engine, name: str, changes: dict[str, Any]) -> None:
    for index in range(3):
        request = engine.add(transfer(**changes), f"cmpl-d{index}-0-11111111")
        assert not engine.transport.is_remote(request)
    assert not engine.step().reqs_to_recv
    assert engine.num_refused == 3
    (warning,) = engine.warnings
    assert f"cmpl-d0-0-11111111: {name}: got " in warning


def test_embeddings_are_computed_here(engine: Engine) -> None:
    """vLLM's NIXL connector takes their number for 0."""
    request = make_request("cmpl-d-0-11111111", PROMPT, extra_args={"kv_transfer_params": transfer()})
    request.prompt_token_ids = None
    assert not engine.transport.accept(request)
    assert "prompt: got 'embeddings'" in engine.warnings[0]


def test_this_engine_is_not_its_own_prefill_instance(engine: Engine) -> None:
    own = engine.transport.connector.engine_id
    assert not engine.transport.is_remote(engine.add(transfer(remote_engine_id=own)))


@pytest.mark.parametrize("params", ["x", ["do_remote_prefill"], 7, True, 1.5])
def test_no_object(engine: Engine, params: Any) -> None:
    """Parameters from `vllm_xargs` that are no dict are dropped, because vLLM's scheduler would read them next."""
    engine.add(params)
    assert not engine.step().reqs_to_recv
    assert engine.num_refused == 1


# Ranks that the prefill side does not have


@pytest.fixture
def listener() -> Iterator[tuple[threading.Thread, int]]:
    """vLLM's handshake listener of a prefill instance with one rank."""
    (port,) = free_ports(1)
    ready, stop = threading.Event(), threading.Event()
    args = ({(0, 0): b"metadata"}, ready, stop, "127.0.0.1", port)
    thread = threading.Thread(target=NixlBaseConnectorScheduler._nixl_handshake_listener, args=args, daemon=True)
    thread.start()
    ready.wait()
    yield thread, port
    stop.set()
    thread.join()


@pytest.mark.long
def test_the_listener_is_asked_for_its_own_ranks_only(engine: Engine, listener: tuple[threading.Thread, int]) -> None:
    """Another one would end it for good, and with it all later handshakes."""
    thread, port = listener
    ranks = [{"tp_size": 7}, {"tp_size": 2, "dcp_size": 2}, {"pp_size": 2}, {"tp_size": True}, {"tp_size": 0}, {}]
    for index, changes in enumerate(ranks):
        name = f"cmpl-{index}-0-00000000"
        params = transfer(name=name, remote_engine_id=f"prefill-{index}", remote_port=port, **changes)
        engine.add(params, f"cmpl-d{index}-0-11111111")
    worker = AskingWorker()
    assert list(pulled(engine.step(worker)).values()) == ["cmpl-5-0-00000000"]
    assert ask(port) == b"metadata" and thread.is_alive()


def ask(port: int) -> bytes:
    with zmq.Context.instance().socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        return socket.recv_multipart()[0]


@pytest.mark.parametrize("prefill_tp_size", [1, 2, 4])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_that_are_asked_for_exist(tp_size: int, prefill_tp_size: int) -> None:
    for claimed in range(1, 9):
        params = TransferParams.parse(transfer(tp_size=claimed))
        try:
            params.check_tp_size(prefill_tp_size)
        except TransferRefused:
            continue
        for rank in range(tp_size):
            topology = TransferTopology(rank, tp_size, BLOCK_SIZE, "decode", True, False, 1, [])
            asked = topology.handshake_target_ranks(params.tp_size, params.dcp_size)
            assert set(asked) <= set(range(prefill_tp_size))


# Anything


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.integers(-2, 5) | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=2),
    max_leaves=6,
)
BLOCK_IDS = st.lists(st.lists(st.integers(-1, 2**25) | JSON, max_size=4), max_size=3)
CHANGES = st.dictionaries(
    st.sampled_from([*sorted(transfer()), "_remote_blocks_processed", "remote_block_size", "_p_side_truncated"]),
    JSON | BLOCK_IDS | st.just(MISSING),
    max_size=3,
)


def is_sound(params: dict[str, Any]) -> bool:
    """True if a pull with these parameters is one of PROMPT, said again in plain words."""

    def is_int(value: Any) -> bool:
        return type(value) is int

    groups = params.get("remote_block_ids")
    texts = [params.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_host")]
    return (
        params.get("do_remote_prefill") is True
        and not params.get("do_remote_decode")
        and type(groups) is list
        and len(groups) == 1
        and type(groups[0]) is list
        and len(groups[0]) == 3
        and all(is_int(block) and 0 <= block <= 2**24 for block in groups[0])
        and all(type(text) is str and text for text in texts)
        and is_int(params.get("remote_port"))
        and 0 < params["remote_port"] < 2**16
        and all(is_int(params.get(name, 1)) and params.get(name, 1) == 1 for name in ("tp_size", "dcp_size", "pp_size"))
        and is_int(params.get("remote_num_tokens"))
        and params["remote_num_tokens"] == len(PROMPT)
    )


@pytest.mark.long
@settings(max_examples=max(settings().max_examples, 200))
@given(st.builds(lambda changes: transfer(**changes), CHANGES) | JSON)
@example(transfer())
@example(transfer(remote_block_ids=7))
@example(transfer(remote_block_ids=[[1], 5]))
@example(transfer(remote_engine_id=["e"]))
def test_whatever_comes_ends_no_engine(params: Any) -> None:
    """Two requests with the same random parameters: at most one pulls, and every block comes back."""
    engine = Engine()
    requests = [engine.add(params, name) for name in ("cmpl-d-0-11111111", "cmpl-e-0-22222222")]
    remote = [engine.transport.is_remote(request) for request in requests]
    if any(remote):
        assert remote == [True, False] and is_sound(params)
    metadata = engine.step()
    assert list(pulled(metadata)) == [request.request_id for request in requests[: sum(remote)]]
    engine.step()
    for request in requests:
        engine.abort(request)
    engine.step()
    engine.assert_empty()


def test_nobody_can_read_from_a_decode_instance() -> None:
    """vLLM would listen for readers, and wait for ever if the prefill instance on this host has the port already."""
    threads = set(threading.enumerate())
    Engine().half.connect_workers({})
    assert set(threading.enumerate()) <= threads, "threads of other tests may end meanwhile"
