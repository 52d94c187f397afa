"""The kernels' library: built where nvcc is found, bound to no Python or torch release, skipped with a message."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_hisparse.ops import cuda_ops
from vllm_hisparse.ops.registry import swap_in_ops

ROOT = Path(__file__).resolve().parents[1]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which builds the library")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    cuda_ops._load_library.cache_clear()
    monkeypatch.setattr(cuda_ops, "LIBRARY", tmp_path / "_kernels.so")
    yield
    cuda_ops._load_library.cache_clear()


@needs_nvcc
def test_the_library_exports_every_launcher() -> None:
    library = cuda_ops._load_library()
    for name in cuda_ops._ARGUMENTS:
        assert getattr(library, f"hisparse_{name}").argtypes[-1] is ctypes.c_void_p  # the stream


@needs_nvcc
def test_the_library_depends_on_nothing_that_a_release_of_python_or_torch_brings() -> None:
    dynamic_section = subprocess.check_output(["readelf", "-d", cuda_ops.LIBRARY], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section)
    assert "libc.so.6" in needed
    assert not any(name in library for library in needed for name in ("cudart", "torch", "c10", "python"))


def test_a_library_of_another_version_is_refused(no_library: None, tmp_path: Path) -> None:
    """A build that is older than the Python code beside it says nothing of its version, or another one."""
    for source, version in (("", 1), ("int hisparse_interface_version() { return 99; }", 99)):
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(cuda_ops.LIBRARY)]
        subprocess.run(command, input=source, text=True, check=True)
        with pytest.raises(RuntimeError, match=f"has interface {version}, this code has"):
            swap_in_ops(torch.device("cuda"))
        cuda_ops.LIBRARY.unlink()


def test_without_nvcc_the_kernels_are_skipped_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--name"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "CUDA kernels skipped (nvcc is not on PATH); installing pure Python" in result.stderr


def test_cuda_without_the_library_names_the_fix(no_library: None) -> None:
    with pytest.raises(RuntimeError, match="so that nvcc is on PATH, and install vllm_hisparse again"):
        swap_in_ops(torch.device("cuda"))
