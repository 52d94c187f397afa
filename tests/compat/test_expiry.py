"""Adapters and mends say which releases of vLLM they are for; one that is for none we serve is to be deleted."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from vllm_hisparse.releases import RELEASES, SUPPORTED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_hisparse"
FILES = sorted(path for folder in ("compat", "vllm_patches") for path in (PACKAGE / folder).glob("[!_]*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


def constant(source: str, name: str) -> object:
    """Value of a constant at the top of a file; None if there is none. Nothing is imported: kernels may be missing."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    return None


def served(releases: str) -> list[str]:
    """The supported releases among `releases`."""
    return [release for release in RELEASES if SpecifierSet(releases).contains(f"{release}.0")]


def expired(files: list[Path]) -> list[str]:
    """Code for none of the supported releases, and what to delete with it."""
    found = []
    for path in files:
        source = path.read_text()
        if not served(constant(source, "RELEASES")):
            found.append(f"{path}: for {constant(source, 'RELEASES')}. Delete {constant(source, 'DELETE')}")
    return found


def test_nothing_is_for_releases_that_are_no_longer_supported() -> None:
    assert not expired(FILES)


def test_an_expired_mend_is_listed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text('RELEASES = ">=0.30,<0.32"\nDELETE = "the call in plugin.py"\n')
    new.write_text('RELEASES = ">=0.30,<0.33"\nDELETE = "nothing"\n')
    assert expired([old, new]) == [f"{old}: for >=0.30,<0.32. Delete the call in plugin.py"]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_a_file_says_of_itself(path: Path) -> None:
    source = path.read_text()
    names, ends = constant(source, "VLLM"), served(constant(source, "RELEASES")) != list(RELEASES)
    assert names and all(name.startswith("vllm.") for name in names)
    if ends or path.parent.name == "vllm_patches":
        assert constant(source, "DELETE"), "what goes when the releases that it is for are dropped"


def test_the_supported_releases_are_those_that_are_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm{SUPPORTED}" in extras["cuda"]
    assert served(SUPPORTED) == list(RELEASES)
    assert not SpecifierSet(SUPPORTED).contains("0.31.9") and not SpecifierSet(SUPPORTED).contains("0.34.0")


def test_no_other_file_looks_at_vllms_version() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path not in FILES and path.name != "releases.py":
            source = path.read_text()
            assert "serves(" not in source and "vllm.__version__" not in source and "vllm.version" not in source, path
