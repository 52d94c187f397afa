"""Private parts of vLLM's attention layers, metadata and sparse MLA backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.v1.attention.backend import CommonAttentionMetadata

RELEASES = ">=0.32"
VLLM = (
    "vllm.v1.attention.backend.CommonAttentionMetadata._num_computed_tokens_cache",
    "vllm.v1.attention.backend.CommonAttentionMetadata._token_to_req_indices_cache",
    "vllm.models.deepseek_v32.attention.DeepseekV32Attention._dense_mha_metadata_layer_name",
    "vllm.models.deepseek_v32.attention.DeepseekV32Attention._fp8_kv_needs_view",
    "vllm.model_executor.layers.attention.attention.set_default_quant_scales",
    "vllm._custom_ops.concat_mla_q",
    "vllm.model_executor.layers.attention.sparse_mla_attention.SparseMLACommonImpl._convert_logical_to_physical_topk",
    "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseMetadataBuilder._build_req_id_per_token",
    "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseMetadataBuilder._init_reorder_batch_threshold",
    "vllm.models.deepseek_v32.attention.DeepseekV32Attention._sparse_indexer_and_attn",
)

Layer = TypeVar("Layer", bound=type)


def replace_batch(common: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
    """Return a copy of a step's batch with changed values, without vLLM's cached results for the old values."""
    return common.replace(**changes, _num_computed_tokens_cache=None, _token_to_req_indices_cache=None)


def disable_dense_prefill(layer: MLAAttention) -> None:
    """Let all query tokens of a sparse MLA layer take `forward_mqa`, because the dense path reads the full KV cache."""
    layer.prefill_backend = None
    layer._dense_mha_metadata_layer_name = ""


def pass_no_cache(layer: MLAAttention) -> None:
    """Let a fused layer hand `forward_mqa` its cache as it is, because a layer with hot buffers may have none.

    vLLM would view a cache in fp8 with one scale per layer as fp8.
    """
    layer._fp8_kv_needs_view = False


def key_scale(layer: torch.nn.Module) -> torch.Tensor:
    """Return the scale with which keys of an attention layer are quantised: [1] float32, or a scalar tensor."""
    return layer._k_scale


class QuantScales(NamedTuple):
    """Scales by which a layer's queries, keys and values were divided when they were quantised: scalar tensors."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def quant_scales(layer: torch.nn.Module) -> QuantScales:
    """Return the scales of an attention layer of a dense model."""
    return QuantScales(layer._q_scale, layer._k_scale, layer._v_scale)


def join_query(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Join the parts of an MLA layer's query on CUDA: [tokens, heads, kv_lora_rank + qk_rope_head_dim].

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

    def locate_selection(self, selected_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row ids of selected positions, [tokens, k] int32, and the number of leading valid ones, [tokens]
        int32.

        Args:
            selected_positions: [tokens, k] int32, -1 for none.
        """
        raise NotImplementedError

    def _convert_logical_to_physical_topk(
        self, logical_topk_indices: torch.Tensor, attn_metadata: Any, *, return_valid_counts: bool, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        row_ids, num_valid = self.locate_selection(logical_topk_indices)
        return (row_ids, num_valid) if return_valid_counts else row_ids


class ShortDecodes:
    """Mixin of vLLM's sparse MLA metadata builders: a request decodes if it has one query token and its drafts."""

    def request_of_token(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the batch index of each token's request, [tokens] int32. vLLM launches a kernel to find it."""
        return super()._build_req_id_per_token(common)

    def _build_req_id_per_token(self, common_attn_metadata: CommonAttentionMetadata) -> torch.Tensor:
        return self.request_of_token(common_attn_metadata)

    def _init_reorder_batch_threshold(self, *args: Any, **kwargs: Any) -> None:
        super()._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


def wraps_indexer_and_attention(layer_class: Layer) -> Layer:
    """Class decorator of a `DeepseekV32Attention` for its indexer and attention, which piecewise CUDA graphs leave out.

    They run as `layer.select_and_attend(run, tensors)`, where `run` takes a layer and the tensors, each [tokens, ...]
    or None. The call is made inside `layer.writing_rows(positions, kv_c, k_pe)`, a context manager.
    """
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    def run(layer: Any, *tensors: torch.Tensor | None) -> None:
        super(layer_class, layer)._sparse_indexer_and_attn(*tensors)

    @eager_break_during_capture  # NOTE: must be outermost, or a replay runs vLLM's part alone
    def _sparse_indexer_and_attn(self: Any, positions: torch.Tensor, *args: Any) -> None:
        kv_c, k_pe = args[6:8]  # q_c, q_nope, q_pe, index_q, index_k, index_weights, kv_c, k_pe, ...
        with self.writing_rows(positions, kv_c, k_pe):
            self.select_and_attend(run, (positions, *args))

    layer_class._sparse_indexer_and_attn = _sparse_indexer_and_attn
    return layer_class
