"""Builds the CUDA kernels of csrc/cuda where nvcc is found; everything else is declared in pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NVCC_FLAGS = ["-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90a,code=sm_90a"]


def cuda_extensions() -> list[Extension]:
    sources = sorted(str(path) for path in Path("csrc/cuda").glob("*.cu"))
    if sources and shutil.which("nvcc"):
        return [Extension("vllm_hisparse._kernels", sources)]
    reason = "nvcc is not on PATH" if sources else "csrc/cuda holds no sources"
    print(f"vllm_hisparse: CUDA kernels skipped ({reason}); installing pure Python", file=sys.stderr)
    return []


class NvccBuild(build_ext):
    """Links all kernels into one plain shared library."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["nvcc", *NVCC_FLAGS, "-o", str(target), *ext.sources], check=True)


setup(ext_modules=cuda_extensions(), cmdclass={"build_ext": NvccBuild})
