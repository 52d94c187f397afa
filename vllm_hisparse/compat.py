"""What vLLM moves between releases, in one place. Written for vLLM 0.32."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vllm_hisparse.config import CONNECTOR_NAME

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.v1.request import Request


def uses_host_connector(vllm_config: VllmConfig) -> bool:
    """Whether this engine runs `HiSparseHostConnector`."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR_NAME


def is_dsa_model(vllm_config: VllmConfig) -> bool:
    """Whether the model has a DSA indexer."""
    model = vllm_config.model_config
    return model is not None and model.use_mla and hasattr(model.hf_text_config, "index_topk")


def register_connector(name: str, module: str, class_name: str) -> None:
    """Register a KV connector, unless it is."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, class_name)


def cpu_attention_isa(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Which of its kernels vLLM's CPU attention takes for full KV; it decides how a block's keys are ordered."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size)


def copy_blocks_whole(connector: NixlPullConnector) -> None:
    """Tell NIXL's worker half that blocks are the same on both sides.

    NOTE: it says `use_mla` for that: with as many ranks on each side no block is cut by heads, whatever the model. Only
    then does it map one remote KV cache group to several local ones and register host and device memory together.
    """
    connector.connector_worker.use_mla = True


# The id of an engine's request: [<sample>_]<id in the API>[-<eight random hexadecimal digits>]
_REQUEST_ID = re.compile(r"(?:(\d+)_)?(.*?)(?:-[0-9a-f]{8})?", re.DOTALL)
# Ids in the API that number the prompts of one HTTP request
_PROMPT_INDEX = re.compile(r"cmpl-.*-(\d+)|chatcmpl-.*_(\d+)", re.DOTALL)


def owns_transfer(request_id: str, remote_request_id: str) -> bool:
    """Whether a request is the one that the prefill side's request `remote_request_id` was made for.

    A router forwards an HTTP request with all its prompts and samples to both sides, and the transfer parameters of one
    of them to the decode side, where vLLM gives a copy to every prompt and sample. It is the first prompt's, or the one
    of the same id where the router names requests (`X-Request-Id`). One sample may use it: the prefill side lets go of
    the blocks after one pull.
    """
    sample, name = _REQUEST_ID.fullmatch(request_id).groups()
    _, remote_name = _REQUEST_ID.fullmatch(remote_request_id).groups()
    return not int(sample or 0) and (name == remote_name or _prompt_index(name) == _prompt_index(remote_name) == 0)


def _prompt_index(name: str) -> int:
    match = _PROMPT_INDEX.fullmatch(name)
    return int(match[1] or match[2]) if match else 0


def is_rejection_notice(request: Request) -> bool:
    """Whether this may be `AsyncLLM.notify_kv_transfer_request_rejected`: it ends at once, to release a transfer.

    vLLM does not tell the scheduler; a user's request may look the same.
    """
    return request.prompt_token_ids == [0] and request.max_tokens == 1


def cut_session(session: Request, num_tokens: int, hash_block_size: int) -> None:
    """Shorten a streaming session that waits with its next turn; at least one token is left to compute.

    Args:
        session: all of its tokens are prompt.
        num_tokens: to keep.
        hash_block_size: tokens of a block hash.
    """
    del session._all_token_ids[num_tokens:], session.prompt_token_ids[num_tokens:]
    del session.block_hashes[num_tokens // hash_block_size :]
    session.num_prompt_tokens = num_tokens
    session.num_computed_tokens = min(session.num_computed_tokens, num_tokens - 1)
