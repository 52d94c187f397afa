"""Sleep mode is refused: vLLM 0.33 asks the connector's class while it checks its configuration."""

from vllm_hisparse.connector.connector import HiSparseHostConnector


def test_the_connector_does_not_sleep() -> None:
    assert not HiSparseHostConnector.supports_sleep_mode(None)
