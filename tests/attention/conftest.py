from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest
from vllm.v1.attention.backends import fa_utils

KERNELS = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")  # not in a CPU build of vLLM


@pytest.fixture(scope="session")
def gqa_cuda() -> ModuleType:
    """Attention of dense models on CUDA with FlashAttention, imported beside a kernel that does nothing."""
    if not hasattr(fa_utils, "flash_attn_varlen_func"):
        fa_utils.flash_attn_varlen_func = print
    return import_module("vllm_hisparse.attention.gqa.flash_attn_cuda")


@pytest.fixture(scope="session")
def msa_cuda() -> ModuleType:
    """Attention of MiniMax-M3 on CUDA, imported without the libraries that only its images need."""
    name = "vllm.transformers_utils.processors.minimax_m3"
    with pytest.MonkeyPatch.context() as patch:
        module = ModuleType(name)
        for kind in ("MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor", "MiniMaxVLProcessor"):
            setattr(module, kind, type(kind, (), {}))
        module.MIN_SHORT_SIDE_PIXEL, module.smart_resize = 0, print
        patch.setitem(sys.modules, name, module)
        return import_module("vllm_hisparse.attention.gqa.msa_cuda")


@pytest.fixture(scope="session")
def cuda_modules() -> dict[str, ModuleType]:
    """Sparse MLA on CUDA, imported beside kernels that do nothing: `backend`, `flashinfer`, `sm100`, `layers` and
    `microbatches`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            module = ModuleType(name)
            module.__path__, module.flash_attn_varlen_func, module.get_scheduler_metadata = [], print, print
            patch.setitem(sys.modules, name, module)
        return {
            "backend": import_module("vllm_hisparse.attention.mla.cuda"),
            "flashinfer": import_module("vllm_hisparse.attention.mla.flashinfer_cuda"),
            "sm100": import_module("vllm_hisparse.attention.mla.sm100_cuda"),
            "layers": import_module("vllm_hisparse.attention.mla.fused_cuda"),
            "microbatches": import_module("vllm_hisparse.attention.mla.microbatches_cuda"),
        }
