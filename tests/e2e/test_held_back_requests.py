"""Requests that wait until it has been measured whether more running ones pay."""

from __future__ import annotations

import pytest
from conftest import assert_pools_empty, assert_same_but_rounding, hot_args, make_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS, MAX_TOKENS = [1400, 1300, 1310, 1320], 90
ALL_BLOCKS = 900  # one request is hot as a whole, four have room


def test_tokens_are_the_same_whoever_waits(run, reference):
    """Requests that would not be hot as a whole wait, at least for the first measurement."""
    engine = hot_args(options={"admission": "auto"}, num_gpu_blocks_override=ALL_BLOCKS, max_model_len=2048)
    phase = {"prompts": [make_prompt(length) for length in LENGTHS], "max_tokens": MAX_TOKENS}
    record = run(engine, [phase], row_check={"every": 7, "corrupt": False})[0]
    assert_same_but_rounding(record["completions"], reference(LENGTHS, MAX_TOKENS))
    assert_pools_empty(record)
    assert record["checked_rows"] > 0 and record["wrong_rows"] == 0
    assert record["counters"].get("resumed_requests", 0) == 0, "somebody was preempted"
    assert record["peaks"]["requests_held_back"] > 0
    assert record["peaks"]["admission_limit"] > 0, "nothing was measured"
