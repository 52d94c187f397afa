"""Another release of vLLM, made of a few files, and what of it breaks a package of ours."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.compat.test_expiry import FILES, NAMES, constant
from tools.vllm_compat import PACKAGES, Comparison, Report, installed_vllm
from tools.vllm_sources import Sources
from vllm_hisparse.releases import serves

OLD = """
    from dataclasses import dataclass

    @dataclass
    class Base:
        first: int
        second: int = 0

    class Worker:
        kind = "worker"

        def __init__(self, config, *, rank=0):
            self._state = {}

        def run(self, batch, block_size):
            return self.step(batch)

        def step(self, batch):
            return batch

    def helper(a, b=1):
        return a
"""
OURS = """
    from vllm.parts import Base, Worker, helper

    class OurWorker(Worker):
        def run(self, batch, block_size):
            return super().run(batch, block_size)

        def step(self, batch):
            return helper(batch, b=2)

    def use(worker, config):
        base = Base(1, second=2)
        return base, Worker(config, rank=1), worker.special_state
"""


def write(folder: Path, source: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text(textwrap.dedent(source))
    (folder / "__init__.py").write_text("")
    return folder


def compare(tmp_path: Path, *changes: tuple[str, str], ours: str = OURS, **adapter: str) -> Report:
    """Report on a release with these changes."""
    old = OLD + "\n    special_state = cache = None\n"
    new = old
    for before, after in changes:
        assert before in new
        new = new.replace(before, after)
    package = write(tmp_path / "vllm_hisparse", ours)
    if adapter:
        (package / "compat").mkdir()
        lines = [f"{name} = {value!r}" for name, value in adapter.items()]
        (package / "compat" / "adapter.py").write_text("\n".join(lines) + "\n")
    folders = write(tmp_path / "old" / "vllm", old), write(tmp_path / "new" / "vllm", new)
    return Comparison(*folders, "0.33.0", {"vllm_hisparse": package}).run()


def test_nothing_has_changed(tmp_path: Path) -> None:
    report = compare(tmp_path, ("return batch", "return list(batch)"))
    assert not report.breaks and not report.look


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (("def helper(", "def moved_helper("), "imports", "vllm.parts.helper"),
        (("def helper(a, b=1)", "def helper(a, c=1)"), "calls", "no parameter b"),
        (("second: int = 0", "other: int = 0"), "calls", "no parameter second"),
        (("*, rank=0", "*, local_rank=0"), "calls", "no parameter rank"),
        (("def step(self, batch)", "def step(self, batch, *, lane)"), "overridden methods", "ours lacks lane"),
        (("def step(self, batch)", "def forward(self, batch)"), "overridden methods", "no base class has it any more"),
        (("special_state", "other_state"), "names", "special_state"),
    ],
)
def test_breaks(tmp_path: Path, change: tuple[str, str], kind: str, says: str) -> None:
    report = compare(tmp_path, change)
    assert kind in report.breaks and set(report.breaks) <= {kind, "names"}
    assert says in report.breaks[kind][0]
    assert says in str(report)


def test_a_changed_signature_that_ours_fits_is_to_be_looked_at(tmp_path: Path) -> None:
    report = compare(tmp_path, ("def run(self, batch, block_size)", "def run(self, batch, num_rows)"))
    assert not report.breaks
    (finding,) = report.look["overridden methods"]
    assert "was (batch, block_size), now (batch, num_rows)" in finding


def test_an_import_with_an_alternative(tmp_path: Path) -> None:
    ours = """
        try:
            from vllm.parts import helper
        except ImportError:
            from vllm.new_parts import helper
    """
    assert not compare(tmp_path, ("def helper(", "def moved("), ours=ours).breaks


@pytest.mark.parametrize(("releases", "is_break"), [(">=0.32", True), (">=0.32,<0.33", False)])
def test_adapters(tmp_path: Path, releases: str, is_break: bool) -> None:
    """A name that is gone breaks an adapter for this release; one for older releases may use it."""
    adapter = {"RELEASES": releases, "VLLM": ("vllm.parts.Worker.step", "vllm.parts.Worker.run")}
    changes = ("def step(", "def forward("), ("self.step(batch)", "self.forward(batch)")
    report = compare(tmp_path, *changes, ours="", **adapter)
    assert bool(report.breaks) == is_break
    found = (report.breaks if is_break else report.look)["adapters and mends"]
    assert [finding.rpartition(" vllm")[2] for finding in found] == [".parts.Worker.step: gone"]
    (changed,) = report.look["adapters and mends whose part of vLLM changed"]
    assert changed.endswith("Worker.run")


@pytest.fixture(scope="module")
def vllm_sources() -> Sources:
    return Sources({"vllm": installed_vllm()})


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_adapters_and_mends_name_is_in_the_installed_vllm(vllm_sources: Sources, path: Path) -> None:
    text = path.read_text()
    if not serves(constant(text, "RELEASES")):
        pytest.skip("it serves other releases of vLLM")
    assert not [name for name in constant(text, "VLLM") if vllm_sources.find(name) is None]


def test_the_packages_are_there() -> None:
    assert all((folder / "__init__.py").is_file() or folder.name in ("tests",) for folder in PACKAGES.values())
