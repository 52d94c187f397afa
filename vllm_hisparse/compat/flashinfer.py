"""Private parts of vLLM's `FLASHINFER` backend. NOTE: this module does not import it, because it needs CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RELEASES = ">=0.32"
VLLM = ("vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder._prefill_wrapper",)


class PrefillPlans:
    """Memory for FlashInfer's plans, so that each part of a step's batch has a plan of its own.

    vLLM's builder has one wrapper, which keeps the plan of one `build`, and one page table, which the wrapper reads
    when it runs. A second `build` in a step would overwrite both before the first layer runs.
    """

    def __init__(self) -> None:
        self._plans: list[tuple[Any, torch.Tensor]] = []  # wrapper and page table of each part of the largest step
        self._num_used = 0

    def begin_step(self) -> None:
        """Reuse the memory of the previous step, as vLLM's builder reuses its own."""
        self._num_used = 0

    def build(self, builder: Any, build: Callable[[], Any]) -> Any:
        """Build vLLM's metadata of the next part of a step's batch.

        Args:
            builder: vLLM's `FlashInferMetadataBuilder`.
            build: builds the metadata with `builder`.
        """
        if self._num_used == len(self._plans):
            self._plans.append((None, builder.paged_kv_indices.clone()))
        builder._prefill_wrapper, builder.paged_kv_indices = self._plans[self._num_used]
        metadata = build()
        self._plans[self._num_used] = builder._prefill_wrapper, builder.paged_kv_indices
        self._num_used += 1
        return metadata
