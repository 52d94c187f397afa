"""Commands, Helm values and Ray options that start the planned deployment."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from vllm_hisparse.attention.backends import dense_choice, mla_choice, untried_gpu
from vllm_hisparse.cli.plan.memory import System
from vllm_hisparse.cli.plan.models import FP4_REFUSAL
from vllm_hisparse.cli.plan.plan import HOST_GPUS, ROUNDING, Plan
from vllm_hisparse.config import CONNECTOR_NAME, default_buffer_size

PREFILL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
# Environment of a prefill instance from which an import buffer reads: all layers of a block are one piece.
BLOCKS_OUTERMOST = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}


def connector_options(plan: Plan) -> dict[str, Any]:
    """Return `kv_connector_extra_config` of the plugin for one rank of a decode instance."""
    options: dict[str, Any] = {"host_pool_gib": math.floor(plan.rank_gib * 10 + ROUNDING) / 10}
    if not plan.model.is_dsa:
        options |= {"algorithm": "quest", "top_k": plan.top_k}
    if plan.model.selects_blocks:
        options["algorithm"] = "msa"
    if plan.device_buffer_size != default_buffer_size(plan.top_k, 1 + plan.drafts):
        options["device_buffer_size"] = plan.device_buffer_size
    if plan.has_narrow_keys:
        options["indexer_key_dtype"] = "fp4"
    if plan.import_buffer_gib:
        options["import_buffer_gib"] = plan.import_buffer_gib
    return options


def decode_connector(plan: Plan, role: str) -> dict[str, Any]:
    """Return the plugin's `--kv-transfer-config`."""
    options = connector_options(plan)
    if role != "kv_consumer":
        options.pop("import_buffer_gib", None)
    return {"kv_connector": CONNECTOR_NAME, "kv_role": role, "kv_connector_extra_config": options}


def attention_backend(plan: Plan, kv_cache_dtype: str) -> tuple[str, str] | None:
    """Return the backend that the engines have to be told, and why; None if vLLM's own choice is right."""
    capability = plan.gpu.capability
    if plan.model.refusal or plan.model.selects_blocks:
        return None
    if plan.model.is_dsa:
        return mla_choice(capability)
    return dense_choice(capability, kv_cache_dtype, plan.model.head_size)


def gpu_warning(plan: Plan, kv_cache_dtype: str) -> str:
    """Return what start-up warns of on the GPU, and which backend the commands set because of it; empty if nothing."""
    warning = "" if plan.model.refusal else untried_gpu(plan.gpu.name, plan.gpu.capability)
    found = [f"Start-up warns: {warning}"] if warning else []
    if (backend := attention_backend(plan, kv_cache_dtype)) is not None:
        name, reason = backend
        found.append(f"The commands set --attention-backend {name}. {reason}")
    return " ".join(found)


def engine_flags(plan: Plan, kv_cache_dtype: str) -> list[str]:
    """Return the options of `vllm serve` that both sides have.

    With drafts, the prefill side computes the draft layer's KV of a prompt.
    """
    flags = ["--max-model-len", str(max_model_len(plan))]
    if kv_cache_dtype != "auto":
        flags += ["--kv-cache-dtype", kv_cache_dtype]
    if (backend := attention_backend(plan, kv_cache_dtype)) is not None:
        flags += ["--attention-backend", backend[0]]
    flags += model_flags(plan)
    if plan.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    if plan.data_parallel > 1:
        flags += ["--data-parallel-size", str(plan.data_parallel)]
        flags += ["--enable-expert-parallel"] if plan.model.num_experts else []
    return flags + draft_flags(plan)


def block_size(plan: Plan) -> int | None:
    """Return the tokens of a block that both sides of a pair have to be told; None if vLLM's own choice is right.

    The plugin chooses larger blocks for a dense model than a stock prefill instance.
    """
    return None if plan.model.is_dsa or plan.model.selects_blocks else plan.memory.layout.block_size


def model_options(plan: Plan) -> dict[str, Any]:
    """Return the engine arguments that the model needs on both sides."""
    if not plan.model.selects_blocks:
        return {}
    return {"attention_config": {"indexer_kv_dtype": plan.model.key_dtype}, "language_model_only": True}


def model_flags(plan: Plan) -> list[str]:
    """Return `model_options` as options of `vllm serve`."""
    flags = []
    for name, value in model_options(plan).items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [json.dumps(value)])]
    return flags


