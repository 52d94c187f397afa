from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_hisparse.config import CONNECTOR_NAME, NIXL_OPTIONS, HiSparseConfig, HiSparseConfigError

GIB = {"host_pool_gib": 2.0}
PARALLEL_OPTIONS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def engine(extra_config: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """A `VllmConfig` of a DSA model with index_topk 256; `changes` are `section__option=value`."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=CONNECTOR_NAME,
            kv_role="kv_consumer",
            kv_connector_extra_config=GIB if extra_config is None else extra_config,
        ),
        model_config=SimpleNamespace(model="some/model", use_mla=True, hf_text_config=SimpleNamespace(index_topk=256)),
        parallel_config=SimpleNamespace(**dict.fromkeys(PARALLEL_OPTIONS, 1)),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    for path, value in changes.items():
        section, _, option = path.partition("__")
        setattr(getattr(config, section) if option else config, option or section, value)
    return config


def refusal(extra_config: dict[str, Any] | None = None, **changes: Any) -> str:
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_vllm_config(engine(extra_config, **changes))
    return str(refused.value)


def parse_refusal(extra_config: dict[str, Any]) -> str:
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_extra_config(extra_config)
    return str(refused.value)


def check_parts(message: str, option: str, got: str, expected: str, fix: str) -> None:
    """A message says option, value got, value expected and what to do, in that order."""
    assert message.startswith(f"{option}: got {got}, expected "), message
    _, _, rest = message.partition(", expected ")
    assert expected in rest and fix in rest and rest.index(expected) < rest.rindex(fix), message


def test_defaults_come_from_the_model() -> None:
    config = HiSparseConfig.from_vllm_config(engine())
    assert (config.top_k, config.device_buffer_size, config.rows) == (256, 512, 512)
    assert (config.algorithm, config.eviction_policy, config.log_request_stats) == ("dsa", "lru", False)


def test_options_win_over_defaults() -> None:
    options = {**GIB, "top_k": 256, "device_buffer_size": 256, "eviction_policy": "fifo", "log_request_stats": True}
    config = HiSparseConfig.from_vllm_config(engine(options))
    assert (config.top_k, config.rows, config.eviction_policy, config.log_request_stats) == (256, 256, "fifo", True)


def test_is_frozen() -> None:
    config = HiSparseConfig.from_vllm_config(engine())
    with pytest.raises(ValidationError, match="frozen"):
        config.top_k = 1


def test_nixl_options_pass_through() -> None:
    options = {name: object() for name in NIXL_OPTIONS}
    extra_config = {**GIB, **options}
    assert HiSparseConfig.from_vllm_config(engine(extra_config)).host_pool_gib == 2.0
    assert extra_config == {**GIB, **options}
    assert {"backends", "num_threads", "enforce_handshake_compat"} <= NIXL_OPTIONS


@pytest.mark.parametrize("name", ["topk", "device_bufer_size", "Top_K", "host_pool_gb", "model_config", ""])
def test_refuses_unknown_options(name: str) -> None:
    message = parse_refusal({**GIB, name: 7})
    check_parts(message, name, "7", "one of the known options: ", "Correct the name.")
    assert all(option in message for option in (*HiSparseConfig.model_fields, *NIXL_OPTIONS))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top_k", "256", "a valid integer"),
        ("top_k", 256.0, "a valid integer"),
        ("top_k", True, "a valid integer"),
        ("top_k", 0, "greater than 0"),
        ("device_buffer_size", [512], "a valid integer"),
        ("device_buffer_size", -1, "greater than 0"),
        ("host_pool_gib", "2", "a valid number"),
        ("host_pool_gib", 0, "greater than 0"),
        ("host_pool_gib", float("nan"), "finite number"),
        ("host_to_device_ratio", -2.0, "greater than 0"),
        ("algorithm", "quest", "'dsa'"),
        ("algorithm_options", [], "a valid dictionary"),
        ("eviction_policy", "LRU", "'lru' or 'fifo'"),
        ("log_request_stats", 1, "a valid boolean"),
        ("log_request_stats", "true", "a valid boolean"),
    ],
)
def test_refuses_wrong_types_and_values(name: str, value: Any, expected: str) -> None:
    extra_config = {name: value} if name.startswith("host") else {**GIB, name: value}
    check_parts(parse_refusal(extra_config), name, repr(value), expected, "Correct the value")


@pytest.mark.parametrize("extra_config", [{}, {**GIB, "host_to_device_ratio": 4.0}])
def test_wants_exactly_one_size(extra_config: dict[str, Any]) -> None:
    got = {"host_pool_gib": None, "host_to_device_ratio": None, **extra_config}
    name = "host_pool_gib / host_to_device_ratio"
    check_parts(parse_refusal(extra_config), name, repr(got), "exactly one of the two", "Set host_pool_gib to")


def test_refuses_options_of_an_algorithm_without_any() -> None:
    message = parse_refusal({**GIB, "algorithm_options": {"pages": 4}})
    check_parts(message, "algorithm_options", "{'pages': 4}", "no options for algorithm 'dsa'", "Remove")


def test_reports_the_parse_error_before_the_model() -> None:
    assert refusal({"top": 1}, model_config__use_mla=False).startswith("top: got 1")


@pytest.mark.parametrize("size", [1, 255])
def test_refuses_a_buffer_below_top_k(size: int) -> None:
    message = refusal({**GIB, "device_buffer_size": size})
    check_parts(message, "device_buffer_size", str(size), "at least top_k (256)", "default of 512 rows or raise it")


@pytest.mark.parametrize("top_k", [1, 128, 255, 257])
def test_refuses_another_top_k_than_the_models(top_k: int) -> None:
    message = refusal({**GIB, "top_k": top_k, "device_buffer_size": 1024})
    check_parts(message, "top_k", str(top_k), "256, the model's index_topk", "Remove top_k or set it to 256.")


@pytest.mark.parametrize(
    "changes",
    [{"model_config__hf_text_config": SimpleNamespace()}, {"model_config__use_mla": False}],
)
def test_refuses_models_without_an_indexer(changes: dict[str, Any]) -> None:
    message = refusal(**changes)
    check_parts(message, "algorithm", "'dsa'", "index_topk in its config.json", f"or remove {CONNECTOR_NAME}.")
    assert "some/model has none" in message


@pytest.mark.parametrize("option", PARALLEL_OPTIONS)
def test_refuses_parallelism(option: str) -> None:
    message = refusal(**{f"parallel_config__{option}": 2})
    check_parts(message, f"--{option.replace('_', '-')}", "2", "1 in this release", "Start more decode instances")


def test_refuses_the_prefill_role():
    message = refusal(kv_transfer_config__kv_role="kv_producer")
    assert "kv_role: got 'kv_producer', expected kv_consumer" in message
    assert "NixlConnector" in message


def test_refuses_speculative_decoding() -> None:
    message = refusal(speculative_config=SimpleNamespace(method="mtp"))
    check_parts(message, "--speculative-config", "'mtp'", "none in this release", "Remove it.")


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_ds_mla", "int8"])
def test_refuses_quantised_kv(dtype: str) -> None:
    message = refusal(cache_config__cache_dtype=dtype)
    check_parts(message, "--kv-cache-dtype", repr(dtype), "one of auto, bfloat16, float16, float32", "Remove it")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_accepts_unquantised_kv(dtype: str) -> None:
    assert HiSparseConfig.from_vllm_config(engine(cache_config__cache_dtype=dtype)).top_k == 256


def test_refuses_one_kv_cache_group() -> None:
    message = refusal(scheduler_config__disable_hybrid_kv_cache_manager=True)
    check_parts(message, "--disable-hybrid-kv-cache-manager", "True", "False", "Remove it")


@pytest.mark.parametrize(
    ("options", "num_blocks", "size_option"),
    [
        ({"host_pool_gib": 1.0}, 1024, "host_pool_gib=1.0"),
        ({"host_pool_gib": 0.5}, 512, "host_pool_gib=0.5"),
        ({"host_to_device_ratio": 2.5}, 250, "host_to_device_ratio=2.5"),
        ({"host_to_device_ratio": 0.001}, 0, "host_to_device_ratio=0.001"),
    ],
)
def test_sizes_the_host_pool(options: dict[str, float], num_blocks: int, size_option: str) -> None:
    config = HiSparseConfig.from_extra_config(options)
    assert config.num_host_blocks(host_block_bytes=2**20, device_kv_bytes=100 * 2**20 + 5) == num_blocks
    assert config.size_option == size_option


def test_an_integer_is_a_size() -> None:
    assert HiSparseConfig.from_extra_config({"host_pool_gib": 2}).num_host_blocks(2**30, 0) == 2


@pytest.mark.parametrize("option", ["host_pool_gib", "host_to_device_ratio"])
def test_infinite_pool_is_refused(option):
    with pytest.raises(HiSparseConfigError, match=option):
        HiSparseConfig.from_extra_config({option: float("inf")})
