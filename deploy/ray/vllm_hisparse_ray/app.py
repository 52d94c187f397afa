"""Builds the Serve application: OpenAI ingress, prefill replicas, and decode replicas that call prefill replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.serve import Application
from ray.serve.llm import LLMConfig, build_pd_openai_app

from vllm_hisparse.config import CONNECTOR_NAME
from vllm_hisparse_ray.backend import register
from vllm_hisparse_ray.config import GIB, AppConfig, Decode, Prefill, Replicas, p2p_ports, side_channel_ports

# Serve kills a draining replica that is still busy this long after its longest request should have ended.
SHUTDOWN_MARGIN_S = 30.0


def build_app(args: dict[str, Any]) -> Application:
    """Build the application of a Serve config file whose `import_path` is `vllm_hisparse_ray.app:build_app`.

    Args:
        args: the fields of `AppConfig`.

    Raises:
        HiSparseConfigError: names the first option that is refused; nothing has been started.
    """
    config = AppConfig.parse(args)
    register()
    return build_pd_openai_app(
        {
            "prefill_config": prefill_config(config),
            "decode_config": decode_config(config),
            "ingress_deployment_config": {
                **scaling(config.ingress_replicas),
                "ray_actor_options": {"num_cpus": config.ingress_cpus},
                "graceful_shutdown_timeout_s": config.longest_request_s + SHUTDOWN_MARGIN_S,
            },
        }
    )


def prefill_config(config: AppConfig) -> LLMConfig:
    """Return the configuration of prefill replicas: stock vLLM."""
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": config.kv_lease_s},
    }
    return llm_config(config, config.prefill, connector, {"side_channel_port_base": side_channel_ports(config.prefill)})


def decode_config(config: AppConfig) -> LLMConfig:
    """Return the configuration of decode replicas, which have a host pool and hot buffers."""
    decode = config.decode
    options = {"prefill_tp_size": max(1, config.prefill.gpus), **decode.hisparse}
    connector = {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": decode.kv_load_failure_policy,
        "kv_connector_extra_config": {**options, "kv_lease_duration": config.kv_lease_s},
    }
    return llm_config(config, decode, connector, {"p2p_port_base": p2p_ports(decode)})


def llm_config(
    config: AppConfig, role: Prefill | Decode, connector: dict[str, Any], ports: dict[str, range]
) -> LLMConfig:
    """Translate a role into the configuration of `ray.serve.llm`.

    Args:
        config: options of the application.
        role: options of the role.
        connector: `kv_transfer_config` of the role's engines.
        ports: ports from which a replica reserves its own, by the option that sets them; an empty range: none.
    """
    num_gpus = role.gpus if config.device == "gpu" else 0
    source = Path(config.model_source)
    return LLMConfig(
        model_loading_config={
            "model_id": config.model_id,
            "model_source": str(source.absolute() if source.is_dir() else config.model_source),
        },
        engine_kwargs={
            **config.engine_kwargs_of(role),
            "tensor_parallel_size": max(1, num_gpus),
            "kv_transfer_config": connector,
        },
        placement_group_config=placement(num_gpus),
        deployment_config={
            **scaling(role.replicas),
            "max_ongoing_requests": role.max_ongoing_requests,
            "graceful_shutdown_timeout_s": config.longest_request_s + SHUTDOWN_MARGIN_S,
            "ray_actor_options": {"num_cpus": role.cpus, "memory": int(role.host_memory_gib * GIB)},
        },
        runtime_env={"env_vars": {**config.env, **role.env}},
        callback_config={
            "callback_class": "vllm_hisparse_ray.side_channel.SideChannel",
            "callback_kwargs": {
                "ports": {option: (each.start, each.stop) for option, each in ports.items() if each},
                "num_ports": max(1, num_gpus),
            },
        },
    )


def scaling(replicas: Replicas) -> dict[str, Any]:
    """Return Serve's options for a fixed or an autoscaled number of replicas."""
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.min, "autoscaling_config": None}
    autoscaling = {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        "target_ongoing_requests": replicas.target_ongoing_requests,
        "upscale_delay_s": replicas.upscale_delay_s,
        "downscale_delay_s": replicas.downscale_delay_s,
    }
    return {"autoscaling_config": autoscaling}


def placement(num_gpus: int) -> dict[str, Any]:
    """Return the placement: one bundle per GPU, all on one node. The replica's actor requests CPUs and host memory."""
    bundles = [{"GPU": 1, "CPU": 0}] * num_gpus or [{"CPU": 0}]
    return {"bundles": bundles, "strategy": "STRICT_PACK"}
