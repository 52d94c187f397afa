"""Private names of vLLM are used in `compat/` and `vllm_patches/` alone.

A private name of vLLM begins with one underscore. It is imported from vLLM; or it is an attribute of a vLLM import; or
an attribute of any object, by a name that the package does not define; or it is defined or used through `self` in a
class, and a vLLM base of that class or of a subclass has the same name.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.vllm_compat import ADAPTERS, PACKAGES, installed_vllm
from tools.vllm_sources import FUNCTIONS, Class, Module, Sources, attributes, is_self, is_vllm, statements

OTHER_LIBRARIES = ("torch", "numpy", "triton", "ray", "os", "sys")  # their private names are not vLLM's


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def private_imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in statements(module.tree):
        if isinstance(node, ast.ImportFrom) and is_vllm(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if is_vllm(alias.name)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if any(map(is_private, name.split("."))))


def private_attributes(module: Module, own_names: set[str]) -> Iterator[tuple[int, str]]:
    """Private attributes of other objects than `self`."""
    for node, value, name in attributes(module.tree):
        if not is_private(name) or is_self(value):
            continue
        root = module.dotted(value).partition(".")[0]
        if root not in OTHER_LIBRARIES and (is_vllm(root) or name not in own_names):
            yield node.lineno, f"{ast.unparse(value)}.{name}"


def private_members(own: Class, vllm_names: set[str]) -> Iterator[tuple[int, str]]:
    """Private members of a class that vLLM's bases have, too."""
    used = {name: node for node, value, name in attributes(own.node) if is_self(value)}
    for name, node in (used | own.members).items():
        if is_private(name) and name in vllm_names:
            yield node.lineno, f"{own.node.name}.{name}"


def private_names(package: Path, vllm: Path) -> list[str]:
    """Uses of private names of vLLM outside the folders for them, as `module:line name`."""
    sources = Sources({"vllm_hisparse": package, "vllm": vllm})
    modules = sources.files("vllm_hisparse")
    classes = [Class(module, node) for module in modules for node in module.classes.values()]
    own_names = {name for own in classes for name in own.members}
    own_names |= {node.name for module in modules for node in module.tree.body if isinstance(node, FUNCTIONS)}
    vllm_names: dict[ast.ClassDef, set[str]] = defaultdict(set)
    for own in classes:
        bases = sources.bases(own)
        names = {name for base in bases if is_vllm(base.module.name) for name in base.members}
        for each in (own, *(base for base in bases if not is_vllm(base.module.name))):
            vllm_names[each.node] |= names
    found = []
    for module in modules:
        if module.name.startswith(ADAPTERS):
            continue
        uses = {*private_imports(module), *private_attributes(module, own_names)}
        for own in (own for own in classes if own.module is module):
            uses |= set(private_members(own, vllm_names[own.node]))
        found += [f"{module.name}:{line} {name}" for line, name in sorted(uses)]
    return found


@pytest.mark.long
def test_private_names_have_a_place() -> None:
    assert private_names(PACKAGES["vllm_hisparse"], installed_vllm()) == []


VLLM = """
    class Worker:
        def __init__(self):
            self._state = {}

        def _step(self):
            return self._state

    def _helper():
        return Worker()
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from vllm.parts import _helper", "vllm.parts._helper"),
        ("def use(worker):\n    return worker._state", "worker._state"),
        ("def use(worker):\n    setattr(worker, '_state', 1)", "worker._state"),
        ("from vllm.parts import Worker\nclass Ours(Worker):\n    def _step(self): pass", "Ours._step"),
        ("from vllm.parts import Worker\nclass Ours(Worker):\n    def go(self): return self._state", "Ours._state"),
        ("class Ours:\n    def go(self): return self._mine\n    def _step(self): pass\n    _mine = 1", None),
    ],
)
def test_each_kind_of_use_is_found(tmp_path: Path, source: str, found: str | None) -> None:
    package, vllm = tmp_path / "vllm_hisparse", tmp_path / "vllm"
    for folder, text in ((package, source), (vllm, textwrap.dedent(VLLM)), (package / "compat", source)):
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "parts.py").write_text(text)
    uses = private_names(package, vllm)
    assert [use.partition(" ")[2] for use in uses] == ([found] if found else [])
    assert all(use.startswith("vllm_hisparse.parts:") for use in uses)
