"""The CUDA kernels: the library of csrc/cuda. Its functions check the types of their arguments (TVM FFI)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_hisparse.ops import limits

if TYPE_CHECKING:
    import tvm_ffi

LIBRARY = Path(__file__).parents[1] / "_kernels.so"
HOW_TO_BUILD = (
    "Install the CUDA toolkit so that nvcc is on PATH, and install vllm_hisparse again: "
    "pip install --force-reinstall --no-deps ."
)


@cache
def kernels() -> tvm_ffi.Module:
    """Return the library; the first call loads it. csrc/cuda/bindings.cc documents the arguments of its functions.

    Raises:
        RuntimeError: the library was not built, or was built from other code than this.
    """
    import tvm_ffi  # NOTE: vLLM depends on it on CUDA only.

    if not LIBRARY.exists():
        raise RuntimeError(
            f"The CUDA kernels of vllm_hisparse are not built: {LIBRARY.name} is missing. {HOW_TO_BUILD}"
        )
    module, expected = tvm_ffi.load_module(str(LIBRARY)), _limits()
    try:
        found = dict(module.limits())
    except AttributeError:
        found = {}
    if found != expected:
        raise RuntimeError(
            f"The CUDA kernels of vllm_hisparse are of another version: {LIBRARY.name} was built with the limits "
            f"{found or 'of an older interface'}, this code has {expected}. {HOW_TO_BUILD}"
        )
    return module


def current_stream() -> int:
    """Return the stream of launches."""
    return torch.cuda.current_stream().cuda_stream


def _limits() -> dict[str, int]:
    return {name: value for name, value in vars(limits).items() if name.isupper()}
