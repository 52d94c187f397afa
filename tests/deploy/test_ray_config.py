"""Options of the Serve application: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_hisparse_ray.config import (
    AppConfig,
    p2p_ports,
    side_channel_ports,
)

from vllm_hisparse.config import HiSparseConfigError

RAY = Path(__file__).parent.parent.parent / "deploy" / "ray"
CONFIGS = sorted(RAY.glob("serve*.yaml"))
DISK = {"type": "fs", "path": "/mnt/kv", "quota_gib": 100}
PEERS = {"type": "p2p", "peers": ["decode-nodes:24000"]}


def with_tiers(*tiers: dict, **over: Any) -> dict[str, Any]:
    """Options of `decode` with exactly the host memory that a pool of 8 GiB and its tiers need."""
    return {"host_memory_gib": 9.5, "hisparse": {"host_pool_gib": 8, "tiers": list(tiers)}, **over}


def app_args(**over: Any) -> dict[str, Any]:
    decode = {"host_memory_gib": 9, "hisparse": {"host_pool_gib": 8}, **over.pop("decode", {})}
    return {"model_id": "m", "model_source": "org/m", "decode": decode, **over}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_parse(path: Path):
    (application,) = yaml.safe_load(path.read_text())["applications"]
    assert application["import_path"] == "vllm_hisparse_ray.app:build_app"
    AppConfig.parse(application["args"])


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"model_id": ""}, "model_id: got ''"),
        ({"colour": 1}, "colour: got 1, expected a known option"),
        ({"decode": {"host_memory_gib": None}}, "decode.host_memory_gib: got None"),
        ({"decode": {"host_memory_gib": 8}}, "decode.host_memory_gib: got 8.0, expected at least 9"),
        ({"decode": {"hisparse": {}}}, "host_pool_gib / host_to_device_ratio"),
        ({"decode": {"hisparse": {"host_to_device_ratio": 4}}}, "decode.hisparse.host_to_device_ratio: got 4"),
        ({"decode": {"hisparse": {"host_pool_gb": 4}}}, "host_pool_gb: got 4"),
        (
            {"decode": {"gpus": 2, "hisparse": {"host_pool_gib": 4, "algorithm": "quest"}}},
            "prefill.gpus: got 1, expected 2",
        ),
        ({"decode": {"gpus": 0}}, "decode.gpus: got 0, expected at least 1"),
        ({"device": "cpu", "prefill": {"gpus": 1}}, "prefill.gpus: got 1, expected 0"),
        (
            {"decode": {"side_channel_port_base": 22000}},
            "decode.side_channel_port_base: got 22000, expected a known option",
        ),
        ({"prefill": {"side_channel_port_base": 65535}}, "prefill.side_channel_port_base: got 65535"),
        ({"prefill": {"engine_kwargs": {"kv_cache_dtype": "fp8"}}}, "prefill.engine_kwargs.kv_cache_dtype: got 'fp8'"),
        (
            {"decode": {"engine_kwargs": {"attention_config": {"backend": "TRITON_ATTN"}}}},
            "prefill.engine_kwargs.attention_backend: got None, expected 'TRITON_ATTN'",
        ),
        *(
            ({"engine_kwargs": {"attention_config": value}}, f"engine_kwargs.attention_config: got {value!r}, expected")
            for value in ('{"backend": "TRITON_ATTN"}', ["TRITON_ATTN"])
        ),
        ({"engine_kwargs": {"kv_cache_dtype": "float16"}}, "engine_kwargs.kv_cache_dtype: got 'float16'"),
        (
            {
                "engine_kwargs": {"kv_cache_dtype": "fp8_ds_mla"},
                "decode": {"hisparse": {"host_pool_gib": 4, "algorithm": "quest"}},
            },
            "got 'fp8_ds_mla', expected one of auto, bfloat16, fp8, fp8_e4m3 with algorithm 'quest' and device: gpu",
        ),
        ({"decode": {"engine_kwargs": {"model": "other"}}}, "decode.engine_kwargs.model: got 'other'"),
        ({"engine_kwargs": {"tensor_parallel_size": 8}}, "engine_kwargs.tensor_parallel_size: got 8"),
        *(
            ({"prefill": {"engine_kwargs": {option: 2}}}, f"prefill.engine_kwargs.{option}: got 2, expected no value")
            for option in ("data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
        ),
        ({"engine_kwargs": {"data_parallel_size": 2}}, "prefill.engine_kwargs.data_parallel_size: got 2"),
        (
            {"decode": {"engine_kwargs": {"hf_overrides": {"rope_theta": 1}}}},
            "prefill.engine_kwargs.hf_overrides: got None, expected {'rope_theta': 1}",
        ),
        (
            {"decode": {"hisparse": {"host_pool_gib": 8, "kv_lease_duration": 300}}},
            "decode.hisparse.kv_lease_duration: got 300",
        ),
        ({"env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}}, "prefill.env.VLLM_NIXL_SIDE_CHANNEL_PORT: got '5600'"),
        ({"env": {"VLLM_P2P_SIDE_CHANNEL_PORT": "1"}}, "prefill.env.VLLM_P2P_SIDE_CHANNEL_PORT: got '1'"),
        ({"decode": with_tiers({**DISK, "quota": 1})}, "tiers.0.fs.quota: got 1"),
        ({"decode": with_tiers(DISK, {**PEERS, "host": "a"})}, "decode.hisparse.tiers.1.host: got 'a'"),
        ({"decode": with_tiers({**PEERS, "port": 5710})}, "decode.hisparse.tiers.0.port: got 5710"),
        (
            {"prefill": {"gpus": 8, "replicas": {"max": 251}}, "decode": with_tiers(PEERS)},
            "decode.p2p_port_base: got 24000, expected no port of the range of prefill.side_channel_port_base",
        ),
        ({"decode": with_tiers(PEERS, p2p_port_base=20000)}, "decode.p2p_port_base: got 20000"),
        ({"decode": with_tiers(PEERS, p2p_port_base=80)}, "decode.p2p_port_base: got 80"),
        ({"decode": with_tiers(DISK, host_memory_gib=9.2)}, "decode.host_memory_gib: got 9.2, expected at least 9.5"),
        ({"prefill": {"replicas": {"min": 3, "max": 2}}}, "replicas.max: got 2"),
        ({"decode": {"kv_load_failure_policy": "ignore"}}, "decode.kv_load_failure_policy: got 'ignore'"),
    ],
)
def test_refuses(over: dict, named: str):
    with pytest.raises(HiSparseConfigError) as refusal:
        AppConfig.parse(app_args(**over))
    message = str(refusal.value)
    assert message.startswith(named) or named in message
    assert "expected" in message and message.endswith(".")


def test_ratio_needs_room_for_the_pool_it_makes():
    decode = {"hisparse": {"host_to_device_ratio": 4}, "engine_kwargs": {"kv_cache_memory_bytes": 2 * 2**30}}
    AppConfig.parse(app_args(decode=decode))
    with pytest.raises(HiSparseConfigError, match=r"decode\.host_memory_gib: got 8\.5, expected at least 9"):
        AppConfig.parse(app_args(decode={**decode, "host_memory_gib": 8.5}))


def test_every_gpu_of_a_dense_model_has_a_pool():
    decode = {
        "hisparse": {"host_to_device_ratio": 4},
        "engine_kwargs": {"kv_cache_memory_bytes": 2 * 2**30},
        "gpus": 2,
        "host_memory_gib": 10,
    }
    AppConfig.parse(app_args(decode=decode))
    dense = {**decode, "hisparse": {**decode["hisparse"], "algorithm": "quest"}}
    with pytest.raises(HiSparseConfigError, match=r"expected at least 18: a host pool of 16 GiB and 2 GiB"):
        AppConfig.parse(app_args(decode=dense, prefill={"gpus": 2}))


def test_tiers_take_ports_and_memory():
    config = AppConfig.parse(app_args(decode=with_tiers(DISK, PEERS, replicas={"max": 3})))
    assert p2p_ports(config.decode) == range(24000, 24006)
    without = AppConfig.parse(app_args(decode=with_tiers(DISK, p2p_port_base=20000)))
    assert not p2p_ports(without.decode)
    larger = {"host_pool_gib": 8, "tiers": [DISK], "tier_buffer_gib": 2}
    with pytest.raises(HiSparseConfigError, match=r"at least 11: a host pool of 8 GiB and 3 GiB for processes and the"):
        AppConfig.parse(app_args(decode={"host_memory_gib": 10.5, "hisparse": larger}))


def test_every_gpu_has_its_port_while_a_fleet_is_replaced():
    config = AppConfig.parse(app_args(prefill={"gpus": 8, "replicas": {"max": 4}}))
    assert side_channel_ports(config.prefill) == range(20000, 20064)
