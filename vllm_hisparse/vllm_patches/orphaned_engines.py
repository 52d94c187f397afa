"""An EngineCore whose parent was killed runs on and keeps its memory.

vLLM's workers end with their EngineCore (`vllm/v1/engine/core.py`); nobody ends that. On Ray, the raylet kills what a
dead replica leaves behind; when the raylet itself dies, nobody does.
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
    """In an EngineCore: end as soon as its parent is gone; nothing in any other process. Calling it again is harmless.

    Both entry points and the connector call this. vLLM asks for platforms while a spawned EngineCore imports it, and
    loads general plugins only after the handshake with the parent. A forked one asks for neither and has the connector.
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
