"""Supported releases of vLLM, and the message for users of others."""

import pytest

from vllm_hisparse import plugin
from vllm_hisparse.releases import UnsupportedVLLM, check_release, serves


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cu130", "0.33.0", "0.33.1rc1", "0.33.1.dev5+g4ba787ec9"])
def test_served(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    check_release()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0rc1", "0.34.0.dev3+gabc", "1.0.0", "dev", "unknown"])
def test_not_served(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The plugin's entry point says it before it imports anything that a release may have moved."""
    install(monkeypatch, version)
    with pytest.raises(UnsupportedVLLM) as refused:
        plugin.register()
    assert f"got vLLM {version}, expected a release of vLLM >=0.32,<0.34" in str(refused.value)
    assert 'pip install "vllm>=0.32,<0.34"' in str(refused.value)


@pytest.mark.parametrize(("version", "expected"), [("0.32.0", True), ("0.32.9+cpu", True), ("0.33.0.dev1", False)])
def test_releases_that_a_mend_is_for(monkeypatch: pytest.MonkeyPatch, version: str, expected: bool) -> None:
    install(monkeypatch, version)
    assert serves(">=0.32,<0.33") == expected
