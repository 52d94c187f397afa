from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest

KERNELS = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")  # not in a CPU build of vLLM


@pytest.fixture(scope="session")
def cuda_modules() -> dict[str, ModuleType]:
    """What runs on CUDA, imported beside kernels that do nothing: `backend` and `layers`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            module = ModuleType(name)
            module.__path__, module.flash_attn_varlen_func, module.get_scheduler_metadata = [], print, print
            patch.setitem(sys.modules, name, module)
        return {
            "backend": import_module("vllm_hisparse.attention.mla.cuda"),
            "layers": import_module("vllm_hisparse.attention.mla.fused_cuda"),
        }
