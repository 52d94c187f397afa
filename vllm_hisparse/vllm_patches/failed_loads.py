"""A request whose load has failed goes on reserving blocks for its whole prompt.

vLLM's scheduler keeps the request among those that load, although it waits without blocks. With `--scheduling-policy
priority`, a prompt of higher priority whose load does not fit beside the reserved blocks is never admitted, and neither
is any request behind it.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

RELEASES = ">=0.32"
DELETE = "the call in connector/connector.py"
VLLM = (
    "vllm.v1.core.sched.scheduler.Scheduler._update_waiting_for_remote_kv",
    "vllm.v1.core.sched.scheduler.Scheduler._inflight_prefills",
    "vllm.v1.core.sched.scheduler.Scheduler.failed_recving_kv_req_ids",
)


def release_failed_loads() -> None:
    """Let vLLM's scheduler forget the reservation of a request whose load has failed and which waits without blocks.

    A load that has ended without a computed token has failed, too, whatever `kv_load_failure_policy` says, because the
    connector has withdrawn it.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler._update_waiting_for_remote_kv
    if hasattr(update, "__wrapped__"):
        return

    @wraps(update)
    def update_and_release(self: Scheduler, request: Request) -> None:
        if not request.num_computed_tokens:
            self.failed_recving_kv_req_ids.add(request.request_id)
        update(self, request)
        if not request.num_computed_tokens:
            self._inflight_prefills.discard(request)

    Scheduler._update_waiting_for_remote_kv = update_and_release
