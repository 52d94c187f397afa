"""One log line per finished request, enabled by `log_request_stats`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vllm.logger import init_logger

from vllm_hisparse.connector.request_line import RequestLine

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


@dataclass
class _RequestStats:
    hits: int = 0
    misses: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    num_open_runs: int = 0
    num_prompt_tokens: int | None = None  # None until the request has ended


class RequestLog:
    """Adds up the worker's reports about a request, and logs a finished request once all of its runs are reported.

    The worker names a run by the id of its first hot block.

    A run lasts from an admission to the release of the hot blocks; a preempted request has several. Each first hot
    block has a queue of runs, because later requests reuse it.
    """

    def __init__(self) -> None:
        self._stats: dict[str, _RequestStats] = {}
        self._runs: dict[int, deque[str]] = {}

    def started(self, first_hot_block_id: int, request_id: str) -> None:
        """Record that a run of a request begins; called before `released` with the same block."""
        self._stats.setdefault(request_id, _RequestStats()).num_open_runs += 1
        self._runs.setdefault(first_hot_block_id, deque()).append(request_id)

    def received(self, request_id: str, bytes_to_host: int, bytes_to_device: int) -> None:
        """Add the bytes of a transfer from a prefill instance."""
        stats = self._stats.setdefault(request_id, _RequestStats())
        stats.bytes_to_host += bytes_to_host
        stats.bytes_to_device += bytes_to_device

    def released(self, first_hot_block_id: int, hits: int, misses: int) -> None:
        """End the oldest open run of a first hot block.

        Args:
            first_hot_block_id: id of the block.
            hits, misses: selected rows of the run that were hot, and rows that were not.

        Raises:
            KeyError: no run of this block is open.
        """
        request_id = self._runs[first_hot_block_id].popleft()
        if not self._runs[first_hot_block_id]:
            del self._runs[first_hot_block_id]
        stats = self._stats[request_id]
        stats.hits += hits
        stats.misses += misses
        stats.num_open_runs -= 1
        self._flush(request_id)

    def ended(self, request_id: str, num_prompt_tokens: int) -> None:
        """Record that a request has ended; its line follows when all of its runs are reported."""
        self._stats.setdefault(request_id, _RequestStats()).num_prompt_tokens = num_prompt_tokens
        self._flush(request_id)

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request, but is not; an empty dict if all is well."""
        kinds = {"requests to log": self._stats, "runs to log": self._runs}
        return {name: left for name, left in kinds.items() if left}

    def _flush(self, request_id: str) -> None:
        stats = self._stats[request_id]
        if stats.num_open_runs or stats.num_prompt_tokens is None:
            return
        del self._stats[request_id]
        line = RequestLine(
            request_id,
            stats.num_prompt_tokens,
            stats.hits,
            stats.misses,
            stats.bytes_to_host,
            stats.bytes_to_device,
        )
        logger.info("%s", line)
