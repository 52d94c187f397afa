"""An engine does not outlive the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """In an EngineCore that was spawned: end as soon as its parent is gone; nothing in any other process.

    NOTE: vLLM's workers end with their EngineCore, but an EngineCore whose parent was killed runs on and keeps its
    memory. On Ray, the raylet kills what a dead replica leaves behind; when the raylet itself dies, nobody does.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith("EngineCore"):
        threading.Thread(target=_kill_after, args=(parent.sentinel,), name="end-with-parent", daemon=True).start()


def _kill_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
