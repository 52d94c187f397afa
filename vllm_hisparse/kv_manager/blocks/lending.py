"""Division of free device blocks among requests, as hot blocks that they are lent beyond their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec

Name = TypeVar("Name", str, int)

MIN_CHANGE = 1 / 16  # share of a request's lent blocks, before or after; `plan` leaves out smaller changes


@dataclass(frozen=True)
class Borrower:
    """A request that may be lent blocks.

    Attributes:
        num_lent: blocks that it has been lent.
        least: lent blocks with which it is hot as a whole until the next balance.
        most: `least` and a margin for more tokens, so that its table changes seldom.
    """

    num_lent: int
    least: int
    most: int

    @property
    def wanted(self) -> int:
        """Lent blocks that it wants: the present number if that is enough, but no more than `most`."""
        return self.num_lent if self.least <= self.num_lent <= self.most else self.most


def plan(borrowers: Mapping[str, Borrower], num_blocks: int, num_available: int) -> dict[str, int]:
    """Decide how many blocks each request is lent from now on.

    Every request gets the same number of blocks, but none more than it wants (`divide`). A small change is left out,
    unless it gives a request all that it wants, or lent blocks are needed for something else. At most `num_available`
    blocks are lent in addition to the present ones.

    Args:
        borrowers: request id -> request.
        num_blocks: blocks to divide, including the lent ones; at most `num_available` more than those.
        num_available: free blocks that are not reserved; negative if lent blocks are needed for something else.

    Returns:
        Request id -> number of lent blocks.
    """
    num_lent = sum(borrower.num_lent for borrower in borrowers.values())
    wanted = blocks_wanted(borrowers, num_blocks)
    target = divide(wanted, num_blocks)
    num_more = sum(
        target[name] - borrower.num_lent
        for name, borrower in borrowers.items()
        if target[name] > borrower.num_lent and _is_large(borrower.num_lent, target[name], wanted[name])
    )
    is_short = num_more > num_available or (num_available < 0 and num_lent > 0)
    for name, borrower in borrowers.items():
        is_needed = is_short and target[name] < borrower.num_lent
        if not is_needed and not _is_large(borrower.num_lent, target[name], wanted[name]):
            target[name] = borrower.num_lent
    return target


def blocks_wanted(borrowers: Mapping[str, Borrower], num_blocks: int) -> dict[str, int]:
    """Return the lent blocks that each request wants: request id -> number.

    If there are enough blocks for all requests only without margins, no request wants a margin.

    Args:
        borrowers: request id -> request.
        num_blocks: blocks to divide.
    """
    num_wanted = sum(borrower.wanted for borrower in borrowers.values())
    if sum(borrower.least for borrower in borrowers.values()) <= num_blocks < num_wanted:
        return {name: borrower.least for name, borrower in borrowers.items()}
    return {name: borrower.wanted for name, borrower in borrowers.items()}


def divide(wanted: Mapping[Name, int], num_blocks: int) -> dict[Name, int]:
    """Divide blocks into equal shares. A request that wants less than its share leaves the rest of it to the others.

    Args:
        wanted: request id -> blocks that it wants.
        num_blocks: blocks to divide.

    Returns:
        Request id -> blocks that it gets.
    """
    given: dict[Name, int] = {}
    num_left = num_blocks
    order = sorted(wanted, key=lambda name: (wanted[name], name))
    for num_served, name in enumerate(order):
        given[name] = min(wanted[name], num_left // (len(order) - num_served))
        num_left -= given[name]
    return given


class BlockNeeds:
    """Upper bounds of the device blocks of all kinds that requests need.

    Args:
        spec: KV cache spec of the hot buffers.
        max_model_len: tokens of the longest request.
        max_num_batched_tokens: tokens that a step may compute.
        watermark: blocks that vLLM leaves free when it admits a request.

    Attributes:
        num_complete: own hot blocks of the longest request. A request that has so many is *complete*: it gets no more
            hot blocks of its own.
        chunk: blocks for as many tokens of one request as a step may compute.
    """

    def __init__(self, spec: HotBufferSpec, max_model_len: int, max_num_batched_tokens: int, watermark: int):
        self.spec, self.watermark = spec, watermark
        self.num_complete = spec.num_blocks(max_model_len)
        self.chunk = self._for_tokens(max_num_batched_tokens)
        self._for_block = self._for_tokens(spec.layout.block_size)
        self._for_block_if_complete = self._for_tokens(spec.layout.block_size, is_complete=True)

    def growing(self, num_requests: int, num_complete_requests: int) -> int:
        """Blocks that running requests need at most if each of them begins its next block of tokens.

        Args:
            num_requests: running requests that are not complete.
            num_complete_requests: running requests that are complete.
        """
        return num_requests * self._for_block + num_complete_requests * self._for_block_if_complete

    def start(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` needs to start."""
        return self.spec.num_request_blocks(num_tokens) + self._for_block

    def turn(self, num_tokens: int, num_new_tokens: int) -> int:
        """Blocks that a session with blocks for `num_tokens` needs to grow to `num_new_tokens`."""
        num_missing = self.spec.num_request_blocks(num_new_tokens) - self.spec.num_request_blocks(num_tokens)
        return max(num_missing, 0) + self._for_block

    def _for_tokens(self, num_tokens: int, is_complete: bool = False) -> int:
        """Blocks that a request needs for more tokens.

        Args:
            num_tokens: number of further tokens.
            is_complete: True if the request gets no more hot blocks of its own.
        """
        layout = self.spec.layout
        num_hot = 0 if is_complete else -(-layout.block_size // layout.whole_rows)
        return layout.num_blocks(num_tokens) * (num_hot + layout.has_resident_kv) + layout.state.num_blocks(num_tokens)


def _is_large(num_lent: int, target: int, num_wanted: int) -> bool:
    """Return True if a change is worth a message to the worker. A change that gives all that is wanted always is."""
    return target == num_wanted or abs(target - num_lent) > MIN_CHANGE * max(target, num_lent)
