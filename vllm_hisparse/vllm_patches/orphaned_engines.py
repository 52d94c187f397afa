"""An EngineCore whose parent was killed runs on and keeps its memory.

vLLM's workers end with their EngineCore (`vllm/v1/executor/multiproc_executor.py`), but nothing ends an EngineCore
without its parent. On Ray, the raylet kills the processes of a dead replica, but nothing kills them when the raylet
itself dies. A worker whose EngineCore is gone closes its distributed groups, its transfers and its memory before it
ends. If it hangs in doing so, it keeps the GPU's memory, too.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from vllm.logger import init_logger

RELEASES = ">=0.32"
DELETE = "the calls in plugin.py and connector/connector.py"
VLLM = (
    "vllm.v1.engine.core.EngineCoreProc",
    "vllm.v1.engine.utils.CoreEngineProcManager.__init__",
    "vllm.v1.executor.multiproc_executor.WorkerProc.make_worker_process",
    "vllm.v1.executor.multiproc_executor.WorkerProc.monitor_death_pipe",
)

ENGINE, WORKER = "EngineCore", "VllmWorker-"  # beginnings of the names that vLLM gives to processes
GRACE_S = 30  # a worker's time to end by itself
_LOOK_S = 1.0  # seconds between looks at the parent's process id
_THREAD_NAME = "end-with-parent"

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


def end_with_parent() -> None:
    """Let an EngineCore end as soon as its parent is gone, and a worker of the multiprocessing executor a little later.

    The worker has `GRACE_S` to end by itself. Calls in other processes, and later calls, do nothing.

    Both entry points and the connector call this. In a spawned process, vLLM asks for platforms when it is imported,
    but an EngineCore loads general plugins only after the handshake with the parent. A forked process does neither, but
    makes the connector.
    """
    name = multiprocessing.current_process().name
    if name.startswith((ENGINE, WORKER)) and all(thread.name != _THREAD_NAME for thread in threading.enumerate()):
        end = _kill if name.startswith(ENGINE) else _kill_later
        threading.Thread(target=_end_after_parent, args=(end,), name=_THREAD_NAME, daemon=True).start()


def _end_after_parent(end: Callable[[], None]) -> None:
    # NOTE: a spawned process imports vLLM before it knows its parent. The parent may be gone by then: its sentinel, a
    # pipe, is ready at once. Processes that the parent has forked later keep the pipe open, hence the process id.
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(0.1)
    while not wait([parent.sentinel], _LOOK_S) and os.getppid() == parent.pid:
        pass
    end()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_later() -> None:
    """Let the kernel end this process after `GRACE_S`, because no thread of Python runs while the interpreter ends.

    The signal may be ignored, handled or blocked, for example by the test runner from which the process was forked.
    """
    logger.warning("HiSparse: this worker's parent is gone. The worker is killed in %d s if it has not ended.", GRACE_S)
    ctypes.CDLL(None).signal(signal.SIGALRM, 0)  # 0: end the process. Python allows it on the main thread alone.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(GRACE_S)
    time.sleep(2 * GRACE_S)  # this thread takes the signal
