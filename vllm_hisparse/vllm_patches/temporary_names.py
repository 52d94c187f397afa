"""Two engines' temporary files in a file system tier have the same names.

vLLM draws the names from Python's random generator, which it seeds (`vllm/v1/kv_offload/tiering/fs/io.py`). If a killed
engine has left such a file, the next engine draws the same name and cannot create its file.
"""

from __future__ import annotations

from random import SystemRandom

RELEASES = ">=0.32"
DELETE = "the call in kv_manager/tiers/fs_tier.py"
VLLM = ("vllm.v1.kv_offload.tiering.fs.io.random",)


def draw_temporary_names() -> None:
    """Let vLLM's file system tier give temporary files names that no other engine uses."""
    from vllm.v1.kv_offload.tiering.fs import io

    io.random = SystemRandom()
