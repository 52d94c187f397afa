"""Processes in the place of an EngineCore and its parent, which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

PARENT = textwrap.dedent("""
    import multiprocessing, sys, time
    from vllm_hisparse.lifetime import end_with_parent

    def child(pipe):
        end_with_parent()
        pipe.send(None)
        time.sleep(60)

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(name=sys.argv[1], target=child, args=(theirs,))
        process.start()
        ours.recv()
        print(process.pid, flush=True)
        time.sleep(60)
""")


@pytest.mark.parametrize(("name", "ends"), [("EngineCore", True), ("EngineCore_DP1", True), ("Worker", False)])
def test_an_engine_core_ends_with_its_parent(tmp_path, name: str, ends: bool):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script), name], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    try:
        _, alive = psutil.wait_procs([child], timeout=10 if ends else 1)
        assert bool(alive) is not ends
    finally:
        if not ends:
            os.kill(child.pid, signal.SIGKILL)
