"""Reads through an import buffer as vLLM's pull worker starts, polls and ends them; NIXL is simulated, memory is real.

A prefill instance has two regions with main KV, which this side has in the host pool, and regions with device-resident
KV, whose pages lie side by side in every block of this side's device cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from campaign.configuration import BLOCK_SIZE
from test_import_buffer import bytes_at
from test_nixl_worker import REMOTE, REQUEST, Nixl, Rank, agent_metadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from vllm_hisparse.connector.import_buffer import STUCK_S, ImportBuffer
from vllm_hisparse.connector.nixl_worker import NixlWorkerTransport
from vllm_hisparse.kv_manager.rows.page_writer import PageWriter

PAGE_BYTES, KEY_BYTES, NUM_REMOTE_BLOCKS, NUM_HOST_BLOCKS = 24, 10, 30, 20
UNUSED_BYTES = 10  # of a device block
NOTICE = f"{REMOTE}:1".encode()


@dataclass(eq=False)
class Handle:
    local: np.ndarray
    remote: np.ndarray
    notice: bytes
    state: str = "new"


class SimulatedNixl(Nixl):
    """Reads move bytes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Handle] = []
        self.registered: list[Any] = []
        self.released: list[Handle] = []
        self.keeps_handles = False
        self.agents = {"agent"}
        self.void: list[np.ndarray] = []

    def release_dlist_handle(self, descriptors: np.ndarray) -> None:
        self.void.append(descriptors)

    def remove_remote_agent(self, agent: str) -> None:
        self.agents.remove(agent)

    def get_reg_descs(self, places: list[tuple], kind: str) -> list[tuple]:
        return places

    def register_memory(self, places: list[tuple], backends: list[str]) -> None:
        self.registered += places

    def deregister_memory(self, places: list[tuple]) -> None:
        for place in places:
            self.registered.remove(place)

    def get_xfer_descs(self, places: np.ndarray, kind: str) -> np.ndarray:
        return places

    def initialize_xfer(
        self, kind: str, local: np.ndarray, remote: np.ndarray, agent: str, notif_msg: bytes = b""
    ) -> Handle:
        assert kind == "READ" and agent in self.agents
        assert local.dtype == remote.dtype == np.uint64 and local.shape == remote.shape
        assert (local[:, 1] == remote[:, 1]).all()
        return Handle(local, remote, notif_msg)

    def make_prepped_xfer(
        self, kind: str, local: np.ndarray, ids: Any, remote: np.ndarray, remote_ids: Any, notif_msg: bytes = b""
    ) -> Handle:
        assert not any(remote is each for each in self.void), "NIXL would use freed memory"
        return Handle(local[ids], remote[remote_ids], notif_msg)

    def transfer(self, handle: Handle) -> None:
        if self.is_broken:
            raise RuntimeError("no connection")
        handle.state = "PROC"
        self.started.append(handle)

    def check_xfer_state(self, handle: Handle) -> str:
        return handle.state

    def release_xfer_handle(self, handle: Handle) -> None:
        if self.keeps_handles and handle.state != "DONE":
            raise RuntimeError("active")
        self.released.append(handle)

    @property
    def open(self) -> list[Handle]:
        return [each for each in self.started if each.state == "PROC"]

    def finish(self, handle: Handle) -> None:
        for (to, num_bytes, _), (address, _, _) in zip(handle.local.tolist(), handle.remote.tolist(), strict=True):
            bytes_at(to, num_bytes)[:] = bytes_at(address, num_bytes)
        handle.state = "DONE"
        if handle.notice:
            self.messages.append(handle.notice)


