"""Python sources as syntax trees: meanings of names, and base classes. No source is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # nodes that are statements or contain some
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def is_vllm(dotted: str) -> bool:
    return dotted.partition(".")[0] == "vllm"


def is_self(node: ast.AST) -> bool:
    """Tell whether an expression is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and all statements in it, in the order of `ast.walk`, which looks at every expression, too."""
    pending = [tree]
    for node in pending:
        yield node
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]


def attributes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, str]]:
    """Attributes by name, also those named to `getattr` and its like: node, object, name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", ""))
            in ("getattr", "setattr", "hasattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node, node.args[0], str(node.args[1].value)


class Module:
    """A file, and what its names refer to."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.source = path.read_text()
        self.tree = ast.parse(self.source)

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def source_of(self, node: ast.ImportFrom) -> str:
        """Full name of the module that an import names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> full name, wherever in the file it is imported."""
        found = {}
        for node in statements(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = self.source_of(node)
                found |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in statements(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def definitions(self) -> dict[str, ast.AST]:
        """Names that the file defines outside functions and classes, also in a branch."""
        found: dict[str, ast.AST] = {}
        pending: list[ast.AST] = list(self.tree.body)
        while pending:
            node = pending.pop(0)
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                found[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {
                    name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }
            else:
                pending += ast.iter_child_nodes(node)
        return found

    def dotted(self, node: ast.expr) -> str:
        """Full name of an expression such as a base class; "" if it is none."""
        if isinstance(node, ast.Subscript):
            return self.dotted(node.value)
        if isinstance(node, ast.Attribute):
            value = self.dotted(node.value)
            return f"{value}.{node.attr}" if value else ""
        if not isinstance(node, ast.Name):
            return ""
        return self.imports.get(node.id, f"{self.name}.{node.id}" if node.id in self.definitions else "")


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
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.setdefault(node.attr, node)
        for node in self.node.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        return found

    @property
    def fields(self) -> list[str]:
        """Annotated names of the body, in order."""
        return [node.target.id for node in self.node.body if isinstance(node, ast.AnnAssign)]


class Sources:
    """Packages by name, each a folder. A file is read when it is first needed."""

    def __init__(self, roots: dict[str, Path]):
        self.roots = roots
        self._modules: dict[str, Module | None] = {}

    def files(self, root: str) -> list[Module]:
        """All modules of a package."""
        folder = self.roots[root]
        names = (path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
        found = (self.module(".".join((root, *(parts[:-1] if parts[-1] == "__init__" else parts)))) for parts in names)
        return [module for module in found if module is not None]

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            root, *parts = name.split(".")
            base = self.roots[root].joinpath(*parts) if root in self.roots else Path("/nowhere")
            path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            self._modules[name] = Module(name, path) if path.is_file() else None
        return self._modules[name]

    def is_module(self, name: str) -> bool:
        root, *parts = name.split(".")
        base = self.roots[root].joinpath(*parts) if root in self.roots else Path("/nowhere")
        return base.is_dir() or base.with_suffix(".py").is_file() or any(base.parent.glob(f"{base.name}.*so"))

    def find(self, dotted: str, depth: int = 0) -> tuple[Module, ast.AST] | None:
        """Definition of a full name such as `package.module.Class.method`, also where a module only re-exports it.

        A module is its own definition. A name that a module makes when asked for it (`__getattr__`) is defined there.
        """
        if self.is_module(dotted):
            module = self.module(dotted)
            return None if module is None else (module, module.tree)
        owner, _, name = dotted.rpartition(".")
        if not owner or depth > 20:
            return None
        module = self.module(owner)
        if module is not None:
            return self._find_in(module, name, depth)
        found = self.find(owner, depth + 1)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        own = Class(*found)
        for each in (own, *self.bases(own)):
            if name in each.members:
                return each.module, each.members[name]
        return None

    def find_class(self, dotted: str) -> Class | None:
        found = self.find(dotted)
        return Class(*found) if found is not None and isinstance(found[1], ast.ClassDef) else None

    def bases(self, of: Class, depth: int = 0) -> list[Class]:
        """All base classes, nearest first, as far as they are in these packages."""
        if depth > 20:
            return []
        direct = [self.find_class(of.module.dotted(base)) for base in of.node.bases]
        return [base for found in direct if found is not None for base in (found, *self.bases(found, depth + 1))]

    def identifiers(self, root: str) -> set[str]:
        """Every name and every word of a text of a package."""
        return {word for path in self.roots[root].rglob("*.py") for word in IDENTIFIER.findall(path.read_text())}

    def _find_in(self, module: Module, name: str, depth: int) -> tuple[Module, ast.AST] | None:
        if name in module.definitions:
            return module, module.definitions[name]
        imported = module.imports.get(name)
        if imported is not None and imported != f"{module.name}.{name}":
            if imported.partition(".")[0] not in self.roots:
                return module, ast.Constant(imported)
            return self.find(imported, depth + 1)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                found = self.find(f"{module.source_of(node)}.{name}", depth + 1)
                if found is not None:
                    return found
        makes_names = "__getattr__" in module.definitions and re.search(rf"\b{name}\b", module.source)
        return (module, module.tree) if makes_names else None
