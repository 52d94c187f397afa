"""Private parts of vLLM's FlashInfer backends. NOTE: this module does not import them, because one needs CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

RELEASES = ">=0.32"
VLLM = (
    "vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder._prefill_wrapper",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90._SM90State",
)
_SM90_SIZES = ("num_heads", "kv_dtype", "max_tokens", "topk_width", "kv_lora_rank", "qk_rope_head_dim", "sm_scale")


class StepPlans:
    """Memory for FlashInfer's plans, so that each part of a step's batch has a plan of its own.

    A builder of vLLM has memory for one plan, which it fills in `build` and a wrapper reads when it runs. A second
    `build` in a step would overwrite the plan before the first layer runs.

    Args:
        names: attributes of the builder that hold a plan.
        make: returns values of these attributes for one more plan of the builder.
    """

    def __init__(self, names: Sequence[str], make: Callable[[Any], Sequence[Any]]):
        self._names, self._make = names, make
        self._plans: list[Sequence[Any]] = []  # a plan for each part of the largest step
        self._num_used = 0

    @classmethod
    def of_dense_prefill(cls) -> StepPlans:
        """Return plans of vLLM's `FlashInferMetadataBuilder`: a wrapper and a page table."""
        names = ("_prefill_wrapper", "paged_kv_indices")
        return cls(names, lambda builder: (None, builder.paged_kv_indices.clone()))

    @classmethod
    def of_sparse_mla(cls) -> StepPlans:
        """Return plans of vLLM's `FlashInferMLASparseSM90Builder`: a wrapper with its tensors."""
        return cls(("state",), lambda builder: (_another_state(builder.state),))

    def begin_step(self) -> None:
        """Reuse the memory of the previous step, as a builder reuses its own."""
        self._num_used = 0

    def build(self, builder: Any, build: Callable[[], Any]) -> Any:
        """Build vLLM's metadata of the next part of a step's batch.

        Args:
            builder: builder of vLLM; it keeps its own memory.
            build: builds the metadata with `builder`.
        """
        if self._num_used == len(self._plans):
            self._plans.append(self._make(builder))
        own = self._replace(builder, self._plans[self._num_used])
        try:
            return build()
        finally:
            self._plans[self._num_used] = self._replace(builder, own)
            self._num_used += 1

    def _replace(self, builder: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Set the attributes of the builder; return their former values."""
        former = [getattr(builder, name) for name in self._names]
        for name, value in zip(self._names, values, strict=True):
            setattr(builder, name, value)
        return former


def _another_state(state: Any) -> Any:
    """Return another object like `FlashInferMLASparseSM90Builder.state`."""
    sizes = {name: getattr(state, name) for name in _SM90_SIZES}
    return type(state)(state.device, **sizes, index_topk=state.index_topk, index_kpool=state.index_kpool)


def attend_to_planned_rows(
    impl: Any,
    state: Any,
    query: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    layer: Any,
) -> torch.Tensor:
    """Attend over selected rows, as vLLM's `FlashInferMLASparseSM90Impl.forward_mqa` does over a paged cache.

    Args:
        impl: implementation of the layer.
        state: planned state of the builder; it knows how many leading ids each token has.
        query: [tokens, num_heads, kv_lora_rank] and [tokens, num_heads, qk_rope_head_dim].
        rows: [num_rows, head_size], in bf16, or in fp8 as bytes.
        row_ids: [tokens, k] int32, contiguous; the leading ones are valid.
        layer: the attention layer.

    Returns:
        [tokens, num_heads, kv_lora_rank].
    """
    state.pack_indices(row_ids)
    scales = {}
    if impl.use_fp8_kv_cache:
        rows, scales = rows.view(torch.float8_e4m3fn), {"ckv_scale": float(layer._k_scale_float or 1), "kpe_scale": 1.0}
    pages = rows.unsqueeze(1)  # pages of one row each
    return state.wrapper.run(*query, pages[..., : impl.kv_lora_rank], pages[..., impl.kv_lora_rank :], **scales)
