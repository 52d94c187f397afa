"""What cannot work is refused before the engine serves, with the option, the value and the fix."""

from __future__ import annotations

import pytest
from conftest import hot_args

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_pool_gib": 0.01}, r"host_pool_gib: got 0.01, expected a host pool of at least .*max_model_len 4096"),
        ({"host_pool_gib": 100_000.0}, r"host_pool_gib: got 100000.0, expected a host pool of at most .*free host"),
        ({"top_k": 64}, r"top_k: got 64, expected 256"),
    ],
)
def test_refused(run, options, message):
    with pytest.raises(AssertionError, match=message):
        run(hot_args(options=options), [])
