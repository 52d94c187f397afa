"""Decides whether decode steps run in microbatches: only if enough rows are copied to pay for them."""

from __future__ import annotations

from vllm_hisparse.kv_manager.usage import Usage

# Least bytes of rows that a step must copy in a layer to be divided. Microbatches cost 25 to 40 us in a layer of
# DeepSeek-V3.2 on an H200, and hide a part of the copies, which take as long for this many bytes (at 40 GB/s).
MIN_COPIED_BYTES = 1_600_000


class StepForm:
    """Chooses the form of each step from the misses of the last measured ones.

    Tensor parallel ranks should run the same form, because each layer waits for the slowest of them. NOTE: a position
    that several drafts select, and a request that is shorter than its selection, count as more copied bytes than they
    are, so such steps are divided more often than they should be.

    Args:
        selection_bytes: bytes of the rows that a token selects in a layer.
    """

    def __init__(self, selection_bytes: int):
        self._selection_bytes = selection_bytes
        self._missed_share: float | None = None  # of selections, None before the first measurement

    def measured(self, usage: Usage) -> None:
        """Note the hits and misses of steps."""
        num_selected = usage.hits + usage.misses
        if num_selected:
            self._missed_share = usage.misses / num_selected

    def runs_whole(self, num_tokens: int) -> bool:
        """Return True if a step that decodes `num_tokens` tokens is not to be divided."""
        if self._missed_share is None:
            return False
        return self._missed_share * num_tokens * self._selection_bytes < MIN_COPIED_BYTES
