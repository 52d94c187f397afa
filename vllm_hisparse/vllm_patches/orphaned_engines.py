"""An EngineCore whose parent was killed runs on and keeps its memory.

vLLM's workers end with their EngineCore (`vllm/v1/engine/core.py`), but nothing ends an EngineCore without its parent.
On Ray, the raylet kills the processes of a dead replica, but nothing kills them when the raylet itself dies.
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
VLLM = ("vllm.v1.engine.core.EngineCoreProc",)

_THREAD_NAME = "end-with-parent"


def end_with_parent() -> None:
    """Let an EngineCore end as soon as its parent is gone. Another process, or another call, changes nothing.

    Both entry points and the connector call this. In a spawned EngineCore, vLLM asks for platforms when it is imported,
    but loads general plugins only after the handshake with the parent. A forked EngineCore does neither, but makes the
    connector.
    """
    is_engine = multiprocessing.current_process().name.startswith("EngineCore")
    if is_engine and all(thread.name != _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(target=_kill_after_parent, name=_THREAD_NAME, daemon=True).start()


def _kill_after_parent() -> None:
    # NOTE: a spawned process imports vLLM before it knows its parent. The parent may be gone by then: its sentinel, a
    # pipe, is ready at once.
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(0.1)
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