class Side(Rank):
    """A decode rank over real memory.

    Args:
        unused_bytes: bytes of a block of the prefill side after its pages. None: layers are outermost there.
        num_resident: regions with device-resident KV. 0: a dense model without full-KV layers, whose regions are one
            group on both sides.
        lands_on_host: True: device-resident KV lands in the host pool.
    """

    def __init__(self, unused_bytes: int | None = None, num_resident: int = 1, lands_on_host: bool = False):
        super().__init__()
        self.nixl_wrapper, num_regions, self.num_resident = SimulatedNixl(), 2 + num_resident, num_resident
        sizes = [PAGE_BYTES] * 2 + [KEY_BYTES] * num_resident
        row_bytes, firsts = sum(sizes) + (unused_bytes or 0), np.cumsum([0, *sizes[:-1]])
        values = np.random.default_rng(1).integers(0, 250, NUM_REMOTE_BLOCKS * row_bytes, np.uint8)
        self.remote = torch.from_numpy(values)
        bases = (self.remote.data_ptr() + firsts * (1 if unused_bytes is not None else NUM_REMOTE_BLOCKS)).tolist()
        strides = sizes if unused_bytes is None else [row_bytes] * num_regions
        main_bytes, saved_bytes = 2 * NUM_HOST_BLOCKS * PAGE_BYTES, num_resident * KEY_BYTES
        self.pool = torch.full((main_bytes + NUM_HOST_BLOCKS * saved_bytes,), 255, dtype=torch.uint8)
        self.pages = self.pool[:main_bytes].view(-1, PAGE_BYTES)
        self.cache = torch.full((NUM_HOST_BLOCKS, saved_bytes + UNUSED_BYTES), 255, dtype=torch.uint8)
        self.resident_kv = self.pool[main_bytes:].view(NUM_HOST_BLOCKS, -1) if lands_on_host else self.cache
        local = [self.pages.data_ptr() + layer * NUM_HOST_BLOCKS * PAGE_BYTES for layer in range(2)]
        local += [self.resident_kv.data_ptr() + layer * KEY_BYTES for layer in range(num_resident)]
        local_strides = [PAGE_BYTES] * 2 + [self.resident_kv.stride(0)] * num_resident
        self.region_group_ids, self.region_mem_types = [0] * 2 + [1] * num_resident, ["DRAM"] * num_regions
        groups = [SimpleNamespace(host_resident=True), SimpleNamespace(host_resident=False)][: 2 if num_resident else 1]
        self.kv_cache_config = SimpleNamespace(transfer_groups=groups, transfer_group_ids=tuple(range(len(groups))))
        self.dst_region_group_ids = {"prefill": [0] * num_regions}
        self.kv_caches_base_addr = {"decode": {0: local}}
        self.engine_id, self.block_size, self.num_regions = "decode", BLOCK_SIZE, num_regions
        self.block_len_per_layer, self.block_stride_per_layer = sizes, local_strides
        self.nixl_backends, self._registered_descs, self._skip_dram_xfer = ["UCX"], [], False
        self._remote_registration_generations: dict[str, int] = {}  # since vLLM 0.33, as are the next two
        self._kv_unregistered, self.draft_tp_mappings = False, {}
        self._mixed_mem_types, self._transfer_layer_group_ids = False, ()
        self.dst_num_blocks = {"prefill": NUM_REMOTE_BLOCKS, "decode": NUM_HOST_BLOCKS}
        self.dst_region_num_blocks = {
            "prefill": [NUM_REMOTE_BLOCKS] * num_regions,
            "decode": [NUM_HOST_BLOCKS] * num_regions,
        }
        self._uses_region_group_mapping = num_resident > 0
        self.dst_uses_region_group_mapping = {"prefill": False}
        self.dst_region_mem_types = {"prefill": ["DRAM"] * num_regions}
        self.tp_mappings = {
            "prefill": SimpleNamespace(all_source_ranks=[0], source_ranks_per_group=[[0]], local_consumers=1)
        }
        info = {"remote_tp_size": 1, "remote_block_size": BLOCK_SIZE, "remote_dcp_size": 1}
        remote = SimpleNamespace(**info, remote_physical_blocks_per_logical=1)
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: remote,
            block_size_ratio=lambda _: 1,
            tp_ratio=lambda _: 1,
            unregister_remote_engine=lambda _: None,
        )
        self.src_xfer_handles_by_block_size = {BLOCK_SIZE: descriptors(local, local_strides, sizes, NUM_HOST_BLOCKS)}
        remote_descriptors = descriptors(bases, strides, sizes, NUM_REMOTE_BLOCKS)
        self.dst_xfer_side_handles = {"prefill": {0: remote_descriptors}}
        self._bases, self._strides = bases, strides

    def read_through_buffer(
        self,
        monkeypatch: pytest.MonkeyPatch,
        num_parts: int = 2,
        pages_per_part: int = 5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> range:
        """Make the buffer, if the rank reads for the host pool, then shake hands. Returns the buffer's addresses."""
        imports, addresses = None, range(0)
        if self.reads_for_host:
            memory = torch.zeros(num_parts, pages_per_part * PAGE_BYTES, dtype=torch.uint8)
            imports = ImportBuffer(memory, self, PageWriter(self.pool), clock)
            addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        self.read_through(imports, range(self.pool.data_ptr(), self.pool.data_ptr() + self.pool.nbytes))

        def add_remote_agent(worker: Side, metadata: SimpleNamespace, rank: int) -> str:
            worker.kv_caches_base_addr["prefill"] = {rank: metadata.kv_caches_base_addr}
            return "agent"

        monkeypatch.setattr(NixlPullConnectorWorker, "add_remote_agent", add_remote_agent)
        self.shake_hands()
        return addresses

    def shake_hands(self) -> None:
        memory = {"kv_caches_base_addr": self._bases, "block_strides": self._strides, "device_id": 0}
        self.add_remote_agent(agent_metadata(**memory), 0)

    def forget(self) -> None:
        """Forget the prefill instance, as vLLM does before it connects again."""
        self._cleanup_remote_engine("prefill", log_eviction=False)

    def connect_again(self, known: dict[str, dict]) -> None:
        """Connect to the prefill instance, which has other handles now.

        Args:
            known: what this side knew of it, by attribute.
        """
        for name, value in known.items():
            getattr(self, name).update(value)
        self.nixl_wrapper.agents.add("agent")
        self.dst_xfer_side_handles = {"prefill": {0: known["dst_xfer_side_handles"]["prefill"][0].copy()}}
        self.shake_hands()

    def pull(self, remote_ids: list[int], host_ids: list[int], device_ids: list[int], name: str = REQUEST) -> None:
        """Pull a prompt; as many of its last blocks as there are ids on this side."""
        self.pull_into((host_ids, device_ids)[: len(self.kv_cache_config.transfer_groups)], remote_ids, name)

    def pull_into(
        self, local: Sequence[list[int]], remote_ids: list[int], name: str = REQUEST, awaiting_kvs: bool = True
    ) -> None:
        """Pull a prompt into blocks of each group."""
        origin = SimpleNamespace(
            engine_id="prefill", request_id=REMOTE, blocks_expiry_time=None, block_ids=(remote_ids,), num_tokens=None
        )
        origin.registration_generation = 0  # since vLLM 0.33
        meta = ReqMeta(local, local, 1, remote=origin, awaiting_kvs=awaiting_kvs)
        meta.local_num_computed_blocks = None
        if awaiting_kvs:
            self._recving_metadata[name] = meta
        self._read_blocks_for_req(name, meta)

    def key_reads(self) -> list[Handle]:
        """Reads of device-resident KV into device blocks."""
        first = self.cache.data_ptr()
        return [each for each in self.nixl_wrapper.started if first <= each.local[0, 0] < first + self.cache.nbytes]

    def results(self, *ended: str) -> KVConnectorTransferResults:
        """Ask for results in a step before which requests have ended."""
        transport = NixlWorkerTransport.__new__(NixlWorkerTransport)
        transport.connector = SimpleNamespace(
            connector_worker=self,
            get_transfer_results=lambda _: self.get_transfer_results(),
            get_block_ids_with_load_errors=set,
        )
        return transport.transfer_results(set(ended))

    def finish_all(self) -> set[str]:
        """Let everything arrive; returns the requests that have ended well."""
        ended: set[str] = set()
        for _ in range(40):
            for handle in self.nixl_wrapper.open:
                self.nixl_wrapper.finish(handle)
            results = self.get_transfer_results()
            assert not results.failed_recving
            ended |= results.finished_recving
        return ended

    def assert_holds(self, remote_ids: list[int], host_ids: list[int], device_ids: list[int]) -> None:
        """Compare all pages; those that were not to be written are as before."""
        pages, resident_kv = torch.full_like(self.pages, 255), torch.full_like(self.resident_kv, 255)
        for layer in range(2):
            for row, block in zip(reversed(host_ids), reversed(remote_ids), strict=False):
                pages[layer * NUM_HOST_BLOCKS + row] = self.page(layer, block)
        for layer in range(self.num_resident):
            for row, block in zip(reversed(device_ids), reversed(remote_ids), strict=False):
                resident_kv[row, layer * KEY_BYTES : (layer + 1) * KEY_BYTES] = self.page(2 + layer, block)
        assert torch.equal(self.pages, pages) and torch.equal(self.resident_kv, resident_kv)

    def page(self, region: int, block: int) -> torch.Tensor:
        first = self._bases[region] - self.remote.data_ptr() + block * self._strides[region]
        return self.remote[first : first + self.block_len_per_layer[region]]


def descriptors(bases: list[int], strides: list[int], sizes: list[int], num_blocks: int) -> np.ndarray:
    """One descriptor per region and block, as vLLM prepares them."""
    places = [
        (base + block * stride, size, 0)
        for base, stride, size in zip(bases, strides, sizes, strict=True)
        for block in range(num_blocks)
    ]
    return np.array(places, np.int64)


REMOTE_IDS = [7, 8, 9, 3, 11, 20, 19, 18]
HOST_IDS, DEVICE_IDS = [4, 5, 19, 0, 2, 1, 7, 9], [1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize("unused_bytes", [None, 0, 10])
@pytest.mark.parametrize("num_new", [8, 3])
def test_every_block_lands_before_the_prefill_instance_frees_it(
    monkeypatch: pytest.MonkeyPatch, unused_bytes: int | None, num_new: int
) -> None:
    side = Side(unused_bytes)
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS[-num_new:], DEVICE_IDS)
    nixl = side.nixl_wrapper
    assert len(nixl.open) == 2, "as much as the buffer holds"
    while nixl.open and not nixl.open[-1].notice:
        nixl.finish(nixl.open[0])
        assert not side.get_transfer_results().finished_recving and not nixl.messages
    assert side.finish_all() == {REQUEST} and nixl.messages == [NOTICE]
    side.assert_holds(REMOTE_IDS, HOST_IDS[-num_new:], DEVICE_IDS)
    num_pieces = sum(len(handle.local) for handle in nixl.started if not handle.notice)
    assert num_pieces < 2 * num_new, "neighbours are read together"


def test_one_group_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last page, vLLM has nothing to read, and tells the prefill instance so."""
    side = Side(num_resident=0)
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS[3:], [])
    assert not side.nixl_wrapper.messages
    assert side.finish_all() == {REQUEST} and side.nixl_wrapper.messages == [NOTICE]
    side.assert_holds(REMOTE_IDS, HOST_IDS[3:], [])


def test_without_main_kv_nothing_waits_for_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, [], DEVICE_IDS)
    assert [handle.notice for handle in side.nixl_wrapper.open] == [NOTICE]
    assert side.finish_all() == {REQUEST}
    side.assert_holds(REMOTE_IDS, [], DEVICE_IDS)


@pytest.mark.parametrize("leaves_main_kv", [False, True])
def test_layers_that_lie_side_by_side_on_both_sides_are_read_as_one(
    monkeypatch: pytest.MonkeyPatch, leaves_main_kv: bool
) -> None:
    """They are in one transfer; also on ranks that leave main KV to rank 0."""
    side = Side(3, num_resident=4)
    side._skip_dram_xfer = leaves_main_kv
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    assert side.finish_all() == {REQUEST} and side.nixl_wrapper.messages == [NOTICE]
    side.assert_holds(REMOTE_IDS, [] if leaves_main_kv else HOST_IDS, DEVICE_IDS)
    (read,) = side.key_reads()
    assert read.local[:, 1].tolist() == [4 * KEY_BYTES] * len(REMOTE_IDS)
    assert (np.diff(read.remote[:, 0].astype(np.int64)) > 0).all(), "in the order of the source's memory"


@pytest.mark.parametrize("keys_come_first", [True, False])
def test_keys_in_pieces_are_read_while_main_kv_is(monkeypatch: pytest.MonkeyPatch, keys_come_first: bool) -> None:
    """The blocks are freed when both are there."""
    side = Side(3, num_resident=4)
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    nixl = side.nixl_wrapper
    (keys,) = side.key_reads()
    assert len(nixl.open) == 3, "both parts of the buffer are read, too"
    if keys_come_first:
        nixl.finish(keys)
    while reading := [handle for handle in nixl.open if handle is not keys]:
        assert not side.get_transfer_results().finished_recving and not nixl.messages
        nixl.finish(reading[0])
    if not keys_come_first:
        assert not side.get_transfer_results().finished_recving and not nixl.messages
    assert side.finish_all() == {REQUEST} and nixl.messages == [NOTICE]
    side.assert_holds(REMOTE_IDS, HOST_IDS, DEVICE_IDS)


def test_keys_that_fail_while_main_kv_is_read_fail_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request keeps its blocks as long as main KV may be copied to them."""
    side = Side(3, num_resident=4)
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    nixl, failed = side.nixl_wrapper, set()
    side.key_reads()[0].state = "ERR"
    while nixl.open:
        assert not failed
        nixl.finish(nixl.open[0])
        failed |= side.get_transfer_results().failed_recving
    failed |= side.get_transfer_results().failed_recving
    assert failed == {REQUEST} and not nixl.messages
    assert not side._recving_metadata and not side._recving_transfers and not side._pending_recv_notifs


def test_main_kv_that_fails_while_keys_are_read_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request keeps its device blocks as long as NIXL may write to them."""
    side = Side(3, num_resident=4)
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    (keys,), nixl = side.key_reads(), side.nixl_wrapper
    for handle in nixl.open:
        handle.state = "PROC" if handle is keys else "ERR"
    for _ in range(3):
        assert not side.get_transfer_results().failed_recving and REQUEST in side._recving_metadata
    nixl.finish(keys)
    assert side.get_transfer_results().failed_recving == {REQUEST} and not nixl.messages
    assert not side._recving_metadata and not side._recving_transfers and not side._pending_recv_notifs


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_prompt_is_read_past_parts_that_are_stuck(monkeypatch: pytest.MonkeyPatch, in_pieces: bool) -> None:
    """Straight into the host pool; its keys come as they always do."""
    side, now, other = Side(3, num_resident=4) if in_pieces else Side(), [0.0], "cmpl-e-0-22222222"
    memory = side.read_through_buffer(monkeypatch, clock=lambda: now[0])
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    nixl, ended = side.nixl_wrapper, set()
    stuck = nixl.open
    now[0] += STUCK_S
    side.pull([25, 26], [10, 11], [16, 17], other)
    for _ in range(4):
        for handle in nixl.open:
            if handle not in stuck:
                nixl.finish(handle)
        ended |= side.get_transfer_results().finished_recving
    assert ended == {other} and nixl.messages == [NOTICE]
    own = [handle for handle in nixl.started if handle not in stuck]
    assert own and not any(address in memory for handle in own for address in handle.local[:, 0].tolist())
    assert side.finish_all() == {REQUEST}
    side.assert_holds([*REMOTE_IDS, 25, 26], [*HOST_IDS, 10, 11], [*DEVICE_IDS, 16, 17])


@pytest.mark.parametrize("unused_bytes", [None, 3])
@pytest.mark.parametrize("num_new", [8, 3])
def test_device_resident_kv_that_lands_on_the_host_comes_through_the_buffer(
    monkeypatch: pytest.MonkeyPatch, unused_bytes: int | None, num_new: int
) -> None:
    """The prefill instance is told to free the blocks when all of it is in the host pool."""
    side = Side(unused_bytes, num_resident=3, lands_on_host=True)
    memory = side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS[-num_new:], DEVICE_IDS)
    nixl = side.nixl_wrapper
    while nixl.open:
        assert not nixl.messages
        nixl.finish(nixl.open[0])
        if nixl.open:
            assert not side.get_transfer_results().finished_recving
    assert side.finish_all() == {REQUEST} and nixl.messages == [NOTICE]
    side.assert_holds(REMOTE_IDS, HOST_IDS[-num_new:], DEVICE_IDS)
    pieces = [piece for read in nixl.started for piece in read.local.tolist()]
    assert all(memory.start <= address and address + size <= memory.stop for address, size, _ in pieces)
    assert sum(size for _, size, _ in pieces) == 2 * num_new * PAGE_BYTES + 3 * len(DEVICE_IDS) * KEY_BYTES
    if unused_bytes is not None:
        assert len(pieces) <= num_new + len(DEVICE_IDS) + len(nixl.started), "layers of a block are one piece"


@pytest.mark.parametrize("keeps_handles", [False, True])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_read_of_pieces_that_fails_fails_its_request(
    monkeypatch: pytest.MonkeyPatch, is_started: bool, keeps_handles: bool
) -> None:
    """The request keeps its blocks as long as NIXL may write to them; the prefill instance is not told to free them."""
    side = Side(3, num_resident=4)
    side.read_through_buffer(monkeypatch)
    nixl, failed = side.nixl_wrapper, set()
    nixl.is_broken, nixl.keeps_handles = not is_started, keeps_handles
    side.pull(REMOTE_IDS, [], DEVICE_IDS)
    if is_started:
        (read,) = nixl.open
        read.state = "ERR"
    for _ in range(3):
        failed |= side.get_transfer_results().failed_recving
    if keeps_handles:
        assert not failed and REQUEST in side._recving_metadata
        nixl.keeps_handles = False
        failed = side.get_transfer_results().failed_recving
    assert failed == {REQUEST} and not nixl.messages and len(nixl.released) == 1
    assert not side._recving_metadata and not side._recving_transfers


@pytest.mark.parametrize("keeps_handles", [False, True])
def test_a_read_that_fails_fails_its_request(monkeypatch: pytest.MonkeyPatch, keeps_handles: bool) -> None:
    """The request keeps its blocks as long as NIXL may write to the buffer for it. The other request goes on."""
    side, other = Side(), "cmpl-e-0-22222222"
    side.read_through_buffer(monkeypatch, num_parts=3)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    side.pull([25, 26], [10, 11], [16, 17], other)
    nixl = side.nixl_wrapper
    nixl.keeps_handles = keeps_handles
    nixl.open[0].state = "ERR"
    ended, failed = set(), set()
    for _ in range(20):
        for handle in nixl.open:
            nixl.finish(handle)
        results = side.get_transfer_results()
        ended |= results.finished_recving
        failed |= results.failed_recving
        if keeps_handles and ended == {other}:
            assert REQUEST in side._recving_metadata and not failed
            nixl.keeps_handles = False
    assert ended == {REQUEST, other} and failed == {REQUEST}
    assert nixl.messages == [NOTICE], "only the other one's blocks are freed there"
    assert not side._recving_metadata and not side._recving_transfers


LIVE = "cmpl-e-0-22222222"


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_request_that_ends_leaves_the_buffer_to_live_ones(monkeypatch: pytest.MonkeyPatch, in_pieces: bool) -> None:
    """The reads that run end, and then the prefill instance is told to free the blocks; no others are started."""
    side = Side(3, num_resident=4) if in_pieces else Side()
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    side.pull([25, 26], [10, 11], [16, 17], LIVE)
    nixl = side.nixl_wrapper
    running = nixl.open[: 2 + in_pieces]
    assert not side.results(REQUEST).finished_recving and not nixl.messages, "NIXL may still write"
    for handle in running:
        nixl.finish(handle)
    assert side.results().finished_recving == {REQUEST} and nixl.messages == [NOTICE]
    assert len(nixl.started) == len(running) + 1 + in_pieces, "the next read is the live one's"
    assert side.finish_all() == {LIVE} and nixl.messages == [NOTICE] * 2
    assert (side.pages[[each + layer * NUM_HOST_BLOCKS for each in HOST_IDS for layer in range(2)]] == 255).all()
    for layer in range(2):
        for row, block in zip([10, 11], [25, 26], strict=True):
            assert torch.equal(side.pages[layer * NUM_HOST_BLOCKS + row], side.page(layer, block))


def test_a_request_that_ends_while_it_waits_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that do not pull end, too."""
    side = Side()
    side.read_through_buffer(monkeypatch)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS, LIVE)
    side.pull([25, 26], [10, 11], [16, 17])
    nixl = side.nixl_wrapper
    running = nixl.open
    assert side.results(REQUEST, "unknown").finished_recving == {REQUEST}
    assert nixl.messages == [NOTICE] and nixl.open == running
    assert side.finish_all() == {LIVE}
    side.assert_holds(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    side.results()
    side.pull([25, 26], [10, 11], [16, 17])
    assert side.finish_all() == {REQUEST}, "its id is not remembered"


@pytest.mark.parametrize("has_buffer", [False, True])
def test_a_request_that_ends_before_its_pull_reads_nothing(monkeypatch: pytest.MonkeyPatch, has_buffer: bool) -> None:
    """Its prefill instance was being connected to."""
    side = Side()
    if has_buffer:
        side.read_through_buffer(monkeypatch)
    agents, side._remote_agents = side._remote_agents, {}
    monkeypatch.setattr(side, "_background_nixl_handshake", lambda *request: waiting.append(request))
    waiting: list[tuple] = []
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    assert not side.results(REQUEST).finished_recving
    side._remote_agents = agents
    ((name, _, meta),) = waiting
    side._read_blocks_for_req(name, meta)
    assert not side.nixl_wrapper.started and side.nixl_wrapper.messages == [NOTICE]
    assert side.results().finished_recving == {REQUEST} and not side.failures


def test_a_read_that_cannot_be_started_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.read_through_buffer(monkeypatch)
    side.nixl_wrapper.is_broken = True
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    assert side.get_transfer_results().failed_recving == {REQUEST}
    assert len(side.failures) == 1 and not side._recving_transfers


def test_a_block_that_the_prefill_instance_does_not_have_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a block of another layer."""
    side = Side()
    side.read_through_buffer(monkeypatch)
    side.pull([NUM_REMOTE_BLOCKS], [3], [3])
    assert side.get_transfer_results().failed_recving == {REQUEST}
    assert "30 of a prefill instance that has 30 blocks" in str(side.failures[0])
    assert not side.nixl_wrapper.started


@pytest.mark.parametrize("is_back", [False, True])
def test_what_a_forgotten_instance_said_of_its_memory_is_not_used(
    monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """vLLM forgets an instance that has woken from a sleep, even while it reads from it, and connects again."""
    side = Side()
    side.read_through_buffer(monkeypatch)
    nixl = side.nixl_wrapper
    names = [name for name in vars(side) if name.startswith("dst_")]
    names += ["kv_caches_base_addr", "tp_mappings", "_remote_agents", "_engine_clock_offset", "_engine_by_address"]
    known = {name: dict(getattr(side, name)) for name in names}
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    reading = nixl.open
    side.forget()
    if is_back:
        side.connect_again(known)
    assert not side.get_transfer_results().finished_recving, "NIXL may still write into the buffer"
    for handle in reading:
        nixl.finish(handle)
    assert side.get_transfer_results().failed_recving == {REQUEST}
    assert nixl.started == reading and not nixl.messages and (side.pages == 255).all()
    if not is_back:
        side.connect_again(known)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    assert side.finish_all() == {REQUEST} and nixl.messages == [NOTICE]
    side.assert_holds(REMOTE_IDS, HOST_IDS, DEVICE_IDS)


@pytest.mark.parametrize("num_resident", [1, 0])
@pytest.mark.parametrize("has_expired", [False, True])
def test_a_request_fails_if_its_instance_is_forgotten_while_vllm_reads_from_it(
    monkeypatch: pytest.MonkeyPatch, num_resident: int, has_expired: bool
) -> None:
    """Without an import buffer. vLLM would ask for an instance that it does not know, which ends the engine."""
    side = Side(num_resident=num_resident)
    known = {"prefill": side.transfer_topo.get_engine_info("prefill")}
    monkeypatch.setattr(side.transfer_topo, "get_engine_info", known.__getitem__)
    monkeypatch.setattr(side.transfer_topo, "unregister_remote_engine", known.pop)
    monkeypatch.setattr(side, "may_pull", lambda *_: not has_expired)
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    reading = side.nixl_wrapper.open
    assert len(reading) == (not has_expired)
    side.forget()
    for handle in reading:
        assert not side.get_transfer_results().finished_recving, "NIXL may still write"
        side.nixl_wrapper.finish(handle)
    results = side.get_transfer_results()
    assert results.failed_recving == results.finished_recving == {REQUEST}
    assert not side._recving_metadata and not side._recving_transfers


@pytest.mark.parametrize("local", [(), [], ([], [])])
@pytest.mark.parametrize("num_resident", [1, 0])
def test_a_prompt_that_needs_nothing_is_freed_at_once(
    monkeypatch: pytest.MonkeyPatch, local: Sequence[list[int]], num_resident: int
) -> None:
    """It was aborted before its pull, or this side has all of it."""
    side = Side(num_resident=num_resident)
    side.read_through_buffer(monkeypatch)
    side.pull_into(local[: 1 + num_resident], REMOTE_IDS, awaiting_kvs=False)
    assert side.nixl_wrapper.messages == [NOTICE] and not side.failures


def test_shutdown_ends_reads_and_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.read_through_buffer(monkeypatch)
    assert len(side.nixl_wrapper.registered) == 1
    side._handshake_initiation_executor = SimpleNamespace(shutdown=lambda wait: None)
    side.src_xfer_handles_by_tp_ratio = side._dram_src_handles_by_tp_ratio = side._dram_src_handles_by_block_size = {}
    side.pull(REMOTE_IDS, HOST_IDS, DEVICE_IDS)
    reading = side.nixl_wrapper.open
    side._remote_agents, side.src_xfer_handles_by_block_size = {}, {}
    side.shutdown()
    side.shutdown()
    assert side.nixl_wrapper.released == reading and not side.nixl_wrapper.registered
