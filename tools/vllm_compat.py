#!/usr/bin/env python3
"""Tells what another release of vLLM breaks here: `python tools/vllm_compat.py 0.33.0` (or the path of a wheel).

The wheel is fetched once and its Python files are unpacked into `build/vllm-<version>`. Everything is read from syntax
trees, and compared with the installed vLLM. A break ends the command with status 1:

* an import, or a name in `VLLM` of an adapter or a mend, that the release does not have;
* a keyword or a number of arguments that a function or class of vLLM does not take;
* a method of ours that vLLM calls with arguments that it does not take, or does not call any more;
* an attribute, keyword or name in a text that is nowhere in the release, though it is in the installed one.

Other findings have to be reviewed: methods that are overridden and whose signature changed, and adapters and mends
whose part of vLLM changed. With `--tree`, the compiled parts of the installed CPU build are put beside the Python
files. Tests with `build/vllm-<version>` first on PYTHONPATH then run against that release, as far as the compiled parts
fit.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools.vllm_sources import FUNCTIONS, Class, Module, Sources, attributes, is_self, is_vllm  # noqa: E402

PACKAGES = {
    "vllm_hisparse": ROOT / "vllm_hisparse",
    "vllm_hisparse_ray": ROOT / "deploy/ray/vllm_hisparse_ray",
    "tests": ROOT / "tests",
    "benchmarks": ROOT / "benchmarks",
    "tools": ROOT / "tools",
}
ADAPTERS = ("vllm_hisparse.compat.", "vllm_hisparse.vllm_patches.")
PLATFORM, PYTHON = "manylinux_2_28_x86_64", "3.12"


@dataclass
class Report:
    """Findings by kind. Places are written `file:line`."""

    breaks: dict[str, list[str]] = field(default_factory=dict)
    look: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, finding: str, is_break: bool = True) -> None:
        found = (self.breaks if is_break else self.look).setdefault(kind, [])
        if finding not in found:
            found.append(finding)

    def __str__(self) -> str:
        parts = []
        for title, kinds in (("Breaks", self.breaks), ("To be looked at", self.look)):
            parts.append(f"{title}: {sum(map(len, kinds.values()))}")
            parts += ["\n".join((f"  {kind}", *(f"    {each}" for each in found))) for kind, found in kinds.items()]
        return "\n".join(parts)


class Comparison:
    """Our packages over the installed vLLM and over another release.

    Args:
        installed, release: folders of the package `vllm`.
        version: version of the release.
        packages: ours, by name.
    """

    def __init__(self, installed: Path, release: Path, version: str, packages: dict[str, Path]):
        self.version, self.report, self.packages = version, Report(), packages
        self.old, self.new = (Sources({**packages, "vllm": folder}) for folder in (installed, release))
        self.ours = [module for package in packages for module in self.old.files(package)]

    def run(self) -> Report:
        for module in self.ours:
            if self._is_for_the_release(module):
                self._check_imports(module)
                self._check_calls(module)
                self._check_overrides(module)
        self._check_names()
        self._check_adapters()
        return self.report

    def _is_for_the_release(self, module: Module) -> bool:
        """Return True if an adapter or a mend is for this release, or the file is neither."""
        releases = constant(module, "RELEASES") if module.name.startswith(ADAPTERS) else None
        return releases is None or SpecifierSet(releases).contains(self.version, prereleases=True)

    def _check_imports(self, module: Module) -> None:
        for node, names in vllm_imports(module.tree):
            for name in names:
                if self.new.find(name) is None and self.old.find(name) is not None:
                    self.report.add("imports", f"{place(module, node)} {name}")

    def _check_calls(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            name = module.dotted(node.func) if isinstance(node, ast.Call) else ""
            if is_vllm(name):
                signature = self._signature(self.new, name)
                wrong = signature and signature.refuses(node)
                if wrong and not (self._signature(self.old, name) or signature).refuses(node):
                    self.report.add("calls", f"{place(module, node)} {name}: {wrong}")

    def _check_overrides(self, module: Module) -> None:
        for node in module.classes.values():
            own = Class(module, node)
            for name, method in methods(node).items():
                old, new = (self._overridden(sources, own, name) for sources in (self.old, self.new))
                if old is None or name.startswith("__"):
                    continue
                where = f"{place(module, method)} {node.name}.{name}"
                if new is None:
                    self.report.add("overridden methods", f"{where}: no base class has it any more")
                elif (was := Signature.of(old)) != (now := Signature.of(new)):
                    missing = Signature.of(method).missing(now)
                    says = f"{where}: was {was}, now {now}"
                    self.report.add(
                        "overridden methods", says + (f"; ours lacks {missing}" if missing else ""), bool(missing)
                    )

    def _check_names(self) -> None:
        """Attributes, keywords and names in texts that are nowhere in the release."""
        old, new = self.old.identifiers("vllm"), self.new.identifiers("vllm")
        own = {name: {word for each in self.old.files(name) for word in own_names(each)} for name in self.packages}
        for module in self.ours:
            known = new | set(dir(builtins)) | own["vllm_hisparse"] | own[module.name.partition(".")[0]]
            is_for_it = self._is_for_the_release(module)
            for node, name in used_names(module.tree):
                if name in old and name not in known:
                    kind = "names" if is_for_it else "names of an older release's variant"
                    self.report.add(kind, f"{place(module, node)} {name}", is_for_it)

    def _check_adapters(self) -> None:
        for module in self.ours:
            for name in constant(module, "VLLM") or () if module.name.startswith(ADAPTERS) else ():
                old, new = self.old.find(name), self.new.find(name)
                where = f"{module.path.relative_to(self.packages['vllm_hisparse'].parent)} {name}"
                if new is None:
                    self.report.add("adapters and mends", f"{where}: gone", self._is_for_the_release(module))
                elif old is not None and ast.dump(old[1]) != ast.dump(new[1]):
                    self.report.add("adapters and mends whose part of vLLM changed", where, is_break=False)

    def _overridden(self, sources: Sources, own: Class, name: str) -> ast.FunctionDef | None:
        for base in sources.bases(own):
            if is_vllm(base.module.name) and isinstance(base.members.get(name), FUNCTIONS):
                return base.members[name]
        return None

    def _signature(self, sources: Sources, name: str) -> Signature | None:
        """Return the signature of a function or class of vLLM; None if the source does not show it."""
        found = sources.find(name)
        if found is None or isinstance(found[1], FUNCTIONS):
            is_method = found is not None and is_class(sources, name.rpartition(".")[0])
            return Signature.of(found[1], skips_self=is_method) if found is not None else None
        if not isinstance(found[1], ast.ClassDef):
            return None
        own = Class(*found)
        chain = [own, *sources.bases(own)]
        for each in chain:
            if "__init__" in methods(each.node):
                return Signature.of(methods(each.node)["__init__"], skips_self=True)
        if all("dataclass" in ast.unparse(ast.Module([*each.node.decorator_list], [])) for each in chain):
            names = [name for each in reversed(chain) for name in each.fields]
            return Signature(tuple(dict.fromkeys(names)), (), False, False)
        return None


@dataclass(frozen=True)
class Signature:
    """Parameters of a function, without `self`."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    takes_more: bool
    takes_keywords: bool

    @classmethod
    def of(cls, node: ast.FunctionDef, skips_self: bool = True) -> Signature:
        args = node.args
        names = tuple(arg.arg for arg in (*args.posonlyargs, *args.args))
        is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list)
        if skips_self and not is_static and names[:1] in (("self",), ("cls",)):
            names = names[1:]
        return cls(names, tuple(arg.arg for arg in args.kwonlyargs), args.vararg is not None, args.kwarg is not None)

    def refuses(self, call: ast.Call) -> str:
        """Return the arguments of a call that are refused, as text; "" if none is."""
        num_positional = sum(not isinstance(arg, ast.Starred) for arg in call.args)
        if num_positional > len(self.positional) and not self.takes_more:
            return f"{num_positional} arguments, it takes {len(self.positional)}"
        known = {*self.positional, *self.keyword_only}
        unknown = [each.arg for each in call.keywords if each.arg and each.arg not in known]
        return f"no parameter {', '.join(unknown)}" if unknown and not self.takes_keywords else ""

    def missing(self, called_as: Signature) -> str:
        """Parameters of another signature that this one does not take."""
        names = {*self.positional, *self.keyword_only}
        missing = []
        if not self.takes_more and len(called_as.positional) > len(self.positional):
            missing += [name for name in called_as.positional[len(self.positional) :] if name not in names]
        if not self.takes_keywords:
            missing += [name for name in called_as.keyword_only if name not in names]
        return ", ".join(missing)

    def __str__(self) -> str:
        more, rest = ["*"] * self.takes_more, ["**"] * self.takes_keywords
        return f"({', '.join([*self.positional, *more, *(f'{name}=' for name in self.keyword_only), *rest])})"


