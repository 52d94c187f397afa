"""Transfer parameters that no prefill instance gave: a client's own, or damaged on the way."""

from __future__ import annotations

import random
from typing import Any

VALUES: tuple[Any, ...] = (None, True, 7, -1, 1.5, "x", "", [], {}, ["e"], [1, 2], [[1], 5], [["a"]], [[-1]], [[], []])


def malformed(params: dict[str, Any], rng: random.Random) -> Any:
    """Parameters with one thing wrong."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(VALUES)
    name = rng.choice(list(params))
    if kind == 1:
        return {key: value for key, value in params.items() if key != name}
    if kind == 2:
        return {**params, "remote_num_tokens": params["remote_num_tokens"] + rng.choice((-1, 1, 64))}
    if kind == 3:
        block_ids = params["remote_block_ids"][0]
        return {**params, "remote_block_ids": [rng.choice((block_ids[:-1], block_ids[1:], block_ids * 2))]}
    if kind == 4:
        return {**params, rng.choice(("tp_size", "pp_size", "dcp_size")): rng.choice((0, 2, 7))}
    return {**params, name: rng.choice(VALUES)}
