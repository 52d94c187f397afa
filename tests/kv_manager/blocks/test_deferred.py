"""When actions run that wait for a step."""

from functools import partial

from vllm_hisparse.kv_manager.blocks.deferred import Deferred


def test_actions_run_when_their_step_is_over() -> None:
    deferred, ran = Deferred(), []
    for _ in range(3):
        deferred.step_scheduled()
    for name, number in (("third", 3), ("first", 1), ("third, too", 3), ("next", deferred.num_scheduled + 1)):
        deferred.after_step(number, partial(ran.append, name))
    assert len(deferred) == 4
    for expected in (["first"], [], ["third", "third, too"]):
        deferred.step_processed()
        assert ran == expected
        ran.clear()
    deferred.step_scheduled()
    deferred.step_processed()
    assert ran == ["next"] and len(deferred) == 0


def test_an_action_of_a_step_that_is_over_runs_at_once() -> None:
    deferred, ran = Deferred(), []
    deferred.after_step(0, partial(ran.append, "nothing was in flight"))
    deferred.step_scheduled()
    deferred.step_processed()
    deferred.after_step(1, partial(ran.append, "over"))
    assert ran == ["nothing was in flight", "over"]
