"""Modules that a server imports: the plugin, the connector and the platform, but nothing of the command line; and names
of the package that tests use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tools.vllm_sources import FUNCTIONS, attributes, is_self

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "vllm_hisparse"
NOT_IN_A_SERVER = ("vllm_hisparse.cli", "typer", "rich", "matplotlib")
RUNTIME_FILES = sorted(path for path in PACKAGE.rglob("*.py") if "cli" not in path.relative_to(PACKAGE).parts)
SERVER = """
import sys
from vllm_hisparse import plugin
plugin.cpu_platform()
plugin.register()
import vllm_hisparse.connector.connector
import vllm_hisparse.cpu.platform
print(*sys.modules, sep="\\n")
"""
MISSING_EXTRA = """
import sys
sys.modules[{package!r}] = None
from vllm_hisparse.cli import run
run()
"""


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


def is_forbidden(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in NOT_IN_A_SERVER)


@cache
def imported_modules(source: str) -> set[str]:
    """Modules that a file imports anywhere, function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "absolute imports only"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.slow
@pytest.mark.e2e  # the next test looks at the files alone
def test_a_server_does_not_load_the_command_line() -> None:
    result = run_python(SERVER)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert {"vllm_hisparse.connector.worker", "vllm_hisparse.cpu.platform"} <= loaded
    assert not [module for module in loaded if is_forbidden(module)]


@pytest.mark.long
def test_the_runtime_does_not_import_the_command_line() -> None:
    assert len(RUNTIME_FILES) > 40
    imports = {path.relative_to(PACKAGE): imported_modules(path.read_text()) for path in RUNTIME_FILES}
    assert not [(path, name) for path, names in imports.items() for name in names if is_forbidden(name)]


@pytest.mark.long
def test_the_package_imports_nothing_of_the_checkout() -> None:
    """An installed package has neither tools nor benchmarks beside it."""
    imports = {path.relative_to(PACKAGE): imported_modules(path.read_text()) for path in PACKAGE.rglob("*.py")}
    beside = {path.name for path in PACKAGE.parent.iterdir() if path.is_dir()} - {PACKAGE.name}
    assert {"tools", "benchmarks", "tests"} <= beside
    assert not [(path, name) for path, names in imports.items() for name in names if name.partition(".")[0] in beside]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_names_the_extra_that_is_missing(package: str) -> None:
    result = run_python(MISSING_EXTRA.format(package=package))
    assert result.returncode == 1
    assert package in result.stderr and "pip install 'vllm-hisparse[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_workers_import_nothing_of_the_scheduler_side() -> None:
    scheduler_side = ("vllm_hisparse.kv_manager.blocks", "vllm_hisparse.kv_manager.tiers")
    folders = ("kv_manager/rows", "attention", "cpu", "ops", "algorithms")
    files = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    files += [PACKAGE / "connector" / name for name in ("metadata.py", "worker.py", "nixl_worker.py")]
    imports = {path.relative_to(PACKAGE): imported_modules(path.read_text()) for path in files}
    assert len(files) > 40
    assert not [(path, name) for path, names in imports.items() for name in names if name.startswith(scheduler_side)]


def test_the_kv_manager_imports_nothing_of_the_connector() -> None:
    files = list((PACKAGE / "kv_manager").rglob("*.py"))
    imports = {path.relative_to(PACKAGE): imported_modules(path.read_text()) for path in files}
    assert len(files) > 40
    assert not [(path, name) for path, names in imports.items() for name in names if "vllm_hisparse.connector" in name]


def test_modules_import_each_other_in_one_direction() -> None:
    """Imports in functions and for type checkers count, too."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in RUNTIME_FILES}
    graph = {name: imported_modules(path.read_text()) & names.keys() - {name} for name, path in names.items()}
    while free := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"these modules import each other, or one that does: {sorted(graph)}"


# Private names that tests use, and why: CONTRIBUTING.md, Tests
EXCEPTIONS = {
    "attention/test_attach.py": {"_decode", "_for_tokens"},
    "benchmarks/test_train_dsa.py": {"_heads"},  # of the benchmark's model
    "e2e/offline_engine.py": {"_take"},
}
OF_VLLM = {  # private names of vLLM that the package overrides or sets
    "_capture_descs",
    "_convert_logical_to_physical_topk",
    "_dense_mha_metadata_layer_name",
    "_forward_mqa_kernel",
    "_fp8_kv_needs_view",
    "_read_blocks_for_req",
    "_run_mqa_kernel",
    "_sparse_indexer_and_attn",
    "_update_waiting_for_remote_kv",
}


def private_names(tree: ast.AST) -> set[str]:
    """Private functions, methods and attributes that a file defines."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.endswith("__") and len(name) > 1}


def used_names(tree: ast.AST) -> set[str]:
    """Names of others that a test imports, or reads, sets or replaces on other objects than `self`."""
    found = {name for _, value, name in attributes(tree) if not is_self(value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_hisparse"):
            found |= {alias.name for alias in node.names}
    return found - private_names(tree)


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their names alone, and ends if it finds a name twice."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.long
def test_tests_use_public_names() -> None:
    """A rename inside of a class must break no test."""
    own = set().union(*(private_names(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py"))) - OF_VLLM
    assert len(own) > 300
    used = {
        str(path.relative_to(TESTS)): found
        for path in TESTS.rglob("*.py")
        if (found := used_names(ast.parse(path.read_text())) & own)
    }
    assert used == EXCEPTIONS
