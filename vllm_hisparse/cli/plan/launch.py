"""Commands, Helm values and Ray options that start what was planned."""

from __future__ import annotations

import json
import shlex
from typing import Any

from vllm_hisparse.cli.plan.plan import Plan

PREFILL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def connector_options(plan: Plan) -> dict[str, Any]:
    """Return `kv_connector_extra_config` of the plugin for one rank."""
    options: dict[str, Any] = {"host_pool_gib": round(plan.host_gib / plan.data_parallel, 1)}
    if not plan.model.is_dsa:
        options |= {"algorithm": "quest", "top_k": plan.top_k}
    if plan.device_buffer_size != plan.top_k * max(2, 1 + plan.drafts):
        options["device_buffer_size"] = plan.device_buffer_size
    return options


def decode_connector(plan: Plan, role: str) -> dict[str, Any]:
    """Return the plugin's `--kv-transfer-config`."""
    options = connector_options(plan)
    return {"kv_connector": "HiSparseHostConnector", "kv_role": role, "kv_connector_extra_config": options}


def engine_flags(plan: Plan, kv_cache_dtype: str) -> list[str]:
    """Return the options of `vllm serve` that both sides have."""
    flags = ["--max-model-len", str(-(-plan.load.longest // 64) * 64)]
    if kv_cache_dtype != "auto":
        flags += ["--kv-cache-dtype", kv_cache_dtype]
    if plan.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    if plan.data_parallel > 1:
        flags += ["--data-parallel-size", str(plan.data_parallel)]
        flags += ["--enable-expert-parallel"] if plan.model.num_experts else []
    return flags


def decode_flags(plan: Plan) -> list[str]:
    """Return the options of the decode side alone."""
    seqs = min(plan.max_num_seqs, max(1, -(-plan.concurrency // plan.data_parallel)))
    flags = ["--max-num-seqs", str(seqs), "--gpu-memory-utilization", f"{plan.gpu_memory_utilization:g}"]
    if plan.drafts:
        flags += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": plan.drafts})]
    return flags


def commands(plan: Plan, model: str, kv_cache_dtype: str) -> dict[str, str]:
    """Return shell commands: one instance, or a prefill side, a decode side and a router.

    A model that the plugin refuses has one instance, without the plugin.
    """
    flags = engine_flags(plan, kv_cache_dtype)
    if plan.model.refusal:
        return {"one instance": shlex.join(["vllm", "serve", model, *flags, *decode_flags(plan)])}

    def serve(*words: str, connector: dict[str, Any]) -> str:
        return shlex.join(["vllm", "serve", model, *words, "--kv-transfer-config", json.dumps(connector)])

    return {
        "one instance": serve(*flags, *decode_flags(plan), connector=decode_connector(plan, "kv_both")),
        "prefill": "VLLM_NIXL_SIDE_CHANNEL_PORT=5600 " + serve("--port", "8100", *flags, connector=PREFILL),
        "decode": "VLLM_NIXL_SIDE_CHANNEL_PORT=5601 "
        + serve("--port", "8200", *flags, *decode_flags(plan), connector=decode_connector(plan, "kv_consumer")),
        "router": "vllm-router --port 8000 --vllm-pd-disaggregation --kv-connector nixl "
        "--prefill http://localhost:8100 --decode http://localhost:8200",
    }


def helm_values(plan: Plan, model: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Return values of the Helm chart for one prefill and one decode replica."""
    host_pool, overhead = round(plan.host_gib), 16
    extra = {key: value for key, value in connector_options(plan).items() if key != "host_pool_gib"}
    extra.pop("device_buffer_size", None)
    hisparse: dict[str, Any] = {"hostPoolGiB": host_pool}
    if "device_buffer_size" in connector_options(plan):
        hisparse["deviceBufferSize"] = plan.device_buffer_size
    if extra:
        hisparse["extraConfig"] = extra
    decode = {"gpus": plan.tensor_parallel, "memoryGiB": host_pool + overhead, "overheadGiB": overhead}
    return {
        "model": {"id": model},
        "engine": {"kvCacheDtype": kv_cache_dtype, "maxModelLen": -(-plan.load.longest // 64) * 64},
        "prefill": {"replicas": 1, "gpus": plan.tensor_parallel},
        "decode": decode | {"replicas": plan.data_parallel, "hisparse": hisparse, "extraArgs": decode_flags(plan)},
    }


def ray_options(plan: Plan, model: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Return the arguments of the Ray Serve application: one prefill replica, as many decode replicas as ranks."""
    length = -(-plan.load.longest // 64) * 64
    decode_kwargs: dict[str, Any] = {"max_num_seqs": max(1, -(-plan.concurrency // plan.data_parallel))}
    if plan.drafts:
        decode_kwargs["speculative_config"] = {"method": "mtp", "num_speculative_tokens": plan.drafts}
    options = connector_options(plan)
    return {
        "model_id": plan.model.name,
        "model_source": model,
        "engine_kwargs": {"kv_cache_dtype": kv_cache_dtype, "max_model_len": length},
        "prefill": {"gpus": plan.tensor_parallel},
        "decode": {
            "gpus": plan.tensor_parallel,
            "replicas": {"min": plan.data_parallel, "max": plan.data_parallel},
            "host_memory_gib": round(options["host_pool_gib"] + 2 * plan.tensor_parallel + 8, 1),
            "hisparse": options,
            "engine_kwargs": decode_kwargs,
        },
    }
