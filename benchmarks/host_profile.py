"""Where the host time of an engine's steps goes: the calls of some methods, and operations that wait for the device."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

SCHEDULER_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "get_kv_connector_stats",
)
MANAGER_HOOKS = (
    "new_step_starts",
    "get_num_blocks_to_allocate",
    "allocate_external_computed_blocks",
    "allocate_new_blocks",
    "free",
    "pop_blocks_for_free",
)
SHORTEST_MS = 0.005  # of what is reported


class HostTimes:
    """Times calls of methods.

    Args:
        methods: name in the result, owner (an object or a class) and name of each method.

    Attributes:
        seconds: name -> seconds of all calls. A call within another counts in both.
    """

    def __init__(self, methods: list[tuple[str, Any, str]]):
        self.methods, self.seconds = methods, Counter[str]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the calls inside this context."""
        with ExitStack() as stack:
            for name, owner, method in self.methods:
                stack.enter_context(self._replaced(name, owner, method))
            yield

    def milliseconds(self) -> dict[str, float]:
        """Name -> milliseconds of all calls, longest first, but for very short ones."""
        times = {name: round(1e3 * seconds, 3) for name, seconds in self.seconds.most_common()}
        return {name: time for name, time in times.items() if time >= SHORTEST_MS}

    @contextmanager
    def _replaced(self, name: str, owner: Any, method: str) -> Iterator[None]:
        original, own = getattr(owner, method), vars(owner).get(method)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)
        try:
            yield
        finally:
            if own is None:
                delattr(owner, method)
            else:
                setattr(owner, method, own)


def engine_methods(engine_core: Any) -> list[tuple[str, Any, str]]:
    """Methods of an engine in this process for `HostTimes`: parts of a step, and hooks of this plugin, if it runs.

    Args:
        engine_core: vLLM's `EngineCore`.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    scheduler, executor = engine_core.scheduler, engine_core.model_executor
    methods = [("schedule", scheduler, "schedule"), ("update", scheduler, "update_from_output")]
    methods += [("launch", executor, "execute_model"), ("sample", executor, "sample_tokens")]
    layers: Mapping[str, Any] = engine_core.vllm_config.compilation_config.static_forward_context
    layer = next(layer for layer in layers.values() if hasattr(getattr(layer, "impl", None), "forward_mqa"))
    builder = layer.attn_backend.get_builder_cls()
    methods += [("metadata", owner_of(builder, "build"), "build")]
    methods += [("attention", owner_of(type(layer.impl), "forward_mqa"), "forward_mqa")]
    if has_kv_transfer_group():
        from vllm_hisparse.kv_manager.blocks.hot_block_manager import HotBlockManager

        methods += [(f"scheduler: {hook}", scheduler.connector, hook) for hook in SCHEDULER_HOOKS]
        methods += [(f"worker: {hook}", get_kv_transfer_group(), hook) for hook in WORKER_HOOKS]
        methods += [(f"blocks: {hook}", HotBlockManager, hook) for hook in MANAGER_HOOKS]
    return methods


def owner_of(cls: type, method: str) -> type:
    """Return the class that defines the method that instances of `cls` have."""
    return next(each for each in cls.__mro__ if method in vars(each))


@contextmanager
def counting_waits(counts: Counter[str]) -> Iterator[None]:
    """Count the operations inside this context that wait for the device, by place in the code.

    Args:
        counts: file and line -> number of waits.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if "called a synchronizing" in str(each.message):
            counts[f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}"] += 1
