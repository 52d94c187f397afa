import pytest

from tools.harness.openai_client import Completion


def chunk(token_ids: list[int], top_logprobs: list[dict[str, float]]) -> dict:
    logprobs = {"token_logprobs": [-0.5] * len(token_ids), "top_logprobs": top_logprobs}
    choice = {"token_ids": token_ids, "logprobs": logprobs, "text": "x" * len(token_ids), "finish_reason": None}
    return {"id": "cmpl-a", "choices": [choice]}


def test_chunks_are_added_with_the_margin_between_the_two_best_tokens() -> None:
    completion = Completion()
    first = [{"token_id:7": -0.5, "token_id:3": -2.0}, {"token_id:1": -3.0, "token_id:9": -0.5, "token_id:4": -0.75}]
    assert completion.add_chunk(chunk([7, 9], first)) == 2
    assert completion.add_chunk(chunk([4], [{"token_id:4": -0.5, "token_id:5": -0.5}])) == 1
    assert (completion.response_id, completion.token_ids, completion.text) == ("cmpl-a", [7, 9, 4], "xxx")
    assert completion.margins == pytest.approx([1.5, 0.25, 0.0])
