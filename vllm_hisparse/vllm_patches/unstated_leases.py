"""A decode side does not know when the lease of a prompt's KV ends, and reads another prompt's KV after the end.

`NixlPullConnectorScheduler.request_finished` of the prefill side leaves `remote_blocks_expiry_time` empty in a prompt's
`kv_transfer_params`. vLLM fills this parameter only where a decode side keeps KV for a prefill side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

RELEASES = ">=0.32"
DELETE = "the call in plugin.py"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory._registry",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler.NixlPullConnectorScheduler.request_finished",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._reqs_need_send",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._kv_lease_duration",
)


def state_leases() -> None:
    """Let the prefill side of vLLM's NIXL connector state when a lease ends, and its duration (`kv_lease_duration`).

    The connector is not imported before vLLM loads it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("NixlConnector", "NixlPullConnector"):
        load = KVConnectorFactory._registry[name]
        if not hasattr(load, "__wrapped__"):
            KVConnectorFactory._registry[name] = _stating_leases(load)


def _stating_leases(load: Callable[[], type]) -> Callable[[], type]:
    @wraps(load)
    def load_and_mend() -> type:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

        finish = NixlPullConnectorScheduler.request_finished
        if not hasattr(finish, "__wrapped__"):

            @wraps(finish)
            def finish_and_state(self: Any, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
                is_kept, params = finish(self, request, block_ids)
                if is_kept and params is not None and params["do_remote_prefill"]:
                    params["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
                    params["kv_lease_duration"] = self._kv_lease_duration
                return is_kept, params

            NixlPullConnectorScheduler.request_finished = finish_and_state
        return load()

    return load_and_mend
