"""Imports of vLLM's modules under the names that they had before vLLM moved them."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

RELEASES = ">=0.32"  # a newer Ray may import the new name: then delete this file, and its call in plugin.py
VLLM = ("vllm.entrypoints.launchers",)


class MovedModules(MetaPathFinder, Loader):
    """Finds modules under the names that they had before vLLM moved them.

    NOTE: `ray.llm` of Ray 2.60 imports `vllm.entrypoints.launchers.cli_args` in every process of an application, after
    vLLM has asked for platforms; vLLM 0.33 has moved this module. A finder is asked last, only by imports, and only for
    names that no other finder knows. An entry in `sys.modules` would do harm, because code that inspects a stack reads
    every entry, and would load the module.
    """

    NAMES: ClassVar[dict[str, str]] = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}

    @classmethod
    def install(cls) -> None:
        """Add the finder to Python's import system, unless it is there."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        moved = import_module(self.NAMES[module.__name__])
        vars(module).update((name, value) for name, value in vars(moved).items() if not name.startswith("__"))
