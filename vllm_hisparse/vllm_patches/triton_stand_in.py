"""vLLM's stand-in for Triton lacks a function that the launcher of a quantisation kernel calls on the host.

Without Triton, another implementation of a kernel can be registered, but `per_token_group_quant_fp8` fails before it
launches the kernel (`vllm/triton_utils/importing.py`).
"""

from __future__ import annotations

RELEASES = ">=0.32"
DELETE = "the call in cpu/platform.py"
VLLM = ("vllm.triton_utils.importing.TritonPlaceholder",)


def complete_stand_in() -> None:
    """Give the stand-in the function; nothing happens if it has it, or if there is Triton."""
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.utils.math_utils import next_power_of_2

    if not HAS_TRITON and not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = next_power_of_2
