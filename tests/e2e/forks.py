"""Processes that are forked from one that has imported vLLM, which takes longer than all the rest of their start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tools.harness.processes import EngineProcess

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # several engines share the cores; more threads than cores spin
    # Keep the memory of temporary tensors: a third of an engine's CPU time went into page faults.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "NUMBA_NUM_THREADS": "1",  # numba sets as many for all who use OpenMP, torch too
    "NUMBA_CACHE_DIR": str(HERE.parents[1] / "build" / "numba"),  # `compile_drafting_once`
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
POLL_MS = 2  # between two looks of an EngineCore and its worker for each other's messages
POLL_US = 200  # between two looks of NIXL's progress thread; 0, which NIXL sets, is to look all the time

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["engine_imports"])


def fork(target: Callable[..., Any], *args: Any) -> BaseProcess:
    """A process that has started; its environment is `ENVIRONMENT` and that of the first call in this session."""
    process = FORKS.Process(target=target, args=args)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        process.start()
    return process


def begin(log_path: str, environment: dict[str, str]) -> None:
    """First thing in a forked process: its log and environment."""
    with open(log_path, "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    assert "engine_imports" in sys.modules, "the process that engines are forked from could not import it"
    os.environ.update(environment)


@dataclass
class Child:
    """A forked process as `EngineProcess` sees its children."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode


class ForkedServer(EngineProcess):
    """vLLM's OpenAI server with the options of a command line: API server, EngineCore and worker are forked.

    Cores are not bound. A process that waits sleeps: NIXL's progress thread between two looks, and EngineCore and
    worker for each other. By default these processes are busy for as long as they have requests, on cores that others
    need.
    """

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        has_group, theirs = FORKS.Pipe(duplex=False)
        environment = self.env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        _, _, module, *args = self.command
        assert module == "vllm.entrypoints.openai.api_server"
        self._child = Child(fork(_serve, args, environment, str(self.log_path), theirs))
        theirs.close()
        has_group.recv()

    def calm_polling_threads(self) -> int:
        return 0


def forked(process: EngineProcess) -> ForkedServer:
    """The same server, forked."""
    return ForkedServer(process.name, process.command, process.log_path, env=process.env, health_url=process.health_url)


def _serve(args: Sequence[str], environment: dict[str, str], log_path: str, has_group: Connection) -> None:
    os.setsid()
    begin(log_path, environment)
    has_group.send(None)
    fork_children()
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["api_server", *args]
    main()


def fork_children() -> None:
    """Have an engine of this process fork its children; what waits in them sleeps."""
    after_platform_update(_fork_children)
    compile_drafting_once()
    sleep_while_waiting()


def after_platform_update(change: Callable[[Any], None]) -> None:
    """Call `change` with a configuration whenever vLLM's platform has set what it wants."""
    from vllm.platforms import current_platform

    update = current_platform.check_and_update_config

    def update_and_change(vllm_config: Any) -> None:
        update(vllm_config)
        change(vllm_config)

    type(current_platform).check_and_update_config = staticmethod(update_and_change)


def compile_drafting_once() -> None:
    """Have engines that look drafts up in the text find the compiled code of earlier ones: else each compiles it anew,
    which takes longer than its start."""
    after_platform_update(_cache_drafting)


def _cache_drafting(vllm_config: Any) -> None:
    """NOTE: numba is imported late: vLLM looks through all modules for its kernels, and fails on numba's."""
    if getattr(vllm_config.speculative_config, "method", None) != "ngram":
        return
    from vllm.platforms import current_platform

    replace_kernels = current_platform.register_triton_kernel_overrides

    def replace_kernels_and_cache() -> None:
        replace_kernels()
        from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

        batch_propose_numba.enable_caching()

    type(current_platform).register_triton_kernel_overrides = staticmethod(replace_kernels_and_cache)


def _fork_children(_: Any) -> None:
    """vLLM's default for children, which its CPU platform changes so that each may bind its own threads."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def sleep_while_waiting() -> None:
    """Have engines of this process look for messages seldom, and NIXL's progress thread too: both spin otherwise."""
    _poll_seldom()
    _wait_asleep()


def _wait_asleep() -> None:
    """NOTE: a notification may be lost; vLLM looks after five seconds then."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait
    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=0)
    SpinCondition.wait = lambda self, timeout_ms=None: wait(self, POLL_MS)


def _poll_seldom() -> None:
    import nixl._api

    bindings = nixl._api.nixlBind
    make_agent = bindings.nixlAgent

    def make_calm_agent(name: str, config: Any) -> Any:
        config.pthrDelay = POLL_US
        return make_agent(name, config)

    bindings.nixlAgent = make_calm_agent
