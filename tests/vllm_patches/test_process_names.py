"""Names by which `orphaned_engines` tells EngineCores and workers from other processes."""

from __future__ import annotations

import inspect

from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.multiproc_executor import WorkerProc

from vllm_hisparse.vllm_patches.orphaned_engines import ENGINE, WORKER


def test_vllm_gives_these_names() -> None:
    assert f'name=f"{WORKER}{{rank}}"' in inspect.getsource(WorkerProc.make_worker_process)
    source = inspect.getsource(CoreEngineProcManager.__init__)
    assert f'f"{ENGINE}_DP{{global_index}}" if is_dp else "{ENGINE}"' in source
