"""tools/code_figures.py counts what its docstring says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "code_figures.py"
VLLM = {
    "vllm/__init__.py": "",
    "vllm/backend.py": """
class Base:
    _support = 1
    def __init__(self):
        self._state = 0
    def forward_mqa(self, q): ...
    def _helper(self): ...
""",
    "vllm/api.py": "from vllm.backend import Base",
}


@pytest.fixture(scope="module")
def figures_of() -> ModuleType:
    spec = importlib.util.spec_from_file_location("code_figures", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["code_figures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["code_figures"]


@pytest.fixture
def measure(figures_of: ModuleType, tmp_path: Path):
    """Measures a package of the given files."""

    def run(**files: str):
        own = {f"package/{name}.py": text for name, text in files.items()}
        for path, text in (VLLM | {"package/__init__.py": ""} | own).items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
        return figures_of.measure(tmp_path / "package", tmp_path / "vllm")

    return run


@pytest.mark.parametrize(
    "source",
    [
        "from vllm import _custom_ops",
        "from vllm.api import _helper",
        "def f():\n    import vllm._C",
        "from vllm.backend import Base\nprint(Base._support)",
        "def f(request):\n    return request._tokens",
        "def f(request):\n    return getattr(request, '_tokens')",
        "def f(request):\n    request.inner._tokens = 1",
        "from vllm.api import Base\nclass Own(Base):\n    def _helper(self): ...",
        "from vllm.api import Base\nclass Own(Base):\n    _support = 2",
        "from vllm.api import Base\nclass Own(Base):\n    def f(self):\n        return self._state",
        "from vllm.api import Base\nclass Own(Base):\n    def f(self):\n        return super()._helper()",
        "class Mixin:\n    def _helper(self): ...\nfrom vllm.api import Base\nclass Own(Mixin, Base): ...",
    ],
)
def test_private_vllm_names_are_found(measure, source: str) -> None:
    assert len(measure(module=source).private_names) == 1


def test_private_names_of_the_package_are_its_own(measure) -> None:
    source = """
import torch
from vllm.api import Base
class Own(Base):
    def __init__(self):
        super().__init__()
        self._tables = torch._C
    def _grow(self):
        return self._tables.__len__()
def use(own):
    return own._tables, own._grow()
"""
    assert measure(module=source).private_names == []


def test_compat_may_use_private_names(measure) -> None:
    assert measure(compat="from vllm import _custom_ops").private_names == []


def test_tensor_functions_need_shapes(measure) -> None:
    source = '''
from vllm.api import Base
class Own(Base):
    def forward_mqa(self, q: Tensor): ...
    def rows(self) -> Tensor:
        """[num_rows] int32."""
    def vague(self, rows: "torch.Tensor | None"):
        """Some rows."""
    def _hidden(self, rows: Tensor): ...
class Child(Own):
    def rows(self) -> Tensor: ...
def plain(rows: list[int]): ...
def bare(rows: Tensor): ...
'''
    figures = measure(module=source)
    assert figures.num_tensor_functions == 4
    assert [place.split()[1] for place in figures.without_shapes] == ["Own.vague", "bare"]
    assert figures.documented_share == 0.5


def test_lengths_and_limits(measure) -> None:
    body = "\n".join(f"    def f{number}(self): ..." for number in range(200))
    figures = measure(module=f"class Large:\n{body}\nclass Small:\n    def f(self):\n        return 1")
    assert figures.largest_class == "package/module.py:1 Large"
    assert figures.class_lines["package/module.py:1 Large"] == 201
    assert (figures.percentile(50), figures.percentile(100)) == (1, 2)
    assert figures.problems() == ["package/module.py:1 Large: 201 lines"]


def test_the_limits_hold(figures_of: ModuleType) -> None:
    """Classes of at most 200 lines, shapes in 90% of tensor functions, private vLLM names in compat.py only."""
    assert figures_of.measure(figures_of.PACKAGE, figures_of.find_vllm()).problems() == []
