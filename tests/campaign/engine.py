"""One simulated engine: the loop of vLLM's EngineCore around its real scheduler, over simulated ranks."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .adapter import Product, Sizes
from .checks import check_pools, check_tokens
from .configuration import Configuration
from .nixl import Nixl, Prefill
from .rank import HostMemory, Rank, Step
from .texts import NUM_OUTPUT_TOKENS, Text

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

    from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
    from vllm_hisparse.kv_manager.tiers.tiers import Tiers


@dataclass(frozen=True)
class Pace:
    """Behaviour of an engine's devices and its NIXL.

    Attributes:
        zeroes_blocks: whether vLLM zeroes new blocks.
        device_share: probability that a device that has work does one more piece of it in a turn of the loop.
        nixl_share: largest probability that one of the blocks on their way is written in a turn of the loop.
        zeroes_first: whether blocks are zeroed before the worker half's copies (Model Runner V2) or after (V1).
        failure_share: share of transfers that fail.
    """

    zeroes_blocks: bool
    device_share: float
    nixl_share: float
    zeroes_first: bool
    failure_share: float = 0.15

    @classmethod
    def draw(cls, rng: random.Random) -> Pace:
        return cls(
            zeroes_blocks=rng.random() < 0.7,
            device_share=rng.choice((0.3, 0.6, 0.9)),
            nixl_share=rng.choice((0.3, 0.7, 1.0)),
            zeroes_first=rng.random() < 0.5,
        )


class Engine:
    """Schedules, launches and updates like `EngineCore.step_with_batch_queue`; how far devices and NIXL come is random.

    Args:
        configuration: options of the world.
        sizes: options that were drawn for the world.
        rng: random numbers of the world.
        prefill: the prefill instance.
        counts: counts of the world's events, which are added to.
        pace: behaviour of its devices and NIXL; drawn unless given.
        make_tiers: makes the tiers from the host pool and the memories of the ranks; None: there is none.
        options: more options of the product.
    """

    def __init__(
        self,
        configuration: Configuration,
        sizes: Sizes,
        rng: random.Random,
        prefill: Prefill,
        counts: Counter[str],
        pace: Pace | None = None,
        make_tiers: Callable[[HostBlockPool, Sequence[HostMemory]], Tiers] | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        self.rng, self.counts, self.num_drafts = rng, counts, configuration.num_drafts
        self.is_async, self.has_draft_layer = configuration.is_async, configuration.has_draft_layer
        memories: list[HostMemory] = []
        tiers = None if make_tiers is None else lambda host_pool: make_tiers(host_pool, memories)
        self._seconds, self._limits_running = 0.0, configuration.limits_running
        self.product = Product(configuration, sizes, tiers, options, lambda: self._seconds)
        self.scheduler = self.product.scheduler
        self.pace = pace = pace or Pace.draw(rng)
        self.scheduler.needs_kv_cache_zeroing = pace.zeroes_blocks
        self.scheduler.use_v2_model_runner = pace.zeroes_first
        shared = HostMemory()
        self.ranks = [
            Rank(
                index,
                shared if configuration.shares_host_pool else HostMemory(),
                self.product.num_tables(),
                configuration.max_model_len,
                self.product.layout,
                pace.zeroes_first,
                configuration.num_drafts if configuration.has_draft_layer else 0,
            )
            for index in range(configuration.num_ranks)
        ]
        memories += {id(rank.host): rank.host for rank in self.ranks}.values()
        if make_tiers is not None:
            self.product.connect_host_pools()
        self.nixl = Nixl(rng, prefill, self.ranks, configuration.shares_host_pool, pace.failure_share)
        self._aggregator = KVOutputAggregator(configuration.num_ranks)
        self.in_flight: deque[Step] = deque()
        self._numbers = count()

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.scheduler.requests or self.scheduler.has_requests() or self.nixl.is_busy)

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def live_requests(self) -> list[Request]:
        return [request for request in self.scheduler.requests.values() if not request.is_finished()]

    def abort(self, request_id: str) -> None:
        """A client is gone."""
        ended = self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        self.counts["aborts"] += len(ended)

    def reset(self, reset_running: bool, reset_connector: bool) -> None:
        """The effect of `/reset_prefix_cache`; vLLM refuses while blocks are in use that it cannot take back."""
        num_preemptions = self._num_preemptions()
        try:
            self.scheduler.reset_prefix_cache(reset_running, reset_connector)
        except RuntimeError as refusal:
            if not str(refusal).startswith("Failed to reset KV cache"):
                raise
        self.counts["resets"] += 1
        self.counts["preemptions"] += self._num_preemptions() - num_preemptions

    def step(self, on_wait: Callable[[], None]) -> None:
        """One turn of the loop.

        Args:
            on_wait: called when a batch is done and not yet processed: aborts may arrive then.
        """
        if self.scheduler.has_requests() and len(self.in_flight) < self.product.max_in_flight:
            self.launch()
        for rank in self.ranks:
            while rank.is_busy and self.rng.random() < self.pace.device_share:
                rank.run_one()
        self.nixl.write_some(self.rng.random() * self.pace.nixl_share)
        is_full = len(self.in_flight) == self.product.max_in_flight
        if self.in_flight and (is_full or self.rng.random() < 0.3 or not self.scheduler.has_requests()):
            self.finish(on_wait)
        check_pools(self)
        self.counts["steps"] += 1

    def flush(self) -> None:
        """An empty step, which tells the ranks what is still to be told."""
        self.launch()
        number = self.in_flight[0].number
        self.finish(lambda: None)
        for rank in self.ranks:
            rank.finish(number)

    def shutdown(self) -> None:
        self.scheduler.shutdown()

    def launch(self) -> Step:
        """Schedule a step and queue it on the ranks."""
        num_preemptions = self._num_preemptions()
        output = self.scheduler.schedule()
        self.counts["preemptions"] += self._num_preemptions() - num_preemptions
        before = self.in_flight[0].batch if self.in_flight else ()
        step = Step(next(self._numbers), output, self.product.batch(output, before, self._draft_in_flight))
        self.counts["rejected in flight"] += sum(entry.num_corrected for entry in step.batch)
        self.counts["tail saves"] += len(step.metadata.preemption_saves)
        self.counts["restores"] += len(step.metadata.restores)
        for rank in self.ranks:
            rank.launch(step, self.ranks)
        # NOTE: posted by the worker's CPU: the device may be steps behind.
        self.nixl.post(step.metadata.transport)
        self.nixl.write_some(self.rng.random() * self.pace.nixl_share)
        step.results = self.nixl.poll()
        self._seconds += self.rng.random() if self._limits_running else 0.01
        if self._limits_running:
            self.counts["held back"] += self.product.half.tracker.num_held_back()
            if self.rng.random() < 0.2:
                step.results[0].kv_connector_worker_meta = self.product.usage(step.metadata.step, self.rng)
        self.in_flight.appendleft(step)
        return step

    def finish(self, on_wait: Callable[[], None]) -> dict[int, EngineCoreOutputs]:
        """Update vLLM's scheduler with the oldest step in flight; returns what it reports.

        NOTE: nothing waits for the device in a step without a batch, unless it is told to.
        """
        step = self.in_flight.pop()
        if step.batch or step.metadata.waits_for_preemption_saves:
            for rank in self.ranks:
                rank.finish(step.number)
        on_wait()
        outputs = self.scheduler.update_from_output(step.output, self._model_output(step))
        if self.num_drafts and not self.is_async:
            self.product.take_drafts({entry.request_id: self._draft(entry.request_id) for entry in step.batch})
        for entry in step.batch:
            request = self.scheduler.requests.get(entry.request_id)
            if request is not None:
                check_tokens(request)
        return outputs

    def _model_output(self, step: Step) -> ModelRunnerOutput:
        ids = [entry.request_id for entry in step.batch]
        sampled = [entry.sampled() for entry in step.batch]
        self.counts["rejected drafts"] += sum(entry.num_rejected for entry in step.batch)
        outputs = [
            ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, sampled, kv_connector_output=result)
            for result in step.results
        ]
        return self._aggregator.aggregate(outputs)

    def _draft(self, request_id: str) -> list[int]:
        """The output that the scheduler gets if it waits for the drafts of one step before it schedules the next."""
        request = self.scheduler.requests.get(request_id)
        if request is None or not request.all_token_ids:
            return []
        return self._drafts(list(request.all_token_ids), self.rng.randint(0, self.num_drafts))

    def _draft_in_flight(self, token_ids: list[int], num_placeholders: int) -> list[int]:
        """Drafts of the worker while the scheduler knows placeholders: a layer as many, looking them up may fail."""
        num_drafts = num_placeholders if self.has_draft_layer else self.rng.randint(0, num_placeholders)
        return self._drafts(token_ids, num_drafts)

    def _drafts(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """Tokens most of which the model would say."""
        drafts = Text(token_ids, len(token_ids) + num_drafts).token_ids[len(token_ids) :]
        return [self.rng.randrange(NUM_OUTPUT_TOKENS) if self.rng.random() < 0.4 else token for token in drafts]

    def _num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.scheduler.requests.values())
