"""Engines of the demo and the campaign, not started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.harness.deployment import vllm_engine


def test_engines_log_what_the_demo_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variables of the user's shell do not reach vLLM's logger."""
    user = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "0"}
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    env = user | vllm_engine("decode", tmp_path, tmp_path, 1, None, 2, [0]).env
    assert (env["VLLM_LOGGING_LEVEL"], env["VLLM_CONFIGURE_LOGGING"]) == ("INFO", "1")
