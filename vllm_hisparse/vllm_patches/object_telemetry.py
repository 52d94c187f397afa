"""The object store tier asks NIXL how long a transfer took, and has not told NIXL to measure that.

Every transfer fails then (`vllm/v1/kv_offload/tiering/obj/manager.py`); vLLM 0.33 tells NIXL to measure.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_hisparse.releases import serves

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

RELEASES = ">=0.32,<0.33"
DELETE = "the call in kv_manager/tiers/obj_tier.py"
VLLM = ("vllm.v1.kv_offload.tiering.obj.manager.ObjectStoreSecondaryTierManager._agent",)


def tolerate_missing_telemetry(tier: ObjectStoreSecondaryTierManager) -> None:
    """Let a tier ask NIXL how long a transfer took, though it has not told NIXL to measure that: it took 0 then."""
    if not serves(RELEASES):
        return
    measured = tier._agent.get_xfer_telemetry

    def get_xfer_telemetry(handle: Any) -> Any:
        try:
            return measured(handle)
        except Exception:  # of NIXL's bindings
            return SimpleNamespace(xferDuration=0)

    tier._agent.get_xfer_telemetry = get_xfer_telemetry
