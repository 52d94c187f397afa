from typing import Any

import pytest
from pydantic import ValidationError

from vllm_hisparse.connector.transfer_params import MAX_BLOCK_ID, TransferParams, TransferRefused

# Parameters as vLLM 0.32's prefill side hands them over.
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 1, 2]],
    "remote_engine_id": "engine_dp0",
    "remote_request_id": "cmpl-a-0-12345678",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 10,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}
MISSING = object()


def changed(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**PARAMS, **changes}.items() if value is not MISSING}


def test_of_vllms_prefill_side() -> None:
    params = TransferParams.parse(PARAMS)
    assert params is not None
    assert params.remote_block_ids == [[3, 1, 2]]
    params.check_tp_size(1)
    params.check_prompt(10, 4)
    assert TransferParams.parse(changed(remote_block_ids=([3, 1, 2],))) == params
    assert set(params.model_dump()) - set(PARAMS) == {"remote_registration_generation", "kv_lease_duration"}


def test_the_registration_of_a_prefill_instance_that_slept_is_forwarded() -> None:
    params = TransferParams.parse(changed(remote_registration_generation=3))
    assert params is not None and params.model_dump()["remote_registration_generation"] == 3


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"remote_host": 7}])
def test_no_transfer(params: dict | None) -> None:
    assert TransferParams.parse(params) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_remote_prefill", "yes"),
        ("do_remote_prefill", 1),
        ("do_remote_decode", True),
        ("remote_block_ids", 7),
        ("remote_block_ids", None),
        ("remote_block_ids", []),
        ("remote_block_ids", [[]]),
        ("remote_block_ids", [1, 2]),
        ("remote_block_ids", [[1], 5]),
        ("remote_block_ids", [[1], [2]]),
        ("remote_block_ids", "ab"),
        ("remote_block_ids", ["ab"]),
        ("remote_block_ids", [[1, -1]]),
        ("remote_block_ids", [[1, True]]),
        ("remote_block_ids", [[1.0]]),
        ("remote_block_ids", [["1"]]),
        ("remote_block_ids", [[MAX_BLOCK_ID + 1]]),
        ("remote_engine_id", ["e"]),
        ("remote_engine_id", ""),
        ("remote_engine_id", 5),
        ("remote_request_id", ["r"]),
        ("remote_request_id", "r,another"),
        ("remote_request_id", "\ud800"),
        ("remote_request_id", "r" * 2000),
        ("remote_host", 1),
        ("remote_host", "evil;tcp://other"),
        ("remote_host", ""),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", True),
        ("remote_port", 10**30),
        ("tp_size", "1"),
        ("tp_size", 0),
        ("tp_size", True),
        ("pp_size", 2),
        ("dcp_size", 2),
        ("remote_num_tokens", "10"),
        ("remote_num_tokens", 0),
        ("remote_num_tokens", 1e3),
        ("remote_num_tokens", 2**31),
        ("transfer_mode", "push"),
        ("remote_blocks_expiry_time", "1.5"),
        ("remote_blocks_expiry_time", float("nan")),
        ("kv_lease_duration", 0),
        ("kv_lease_duration", float("inf")),
        ("remote_registration_generation", -1),
        ("remote_registration_generation", "1"),
        *((name, MISSING) for name in ("remote_block_ids", "remote_engine_id", "remote_request_id")),
        *((name, MISSING) for name in ("remote_host", "remote_port", "remote_num_tokens", "tp_size")),
    ],
)
def test_refusals_name_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(TransferRefused, match=f"^{name}") as refusal:
        TransferParams.parse(changed(**{name: value}))
    assert refusal.value.name.split(".")[0] == name
    assert len(str(refusal.value)) < 300


def test_the_first_wrong_block_id_ends_the_check() -> None:
    """A client may send a million, and an error for each of them would hold the scheduler for seconds."""
    with pytest.raises(ValidationError) as error:
        TransferParams.model_validate(changed(remote_block_ids=[["x"] * 1000]))
    assert error.value.error_count() == 1


@pytest.mark.parametrize("params", ["do_remote_prefill", ["do_remote_prefill"], 7, True, b"x"])
def test_no_object(params: Any) -> None:
    with pytest.raises(TransferRefused, match=r"^kv_transfer_params: got .*, expected an object"):
        TransferParams.parse(params)


def test_refusal_says_value_and_what_is_expected() -> None:
    with pytest.raises(TransferRefused, match=r"^remote_port: got '5600', expected a valid integer$"):
        TransferParams.parse(changed(remote_port="5600"))
    with pytest.raises(TransferRefused, match=r"^remote_host: got None, expected a value$"):
        TransferParams.parse(changed(remote_host=MISSING))


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "name"), [(9, 4, "remote_num_tokens"), (10, 8, "remote_block_ids")]
)
def test_of_another_prompt(num_tokens: int, block_size: int, name: str) -> None:
    params = TransferParams.parse(PARAMS)
    with pytest.raises(TransferRefused, match=f"^{name}: got"):
        params.check_prompt(num_tokens, block_size)


def test_another_tp_size() -> None:
    with pytest.raises(TransferRefused, match=r"^tp_size: got 1, expected 2, the value of prefill_tp_size"):
        TransferParams.parse(PARAMS).check_tp_size(2)
