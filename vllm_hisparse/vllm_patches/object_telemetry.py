"""Every transfer of the object store tier fails, because the tier asks NIXL for times that it has not let NIXL measure.

See `vllm/v1/kv_offload/tiering/obj/manager.py`. vLLM 0.33 tells NIXL to measure.
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
    """Let a tier ask NIXL how long a transfer took; the answer is 0 if NIXL was not told to measure."""
    if not serves(RELEASES):
        return
    measured = tier._agent.get_xfer_telemetry

    def get_xfer_telemetry(handle: Any) -> Any:
        try:
            return measured(handle)
        except Exception:  # NIXL's bindings have exceptions of their own
            return SimpleNamespace(xferDuration=0)

    tier._agent.get_xfer_telemetry = get_xfer_telemetry
