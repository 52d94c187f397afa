"""`reset_running_requests` fails while steps are in flight, and preempts all running requests in vain.

With asynchronous scheduling and a connector that receives KV, vLLM keeps a request's device blocks until the steps in
flight are over (`Scheduler._free_request_blocks`). `Scheduler.reset_prefix_cache` preempts the running requests, finds
their blocks in use, and raises before it resets the connector. The requests go on with the KV that was to be forgotten.

Engines that run in the process of their caller (`InprocClient`) are not mended.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

RELEASES = ">=0.32"
DELETE = "the call in connector/connector.py"
VLLM = (
    "vllm.v1.engine.core.EngineCoreProc.reset_prefix_cache",
    "vllm.v1.engine.core.EngineCoreProc._process_engine_step",
    "vllm.v1.engine.core.EngineCoreProc._handle_client_request",
    "vllm.v1.engine.core.EngineCore.step_with_batch_queue",
    "vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache",
    "vllm.v1.core.sched.scheduler.Scheduler._free_request_blocks",
    "vllm.v1.core.sched.scheduler.Scheduler.set_pause_state",
)


def reset_between_steps() -> None:
    """Let an engine finish the steps in flight, and schedule none, before it takes the blocks of running requests.

    If one of these steps fails, the engine ends, as it does if any other step fails.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    reset = EngineCoreProc.reset_prefix_cache
    if hasattr(reset, "__wrapped__"):
        return

    @wraps(reset)
    def finish_and_reset(
        self: EngineCoreProc, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests and self.batch_queue:
            state = self.scheduler.pause_state
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            try:
                while self.batch_queue and self.scheduler.processed_step_seq < self.scheduler.sched_step_seq:
                    self._process_engine_step()
            except Exception:  # NOTE: vLLM would answer the call with it, and go on without the step's tokens
                self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
                raise
            finally:
                self.scheduler.set_pause_state(state)
        return reset(self, reset_running_requests, reset_connector)

    EngineCoreProc.reset_prefix_cache = finish_and_reset
