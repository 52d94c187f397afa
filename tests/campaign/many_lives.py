"""Lives of many configurations, a world at a time in each of several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import forkserver, get_context

from .configuration import Configuration
from .lives import Result, run_world, world_seeds

# Lives are the same whatever vLLM is built for, and as often as they are run.
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # a world draws which one its scheduler works for
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}


def run_many_lives(
    configurations: Sequence[Configuration],
    num_lives: int,
    seed: int = 0,
    num_jobs: int = 1,
    seconds: float | None = None,
    on_world: Callable[[Result], None] = lambda result: None,
) -> Iterator[Result]:
    """Run `run_lives` for each configuration; the number of processes changes only the time.

    Args:
        num_jobs: processes.
        seconds: after which no more worlds are begun; all configurations then have had their share of the time. None:
            one configuration is run after the other.
        on_world: called after each world with its configuration's result so far.

    Yields:
        Results of configurations as they are complete, at last those for which the time was too short, unless they have
        not lived at all.
    """
    seeds = world_seeds(num_lives, seed)
    results = {configuration.name: Result(configuration) for configuration in configurations}
    num_left = dict.fromkeys(results, len(seeds))
    worlds = [(configuration, number) for configuration in configurations for number in seeds]
    if seconds is not None:
        worlds.sort(key=lambda world: world[1])
    with _processes(num_jobs) as pool:
        futures = {pool.submit(run_world, *world): world[0].name for world in worlds}
        for future in _until(futures, seconds):
            name = futures[future]
            results[name].add(future.result())
            on_world(results[name])
            num_left[name] -= 1
            if not num_left[name]:
                yield results[name]
    yield from (results[name] for name, num in num_left.items() if num and results[name].counts)


def _until(futures: Sequence[Future], seconds: float | None) -> Iterator[Future]:
    """Futures as they are done; when the time is over, those that have begun."""
    left = set(futures)
    try:
        for future in as_completed(futures, seconds):
            left.remove(future)
            yield future
    except TimeoutError:
        yield from as_completed([future for future in left if not future.cancel()])


@contextmanager
def _processes(num_jobs: int) -> Iterator[ProcessPoolExecutor]:
    """NOTE: forked from a process that has imported vLLM and done nothing else: no thread, no device."""
    context = get_context("forkserver")
    context.set_forkserver_preload([run_world.__module__])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        yield pool
