"""vLLM's private names, and what vLLM moves between releases, in one place. Written for vLLM 0.32.

A class of vLLM that calls a private method of its own to be overridden is given that method here, by a mixin or a class
decorator that calls a method with a public name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from random import SystemRandom
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm_hisparse.config import CONNECTOR_NAME

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
    from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager
    from vllm.v1.request import Request

Layer = TypeVar("Layer", bound=type)
Kernel = Callable[..., None]


def uses_host_connector(vllm_config: VllmConfig) -> bool:
    """Whether this engine runs `HiSparseHostConnector`."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR_NAME


def is_dsa_model(vllm_config: VllmConfig) -> bool:
    """Whether the model has a DSA indexer."""
    model = vllm_config.model_config
    return model is not None and model.use_mla and hasattr(model.hf_text_config, "index_topk")


def is_draft_layer(layer_name: str, vllm_config: VllmConfig) -> bool:
    """Whether a layer is one that drafts: vLLM numbers these after the model's own."""
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(layer_name) >= vllm_config.model_config.hf_text_config.num_hidden_layers


def register_connector(name: str, module: str, class_name: str) -> None:
    """Register a KV connector, unless it is."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, class_name)


def cpu_kernels() -> ModuleType:
    """vLLM's C++ kernels."""
    from vllm import _custom_ops

    return _custom_ops


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
    return _is_zero(sample) and (name == remote_name or (_is_first_prompt(name) and _is_first_prompt(remote_name)))


def transfer_of_sample(request_id: str, remote_request_id: str) -> str | None:
    """The prefill side's request that nobody will pull because this sample here is computed; None if there is none.

    The prefill side computes as many samples as the decode side, under ids that differ in their number alone, and hands
    over the transfer of one of them. The first sample here owns that one. Each other sample here stands for the one of
    its number there, or for the first one where its own was handed over.
    """
    sample, name = _REQUEST_ID.fullmatch(request_id).groups()
    remote_sample, remote_name = _REQUEST_ID.fullmatch(remote_request_id).groups()
    is_same_prompt = name == remote_name or (_is_first_prompt(name) and _is_first_prompt(remote_name))
    if _is_zero(sample) or remote_sample is None or not is_same_prompt:
        return None
    return f"{'0' if sample == remote_sample else sample}_{remote_request_id.partition('_')[2]}"


def _is_first_prompt(name: str) -> bool:
    match = _PROMPT_INDEX.fullmatch(name)
    return match is None or _is_zero(match[1] or match[2])


def _is_zero(digits: str | None) -> bool:
    """Whether digits, or none, spell 0. NOTE: clients choose ids, and `int` fails on more than 4,300 digits."""
    return not (digits or "").strip("0")


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


