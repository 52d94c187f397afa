"""Workflows, hooks and the CI entry point use targets and tools that exist."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SKIP = "importorskip('vllm_router'"  # as `ast.unparse` writes it
ROUTER_TESTS = [
    path for path in sorted((ROOT / "tests").rglob("test_*.py")) if SKIP.replace("'", '"') in path.read_text()
]


def make_targets(command: str) -> set[str]:
    """Targets of each `make` in a shell command."""
    without_variables = re.sub(r"\w+=(\"[^\"]*\"|\S+)", "", command)
    return {word for words in re.findall(r"\bmake ([a-z\- ]+)", without_variables) for word in words.split()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_calls_targets_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = set().union(*(make_targets(step.get("run", "")) for step in steps))
    assert called <= TARGETS
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_every_push_is_linted_and_tested() -> None:
    (path,) = (path for path in WORKFLOWS if path.name == "ci.yml")
    workflow = yaml.safe_load(path.read_text())
    assert "push" in workflow[True]  # YAML 1.1 reads the key `on` as true
    commands = " ".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])
    assert {"lint", "docs", "test"} <= make_targets(commands)
    assert re.findall(r"-m '([^']*)'", commands) == ["not e2e"], "slow tests without an engine run, too"


@pytest.mark.parametrize("path", ROUTER_TESTS, ids=lambda path: path.name)
def test_tests_that_start_the_router_are_end_to_end_tests(path: Path) -> None:
    """A test, or a module of tests, is skipped where vllm-router is not installed because it starts the router."""
    module = ast.parse(path.read_text())
    for scope in (node for node in ast.walk(module) if isinstance(node, ast.Module | ast.FunctionDef)):
        calls = [each.value for each in scope.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
        if not any(SKIP in ast.unparse(call) for call in calls):
            continue
        if isinstance(scope, ast.Module):
            marks = [ast.unparse(each) for each in scope.body if isinstance(each, ast.Assign)]
            assert "pytestmark = pytest.mark.e2e" in marks
        else:
            assert "pytest.mark.e2e" in map(ast.unparse, scope.decorator_list), scope.name


def test_ci_run_lints_before_it_tests() -> None:
    command = (ROOT / ".ci" / "run").read_text()
    assert make_targets(command) == {"lint", "docs", "test-all"}
    assert command.index("lint") < command.index("test-all")


def test_hooks_run_installed_tools() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for hook in (hook for repository in config["repos"] for hook in repository["hooks"]):
        tool = hook["entry"].split()[0]
        assert (Path(sys.executable).parent / tool).exists(), tool


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_template_is_valid_yaml(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    if path.name != "config.yml":
        assert template["name"] and template["description"]
        assert all(field["attributes"]["label"] for field in template["body"])
