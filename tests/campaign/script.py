"""The simulated engine, a step at a time: a test says what arrives, what is preempted and when a step is over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.connector.metrics import HiSparseStats

from .adapter import HASHER, Sizes
from .checks import check_idle, check_pools
from .configuration import FIXED_BUFFER_SIZE, Configuration
from .engine import Engine, Pace
from .nixl import Prefill
from .rank import HostMemory, Rank, Step

if TYPE_CHECKING:
    from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
    from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
    from vllm_hisparse.kv_manager.tiers.tiers import Tiers

MAX_MODEL_LEN = 32
TOKEN_BUDGET = 100


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 8, resumable: bool = False, **sampling: Any
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Request(request_id, list(prompt), params, None, block_hasher=HASHER, resumable=resumable)


class ScriptedEngine(Engine):
    """An engine whose devices are done with a step when `step` returns, and whose pulls end when `receive` says so.

    Args:
        num_device_blocks, num_host_blocks: sizes of the pools.
        hot_first: whether the group of hot blocks comes first.
        zeroes_first: whether blocks are zeroed before the worker half's copies.
        max_num_seqs, token_budget: limits of a step.
        make_tiers: makes the tiers from the host pool and the memories of the ranks; None: there is none.
        options: more options of the product.
        configuration: fields of `Configuration`; by default, one synchronous rank with fixed hot buffers.
    """

    def __init__(
        self,
        num_device_blocks: int = 33,
        num_host_blocks: int = 24,
        hot_first: bool = False,
        zeroes_first: bool = True,
        max_num_seqs: int = 100,
        token_budget: int = TOKEN_BUDGET,
        make_tiers: Callable[[HostBlockPool, Sequence[HostMemory]], Tiers] | None = None,
        options: dict[str, Any] | None = None,
        **configuration: Any,
    ):
        defaults = {"is_async": False, "is_elastic": False, "num_ranks": 1, "device_buffer_size": FIXED_BUFFER_SIZE}
        defaults["max_model_len"] = MAX_MODEL_LEN
        self.prefill = Prefill()
        super().__init__(
            Configuration("scripted", **(defaults | configuration)),
            Sizes(num_device_blocks, num_host_blocks, max_num_seqs, token_budget, "fcfs", True, hot_first),
            random.Random(0),
            self.prefill,
            Counter(),
            Pace(True, 0.0, 0.0, zeroes_first, failure_share=0.0),
            make_tiers,
            options,
        )
        self.half = self.product.half
        self.tracker, self.host_pool = self.half.tracker, self.half.host_pool
        self.kv, self.block_pool = self.scheduler.kv_cache_manager, self.scheduler.kv_cache_manager.block_pool
        self.log: list[HiSparseMetadata] = []
        self.stats = HiSparseStats()

    @property
    def worker(self) -> Rank:
        return self.ranks[0]

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Request]:
        """Requests that have arrived or were preempted, and hold no blocks or those that they have received."""
        queues = *self.scheduler.kv_holding_waiting, *self.scheduler.waiting
        return [request for request in queues if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]

    @property
    def loading(self) -> list[Request]:
        """Requests whose KV is pulled."""
        requests = self.scheduler.requests.values()
        return [request for request in requests if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS]

    def ask(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Request:
        """A request arrives, or, if it is `resumable`, perhaps the next turn of a session."""
        request = make_request(request_id, prompt, max_tokens, **more)
        self.add(request)
        return request

    def end_session(self, request_id: str) -> None:
        """No turn of a session follows the present one."""
        self.ask(request_id, [0])

    def ask_remote(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> Request:
        """A request arrives whose prompt the prefill instance has computed; `changes` are made to its answer."""
        transfer = self.prefill.compute(f"{request_id}-prefill", prompt) | changes
        return self.ask(request_id, prompt, max_tokens, extra_args={"kv_transfer_params": transfer})

    def turn(self, budget: int = 8) -> HiSparseMetadata:
        """Schedule a step of at most `budget` tokens, run it and update; returns what the worker was told."""
        metadata = self.begin(budget).metadata
        self.end()
        return metadata

    def begin(self, budget: int = 8) -> Step:
        """Schedule a step and let it stay in flight."""
        self.scheduler.max_num_scheduled_tokens = budget
        step = self.launch()
        self.log.append(step.metadata)
        check_pools(self)
        return step

    def end(self) -> None:
        """The oldest step in flight is over."""
        number = self.in_flight[-1].number
        for rank in self.ranks:
            rank.finish(number)
        for outputs in self.finish(lambda: None).values():
            if outputs.scheduler_stats is not None:
                self.stats.aggregate(HiSparseStats(outputs.scheduler_stats.kv_connector_stats))
        self.stats.aggregate(self.half.take_stats())
        check_pools(self)

    def turns(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.turn()

    def receive(self) -> None:
        """All pulls end; vLLM learns of it with the output of a step that computes nothing."""
        self.nixl.write_some(1.0)
        self.turn(budget=0)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks as a step does that finds none for another request."""
        self.product.preempt(request)

    def admit_none(self) -> None:
        """Waiting requests wait until `admit`."""
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)

    def admit(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def tables_of(self, request: Request) -> tuple[int, list[int]]:
        """First hot block and device-resident blocks of a request that holds blocks."""
        groups, device = self.half.groups, self.kv.get_block_ids(request.request_id)
        resident_id = groups.resident_group_id
        return device[groups.hot_group_id][0], [] if resident_id is None else list(device[resident_id])

    def host_ids(self, request: Request) -> list[int]:
        return list(self.host_pool.block_ids(request.request_id))

    def take_counters(self) -> dict[str, int]:
        """Counters since the last call."""
        self.stats.aggregate(self.half.take_stats())
        counters = dict(self.stats.data["counters"])
        self.stats.reset()
        return counters

    def run_to_end(self, max_steps: int = 400) -> None:
        """Run until no request is left but sessions that wait for their next turn."""
        while self.scheduler.get_num_unfinished_requests() or self.in_flight:
            assert max_steps, f"no progress: {self.product.progress()}"
            while self.in_flight:
                self.end()
            self.nixl.write_some(1.0)
            self.turn()
            max_steps -= 1

    def check_idle(self) -> None:
        """Check that nothing is left behind once every request has ended."""
        while self.in_flight:
            self.end()
        self.flush()
        check_pools(self)
        check_idle(self)
