"""Parts of a step's batch keep their plans of FlashInfer's prefill."""

from typing import Any

import torch

from vllm_hisparse.compat.flashinfer import StepPlans


class Builder:
    """Stand-in for the builder of vLLM, which has one wrapper and one page table."""

    def __init__(self) -> None:
        self._prefill_wrapper: dict[str, Any] | None = None
        self.paged_kv_indices = torch.zeros(3, dtype=torch.int32)

    def build(self, page: int) -> tuple[dict[str, Any], torch.Tensor]:
        self._prefill_wrapper = {} if self._prefill_wrapper is None else self._prefill_wrapper
        self._prefill_wrapper["plan"] = page
        return self._prefill_wrapper, self.paged_kv_indices.fill_(page)


def test_parts_of_a_step_keep_their_plans_and_the_next_step_reuses_them() -> None:
    builder, plans = Builder(), StepPlans.of_dense_prefill()
    steps = []
    for pages in ((1, 2, 3), (4, 5)):
        plans.begin_step()
        steps.append([plans.build(builder, lambda page=page: builder.build(page)) for page in pages])
        assert [wrapper["plan"] for wrapper, _ in steps[-1]] == list(pages)
        assert [table.tolist() for _, table in steps[-1]] == [[page] * 3 for page in pages]
        assert builder._prefill_wrapper is None and not builder.paged_kv_indices.any()  # its own
    for (first, first_table), (second, second_table) in zip(*steps, strict=False):
        assert first is second and first_table is second_table
