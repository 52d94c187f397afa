"""The rejection sampler's kernels for a CPU without Triton are wrong.

They leave the sampling parameters of drafts unwritten, and do not reject the placeholders (-1) that the scheduler uses
as drafts (`vllm/utils/cpu_triton_utils.py`). In a step without drafts, the sampler fails, because it looks up the
largest top-k of no drafts (`vllm/v1/sample/rejection_sampler.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RELEASES = ">=0.32"
DELETE = "cpu/rejection.py, and the override in cpu/platform.py"
VLLM = (
    "vllm.v1.sample.rejection_sampler.apply_sampling_constraints",
    "vllm.utils.cpu_triton_utils._expand_kernel_impl",
    "vllm.utils.cpu_triton_utils._rejection_random_sample_kernel_impl",
    "vllm.utils.cpu_triton_utils._sample_recovered_tokens_kernel_impl",
)

Kernel = Callable[..., None]


def mend_rejection_sampler(expand: Kernel, reject: Kernel, recover: Kernel) -> None:
    """Let vLLM's CPU platform register these versions of three kernels of the rejection sampler."""
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
