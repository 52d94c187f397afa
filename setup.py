"""Builds the CUDA kernels of csrc/cuda where nvcc is found; everything else is declared in pyproject.toml."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ARCHITECTURES = ("80", "90", "100")  # machine code of each, and PTX of the last for newer ones
WITH_FEATURES = {"90": "90a"}  # machine code with instructions that no other architecture has: WGMMA


SOURCES = Path("csrc/cuda")


def limit_flags() -> list[str]:
    """The limits that Python and the kernels share, as macros."""
    limits = runpy.run_path("vllm_hisparse/ops/limits.py")
    return [f"-DHISPARSE_{name}={value}" for name, value in limits.items() if name.isupper()]


def nvcc_flags() -> list[str]:
    from tvm_ffi import libinfo

    targets = [
        f"-gencode=arch=compute_{arch},code=sm_{arch}"
        for arch in (WITH_FEATURES.get(each, each) for each in ARCHITECTURES)
    ]
    targets.append(f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}")
    # The CUDA runtime is linked in. The TVM FFI runtime is not: who loads the library has loaded it.
    host = ["-Xcompiler=-fPIC,-fvisibility=hidden", *(f"-I{path}" for path in libinfo.include_paths())]
    return ["-O3", "-std=c++17", "-shared", "-cudart=static", "--threads=0", *host, *limit_flags(), *targets]


def cuda_extensions() -> list[Extension]:
    sources = sorted(str(path) for suffix in ("*.cu", "*.cc") for path in SOURCES.glob(suffix))
    if sources and shutil.which("nvcc"):
        headers = [str(path) for suffix in ("*.cuh", "*.h") for path in SOURCES.glob(suffix)]
        return [Extension("vllm_hisparse._kernels", sources, depends=[*headers, "vllm_hisparse/ops/limits.py"])]
    reason = "nvcc is not on PATH" if sources else "csrc/cuda holds no sources"
    print(f"vllm_hisparse: CUDA kernels skipped ({reason}); installing pure Python", file=sys.stderr)
    return []


class NvccBuild(build_ext):
    """Links all kernels into one plain shared library, which no Python or torch release is tied to."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["nvcc", *nvcc_flags(), "-o", str(target), *ext.sources], check=True)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python and every torch: the library is no Python extension."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if self.root_is_pure:
            return python, abi, platform
        library = next(Path(self.bdist_dir).rglob("_kernels.so"), None)
        if library is None:  # an editable install leaves it beside its sources
            return "py3", "none", platform
        return "py3", "none", manylinux(library.read_bytes(), platform)


def manylinux(library: bytes, platform: str) -> str:
    """The platform tag of a shared library that needs libc alone: the newest glibc whose symbols it names.

    Args:
        library: bytes of the file.
        platform: tag of the machine, such as "linux_x86_64".
    """
    minor = max(int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", library))
    return f"manylinux_2_{max(minor, 17)}_{platform.removeprefix('linux_')}"


if __name__ == "__main__":
    setup(ext_modules=cuda_extensions(), cmdclass={"build_ext": NvccBuild, "bdist_wheel": PlatformWheel})
