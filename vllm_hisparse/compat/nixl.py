"""Private parts of vLLM's NIXL connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

RELEASES = ">=0.32"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector.NixlPullConnector.connector_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.use_mla",
)


def copy_blocks_whole(connector: NixlPullConnector) -> None:
    """Tell NIXL's worker half that blocks are the same on both sides.

    NOTE: it says `use_mla` for that: with as many ranks on each side no block is cut by heads, whatever the model. Only
    then does it map one remote KV cache group to several local ones and register host and device memory together.
    """
    connector.connector_worker.use_mla = True
