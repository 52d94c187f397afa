"""Which prompts are pulled, by what came with them; tests/e2e/test_pd.py pulls them."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hisparse.connector.nixl_scheduler import _REMOTE_PARAMS, NixlSchedulerTransport

PARAMS = {"do_remote_prefill": True, "tp_size": 2, **dict.fromkeys(_REMOTE_PARAMS, "something")}


@pytest.mark.parametrize(
    ("params", "prompt", "num_ranks", "reason"),
    [
        (PARAMS, [1, 2], None, None),
        (PARAMS, [1, 2], 2, None),
        (PARAMS, [1, 2], 1, "have tp_size 2"),
        (PARAMS, None, None, "come with embeddings"),
        ({**PARAMS, _REMOTE_PARAMS[0]: None}, [1, 2], None, f"lack {_REMOTE_PARAMS[0]}"),
    ],
)
def test_prompts_that_cannot_be_pulled_are_computed(
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
    prompt: list[int] | None,
    num_ranks: int | None,
    reason: str | None,
) -> None:
    warnings: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr("vllm_hisparse.connector.nixl_scheduler.logger", logger)
    transport = object.__new__(NixlSchedulerTransport)
    transport.connector, transport._num_ranks = SimpleNamespace(on_new_request=lambda request: None), num_ranks
    request = SimpleNamespace(request_id="a", kv_transfer_params=dict(params), prompt_token_ids=prompt)
    transport.on_new_request(request)
    assert transport.is_remote(request) == (reason is None)
    assert [reason in warning for warning in warnings] == ([] if reason is None else [True])
