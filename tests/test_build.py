"""The kernels' library: built where nvcc is found, bound to no Python or torch release, skipped with a message."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_hisparse.ops import kernels as library
from vllm_hisparse.ops.registry import swap_in_ops

ROOT = Path(__file__).resolve().parents[1]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which builds the library")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    library.kernels.cache_clear()
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "_kernels.so")
    yield
    library.kernels.cache_clear()


@needs_nvcc
def test_the_library_depends_on_nothing_that_a_release_of_python_or_torch_brings() -> None:
    """It finds the functions of TVM FFI in the process that loads it; their ABI is that of all releases 0.1."""
    dynamic_section = subprocess.check_output(["readelf", "-d", library.LIBRARY], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section)
    assert "libc.so.6" in needed
    assert not any(name in each for each in needed for name in ("cudart", "torch", "c10", "python", "tvm"))


def test_without_nvcc_the_kernels_are_skipped_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--name"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "CUDA kernels skipped (nvcc is not on PATH); installing pure Python" in result.stderr


def test_cuda_without_the_library_names_the_fix(no_library: None) -> None:
    with pytest.raises(RuntimeError, match="so that nvcc is on PATH, and install vllm_hisparse again"):
        swap_in_ops(torch.device("cuda"))
