"""Import of the FLASHINFER backend of dense models where there is no FlashInfer."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest


def import_flashinfer_cuda() -> ModuleType:
    """Import `flashinfer_cuda`, beside a FlashInfer whose classes and functions do nothing if there is none."""
    with pytest.MonkeyPatch.context() as patch:
        names = ("", ".cascade", ".decode", ".prefill", ".utils")
        for name in names if find_spec("flashinfer") is None else ():
            module = ModuleType(f"flashinfer{name}")
            module.__path__, module.__getattr__ = [], lambda name: type(name, (), {})
            patch.setitem(sys.modules, module.__name__, module)
        return import_module("vllm_hisparse.attention.gqa.flashinfer_cuda")
