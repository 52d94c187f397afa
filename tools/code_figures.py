#!/usr/bin/env python3
"""Figures of the package's code that the house style limits: `python tools/code_figures.py [--list]`.

Everything is read from the syntax trees of the package and of the installed vLLM; nothing is imported.

* Lines of a function or class: from its `def` or `class` line to its end, docstring included.
* A tensor function is a public function or method outside `cli/` with a parameter or result annotated with `Tensor`.
  Methods that a vLLM base class defines, constructors (their class documents them) and `forward` are left out. Its
  docstring gives shapes if it contains one, such as `[batch, top_k]`, or names what does: "as in `SwapInOps`". A method
  without a docstring has that of the method it overrides.
* A private vLLM name begins with one underscore and is used outside `compat.py`: it is imported from vLLM; or it is an
  attribute of a vLLM import; or an attribute of any object, by a name that the package does not define; or it is
  defined or used through `self` in a class, and a vLLM base of that class or of a subclass has the same name.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "vllm_hisparse"
MAX_CLASS_LINES, MIN_DOCUMENTED_SHARE = 200, 0.9
SHAPE = re.compile(r"\[[\w ,.*/+<>=()-]+\]|\bas in `|\bas `", re.IGNORECASE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OTHER_LIBRARIES = ("torch", "numpy", "triton", "ray", "os", "sys")  # their private names are not vLLM's


@dataclass(frozen=True)
class Figures:
    """What was measured. Places are written `file:line name`."""

    function_lines: list[int]
    class_lines: dict[str, int]
    num_tensor_functions: int
    without_shapes: list[str]
    private_names: list[str]

    @property
    def documented_share(self) -> float:
        return 1 - len(self.without_shapes) / max(self.num_tensor_functions, 1)

    @property
    def largest_class(self) -> str:
        return max(self.class_lines, key=self.class_lines.__getitem__)

    def percentile(self, percent: int) -> int:
        lines = sorted(self.function_lines)
        return lines[(len(lines) - 1) * percent // 100]

    def problems(self) -> list[str]:
        """Limits that do not hold."""
        large = [f"{place}: {n} lines" for place, n in self.class_lines.items() if n > MAX_CLASS_LINES]
        share = self.documented_share
        vague = [f"shapes in {share:.0%} of docstrings"] if share < MIN_DOCUMENTED_SHARE else []
        return large + vague + [f"{place} is private to vLLM" for place in self.private_names]


class Module:
    """A file, and what its names refer to."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.tree = ast.parse(path.read_text())

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> dotted name, wherever in the file it is imported."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    def dotted(self, node: ast.expr) -> str:
        """Full name of an expression such as a base class; "" if it is none."""
        if isinstance(node, ast.Subscript):
            return self.dotted(node.value)
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}"
        return self.imports.get(node.id, f"{self.name}.{node.id}") if isinstance(node, ast.Name) else ""


@dataclass(frozen=True)
class Class:
    """A class and the file it is in."""

    module: Module
    node: ast.ClassDef

    @cached_property
    def members(self) -> dict[str, ast.AST]:
        """Methods, class attributes and attributes that methods set on `self`, by name."""
        found: dict[str, ast.AST] = {}
        for node in ast.walk(self.node):
            if isinstance(node, FUNCTIONS):
                found[node.name] = node
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.setdefault(node.attr, node)
        for node in self.node.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        return found


class Sources:
    """The package's files, and vLLM's as far as the package's classes derive from them."""

    def __init__(self, package: Path, vllm: Path):
        self._roots = {package.name: package, "vllm": vllm}
        self._modules: dict[str, Module | None] = {}
        files = sorted(package.rglob("*.py"))
        self.modules = [self.module(".".join((package.name, *relative_name(path, package)))) for path in files]

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            root, *parts = name.split(".")
            base = self._roots[root].joinpath(*parts) if root in self._roots else Path("/nowhere")
            path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            self._modules[name] = Module(name, path) if path.is_file() else None
        return self._modules[name]

    def find_class(self, dotted: str) -> Class | None:
        """The class of a full name, also where its module only re-exports it."""
        module_name, _, name = dotted.rpartition(".")
        module = self.module(module_name) if module_name else None
        if module is None:
            return None
        if name in module.classes:
            return Class(module, module.classes[name])
        imported = module.imports.get(name, "")
        return self.find_class(imported) if imported not in ("", dotted) else None

    def bases(self, of: Class) -> list[Class]:
        """All base classes, nearest first, as far as they are the package's or vLLM's."""
        direct = [self.find_class(of.module.dotted(base)) for base in of.node.bases]
        return [base for found in direct if found is not None for base in (found, *self.bases(found))]

    def own_classes(self) -> list[Class]:
        return [Class(module, node) for module in self.modules for node in module.classes.values()]

    def vllm_members(self) -> dict[ast.ClassDef, set[str]]:
        """Members of vLLM's classes that a class of the package has, itself or in a subclass."""
        found: dict[ast.ClassDef, set[str]] = defaultdict(set)
        for own in self.own_classes():
            bases = self.bases(own)
            names = {name for base in bases if is_vllm(base.module.name) for name in base.members}
            for each in (own, *(base for base in bases if not is_vllm(base.module.name))):
                found[each.node] |= names
        return found