def replace_batch(common: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
    """A copy of a step's batch with other values, without what vLLM has cached of the old ones."""
    return common.replace(**changes, _num_computed_tokens_cache=None, _token_to_req_indices_cache=None)


def disable_dense_prefill(layer: MLAAttention) -> None:
    """Let every query token of a sparse MLA layer take `forward_mqa`: the dense path reads the full KV cache."""
    layer.prefill_backend = None
    layer._dense_mha_metadata_layer_name = ""


def key_scale(layer: torch.nn.Module) -> torch.Tensor:
    """The scale that keys of an attention layer are quantised with: [1] float32 or a scalar tensor."""
    return layer._k_scale


def attend_to_flat_rows(
    impl: Any,
    query: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    selection: tuple[torch.Tensor, torch.Tensor],
    layer: torch.nn.Module,
) -> torch.Tensor:
    """Run the kernel of vLLM's `FlashAttnMLASparseImpl` over rows that have been selected.

    Args:
        impl: of the layer.
        query: [tokens, num_heads, kv_lora_rank] and [tokens, num_heads, qk_rope_head_dim].
        rows: [num_rows, row elements], contiguous.
        selection: [tokens, k] int32 row ids, and [tokens] int32 how many lead.
        layer: the attention layer.

    Returns:
        [tokens, num_heads, kv_lora_rank].
    """
    if hasattr(impl, "_run_mqa_kernel"):  # vLLM 0.32
        return impl._run_mqa_kernel(*query, rows, *selection, 1, cache_is_flat=True)
    return impl._forward_mqa_kernel(query, rows.unsqueeze(1), *selection, layer=layer, block_size=1, is_decode=True)[0]


def join_query(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The query of some tokens of an MLA layer on CUDA, [tokens, heads, kv_lora_rank + qk_rope_head_dim].

    Args:
        nope: [tokens, heads, kv_lora_rank].
        rope: [tokens, heads, qk_rope_head_dim].
    """
    from vllm import _custom_ops

    query = nope.new_empty(*nope.shape[:2], nope.shape[2] + rope.shape[2])
    _custom_ops.concat_mla_q(nope, rope, query)
    return query


class SelectionHook:
    """Mixin of vLLM's `FlashMLASparseImpl`: `locate_selection` turns selected positions into rows of the cache."""

    def locate_selection(self, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row ids of selected positions, [tokens, k] int32, and how many lead, [tokens] int32.

        Args:
            top_k: [tokens, k] int32 positions, -1 for none.
        """
        raise NotImplementedError

    def _convert_logical_to_physical_topk(
        self, logical_topk_indices: torch.Tensor, attn_metadata: Any, *, return_valid_counts: bool, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        row_ids, num_valid = self.locate_selection(logical_topk_indices)
        return (row_ids, num_valid) if return_valid_counts else row_ids


class ShortDecodes:
    """Mixin of vLLM's sparse MLA metadata builders: a request decodes if it has one query token, and those drafted."""

    def request_of_token(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Batch index of each token's request, [tokens] int32; vLLM launches a kernel to find it."""
        return super()._build_req_id_per_token(common)

    def _build_req_id_per_token(self, common_attn_metadata: CommonAttentionMetadata) -> torch.Tensor:
        return self.request_of_token(common_attn_metadata)

    def _init_reorder_batch_threshold(self, *args: Any, **kwargs: Any) -> None:
        super()._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


def wraps_indexer_and_attention(layer_class: Layer) -> Layer:
    """Class decorator of a `DeepseekV32Attention`: indexer and attention of a layer, the part of it that no piecewise
    CUDA graph captures, run inside `layer.writing_rows(positions, kv_c, k_pe)`, a context manager, as
    `layer.select_and_attend(run, tensors)`, where `run` takes a layer and the tensors, [tokens, ...] or None each."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    def run(layer: Any, *tensors: torch.Tensor | None) -> None:
        super(layer_class, layer)._sparse_indexer_and_attn(*tensors)

    @eager_break_during_capture  # NOTE: outermost, or replay runs vLLM's part alone
    def _sparse_indexer_and_attn(self: Any, positions: torch.Tensor, *args: Any) -> None:
        kv_c, k_pe = args[6:8]  # q_c, q_nope, q_pe, index_q, index_k, index_weights, kv_c, k_pe, ...
        with self.writing_rows(positions, kv_c, k_pe):
            self.select_and_attend(run, (positions, *args))

    layer_class._sparse_indexer_and_attn = _sparse_indexer_and_attn
    return layer_class


def forget_chunk(primary: CPUPrimaryTierOffloadingManager, key: OffloadKey) -> None:
    """Remove a chunk that nobody reads from the primary tier of vLLM's tiering; nothing happens if there is none."""
    chunk = primary._policy.get(key)
    if chunk is not None and chunk.is_ready and not chunk.ref_cnt:
        primary._policy.remove(key)
        primary._free_chunk(chunk)
        primary._num_evictable_cache_chunks -= 1


def register_tier(name: str, module: str, class_name: str) -> None:
    """Register a tier of vLLM's tiering, unless it is."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if name not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(name, module, class_name)


def mend_rejection_sampler(expand: Kernel, reject: Kernel, recover: Kernel) -> None:
    """Have vLLM's CPU platform register other versions of three kernels of the rejection sampler.

    NOTE: it runs in steps without drafts, too, and fails on the CPU to look up the largest top-k of none.
    """
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    apply = rejection_sampler.apply_sampling_constraints
    if not hasattr(apply, "__wrapped__"):

        @wraps(apply)
        def apply_to_some(logits: torch.Tensor, *args: Any) -> torch.Tensor:
            return apply(logits, *args) if len(logits) else logits

        rejection_sampler.apply_sampling_constraints = apply_to_some

    cpu_triton_utils._expand_kernel_impl = expand
    cpu_triton_utils._rejection_random_sample_kernel_impl = reject
    cpu_triton_utils._sample_recovered_tokens_kernel_impl = recover


def release_failed_loads() -> None:
    """Have vLLM's scheduler forget the reservation of a request whose load has failed, and which waits without blocks.

    NOTE: it goes on reserving blocks for the whole prompt. With `--scheduling-policy priority`, a prompt of higher
    priority whose load does not fit beside that is never admitted, nor is anything behind it.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler._update_waiting_for_remote_kv
    if hasattr(update, "__wrapped__"):
        return

    @wraps(update)
    def update_and_release(self: Scheduler, request: Request) -> None:
        update(self, request)
        if not request.num_computed_tokens:
            self._inflight_prefills.discard(request)

    Scheduler._update_waiting_for_remote_kv = update_and_release


def draw_temporary_names() -> None:
    """Let vLLM's file system tier name temporary files like no other engine's.

    NOTE: it draws names from Python's generator, which vLLM seeds: an engine that is killed leaves a file of the name
    that the next one wants, too, and cannot create.
    """
    from vllm.v1.kv_offload.tiering.fs import io

    io.random = SystemRandom()


def tolerate_missing_telemetry(tier: ObjectStoreSecondaryTierManager) -> None:
    """Let a tier ask NIXL how long a transfer took, though it has not told NIXL to measure that: it took 0 then."""
    measured = tier._agent.get_xfer_telemetry

    def get_xfer_telemetry(handle: Any) -> Any:
        try:
            return measured(handle)
        except Exception:  # of NIXL's bindings
            return SimpleNamespace(xferDuration=0)

    tier._agent.get_xfer_telemetry = get_xfer_telemetry


class MovedModules(MetaPathFinder, Loader):
    """Finds modules under the names that they had before vLLM moved them.

    NOTE: `ray.llm` of Ray 2.60 imports `vllm.entrypoints.launchers.cli_args` in every process of an application, after
    vLLM has asked for platforms; vLLM 0.33 has this module elsewhere. A finder is asked last, for names that nobody
    has, and by the import alone: a module in `sys.modules` is looked at by whoever inspects a stack.
    """

    NAMES: ClassVar[dict[str, str]] = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}

    @classmethod
    def install(cls) -> None:
        """Let imports ask; nothing happens if they do."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        moved = import_module(self.NAMES[module.__name__])
        vars(module).update((name, value) for name, value in vars(moved).items() if not name.startswith("__"))
