"""Whose a transfer is, from request ids as vLLM makes them."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_hisparse.compat.request_ids import owns_transfer, transfer_of_sample

ROUTED = "___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8100_8b9414439ef443b5a93544c563595e11"


def engine_ids(api_id: str, n: int = 1) -> list[str]:
    """Ids that the engine gets of a request of the API, in the order of its samples: vLLM's own code."""
    params = SamplingParams(n=n)
    request = SimpleNamespace(request_id=api_id, external_req_id=None, params=params)
    InputProcessor.assign_request_id(request)
    if n == 1:
        return [request.request_id]
    parent = ParentRequest(request)
    return [parent.get_child_info(index)[0] for index in range(n)]


@pytest.fixture(params=["0", "1"], ids=["random", "not_random"], autouse=True)
def randomization(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", request.param)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("same_name", [True, False])
def test_first_sample_of_the_first_prompt(n: int, same_name: bool) -> None:
    """Whichever sample of the prefill side answers: all have the same prompt."""
    for remote in engine_ids(f"cmpl-{ROUTED if same_name else 'abc'}-0", n):
        for prompt in range(3):
            owners = [owns_transfer(name, remote) for name in engine_ids(f"cmpl-{ROUTED}-{prompt}", n)]
            assert owners == [prompt == 0] + [False] * (n - 1)


@pytest.mark.parametrize("answered", range(3))
def test_each_sample_of_the_prefill_side_has_one_here(answered: int) -> None:
    remote, other = engine_ids(f"cmpl-{ROUTED}-0", 3), engine_ids("cmpl-abc-1", 3)
    samples = [transfer_of_sample(name, remote[answered]) for name in engine_ids("cmpl-abc-0", 3)]
    assert samples[0] is None
    assert sorted(samples[1:]) == sorted(set(remote) - {remote[answered]})
    assert [transfer_of_sample(name, remote[answered]) for name in other] == [None] * 3
    (single,) = engine_ids(f"cmpl-{ROUTED}-0")
    assert [transfer_of_sample(name, single) for name in engine_ids("cmpl-abc-0", 3)] == [None] * 3


@pytest.mark.parametrize("name", ["a-1", "a-0-deadbeef", "a-3-12345678", "7_a", "a\nb"])
def test_names_that_look_numbered(name: str) -> None:
    """A client may choose `X-Request-Id` where no router does."""
    (remote,) = engine_ids(f"cmpl-{name}-0")
    for prompt in range(3):
        assert owns_transfer(engine_ids(f"cmpl-{name}-{prompt}")[0], remote) == (prompt == 0)
    for number in (0, 5):
        (chat,), (again,) = engine_ids(f"chatcmpl-{name}_{number}"), engine_ids(f"chatcmpl-{name}_{number}")
        assert owns_transfer(chat, again)


def test_a_batch_of_chats_and_other_endpoints() -> None:
    (first,), (second,) = engine_ids(f"chatcmpl-{ROUTED}_0"), engine_ids(f"chatcmpl-{ROUTED}_1")
    assert owns_transfer(first, engine_ids(f"chatcmpl-{ROUTED}_0")[0])
    assert not owns_transfer(second, engine_ids(f"chatcmpl-{ROUTED}_0")[0])
    assert not owns_transfer(first, second)
    assert owns_transfer(engine_ids("chatcmpl-abc")[0], engine_ids("chatcmpl-def")[0])
    assert owns_transfer("anything", "else")


@pytest.mark.parametrize("request_id", ["chatcmpl-a_" + "9" * 5000, "9" * 5000 + "_cmpl-a-0"])
def test_a_client_may_choose_an_id_of_thousands_of_digits(request_id: str) -> None:
    assert not owns_transfer(request_id, "cmpl-b-0")
