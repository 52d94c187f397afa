"""The kernels' library: built where nvcc is found, bound to no Python or torch release, skipped with a message."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
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
    """The library finds TVM FFI's functions in the process that loads it; all releases 0.1 have the same ABI."""
    dynamic_section = subprocess.check_output(["readelf", "-d", library.LIBRARY], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section)
    assert "libc.so.6" in needed
    assert not any(name in each for each in needed for name in ("cudart", "torch", "c10", "python", "tvm"))


@pytest.mark.long
def test_without_nvcc_the_kernels_are_skipped_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--name"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "CUDA kernels skipped (nvcc is not on PATH); installing pure Python" in result.stderr


def test_cuda_without_the_library_names_the_fix(no_library: None) -> None:
    with pytest.raises(RuntimeError, match="so that nvcc is on PATH, and install vllm_hisparse again"):
        swap_in_ops(torch.device("cuda"))


def without_nvcc(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has Python alone."""
    tools = tmp_path / "tools"
    tools.mkdir()
    return {**os.environ, "PATH": str(tools), "PYTHONPATH": ""}


def pip(environment: dict[str, str], *arguments: str | Path, python: str | Path = sys.executable) -> None:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as `python -m build` does: a source distribution, and a wheel of what that holds; without nvcc."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "results", "models", "__pycache__", "*.so")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=source, env=without_nvcc(folder), capture_output=True, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert kernels and kernels <= names, "a wheel with kernels is built from the source distribution, too"
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    pip({**os.environ, "PATH": str(folder / "tools"), "PYTHONPATH": ""}, "wheel", *options, archive)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_without_kernels_fits_every_machine(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    packages = {name.partition("/")[0] for name in names if name.endswith(".py")}
    assert packages == {"vllm_hisparse", "vllm_hisparse_ray"}
    for folder in ("compat", "vllm_patches", "kv_manager/blocks", "cli"):
        assert any(name.startswith(f"vllm_hisparse/{folder}/") for name in names)


SMOKE = """
import importlib.metadata, vllm_hisparse
from vllm.plugins import load_general_plugins
print(vllm_hisparse.__file__)
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
print(type(current_platform).__name__, "HiSparseHostConnector" in KVConnectorFactory._registry)
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_a_wheel_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """vLLM finds the plugin, its connector and its CPU platform; the command makes a model."""
    environment, fresh = without_nvcc(tmp_path), tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    python = fresh / "bin" / "python"
    pip(environment, "install", "--no-deps", wheel, python=python)
    # Dependencies come from this environment, after what is installed in the fresh one.
    site_packages = next(fresh.glob("lib/python*/site-packages"))
    (site_packages / "dependencies.pth").write_text("\n".join(sysconfig.get_paths()[name] for name in ("purelib",)))
    result = subprocess.run([python, "-c", SMOKE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    place, platform = result.stdout.split("\n")[-3:-1]
    assert Path(place).is_relative_to(site_packages)
    assert platform == "HiSparseCpuPlatform True"
    command = [fresh / "bin" / "vllm-hisparse", "make-model", "dsv32", "--out", tmp_path / "model"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_platform_of_a_wheel_with_kernels() -> None:
    """The newest glibc that the library names, and no older one than pip knows."""
    manylinux = runpy.run_path(str(ROOT / "setup.py"))["manylinux"]
    assert manylinux(b"GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.17\0", "linux_x86_64") == "manylinux_2_34_x86_64"
    assert manylinux(b"GLIBC_2.2.5\0", "linux_aarch64") == "manylinux_2_17_aarch64"


@needs_nvcc
def test_the_library_has_code_for_every_generation() -> None:
    """Machine code of sm_80, sm_90a and sm_100, and PTX for newer ones."""
    found = subprocess.run(["strings", "-a", library.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert all(f"-arch sm_{architecture} " in found for architecture in ("80", "90a", "100"))
    assert ".target sm_100" in found
