"""One simulated engine: the loop of vLLM's EngineCore around its real scheduler, over simulated ranks."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import count

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .adapter import Product, Sizes
from .checks import check_pools, check_tokens
from .configuration import BLOCK_SIZE, MAX_MODEL_LEN, Configuration
from .nixl import Nixl, Prefill
from .rank import HostMemory, Rank, Step
from .texts import NUM_OUTPUT_TOKENS, Text
from .tier import Store


class Engine:
    """Schedules, launches and updates like `EngineCore.step_with_batch_queue`; how far devices and NIXL come is random.

    Args:
        configuration: of the world.
        sizes: of the world.
        rng: of the world.
        prefill: the prefill instance.
        counts: what happened in the world; added to.
        store: behind the tier of all engines.
    """

    def __init__(
        self,
        configuration: Configuration,
        sizes: Sizes,
        rng: random.Random,
        prefill: Prefill,
        counts: Counter[str],
        store: Store,
    ):
        self.rng, self.counts, self.num_drafts = rng, counts, configuration.num_drafts
        self.is_async, self.has_draft_layer = configuration.is_async, configuration.has_draft_layer
        self.product = Product(configuration, sizes)
        self.scheduler = self.product.scheduler
        self.scheduler.needs_kv_cache_zeroing = rng.random() < 0.7
        self._device_share, self._nixl_share = rng.choice((0.3, 0.6, 0.9)), rng.choice((0.3, 0.7, 1.0))
        shared, zeroes_first = HostMemory(), rng.random() < 0.5
        self.scheduler.use_v2_model_runner = zeroes_first
        self.ranks = [
            Rank(
                index,
                shared if configuration.shares_host_pool else HostMemory(),
                self.product.num_tables(),
                -(-MAX_MODEL_LEN // BLOCK_SIZE),
                self.product.layout,
                zeroes_first,
                configuration.num_drafts if configuration.has_draft_layer else 0,
            )
            for index in range(configuration.num_ranks)
        ]
        if configuration.has_tier:
            memories = list({id(rank.host): rank.host for rank in self.ranks}.values())
            self.product.add_tiers(memories, rng, store, counts)
        self.nixl = Nixl(rng, prefill, self.ranks, configuration.shares_host_pool)
        self._aggregator = KVOutputAggregator(configuration.num_ranks)
        self._in_flight: deque[Step] = deque()
        self._numbers = count()

    @property
    def is_idle(self) -> bool:
        return not (self._in_flight or self.scheduler.requests or self.scheduler.has_requests() or self.nixl.is_busy)

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
        if self.scheduler.has_requests() and len(self._in_flight) < self.product.max_in_flight:
            self._launch()
        for rank in self.ranks:
            while rank.is_busy and self.rng.random() < self._device_share:
                rank.run_one()
        self.nixl.write_some(self.rng.random() * self._nixl_share)
        is_full = len(self._in_flight) == self.product.max_in_flight
        if self._in_flight and (is_full or self.rng.random() < 0.3 or not self.scheduler.has_requests()):
            self._finish(on_wait)
        check_pools(self)
        self.counts["steps"] += 1

    def flush(self) -> None:
        """An empty step, which tells the ranks what is still to be told."""
        self._launch()
        number = self._in_flight[0].number
        self._finish(lambda: None)
        for rank in self.ranks:
            rank.finish(number)

    def shutdown(self) -> None:
        self.scheduler.shutdown()

    def _launch(self) -> None:
        num_preemptions = self._num_preemptions()
        output = self.scheduler.schedule()
        self.counts["preemptions"] += self._num_preemptions() - num_preemptions
        before = self._in_flight[0].batch if self._in_flight else ()
        step = Step(next(self._numbers), output, self.product.batch(output, before, self._draft_in_flight))
        self.counts["rejected in flight"] += sum(entry.num_corrected for entry in step.batch)
        self.counts["tail saves"] += len(step.metadata.preemption_saves)
        self.counts["restores"] += len(step.metadata.restores)
        for rank in self.ranks:
            rank.launch(step, self.ranks)
        # NOTE: posted by the worker's CPU: the device may be steps behind.
        self.nixl.post(step.metadata.transport)
        self.nixl.write_some(self.rng.random() * self._nixl_share)
        step.results = self.nixl.poll()
        self._in_flight.appendleft(step)

    def _finish(self, on_wait: Callable[[], None]) -> None:
        """NOTE: nothing waits for the device in a step without a batch, unless it is told to."""
        step = self._in_flight.pop()
        if step.batch or step.metadata.waits_for_preemption_saves:
            for rank in self.ranks:
                rank.finish(step.number)
        on_wait()
        self.scheduler.update_from_output(step.output, self._model_output(step))
        if self.num_drafts and not self.is_async:
            self.product.take_drafts({entry.request_id: self._draft(entry.request_id) for entry in step.batch})
        for entry in step.batch:
            request = self.scheduler.requests.get(entry.request_id)
            if request is not None:
                check_tokens(request)

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
