"""Options of the Serve application: the only place where they are parsed and checked."""

from __future__ import annotations

from functools import cached_property
from itertools import combinations
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.tier_config import P2PTier

# Options that must be equal for prefill and decode replicas, because KV blocks are transferred byte for byte, and NIXL
# compares the names of the attention backends.
SHARED_ENGINE_OPTIONS = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "quantization",
    "revision",
    "seed",
    "hf_overrides",
    "attention_backend",
)
# Engine arguments that are derived from the options of the application.
RESERVED_ENGINE_OPTIONS = ("model", "served_model_name", "kv_transfer_config", "distributed_executor_backend")
# A replica is one engine, whose tensor parallel ranks take the GPUs and the ports that are reserved for it.
SINGLE_ENGINE_OPTIONS = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_rank",
    "data_parallel_backend",
)
# Environment variables that every replica sets for itself.
RESERVED_ENV = (
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_P2P_SIDE_CHANNEL_HOST",
    "VLLM_P2P_SIDE_CHANNEL_PORT",
)
# Host memory of a decode replica in addition to its host pool, per GPU: Python processes, pinned staging buffers, NIXL.
HOST_OVERHEAD_GIB = 1.0
GIB = 2**30
PORTS = range(1024, 65536)


class Options(BaseModel):
    """Base of all options: they are frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Replicas(Options):
    """Number of replicas of a role; equal bounds disable autoscaling."""

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=32, gt=0)
    """Target of autoscaling: ongoing requests per replica."""
    upscale_delay_s: float = Field(default=30, ge=0)
    """A replica is added after this many seconds above the target."""
    downscale_delay_s: float = Field(default=600, ge=0)
    """A replica is removed after this many seconds below the target."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Replicas:
        if self.max < self.min:
            raise HiSparseConfigError(
                "replicas.max", self.max, f"at least replicas.min ({self.min})", "Raise max or lower min."
            )
        return self


class Role(Options):
    """Placement and engine of a role's replicas; `engine_kwargs` override those of the application."""

    replicas: Replicas = Replicas()
    gpus: int = Field(default=1, ge=0)
    """GPUs of a replica, and its tensor parallel size. 0 with `device: cpu`."""
    cpus: float = Field(default=8, gt=0)
    """CPUs that Ray reserves per replica."""
    max_ongoing_requests: int = Field(default=1024, ge=1)
    """Requests that Serve sends to a replica at the same time; the others wait in Serve's queue."""
    env: dict[str, str] = Field(default_factory=dict)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """vLLM's engine arguments by their Python names."""


class Prefill(Role):
    """The prefill role: replicas of stock vLLM."""

    side_channel_port_base: int = 20000
    """First port for NIXL side channels; a replica takes the next free ports of its node, one per GPU."""
    host_memory_gib: float = Field(default=8, gt=0)
    """Host memory that Ray reserves per replica."""


class Decode(Role):
    """The decode role: replicas with a host pool and hot buffers."""

    p2p_port_base: int = 24000
    """First port for peers, if `hisparse.tiers` has one of type p2p; a replica takes the next free one of its node.
    The range must not overlap that of `prefill.side_channel_port_base`."""
    host_memory_gib: float = Field(gt=0)
    """Host memory that Ray reserves per replica: the host pool plus the memory of the processes."""
    hisparse: dict[str, Any]
    """`kv_connector_extra_config` of `HiSparseHostConnector`."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What happens to a request whose prefill replica is gone."""

    @cached_property
    def hisparse_config(self) -> HiSparseConfig:
        """The parsed and checked options in `hisparse`."""
        return HiSparseConfig.from_extra_config(self.hisparse)


