"""How free device blocks are divided among requests, as hot blocks beyond those that each has in any case."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec

MIN_CHANGE = 1 / 16  # of what a request has or gets, unless it gets all or blocks are needed


@dataclass(frozen=True)
class Borrower:
    """A request that may be lent blocks.

    Attributes:
        num_lent: blocks that it has been lent.
        is_whole: whether its whole sequence is hot.
        least: blocks that it could be lent to hold its sequence until this is looked at again.
        most: `least`, and blocks for some more tokens, so that its table changes seldom.
    """

    num_lent: int
    is_whole: bool
    least: int
    most: int

    @property
    def wanted(self) -> int:
        """Blocks that it wants: as many as it has been lent, if they last."""
        return self.num_lent if self.least <= self.num_lent <= self.most else self.most


def plan(borrowers: Mapping[str, Borrower], num_blocks: int, num_available: int) -> dict[str, int]:
    """How many blocks each request is lent from now on.

    Requests whose whole sequence is hot keep it, and those that want least get it, as long as there are enough blocks;
    what is left is divided equally among the others. A small change is left out, unless it gives a request all that it
    wants or lent blocks are needed. No more than `num_available` blocks are lent in addition.

    Args:
        borrowers: request id -> request.
        num_blocks: blocks to divide, those that are lent now included; at most `num_available` more than those.
        num_available: free blocks that nobody needs; negative if lent blocks are needed.
    """
    num_lent = sum(borrower.num_lent for borrower in borrowers.values())
    wanted = blocks_wanted(borrowers, num_blocks)
    whole = {name for name, borrower in borrowers.items() if borrower.is_whole}
    target = divide(wanted, whole, num_blocks)
    num_more = sum(max(target[name] - borrower.num_lent, 0) for name, borrower in borrowers.items())
    is_short = num_more > num_available or (num_available < 0 and num_lent > 0)
    for name, borrower in borrowers.items():
        is_needed = is_short and target[name] < borrower.num_lent
        if not is_needed and not _is_large(borrower.num_lent, target[name], wanted[name]):
            target[name] = borrower.num_lent
    return target


def blocks_wanted(borrowers: Mapping[str, Borrower], num_blocks: int) -> dict[str, int]:
    """How many blocks each request wants: the least, if only then all get what they want.

    Args:
        borrowers: request id -> request.
        num_blocks: blocks to divide.
    """
    num_wanted = sum(borrower.wanted for borrower in borrowers.values())
    if sum(borrower.least for borrower in borrowers.values()) <= num_blocks < num_wanted:
        return {name: borrower.least for name, borrower in borrowers.items()}
    return {name: borrower.wanted for name, borrower in borrowers.items()}


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


class BlockNeeds:
    """Device blocks of all kinds that requests need at most.

    Args:
        spec: of the hot buffers.
        max_model_len: tokens of the longest request.
        max_num_batched_tokens: tokens of a step.
        watermark: blocks that vLLM leaves free when it admits a request.

    Attributes:
        num_complete: hot blocks of a long request, which gets no more of its own.
        chunk: blocks for as many tokens as a step computes.
    """

    def __init__(self, spec: HotBufferSpec, max_model_len: int, max_num_batched_tokens: int, watermark: int):
        self.spec, self.watermark = spec, watermark
        self.num_complete = spec.num_blocks(max_model_len)
        self.chunk = self._for_tokens(max_num_batched_tokens)
        self._for_block = self._for_tokens(spec.layout.block_size)
        self._for_block_if_complete = self._for_tokens(spec.layout.block_size, is_complete=True)

    def growing(self, num_requests: int, num_complete_requests: int) -> int:
        """Blocks that running requests may need at once, for the next block of tokens of each.

        Args:
            num_requests: requests whose hot buffers still grow.
            num_complete_requests: the others.
        """
        return num_requests * self._for_block + num_complete_requests * self._for_block_if_complete

    def start(self, num_tokens: int) -> int:
        """Blocks of a request of `num_tokens` that has none."""
        return self.spec.num_request_blocks(num_tokens) + self._for_block

    def turn(self, num_tokens: int, num_new_tokens: int) -> int:
        """Blocks of a session that has those for `num_tokens` and is to have `num_new_tokens`."""
        num_missing = self.spec.num_request_blocks(num_new_tokens) - self.spec.num_request_blocks(num_tokens)
        return max(num_missing, 0) + self._for_block

    def _for_tokens(self, num_tokens: int, is_complete: bool = False) -> int:
        """Blocks that `num_tokens` more of a request take.

        Args:
            num_tokens: more tokens.
            is_complete: whether the request has all hot blocks that it gets without being lent any.
        """
        layout = self.spec.layout
        num_hot = 0 if is_complete else -(-layout.block_size // layout.rows_per_hot_block)
        return layout.num_blocks(num_tokens) * (num_hot + layout.has_resident_kv) + layout.state.num_blocks(num_tokens)


def _is_large(num_lent: int, target: int, num_wanted: int) -> bool:
    """Whether a change is worth telling the worker of: one that gives all that is wanted always is."""
    return target == num_wanted or abs(target - num_lent) > MIN_CHANGE * max(target, num_lent)
