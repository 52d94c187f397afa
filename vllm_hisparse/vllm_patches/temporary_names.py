"""Two engines' temporary files in a file system tier have the same names.

vLLM draws them from Python's generator, which it seeds (`vllm/v1/kv_offload/tiering/fs/io.py`): an engine that is
killed leaves a file of the name that the next one wants, too, and cannot create.
"""

from __future__ import annotations

from random import SystemRandom

RELEASES = ">=0.32"
DELETE = "the call in kv_manager/tiers/fs_tier.py"
VLLM = ("vllm.v1.kv_offload.tiering.fs.io.random",)


def draw_temporary_names() -> None:
    """Let vLLM's file system tier name temporary files like no other engine's."""
    from vllm.v1.kv_offload.tiering.fs import io

    io.random = SystemRandom()