class AppConfig(Options):
    """A prefill fleet, a decode fleet and the OpenAI API in front of them."""

    model_id: str = Field(min_length=1)
    """The model name for clients."""
    model_source: str = Field(min_length=1)
    """Directory or Hugging Face id; the same for both roles."""
    device: Literal["gpu", "cpu"] = "gpu"
    longest_request_s: float = Field(default=900, gt=0)
    """Time for a replica that is shut down to finish its requests."""
    kv_lease_s: int = Field(default=30, ge=6)
    """A prefill replica frees a prompt's KV if it has not heard from the decode replica for this long."""
    ingress_replicas: Replicas = Replicas(min=1, max=4)
    ingress_cpus: float = Field(default=1, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    prefill: Prefill = Prefill()
    decode: Decode

    @classmethod
    def parse(cls, args: dict[str, Any]) -> AppConfig:
        """Parse and check everything that can be checked without a model.

        Raises:
            HiSparseConfigError: names the first option that is refused.
        """
        try:
            config = cls.model_validate(args)
        except ValidationError as error:
            raise _first_error(error) from None
        for name, role in (("prefill", config.prefill), ("decode", config.decode)):
            _check_engine_kwargs(name, config.engine_kwargs_of(role))
            _check_env(name, {**config.env, **role.env})
            _check_device(name, role, config.device)
        _check_same_engine(config)
        _check_kv_dtype(config)
        _check_ports(config)
        _check_tiers(config.decode)
        _check_decode(config)
        return config

    def engine_kwargs_of(self, role: Role) -> dict[str, Any]:
        """Return the engine arguments of a role: its own replace the application's."""
        return {**self.engine_kwargs, **role.engine_kwargs}


def _first_error(error: ValidationError) -> HiSparseConfigError:
    detail = error.errors()[0]
    if isinstance(cause := detail.get("ctx", {}).get("error"), HiSparseConfigError):
        return cause
    option = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return HiSparseConfigError(option, detail["input"], "a known option", "Correct the name or remove it.")
    if detail["type"] == "missing":
        return HiSparseConfigError(option, None, "a value", f"Set {option}; it has no default.")
    expected = detail["msg"].removeprefix("Input should be ")
    return HiSparseConfigError(option, detail["input"], expected, "Correct the value.")


def _check_engine_kwargs(name: str, engine_kwargs: dict[str, Any]) -> None:
    if not isinstance(attention := engine_kwargs.get("attention_config") or {}, dict):
        raise HiSparseConfigError(
            f"{name}.engine_kwargs.attention_config",
            attention,
            "a mapping",
            "Write its options as a mapping, such as {backend: FLASHMLA_SPARSE}.",
        )
    for option in (*RESERVED_ENGINE_OPTIONS, "tensor_parallel_size"):
        if option in engine_kwargs:
            raise HiSparseConfigError(
                f"{name}.engine_kwargs.{option}",
                engine_kwargs[option],
                "no value here",
                "It is derived from model_id, model_source, gpus and decode.hisparse: set those.",
            )
    for option in SINGLE_ENGINE_OPTIONS:
        if option in engine_kwargs:
            raise HiSparseConfigError(
                f"{name}.engine_kwargs.{option}",
                engine_kwargs[option],
                "no value here: a replica is one engine with tensor parallel ranks only",
                "Remove it; set gpus and replicas.",
            )


def _check_env(name: str, env: dict[str, str]) -> None:
    for variable in RESERVED_ENV:
        if variable in env:
            raise HiSparseConfigError(
                f"{name}.env.{variable}",
                env[variable],
                "no value here: every replica sets its own",
                "Remove it; set prefill.side_channel_port_base or decode.p2p_port_base to change the ports.",
            )


def _check_device(name: str, role: Role, device: str) -> None:
    if device == "cpu" and "gpus" in role.model_fields_set and role.gpus:
        raise HiSparseConfigError(f"{name}.gpus", role.gpus, "0 with device: cpu", "Remove it or set device: gpu.")
    if device == "gpu" and not role.gpus:
        raise HiSparseConfigError(f"{name}.gpus", 0, "at least 1 with device: gpu", "Raise it or set device: cpu.")


def _check_same_engine(config: AppConfig) -> None:
    prefill, decode = (_engine_of(role, config) for role in (config.prefill, config.decode))
    for option in SHARED_ENGINE_OPTIONS:
        if prefill.get(option) != decode.get(option):
            raise HiSparseConfigError(
                f"prefill.engine_kwargs.{option}",
                prefill.get(option),
                f"{decode.get(option)!r}, decode's value: KV blocks are transferred byte for byte",
                f"Set {option} once, in the application's engine_kwargs.",
            )


def _engine_of(role: Role, config: AppConfig) -> dict[str, Any]:
    """Return the engine arguments of a role; an attention backend in `attention_config` becomes an argument."""
    engine = config.engine_kwargs_of(role)
    named = (engine.get("attention_config") or {}).get("backend")
    return engine if named is None else {**engine, "attention_backend": named}


def _check_kv_dtype(config: AppConfig) -> None:
    dtype = config.engine_kwargs_of(config.decode).get("kv_cache_dtype", "auto")
    options = config.decode.hisparse_config
    dtypes = options.kv_cache_dtypes("cuda" if config.device == "gpu" else config.device)
    if dtype not in dtypes:
        raise HiSparseConfigError(
            "engine_kwargs.kv_cache_dtype",
            dtype,
            f"one of {', '.join(dtypes)} with algorithm '{options.algorithm}' and device: {config.device}",
            "Remove it to keep the KV in the model's dtype.",
        )


def side_channel_ports(prefill: Prefill) -> range:
    """Return the side-channel ports: enough for all prefill replicas on one node and as many draining ones."""
    first, num_ports = prefill.side_channel_port_base, 2 * prefill.replicas.max * max(1, prefill.gpus)
    return range(first, first + num_ports)


def p2p_ports(decode: Decode) -> range:
    """Return the ports on which decode replicas answer peers, also while they drain; empty without a p2p tier."""
    tiers = decode.hisparse_config.tiers
    num_ports = 2 * decode.replicas.max if any(isinstance(tier, P2PTier) for tier in tiers) else 0
    return range(decode.p2p_port_base, decode.p2p_port_base + num_ports)


def _check_ports(config: AppConfig) -> None:
    ranges = {
        "prefill.side_channel_port_base": side_channel_ports(config.prefill),
        "decode.p2p_port_base": p2p_ports(config.decode),
    }
    ranges = {option: ports for option, ports in ranges.items() if ports}
    for option, ports in ranges.items():
        if ports.start not in PORTS or ports[-1] not in PORTS:
            raise HiSparseConfigError(
                option,
                ports.start,
                f"a port between {PORTS.start} and {PORTS[-1]} with room for {len(ports)} ports",
                "Choose another base.",
            )
    for (other, taken), (option, ports) in combinations(ranges.items(), 2):
        if max(taken.start, ports.start) < min(taken.stop, ports.stop):
            raise HiSparseConfigError(
                option,
                ports.start,
                f"no port of the range of {other}, {taken.start}-{taken[-1]}",
                "Replicas of both roles may run on one node: move one base by at least the size of the other range.",
            )


def _check_tiers(decode: Decode) -> None:
    for index, tier in enumerate(decode.hisparse_config.tiers):
        for option in ("host", "port"):
            if isinstance(tier, P2PTier) and getattr(tier, option) is not None:
                raise HiSparseConfigError(
                    f"decode.hisparse.tiers.{index}.{option}",
                    getattr(tier, option),
                    "no value here: every replica sets its own",
                    "Remove it; set p2p_port_base to change the ports.",
                )


def _check_decode(config: AppConfig) -> None:
    options = config.decode.hisparse_config
    if "kv_lease_duration" in config.decode.hisparse:
        raise HiSparseConfigError(
            "decode.hisparse.kv_lease_duration",
            config.decode.hisparse["kv_lease_duration"],
            "no value here: both roles must have the same",
            "Set kv_lease_s of the application.",
        )
    if options.dense_unit is not None and config.prefill.gpus != config.decode.gpus:
        raise HiSparseConfigError(
            "prefill.gpus",
            config.prefill.gpus,
            f"{config.decode.gpus}, as in decode: both roles split the KV heads of a dense model over their GPUs",
            "Set both to the same number.",
        )
    pool_gib = options.host_pool_gib
    if pool_gib is None:
        pool_gib = _ratio_pool_gib(config, options)
    overhead_gib = HOST_OVERHEAD_GIB * max(1, config.decode.gpus) + options.tier_buffer_bytes(pool_gib * GIB) / GIB
    needed = pool_gib + overhead_gib
    if config.decode.host_memory_gib < needed:
        raise HiSparseConfigError(
            "decode.host_memory_gib",
            config.decode.host_memory_gib,
            f"at least {needed:g}: a host pool of {pool_gib:g} GiB and {overhead_gib:g} GiB for processes"
            + (" and the buffer of tiers" if options.tiers else ""),
            "Raise it, or shrink the host pool in decode.hisparse.",
        )


def _ratio_pool_gib(config: AppConfig, options: HiSparseConfig) -> float:
    """Return the GiB of all host pools by `host_to_device_ratio`; a dense model has one pool per GPU."""
    assert options.host_to_device_ratio is not None
    device_bytes = config.engine_kwargs_of(config.decode).get("kv_cache_memory_bytes")
    if not isinstance(device_bytes, int) or device_bytes <= 0:
        raise HiSparseConfigError(
            "decode.hisparse.host_to_device_ratio",
            options.host_to_device_ratio,
            "kv_cache_memory_bytes (an int) in decode.engine_kwargs, to compute the host memory to reserve",
            "Set kv_cache_memory_bytes, or set host_pool_gib instead of the ratio.",
        )
    num_pools = 1 if options.dense_unit is None else max(1, config.decode.gpus)
    return options.host_to_device_ratio * device_bytes * num_pools / GIB