def max_model_len(plan: Plan) -> int:
    """Return the tokens of the longest request, rounded up to whole blocks as far as the model goes."""
    return min(-(-plan.load.longest // 64) * 64, plan.model.max_model_len)


def draft_flags(plan: Plan) -> list[str]:
    """Return the option of drafts, the same on both sides."""
    return ["--speculative-config", json.dumps(_drafts(plan))] if plan.drafts else []


def _drafts(plan: Plan) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": plan.drafts}


def max_num_seqs(plan: Plan, running: int | None = None) -> int:
    """Return `--max-num-seqs` of a decode engine.

    Args:
        plan: the plan.
        running: requests that run on all ranks. None: the advised ones, or all planned ones if fewer do not pay.
    """
    if running is None:
        running = plan.advised.running if plan.advised else plan.concurrency
    return min(plan.max_num_seqs, max(1, -(-running // plan.data_parallel)))


def decode_flags(plan: Plan) -> list[str]:
    """Return the options that only the decode side has."""
    flags = ["--max-num-seqs", str(max_num_seqs(plan)), "--gpu-memory-utilization", f"{plan.gpu_memory_utilization:g}"]
    if plan.device_kv_gib is not None:
        flags += ["--kv-cache-memory-bytes", str(int(plan.device_kv_gib * 2**30))]
    return flags


def commands(plan: Plan, model: str, kv_cache_dtype: str) -> dict[str, str]:
    """Return shell commands: one instance, or a prefill side, a decode side and a router. Instances that would not
    start are left out.

    A model that the plugin refuses has one instance, without the plugin.
    """
    if start_refusal(plan):
        return {}
    flags = engine_flags(plan, kv_cache_dtype)
    if plan.model.refusal:
        if plan.model.refusal == FP4_REFUSAL:
            flags += ["--attention-config", json.dumps({"indexer_kv_dtype": "mxfp4"})]
        return {"one instance": shlex.join(["vllm", "serve", model, *flags, *decode_flags(plan)])}

    def serve(*words: str, connector: dict[str, Any]) -> str:
        return shlex.join(["vllm", "serve", model, *words, "--kv-transfer-config", json.dumps(connector)])

    one = {"one instance": serve(*flags, *decode_flags(plan), connector=decode_connector(plan, "kv_both"))}
    if pair_refusal(plan):
        return one
    if plan.pair_fits_host:
        num_gpus = plan.num_gpus
        hosts = "localhost", "localhost"
        prefill, decode = (
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(first, first + num_gpus)))} " for first in (0, num_gpus)
        )
    else:
        hosts = "$PREFILL_HOST", "$DECODE_HOST"
        prefill, decode = f"VLLM_NIXL_SIDE_CHANNEL_HOST={hosts[0]} ", ""
    if (num_tokens := block_size(plan)) is not None:
        flags += ["--block-size", str(num_tokens)]
    if plan.import_buffer_gib:
        prefill += "".join(f"{name}={value} " for name, value in BLOCKS_OUTERMOST.items())
    return one | {
        "prefill": prefill + serve("--port", "8100", *flags, connector=PREFILL),
        "decode": decode
        + serve("--port", "8200", *flags, *decode_flags(plan), connector=decode_connector(plan, "kv_consumer")),
        "router": "vllm-router --port 8000 --vllm-pd-disaggregation --kv-connector nixl "
        f"--prefill http://{hosts[0]}:8100 --decode http://{hosts[1]}:8200",
    }


def start_refusal(plan: Plan, pool_gib: float | None = None) -> str:
    """Return why an engine with the plugin would not start; empty if it would, or if the plugin refuses the model.

    The engine needs room for one request of `--max-model-len`, which may be longer than the mean request.

    Args:
        plan: the plan.
        pool_gib: host pool of a rank, in GiB. None: that of the commands.
    """
    if plan.model.refusal:
        return ""
    tokens, memory = max_model_len(plan), plan.memory
    device, host = memory.request_bytes(System.plugin, tokens)
    pool_gib = connector_options(plan)["host_pool_gib"] if pool_gib is None else pool_gib
    if host > pool_gib * 2**30:
        needed = math.ceil(host / 2**30 * 10) / 10
        return (
            f"{_longest(plan)} needs {needed:g} GiB of host memory, and a rank has {pool_gib:g}: raise "
            f"--host-memory-gib to {math.ceil(needed) * plan.data_parallel} at least, or plan shorter requests"
        )
    if device > memory.kv_bytes(System.plugin):
        return (
            f"{_longest(plan)} needs {_more_gib(device)} GiB of device memory for KV, and a GPU has "
            f"{_less_gib(memory.kv_bytes(System.plugin))}: {device_remedy(plan)}, or plan shorter requests"
        )
    return ""


def pair_refusal(plan: Plan) -> str:
    """Return why a prefill instance, which has full KV on the same GPUs, would not start; empty if it would."""
    if plan.model.refusal:
        return ""
    needed, _ = plan.memory.request_bytes(System.full, max_model_len(plan))
    if needed <= plan.stock_kv_gib * 2**30:
        return ""
    return (
        f"a prefill instance has full KV, {_longest(plan)} needs {_more_gib(needed)} GiB of it, and a GPU has "
        f"{_less_gib(plan.stock_kv_gib * 2**30)}: raise --tensor-parallel-size, or plan shorter requests"
    )


def device_remedy(plan: Plan) -> str:
    """Return which option gives the plugin more device memory for KV."""
    if plan.device_kv_gib is not None:
        return "raise --device-kv-gib"
    if plan.import_buffer_gib:
        return "lower --import-buffer-gib"
    return "raise --gpu-memory-utilization or --tensor-parallel-size"


def _longest(plan: Plan) -> str:
    return f"one request of {max_model_len(plan)} tokens (--context and --output-tokens)"


def _more_gib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30 * 100) / 100:.2f}"


