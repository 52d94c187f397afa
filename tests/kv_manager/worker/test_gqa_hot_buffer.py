import pytest

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.worker.gqa_hot_buffer import check_state_fits

MIB = 2**20


def test_state_that_just_fits() -> None:
    check_state_fits("quest", 7, 256, 10 * MIB, 80 * MIB)  # one row is of no request


def test_refuses_state_that_does_not_fit() -> None:
    with pytest.raises(HiSparseConfigError) as refused:
        check_state_fits("quest", 20, 256, 64 * MIB, 1024 * MIB)
    message = str(refused.value)
    assert message.startswith("--max-num-seqs: got 256, expected at most 15: 'quest' keeps 64.0 MiB")
    assert "1.0 GiB of the device are free for it. Lower it or --max-model-len" in message
