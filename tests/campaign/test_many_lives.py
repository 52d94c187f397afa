"""Many processes live the same lives as one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from .configuration import CONFIGURATIONS
from .lives import Result, Violation, world_seeds
from .many_lives import _until
from .world import LIVES


def test_worlds_of_a_seed() -> None:
    assert list(world_seeds(1)) == [0] and list(world_seeds(2 * LIVES)) == [0, 1]
    assert not set(world_seeds(10_000)) & set(world_seeds(10_000, 1))


def test_results_do_not_depend_on_the_order_of_worlds() -> None:
    def world(seed: int) -> Result:
        return Result(CONFIGURATIONS[0], {"lives": LIVES + seed}, [Violation(seed, "wrong", "here")])

    forwards, backwards = Result(CONFIGURATIONS[0]), Result(CONFIGURATIONS[0])
    for seed in range(3):
        forwards.add(world(seed))
        backwards.add(world(2 - seed))
    assert forwards == backwards
    assert forwards.row()["lives"] == 3 * LIVES + 3 and forwards.row()["violations"] == 3


def test_what_has_begun_is_waited_for_when_the_time_is_over() -> None:
    is_over, results = Event(), []
    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(lambda: 1), pool.submit(is_over.wait), pool.submit(lambda: 3)]
        for future in _until(futures, 0.1):
            results.append(future.result())
            pool.submit(lambda: None)
            if len(results) == 1:
                futures[2].add_done_callback(lambda future: is_over.set())  # it is given up
    assert results == [1, True] and futures[2].cancelled()