def constant(module: Module, name: str) -> object:
    """Value of a constant at the top of a file; None if it has none."""
    node = module.definitions.get(name)
    return ast.literal_eval(node.value) if isinstance(node, ast.Assign) else None


def place(module: Module, node: ast.AST) -> str:
    path = module.path
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{node.lineno}"


def is_class(sources: Sources, name: str) -> bool:
    return bool(name) and sources.find_class(name) is not None


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, FUNCTIONS)}


def vllm_imports(tree: ast.AST) -> Iterator[tuple[ast.AST, list[str]]]:
    """Names that a file imports from vLLM; not those in a `try` with an alternative for one that is missing."""
    excepted = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each.type or node) for each in node.handlers)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in excepted:
            continue
        if isinstance(node, ast.ImportFrom) and is_vllm(node.module or "") and not node.level:
            yield node, [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names if is_vllm(alias.name)]


def own_names(module: Module) -> Iterator[str]:
    """Names that a file of ours defines."""
    for node in ast.walk(module.tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def used_names(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Attributes and keywords that a file uses of any object, and names that it gives to `setattr` and its like."""
    for node, _, name in attributes(tree):
        yield node, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from ((node, each.arg) for each in node.keywords if each.arg)


def installed_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm_compat: no vLLM is installed to compare with; run `make setup`")
    return Path(spec.origin).parent


def find_wheel(wheel: str, cache: Path) -> Path:
    """The wheel of a path or of a version, which is fetched into `cache`."""
    path = Path(wheel)
    if path.suffix == ".whl":
        return path
    if not (found := sorted(cache.glob(f"vllm-{wheel}-*.whl"))):
        options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--platform", PLATFORM]
        command = [sys.executable, "-m", "pip", "--quiet", "download", *options, "-d", str(cache), f"vllm=={wheel}"]
        subprocess.run(command, check=True)
        found = sorted(cache.glob(f"vllm-{wheel}-*.whl"))
    return found[0]


def unpack(wheel: Path, folder: Path) -> str:
    """Unpack the Python files and the metadata of a wheel, unless they are there; return the version."""
    version = wheel.name.split("-")[1]
    if not (folder / "vllm").is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if re.search(r"\.(py|json|jinja)$|\.dist-info/(METADATA|entry_points\.txt)$", name):
                    archive.extract(name, partial)
        partial.rename(folder)
    return version


def add_cpu_build(folder: Path, version: str, installed: Path) -> None:
    """Put the compiled parts of an installed CPU build beside a release's Python files, and mark it as a CPU build."""
    for path in installed.rglob("*.so"):
        target = folder / "vllm" / path.relative_to(installed)
        if not target.exists():
            target.symlink_to(path)
    metadata = folder / f"vllm-{version}.dist-info"
    if metadata.is_dir():  # NOTE: vLLM takes the CPU platform where its version says "cpu".
        text = (metadata / "METADATA").read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n")
        (metadata / "METADATA").write_text(text)
        metadata.rename(folder / f"vllm-{version}+cpu.dist-info")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="version, or path of a wheel")
    parser.add_argument("--tree", action="store_true", help="make a folder that tests can import vLLM from")
    args = parser.parse_args()
    cache = ROOT / "build"
    wheel = find_wheel(args.wheel, cache)
    folder = cache / f"vllm-{wheel.name.split('-')[1]}"
    version, installed = unpack(wheel, folder), installed_vllm()
    report = Comparison(installed, folder / "vllm", version, PACKAGES).run()
    if args.tree:
        add_cpu_build(folder, version, installed)
    print(f"vLLM {version}, compared with the installed one:\n{report}")
    return 1 if report.breaks else 0


if __name__ == "__main__":
    sys.exit(main())
