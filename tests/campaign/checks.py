"""Invariants: after every step, at a request's end, and when an engine is idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .texts import Text, sampled_token

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from .engine import Engine


class Finding(AssertionError):
    """Something that must hold does not."""


def check(holds: bool, message: str) -> None:
    if not holds:
        raise Finding(message)


def check_pools(engine: Engine) -> None:
    """No block of either pool is lost, free twice or owned by nobody."""
    engine.product.check_pools()


def check_tokens(request: Request) -> None:
    """A request says what the model says after its tokens."""
    text, num_prompt = Text(request.all_token_ids), request.num_prompt_tokens
    for index in range(num_prompt, len(text.token_ids)):
        expected = sampled_token(text.rows[index - 1])
        check(text.token_ids[index] == expected, f"{request.request_id}: token {index} is not the model's")


def check_idle(engine: Engine) -> None:
    """Nothing is left once every request has ended: no block, no state, in neither half."""
    product = engine.product
    leftovers = {name: value for name, value in product.leftovers().items() if value}
    check(not leftovers, f"left behind: {leftovers}")
    check(product.num_used_host_blocks() == 0, "host blocks without an owner")
    check(product.num_free_device_blocks() == product.num_device_blocks - 1, "device blocks without an owner")
    for rank in engine.ranks:
        check(not rank.tables, f"rank {rank.index} was not told of requests that ended: {rank.tables}")