def relative_name(path: Path, package: Path) -> tuple[str, ...]:
    parts = path.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def is_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def is_vllm(dotted: str) -> bool:
    return dotted.partition(".")[0] == "vllm"


def attributes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, str]]:
    """Attributes by name, also those named to `getattr` and its like: node, object, name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node, node.args[0], str(node.args[1].value)


def private_imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
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


def private_names(sources: Sources) -> list[str]:
    own_classes = sources.own_classes()
    own_names = {name for own in own_classes for name in own.members}
    own_names |= {node.name for m in sources.modules for node in m.tree.body if isinstance(node, FUNCTIONS)}
    vllm_members = sources.vllm_members()
    found = []
    for module in sources.modules:
        if module.path.name == "compat.py":
            continue
        uses = {*private_imports(module), *private_attributes(module, own_names)}
        for own in (own for own in own_classes if own.module is module):
            uses |= set(private_members(own, vllm_members[own.node]))
        found += [f"{place(module, line)} {name}" for line, name in sorted(uses)]
    return found


def place(module: Module, line: int) -> str:
    return f"{'/'.join(module.path.parts[-len(module.name.split('.')) :])}:{line}"


def mentions_tensor(function: ast.FunctionDef) -> bool:
    args = function.args
    annotations = [arg.annotation for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)] + [function.returns]
    return any("Tensor" in ast.unparse(annotation) for annotation in annotations if annotation is not None)


def tensor_functions(sources: Sources) -> Iterator[tuple[str, str]]:
    """Place and docstring of every tensor function."""
    vllm_members = sources.vllm_members()
    for module in sources.modules:
        if "cli" in module.name.split("."):
            continue
        for node in module.tree.body:
            if isinstance(node, FUNCTIONS) and not node.name.startswith("_") and mentions_tensor(node):
                yield f"{place(module, node.lineno)} {node.name}", ast.get_docstring(node) or ""
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from tensor_methods(sources, Class(module, node), vllm_members[node] | {"forward"})


def tensor_methods(sources: Sources, own: Class, left_out: set[str]) -> Iterator[tuple[str, str]]:
    for method in own.node.body:
        if not isinstance(method, FUNCTIONS) or method.name.startswith("_") or method.name in left_out:
            continue
        overridden = [base.members.get(method.name) for base in sources.bases(own)]
        docs = [ast.get_docstring(node) for node in (method, *overridden) if isinstance(node, FUNCTIONS)]
        if mentions_tensor(method):
            name = f"{own.node.name}.{method.name}"
            yield f"{place(own.module, method.lineno)} {name}", next(filter(None, docs), "")


def num_lines(node: ast.FunctionDef | ast.ClassDef) -> int:
    return node.end_lineno - node.lineno + 1


def measure(package: Path, vllm: Path) -> Figures:
    """Measure a package against the vLLM it derives from; both are given by their folders."""
    sources = Sources(package, vllm)
    functions = [node for m in sources.modules for node in ast.walk(m.tree) if isinstance(node, FUNCTIONS)]
    classes = {f"{place(own.module, own.node.lineno)} {own.node.name}": own.node for own in sources.own_classes()}
    documented = list(tensor_functions(sources))
    return Figures(
        function_lines=[num_lines(node) for node in functions],
        class_lines={name: num_lines(node) for name, node in classes.items()},
        num_tensor_functions=len(documented),
        without_shapes=[name for name, docstring in documented if not SHAPE.search(docstring)],
        private_names=private_names(sources),
    )


def find_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vllm is not installed: run this with the Python of the environment that `make setup` makes")
    return Path(next(iter(spec.submodule_search_locations)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the code, and whether the limits hold.")
    parser.add_argument("--list", action="store_true", help="list what lacks shapes and what is private to vLLM")
    figures = measure(PACKAGE, find_vllm())
    lines, name = figures.function_lines, figures.largest_class
    p50, p90 = figures.percentile(50), figures.percentile(90)
    documented = figures.num_tensor_functions - len(figures.without_shapes)
    share = f"{documented} of {figures.num_tensor_functions} ({figures.documented_share:.0%})"
    print(f"functions: {len(lines)}; lines p50 {p50}, p90 {p90}, max {max(lines)}")
    print(f"largest class: {figures.class_lines[name]} lines, {name}")
    print(f"public tensor functions whose docstring gives shapes: {share}")
    print(f"private vLLM names outside compat.py: {len(figures.private_names)}")
    if parser.parse_args().list:
        print(*(f"no shapes: {place}" for place in figures.without_shapes), sep="\n")
        print(*(f"private: {place}" for place in figures.private_names), sep="\n")
    return 1 if figures.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
