"""vLLM's tier of other instances' memory, protected from other programs' messages."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

from vllm_hisparse.vllm_patches.strange_frames import drop_strange_frames


class PeerTier(P2PSecondaryTierManager):
    """vLLM's tier of other instances, except that messages from other programs to its port do not end it.

    Args:
        args, options: as in vLLM's tier.
    """

    def __init__(self, *args: Any, **options: Any):
        drop_strange_frames()
        super().__init__(*args, **(options | {"tier_type": "p2p"}))  # NOTE: the name in metrics
