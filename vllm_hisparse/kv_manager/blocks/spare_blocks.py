"""Free device memory, lent to requests as hot blocks beyond those they have in any case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from vllm_hisparse.kv_manager.blocks.request_ledger import RequestLedger
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

STEPS_PER_BALANCE = 16  # unless blocks are needed
STEPS_IN_FLIGHT = 2  # whose tokens the scheduler does not know yet
MAX_STEPS_OF_REFUSAL = 8  # for want of device blocks, before a request gets whatever was lent
MIN_CHANGE = 1 / 16  # of what a request has or gets, unless it gets all or blocks are needed
SLACK_SHARE = 1 / 4  # of the reserve; so much more stays free, so that it lasts until the next balance


def divide(wanted: Mapping[str, int], whole: Set[str], num_blocks: int) -> dict[str, int]:
    """How many blocks each request gets.

    Args:
        wanted: request id -> blocks that it wants.
        whole: ids of those that are hot as a whole; they come first, so that requests that want nearly the same do not
            take turns.
        num_blocks: blocks to divide.
    """
    given, num_left = {}, num_blocks
    order = sorted(wanted, key=lambda name: (name not in whole, wanted[name], name))
    for number, name in enumerate(order):
        given[name] = wanted[name] if wanted[name] <= num_left else num_left // (len(wanted) - number)
        num_left -= given[name]
    return given


def waiting_requests(ledger: RequestLedger) -> list[Request]:
    """Requests without blocks that could start if there were device blocks."""
    num_seats = max(ledger.max_num_running - len(ledger.admitted), 0)
    could_start = (request for request in ledger.waiting() if request.request_id not in ledger.obstacles)
    return list(islice(could_start, num_seats))


def waiting_turns(ledger: RequestLedger) -> list[str]:
    """Sessions that wait for a step of their next turn; they keep the blocks of those before."""
    if not ledger.sessions:
        return []
    # NOTE: a request that has ended may still be admitted.
    statuses = {name: request.status for name, request in ledger.requests.items() if name in ledger.admitted}
    if sum(status == RequestStatus.RUNNING for status in statuses.values()) >= ledger.max_num_running:
        return []
    return [name for name in sorted(ledger.sessions) if statuses.get(name) == RequestStatus.WAITING]


class SpareBlocks:
    """Lends vLLM's free blocks to running requests, and takes them back before vLLM runs out of blocks.

    A request wants the hot rows that would hold its whole sequence. Those that have them keep them, those that want
    least get them, as long as there is enough; what is left is divided equally among the others. What running requests
    may need in their next steps stays free. Rows for a sequence's next tokens are lent early, but only as early as
    there is room for all.

    If vLLM has refused a request for want of device blocks, what it needs to start stays free as well, and what the
    requests behind it need. Requests that wait for anything else take nothing away from those that run.

    Args:
        block_pool: vLLM's.
        spec: of the hot buffers.
        max_model_len: tokens of the longest request.
        max_num_batched_tokens: tokens of a step.
        watermark_blocks: that vLLM leaves free when it admits a request.

    Attributes:
        lent: request id -> its blocks.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        spec: HotBufferSpec,
        max_model_len: int,
        max_num_batched_tokens: int,
        watermark_blocks: int,
    ):
        self.block_pool, self.spec, self.max_model_len = block_pool, spec, max_model_len
        self.lent: dict[str, list[KVCacheBlock]] = {}
        self._num_wanted = self._num_taken_back = 0
        self._num_complete = spec.num_blocks(max_model_len)  # hot blocks of a long request, which get no more
        self._blocks_per_block = self._num_grown(spec.layout.block_size)  # of as many tokens as a host block has
        self._complete_blocks_per_block = self._num_grown(spec.layout.block_size, is_complete=True)
        self._chunk_blocks = self._num_grown(max_num_batched_tokens)
        self._watermark_blocks = watermark_blocks
        self._known: set[str] = set()
        self._num_complete_requests = 0
        self._steps_to_balance, self._steps_of_refusal = 0, 0

    @classmethod
    def make(
        cls, kv_cache_manager: KVCacheManager, spec: HotBufferSpec, max_num_batched_tokens: int
    ) -> SpareBlocks | None:
        """Of an engine; None where hot buffers are not elastic."""
        if not spec.elastic:
            return None
        sizes = kv_cache_manager.max_model_len, max_num_batched_tokens, kv_cache_manager.watermark_blocks
        return cls(kv_cache_manager.block_pool, spec, *sizes)

    def row_counts(self) -> dict[str, int]:
        """Hot rows lent, and those wanted when this was last looked at."""
        rows_per_block, num_lent = self.spec.layout.rows_per_hot_block, sum(map(len, self.lent.values()))
        return {"hot_rows_lent": num_lent * rows_per_block, "hot_rows_wanted": self._num_wanted * rows_per_block}

    def take_rows_taken_back(self) -> int:
        """Hot rows taken back since the last call."""
        num_blocks, self._num_taken_back = self._num_taken_back, 0
        return num_blocks * self.spec.layout.rows_per_hot_block

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks of a request that ends or is preempted; the caller frees them."""
        return self.lent.pop(request_id, [])

    def balance(
        self,
        ledger: RequestLedger,
        blocks: Mapping[str, Sequence[KVCacheBlock]],
        num_scheduled: Mapping[str, int],
        has_refused: bool,
    ) -> None:
        """Lend or take back, every few steps and whenever blocks are needed; called when a step has been scheduled.

        Args:
            ledger: of the requests; told of what changes.
            blocks: request id -> the hot blocks that it has in any case.
            num_scheduled: request id -> tokens that the step computes.
            has_refused: whether vLLM has refused a request for want of device blocks when it scheduled this step.
        """
        self._steps_of_refusal = self._steps_of_refusal + 1 if has_refused else 0
        self._steps_to_balance -= 1
        is_due = self._steps_to_balance <= 0 or ledger.admitted.keys() != self._known
        if is_due:
            self._num_complete_requests = sum(len(blocks[name]) >= self._num_complete for name in ledger.admitted)
        num_available = self.block_pool.get_num_free_blocks() - self._num_reserved(ledger, num_scheduled)
        is_short = num_available < 0 and bool(self.lent)
        if not is_due and not is_short:
            return
        self._known = set(ledger.admitted)
        self._steps_to_balance = STEPS_PER_BALANCE
        given = {name: len(self.lent.get(name, ())) for name in ledger.admitted}
        whole = {name for name in given if self._is_whole(ledger, name, len(blocks[name]) + given[name])}
        num_slack = int(SLACK_SHARE * self._num_growing(ledger))
        num_blocks = max(num_available + sum(given.values()) - num_slack, 0)
        wanted = self._blocks_wanted(ledger, blocks, given, num_blocks)
        self._num_wanted = sum(wanted.values())
        changes = {name: target - given[name] for name, target in divide(wanted, whole, num_blocks).items()}
        is_short |= sum(change for change in changes.values() if change > 0) > num_available
        for request_id, change in changes.items():
            if change < 0 and (is_short or self._is_large(change, given[request_id], wanted[request_id])):
                self._take_back(ledger, request_id, -change, len(blocks[request_id]))
        for request_id, change in changes.items():
            if change > 0 and self._is_large(change, given[request_id], wanted[request_id]):
                self._lend(ledger, request_id, change)

    @staticmethod
    def _is_large(change: int, num_given: int, num_wanted: int) -> bool:
        """Whether a change is worth telling the worker of: one that gives all that is wanted always is."""
        target = num_given + change
        return target == num_wanted or abs(change) > MIN_CHANGE * max(target, num_given)

    def _num_grown(self, num_tokens: int, is_complete: bool = False) -> int:
        """Blocks of all kinds that so many more tokens of a request take at most.

        Args:
            num_tokens: more tokens.
            is_complete: whether the request has all hot blocks that it gets without being lent any.
        """
        layout = self.spec.layout
        num_hot = 0 if is_complete else -(-layout.block_size // layout.rows_per_hot_block)
        return layout.num_blocks(num_tokens) * (num_hot + layout.has_resident_kv) + layout.state.num_blocks(num_tokens)

    def _num_growing(self, ledger: RequestLedger) -> int:
        """Blocks that running requests may need at once; those that became complete since the last balance count as
        before."""
        num_others = len(ledger.admitted) - self._num_complete_requests
        return num_others * self._blocks_per_block + self._num_complete_requests * self._complete_blocks_per_block

    def _is_whole(self, ledger: RequestLedger, request_id: str, num_blocks: int) -> bool:
        """Whether a request's hot blocks hold its sequence."""
        return num_blocks >= self.spec.num_whole_blocks(ledger.admitted[request_id].num_tokens)

    def _num_reserved(self, ledger: RequestLedger, num_scheduled: Mapping[str, int]) -> int:
        """Blocks that running requests may need in their next steps, and waiting ones if one of them was refused.

        NOTE: a step that has no tokens left for a waiting request computes a part of some prompt. Blocks for one more
        such part stay free then, and the waiting request can start with them in the next step.
        """
        num_reserved = self._num_growing(ledger)
        if max(num_scheduled.values(), default=0) > self.spec.layout.max_query_len:
            num_reserved += self._chunk_blocks
        if self._steps_of_refusal > MAX_STEPS_OF_REFUSAL:
            return self.block_pool.num_gpu_blocks
        needs = self._needs(ledger) if self._steps_of_refusal else []
        return num_reserved + sum(needs) + (self._watermark_blocks if needs else 0)

    def _needs(self, ledger: RequestLedger) -> list[int]:
        """Blocks of each request that could start if there were device blocks, and of each session's next turn."""
        size = self.spec.num_request_blocks
        turns = ((ledger.requests[name].num_tokens, ledger.admitted[name].num_tokens) for name in waiting_turns(ledger))
        needs = [size(request.num_tokens) for request in waiting_requests(ledger)]
        needs += [max(size(num_tokens) - size(num_before), 0) for num_tokens, num_before in turns]
        return [need + self._blocks_per_block for need in needs]

    def _blocks_wanted(
        self,
        ledger: RequestLedger,
        blocks: Mapping[str, Sequence[KVCacheBlock]],
        given: Mapping[str, int],
        num_blocks: int,
    ) -> dict[str, int]:
        """Blocks that would hold each sequence: as many as it has, if they last until the next balance, else also those
        for a few more tokens; just those until the next balance, if only then all sequences can be held.

        Args:
            ledger: of the requests.
            blocks: request id -> the hot blocks that it has in any case.
            given: request id -> blocks that it has been lent.
            num_blocks: blocks to divide.
        """
        num_soon = (STEPS_PER_BALANCE + STEPS_IN_FLIGHT + 1) * self.spec.layout.max_query_len
        least, most = (
            {name: self._num_missing(ledger, name, len(blocks[name]), num_new) for name in given}
            for num_new in (num_soon, num_soon + self.spec.layout.block_size)
        )
        wanted = {name: num if least[name] <= num <= most[name] else most[name] for name, num in given.items()}
        return least if sum(least.values()) <= num_blocks < sum(wanted.values()) else wanted

    def _num_missing(self, ledger: RequestLedger, request_id: str, num_blocks: int, num_new: int) -> int:
        """Blocks that a sequence and its next tokens are missing; none before the hot buffer is complete."""
        request = ledger.requests.get(request_id)
        if request is None or num_blocks < self._num_complete:
            return 0
        num_tokens = min(request.num_tokens + num_new, self.max_model_len)
        return max(self.spec.num_whole_blocks(num_tokens) - num_blocks, 0)

    def _lend(self, ledger: RequestLedger, request_id: str, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.block_pool.get_num_free_blocks())
        if num_blocks > 0:
            self.lent.setdefault(request_id, []).extend(self.block_pool.get_new_blocks(num_blocks))
            ledger.hot_tables.change(request_id)

    def _take_back(self, ledger: RequestLedger, request_id: str, num_blocks: int, num_others: int) -> None:
        """Take the last blocks if the sequence fits into what is left, else the first, which hold its oldest rows.

        NOTE: the step that is being scheduled does not use them any more. Those before it have been processed when the
        next one is scheduled and gives them away, since vLLM has two batches in flight at most.
        """
        lent = self.lent[request_id]
        num_left = num_others + len(lent) - num_blocks
        fits = self._is_whole(ledger, request_id, num_left)
        part = slice(len(lent) - num_blocks, None) if fits else slice(0, num_blocks)
        taken = lent[part]
        del lent[part]
        if not lent:
            del self.lent[request_id]
        self._num_taken_back += len(taken)
        self.block_pool.free_blocks(taken)
        ledger.hot_tables.change(request_id)
