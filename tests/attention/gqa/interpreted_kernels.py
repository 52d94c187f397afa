"""vLLM's Triton kernels of MiniMax-M3 and of attention, run on the CPU by Triton's interpreter. They are slow; those of
MiniMax-M3 take float32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

FOLDER = Path(find_spec("vllm").submodule_search_locations[0])
OPS, MODEL_OPS = "vllm.v1.attention.ops.triton_", FOLDER / "models/minimax_m3/common/ops"
FILES = {
    "index_topk": MODEL_OPS / "index_topk.py",
    "sparse_attn": MODEL_OPS / "sparse_attn.py",
    "unified_attention": FOLDER / "v1/attention/ops/triton_unified_attention.py",
}


@cache
def interpreted() -> dict[str, ModuleType]:
    """Import copies of `FILES`."""
    from vllm import triton_utils

    pytest.importorskip("triton")
    others = {name: module for name, module in sys.modules.items() if _is_copied(name)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in others:  # because a copy of Triton is needed whose own functions are interpreted, too
            del sys.modules[name]
        triton = import_module("triton")
        patch.setattr(triton_utils, "triton", triton)
        patch.setattr(triton_utils, "tl", triton.language)
        autotune = triton.autotune
        # Without a choice, nothing is measured, because that needs a GPU. Few blocks are sorted soon.
        few = [triton.Config({"BLOCK_SIZE_K": 8})]
        triton.autotune = lambda configs, **options: autotune(few, **options)
        interpreter = import_module("triton.runtime.interpreter")
        replace_language_once(interpreter)
        builder = interpreter.InterpreterBuilder
        for method, mask in (("create_masked_load", 1), ("create_masked_store", 2)):
            setattr(builder, method, _take_any_mask(getattr(builder, method), mask))
        modules = {name: _copy(name, path) for name, path in FILES.items()}
        for name in [name for name in sys.modules if _is_copied(name)]:
            del sys.modules[name]
        sys.modules.update(others)
    return modules


def _copy(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(f"interpreted_{name}", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _is_copied(name: str) -> bool:
    """True for modules of Triton, and of vLLM's functions that its kernels share."""
    is_of_triton = name.partition(".")[0] == "triton" and not name.startswith("triton._C")
    return is_of_triton or name.startswith(OPS)


def replace_language_once(interpreter: ModuleType) -> None:
    """NOTE: in every launch and every call of a function, the interpreter looks through Triton's language for what it
    replaces, which takes most of the time. With this, the language stays replaced."""
    patch_lang, patched = interpreter._patch_lang, set()

    def patch_once(function: Callable) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_lang(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def _take_any_mask(function: Callable, position: int) -> Callable:
    """NOTE: the interpreter refuses a mask that is an integer, which Triton's compiler takes."""

    def take_any_mask(self: Any, *args: Any) -> Any:
        args[position].data = np.asarray(args[position].data).astype(bool)
        return function(self, *args)

    return take_any_mask