def _less_gib(num_bytes: float) -> str:
    return f"{max(math.floor(num_bytes / 2**30 * 100 + ROUNDING) / 100, 0):.2f}"


def replicas_refusal(plan: Plan) -> str:
    """Return why neither the chart nor the Ray application can start a plan; empty if they can.

    Each of their replicas is one engine, so data parallel ranks that share experts are impossible.
    """
    if reason := start_refusal(plan) or pair_refusal(plan):
        return reason
    if plan.model.refusal:
        return "they start the plugin, which does not host this model"
    if plan.data_parallel > 1 and plan.model.num_experts:
        return "each of their replicas is one engine, without data parallel ranks that share experts: use the commands"
    return ""


def chart_refusal(plan: Plan) -> str:
    """Return why the chart cannot start a plan; empty if it can."""
    if not replicas_refusal(plan) and plan.tensor_parallel > HOST_GPUS:
        return f"a pod of the chart has at most {HOST_GPUS} GPUs, not {plan.tensor_parallel}: use the commands"
    return replicas_refusal(plan) or start_refusal(plan, chart_pool_gib(plan))


def chart_pool_gib(plan: Plan) -> float:
    """Return the host pool of a decode replica, in whole GiB, or in tenths if it is smaller than one."""
    return int(plan.rank_gib) or connector_options(plan)["host_pool_gib"]


def helm_values(plan: Plan, model: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Return values of the Helm chart: one prefill replica, as many decode replicas as ranks.

    NOTE: there is no import buffer, because pods have IPC namespaces of their own, and CUDA IPC needs a common one.
    """
    host_pool, overhead = chart_pool_gib(plan), 16
    extra = {key: value for key, value in connector_options(plan).items() if key != "host_pool_gib"}
    for name in ("device_buffer_size", "import_buffer_gib"):
        extra.pop(name, None)
    hisparse: dict[str, Any] = {"hostPoolGiB": host_pool}
    if "device_buffer_size" in connector_options(plan):
        hisparse["deviceBufferSize"] = plan.device_buffer_size
    if extra:
        hisparse["extraConfig"] = extra
    decode = {"gpus": plan.tensor_parallel, "memoryGiB": host_pool + overhead, "overheadGiB": overhead}
    if plan.device_kv_gib is not None:
        hisparse["deviceKvGiB"] = plan.device_kv_gib
    extra_args = ["--max-num-seqs", str(max_num_seqs(plan))]
    extra_args += ["--gpu-memory-utilization", f"{plan.gpu_memory_utilization:g}"]
    engine: dict[str, Any] = {"kvCacheDtype": kv_cache_dtype, "maxModelLen": max_model_len(plan)}
    engine["extraArgs"] = model_flags(plan) + draft_flags(plan)
    if (num_tokens := block_size(plan)) is not None:
        engine["blockSize"] = num_tokens
    if (backend := attention_backend(plan, kv_cache_dtype)) is not None:
        engine["attentionBackend"] = backend[0]
    return {
        "model": {"id": model},
        "engine": engine,
        "prefill": {"replicas": 1, "gpus": plan.tensor_parallel},
        "decode": decode | {"replicas": plan.data_parallel, "hisparse": hisparse, "extraArgs": extra_args},
    }


def ray_options(plan: Plan, model: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Return the arguments of the Ray Serve application: one prefill replica, as many decode replicas as ranks."""
    engine_kwargs: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "max_model_len": max_model_len(plan)}
    engine_kwargs |= model_options(plan)
    if (backend := attention_backend(plan, kv_cache_dtype)) is not None:
        engine_kwargs["attention_backend"] = backend[0]
    if (num_tokens := block_size(plan)) is not None:
        engine_kwargs["block_size"] = num_tokens
    if plan.drafts:
        engine_kwargs["speculative_config"] = _drafts(plan)
    decode_kwargs: dict[str, Any] = {"max_num_seqs": max_num_seqs(plan)}
    decode_kwargs["gpu_memory_utilization"] = plan.gpu_memory_utilization
    if plan.device_kv_gib is not None:
        decode_kwargs["kv_cache_memory_bytes"] = int(plan.device_kv_gib * 2**30)
    options = connector_options(plan)
    return {
        "model_id": plan.model.name,
        "model_source": model,
        "engine_kwargs": engine_kwargs,
        "prefill": {"gpus": plan.tensor_parallel} | ({"env": BLOCKS_OUTERMOST} if plan.import_buffer_gib else {}),
        "decode": {
            "gpus": plan.tensor_parallel,
            "replicas": {"min": plan.data_parallel, "max": plan.data_parallel},
            "host_memory_gib": round(options["host_pool_gib"] + 2 * plan.tensor_parallel + 8, 1),
            "hisparse": options,
            "engine_kwargs": decode_kwargs,
        },
    }
