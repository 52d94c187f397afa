"""An EngineCore whose parent was killed runs on and keeps its memory.

vLLM's workers end with their EngineCore (`vllm/v1/executor/multiproc_executor.py`), but nothing ends an EngineCore
without its parent. On Ray, the raylet kills the processes of a dead replica, but nothing kills them when the raylet
itself dies. A worker closes its distributed groups, its transfers and its memory before it ends. If that takes for
ever, the worker keeps the GPU's memory, too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

RELEASES = ">=0.32"
DELETE = "the calls in plugin.py and connector/connector.py"
VLLM = ("vllm.v1.engine.core.EngineCoreProc", "vllm.v1.executor.multiproc_executor.WorkerProc.monitor_death_pipe")

GRACE_S = 30  # a worker's time to end by itself
_THREAD_NAME = "end-with-parent"


def end_with_parent() -> None:
    """Let an EngineCore end as soon as its parent is gone, and a worker at most `GRACE_S` later.

    Another process, or another call, changes nothing. Both entry points and the connector call this. In a spawned
    EngineCore, vLLM asks for platforms when it is imported, but loads general plugins only after the handshake with the
    parent. A forked EngineCore does neither, but makes the connector.
    """
    name = multiprocessing.current_process().name
    is_known = name.startswith(("EngineCore", "VllmWorker"))
    if is_known and all(thread.name != _THREAD_NAME for thread in threading.enumerate()):
        grace_s = 0 if name.startswith("EngineCore") else GRACE_S
        threading.Thread(target=_end_after_parent, args=(grace_s,), name=_THREAD_NAME, daemon=True).start()


def _end_after_parent(grace_s: int) -> None:
    # NOTE: a spawned process imports vLLM before it knows its parent. The parent may be gone by then: its sentinel, a
    # pipe, is ready at once.
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(0.1)
    wait([parent.sentinel])
    if grace_s:
        # NOTE: the kernel waits and kills, because Python's threads do not run while the interpreter ends.
        signal.alarm(grace_s)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
