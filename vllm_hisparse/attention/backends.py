"""Tables of attention backends, and of GPUs: which have run with hot buffers, and which are refused.

Start-up, `plan` and `doctor` read these tables. The module imports nothing of vLLM, because `plan` needs no vLLM.
"""

from __future__ import annotations

Capability = tuple[int, int]  # compute capability of a GPU: major and minor number

TRIED_CAPABILITIES: tuple[Capability, ...] = ((9, 0),)
NARROW_KEYS_CAPABILITY: Capability = (9, 0)
# Backend of a DSA model that has a hot-buffer version -> major numbers of the compute capabilities for which vLLM has
# it. On a GPU where vLLM may take an untried backend, the first tried one is advised.
MLA_BACKENDS = {
    "FLASHMLA_SPARSE": (9, 10),
    "FLASH_ATTN_MLA_SPARSE": (9,),
    "FLASHINFER_MLA_SPARSE_SM90": (9,),
    "FLASHINFER_MLA_SPARSE": (10,),
    "FLASH_ATTN_MLA_SPARSE_FA4": (10,),
}
# Backends whose hot-buffer version has run on no GPU.
UNTRIED_MLA_BACKENDS = ("FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4")
# Backends of a DSA model that have no hot-buffer version: name -> reason, and what to do.
REFUSED_MLA_BACKENDS = {
    "FLASHINFER_MLA_SPARSE_SM120": (
        "it has no version for hot buffers, and vLLM has no other one for this GPU",
        "Use a GPU of compute capability 9.0 or 10.0.",
    ),
}
REFUSED_MLA_MAJORS = {12: "FLASHINFER_MLA_SPARSE_SM120"}  # major number -> the only backend that vLLM has for it

# Major numbers of the GPUs on which vLLM runs MiniMax-M3 with kernels that have no hot-buffer version.
REFUSED_MSA_MAJORS = (10,)
# Major numbers of the GPUs on which vLLM prefers FLASHINFER to FLASH_ATTN for a dense model. FLASH_ATTN is
# FlashAttention 4 on these GPUs, and reads heads of WHOLE_PAGE_HEAD_SIZE elements in pages of 128 tokens alone: such
# pages are larger than units.
FLASHINFER_MAJORS = (10,)
WHOLE_PAGE_HEAD_SIZE = 256
FP8_FLASH_ATTN_MAJORS = (9,)  # major numbers of GPUs on which FLASH_ATTN is FlashAttention 3, which reads KV in fp8
FP8_CAPABILITY: Capability = (8, 9)  # least compute capability on which TRITON_ATTN stores KV in fp8


def untried_gpu(name: str, capability: Capability | None) -> str:
    """Return the warning about a GPU on which hot buffers have never run; empty if they have.

    Args:
        name: name of the GPU.
        capability: its compute capability; None if it is unknown.
    """
    if capability in TRIED_CAPABILITIES:
        return ""
    version = "unknown" if capability is None else ".".join(map(str, capability))
    return (
        f"HiSparse was never tried on this GPU ({name}, compute capability {version}); it was on Hopper (H100, H200). "
        "Compare its answers with those of full KV before you rely on them."
    )


def untried_mla_backend(name: str) -> str:
    """Return the warning about a DSA backend whose hot-buffer version has run on no GPU; empty if it has run."""
    if name not in UNTRIED_MLA_BACKENDS:
        return ""
    return (
        f"HiSparse with --attention-backend {name} has not run on a GPU of this kind: it was tested on the CPU, with a "
        "stand-in for the kernel. Compare its answers with those of full KV before you rely on them, or set it to "
        "FLASHMLA_SPARSE, which has run on Hopper."
    )


def mla_backends(capability: Capability) -> list[str]:
    """Return the backends with which a DSA model may have hot buffers on a GPU; backends that have run come first."""
    names = [name for name, majors in MLA_BACKENDS.items() if capability[0] in majors]
    return sorted(names, key=lambda name: name in UNTRIED_MLA_BACKENDS)


def mla_refusal(capability: Capability) -> str:
    """Return why no DSA model starts with hot buffers on a GPU; empty if one may start."""
    if mla_backends(capability):
        return ""
    name = REFUSED_MLA_MAJORS.get(capability[0])
    if name is None:
        return "vLLM has no backend for DSA models on this GPU"
    return f"{name}: {REFUSED_MLA_BACKENDS[name][0]}"


def msa_refusal(capability: Capability) -> str:
    """Return why MiniMax-M3 does not start with hot buffers on a GPU; empty if it may."""
    return "vLLM runs it there with kernels without hot buffers" if capability[0] in REFUSED_MSA_MAJORS else ""


def mla_choice(capability: Capability) -> tuple[str, str] | None:
    """Return the backend to set for a DSA model, and why.

    None: vLLM's own choice has run with hot buffers, or no DSA model starts on this GPU (`mla_refusal`).
    """
    names = mla_backends(capability)
    untried = [name for name in names if name in UNTRIED_MLA_BACKENDS]
    if not untried:
        return None
    return names[0], (
        f"Hot buffers over it have run on Hopper. Without the option, vLLM may take {' or '.join(untried)}, over which "
        "they have run on no GPU; start-up warns of that, too."
    )


def dense_choice(capability: Capability, kv_cache_dtype: str, head_size: int) -> tuple[str, str] | None:
    """Return the backend to set for a dense model, and why; None if start-up takes vLLM's own choice.

    Args:
        capability: compute capability of the GPU.
        kv_cache_dtype: vLLM's option.
        head_size: elements of a head.
    """
    if kv_cache_dtype == "fp8" and capability[0] not in FP8_FLASH_ATTN_MAJORS:
        return "TRITON_ATTN", "With KV in fp8, start-up refuses every other backend of this GPU."
    if capability[0] not in FLASHINFER_MAJORS:
        return None
    flashinfer = (
        "vLLM's own choice is FLASHINFER, with which start-up refuses blocks of more than 64 tokens: layers with full "
        "KV need larger ones."
    )
    if head_size == WHOLE_PAGE_HEAD_SIZE:
        return "TRITON_ATTN", (
            f"{flashinfer} Start-up refuses FLASH_ATTN, too, because it reads heads of {head_size} elements in pages "
            "of 128 tokens there."
        )
    return "FLASH_ATTN", flashinfer
