"""An EngineCore and a worker end with their parent: processes stand for both, and the parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from vllm_hisparse.vllm_patches import orphaned_engines

pytestmark = pytest.mark.long

# Code that a spawned child imports before it knows its parent, and that it runs then; the parent prints its process id.
PARENT = textwrap.dedent("""
    import multiprocessing, os, sys, time
    {imports}

    def child(pipe):
        {action}
        pipe.send(None)
        {then}

    if __name__ == "__main__":
        context = multiprocessing.get_context("{method}")
        ours, theirs = context.Pipe()
        process = context.Process(name=sys.argv[1], target=child, args=(theirs,))
        process.start()
        print(process.pid, flush=True)
        {wait}
        print("ready", flush=True)
        time.sleep(60)
""")
ENDS_S = 45  # in which a process that is to end has ended, also on a busy machine; the others live 60 s
SCRIPT = {"imports": "", "action": "", "then": "time.sleep(60)", "wait": "ours.recv()", "method": "spawn"}


def outlives(tmp_path: Path, name: str, timeout_s: float, printed: list[str] | None = None, **script: str) -> bool:
    """Return True if a child of this name is there that long after its parent was killed.

    Args:
        tmp_path: directory for the parent's code.
        name: name of the child.
        timeout_s: time after which a child has outlived its parent.
        printed: gets the lines that the child prints after the parent was killed. None: they are not read.
        script: parts of `PARENT` that differ from `SCRIPT`.
    """
    path = tmp_path / "parent.py"
    path.write_text(PARENT.format(**{**SCRIPT, **script}))
    with subprocess.Popen([sys.executable, str(path), name], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        if printed is not None:
            printed += parent.stdout.read().splitlines()
    _, alive = psutil.wait_procs([child], timeout=timeout_s)
    if alive:
        os.kill(child.pid, signal.SIGKILL)
    return bool(alive)


@pytest.mark.parametrize(("name", "ends"), [("EngineCore", True), ("EngineCore_DP1", True), ("Worker", False)])
def test_an_engine_core_ends_with_its_parent(tmp_path: Path, name: str, ends: bool):
    imports, action = "from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent", "end_with_parent()"
    assert outlives(tmp_path, name, ENDS_S if ends else 1, imports=imports, action=action) is not ends


HANGING = textwrap.dedent("""
    import ctypes, signal
    from vllm_hisparse.vllm_patches import orphaned_engines
    orphaned_engines.GRACE_S = 1

    def hang():
        while not signal.getitimer(signal.ITIMER_REAL)[0]:
            time.sleep(0.01)
        ctypes.PyDLL(None).sleep(60)

    {before}
""")
HANGS = {"action": "orphaned_engines.end_with_parent()", "then": "hang()"}


@pytest.mark.parametrize(
    "before",
    [
        "",
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)",
        "signal.signal(signal.SIGALRM, print)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})",
    ],
)
def test_a_worker_that_hangs_while_it_ends_is_killed(tmp_path: Path, before: str):
    """It has a second here. It sleeps in C with Python's lock held, as in a destructor of an extension."""
    assert not outlives(tmp_path, "VllmWorker-0", ENDS_S, imports=HANGING.format(before=before), **HANGS)


def test_forked_workers_that_hang_are_killed(tmp_path: Path):
    """The second one keeps the pipe open by which the first one would learn that its parent is gone."""
    wait = """ours.recv()
    second = context.Process(name="VllmWorker-1", target=child, args=(theirs,))
    second.start()
    ours.recv()"""
    action = """if multiprocessing.current_process().name == "VllmWorker-1":
        orphaned_engines.GRACE_S = 60
    orphaned_engines.end_with_parent()"""
    script = {"imports": HANGING.format(before=""), "action": action, "then": "hang()", "wait": wait, "method": "fork"}
    assert not outlives(tmp_path, "VllmWorker-0", ENDS_S, **script)


def test_a_forked_worker_whose_parent_is_gone_before_it_looks(tmp_path: Path):
    """Its model was loading until then; another worker keeps the pipe open."""
    wait = """context.Process(name="VllmWorker-1", target=time.sleep, args=(60,)).start()"""
    action = """while os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.01)
    orphaned_engines.end_with_parent()
    hang()"""
    script = {"imports": HANGING.format(before=""), "action": action, "wait": wait, "method": "fork"}
    assert not outlives(tmp_path, "VllmWorker-0", ENDS_S, **script)


def test_a_worker_has_time_to_end(tmp_path: Path):
    """The alarm is set as soon as the parent is gone, and rings `GRACE_S` later."""
    imports = "from vllm_hisparse.vllm_patches import orphaned_engines; import signal"
    then = """while not (left := signal.getitimer(signal.ITIMER_REAL)[0]):
        time.sleep(0.01)
    print("left", left, flush=True)"""
    lines: list[str] = []
    script = {"imports": imports, "action": "orphaned_engines.end_with_parent()", "then": then}
    assert not outlives(tmp_path, "VllmWorker-0", ENDS_S, lines, **script)
    left = next(float(line.split()[1]) for line in lines if line.startswith("left"))
    assert orphaned_engines.GRACE_S - 5 < left <= orphaned_engines.GRACE_S


def test_a_forked_engine_core_ends_with_its_parent(tmp_path: Path):
    imports, action = (
        "from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent",
        "end_with_parent(), end_with_parent()",
    )
    assert not outlives(tmp_path, "EngineCore", ENDS_S, imports=imports, action=action, method="fork")


def test_a_parent_that_is_gone_before_its_child_looks(tmp_path: Path):
    """Killed while the child still imports: nobody is left when the child learns who started it."""
    imports = """
    if __name__ != "__main__":
        while os.getppid() == int(os.environ["PARENT"]):
            time.sleep(0.01)
        from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent
        end_with_parent()
    os.environ["PARENT"] = str(os.getpid())
    """
    assert not outlives(
        tmp_path, "EngineCore", ENDS_S, imports=textwrap.dedent(imports), action="time.sleep(60)", wait=""
    )


@pytest.mark.slow
@pytest.mark.e2e
def test_an_engine_core_that_waits_for_its_handshake_is_watched(tmp_path: Path):
    """An EngineCore that waits for its handshake has imported vLLM, but loaded no general plugin."""
    imports = 'if __name__ != "__main__": import vllm.v1.engine.core'
    assert not outlives(tmp_path, "EngineCore", ENDS_S, imports=imports)
