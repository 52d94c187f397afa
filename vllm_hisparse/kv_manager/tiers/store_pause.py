"""A pause for a tier that has failed to store."""

from __future__ import annotations

import time

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector, DropStorePolicy

PAUSE_S = 30.0

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class StorePause(BackpressureDetector):
    """vLLM's hook for dropping stores: after a store has failed (on a full disk, for example), it drops all stores for
    `PAUSE_S`.

    Args:
        name: name of the tier, for the log.
    """

    def __init__(self, name: str):
        super().__init__(DropStorePolicy())
        self.name = name
        self._until = 0.0

    def job_ended(self, success: bool) -> None:
        """Record the end of a store job; a failure begins a pause."""
        if not success and not self.is_under_pressure():
            logger.warning("Storing to tier %s failed: nothing is stored there for %.0f s.", self.name, PAUSE_S)
            self._until = time.monotonic() + PAUSE_S

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Do nothing: slow stores need no pause, because few run at once."""

    def is_under_pressure(self) -> bool:
        return time.monotonic() < self._until

    def reset(self) -> None:
        self._until = 0.0
