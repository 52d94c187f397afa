"""Modules that a server imports: the plugin, the connector and the platform, but nothing of the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_hisparse"
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


@pytest.mark.e2e  # the next test looks at the files alone
def test_a_server_does_not_load_the_command_line() -> None:
    result = run_python(SERVER)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert {"vllm_hisparse.connector.worker", "vllm_hisparse.cpu.platform"} <= loaded
    assert not [module for module in loaded if is_forbidden(module)]


def test_the_runtime_does_not_import_the_command_line() -> None:
    assert len(RUNTIME_FILES) > 40
    imports = {path.relative_to(PACKAGE): imported_modules(path.read_text()) for path in RUNTIME_FILES}
    assert not [(path, name) for path, names in imports.items() for name in names if is_forbidden(name)]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_names_the_extra_that_is_missing(package: str) -> None:
    result = run_python(MISSING_EXTRA.format(package=package))
    assert result.returncode == 1
    assert package in result.stderr and "pip install 'vllm-hisparse[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


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
