"""Hypothesis profiles: the same examples on every run, or (`--hypothesis-profile=explore`) many new ones. This file
also sets the number of threads, the order of tests, and which of them one process runs."""

import gc
import multiprocessing
import sys
from collections.abc import Callable, Generator
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_SHARED = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("repeatable", max_examples=40, stateful_step_count=40, derandomize=True, **_SHARED)
settings.register_profile("explore", max_examples=2000, stateful_step_count=80, print_blob=True, **_SHARED)
settings.load_profile("repeatable")

END_TO_END, CAMPAIGN = "tests/e2e/", "tests/campaign/"
NAMES = ("cluster", "installs", "lora", "parallel", "pd", "pd_dense", "pd_draft_model", "pd_import_buffer")
NAMES += ("pd_narrow_keys", "ray", "request_features")
DEPLOYMENTS = {f"{END_TO_END}test_{name}.py" for name in NAMES}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: deployments, then engines of one test, the campaign, files of short tests."""

    def rank(item: pytest.Item) -> int:
        order = (file_of(item.nodeid) in DEPLOYMENTS, *map(item.nodeid.startswith, (END_TO_END, CAMPAIGN)), True)
        return order.index(True)

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, bool | None, bool | None]:
    """Modules, vLLM's above all, live as long as the process: the garbage collector need not look at them, neither
    while they are imported nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        set_number_of_threads()
        if "vllm" in sys.modules:
            import_module("vllm.model_executor.models.registry")._run_in_subprocess = run_in_fork


def set_number_of_threads() -> None:
    """Where no test module has imported torch, as in the process that starts those that run tests, nor does this."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():  # the references of tests on a GPU are large
        # NOTE: tensors of tests are small, so threads that share an op spend their time waiting for one another.
        torch.set_num_threads(1)


def run_in_fork(function: Callable[[], Any]) -> Any:
    """A function's result, from a process that has imported what this one has.

    NOTE: vLLM asks a process of its own about each class of models, which has to import vLLM first. Its cache of the
    answers does not help on a new machine.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(function, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def send_result(function: Callable[[], Any], pipe: Connection) -> None:
    pipe.send(function())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests that one process runs at a time: all deployments, so that one has the machine; a long test; a file of
    short ones.

    NOTE: marks of `--dist loadgroup` have no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if file_of(nodeid) in DEPLOYMENTS:
                return "deployments"
            return nodeid if nodeid.startswith((END_TO_END, CAMPAIGN)) else file_of(nodeid)

    return Scheduling(config, log)
