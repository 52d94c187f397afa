"""Options of the connector: the only place where they are parsed and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import finalize

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from vllm_hisparse.algorithms.registry import ALGORITHMS, AlgorithmRefused, check_class, find_algorithm
from vllm_hisparse.compat.model_loading import OTHER_LOADERS
from vllm_hisparse.layout import MSA_BLOCK_SIZE, KVLayout, most_buffer_rows, most_drafts
from vllm_hisparse.ops.limits import MAX_TOP_K
from vllm_hisparse.tier_config import (
    BUFFER_SHARE,
    MAX_BUFFER_BYTES,
    MAX_SIZE,
    MIN_BUFFER_BYTES,
    TIER_TYPES,
    P2PTier,
    Tier,
    is_loopback,
    is_unspecified,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_hisparse.algorithms.base import AlgorithmOptions, AttentionShape, Selector, SparseAlgorithm

CONNECTOR_NAME = "HiSparseHostConnector"
# Options that decide what layers write themselves, or how much device memory vLLM leaves to them beside its KV cache.
GRAPH_OPTIONS = (
    *("algorithm", "full_kv_layers", "algorithm_options", "indexer_key_dtype"),
    *("import_buffer_gib", "rows_by_layer"),
)
KV_CACHE_DTYPES = {"cpu": ("auto", "bfloat16", "float16"), "cuda": ("auto", "bfloat16")}  # by device
# In addition to these: of DSA models, and of dense models.
DSA_KV_CACHE_DTYPES = {"cpu": (), "cuda": ("fp8", "fp8_ds_mla")}
INDEXER_KV_DTYPES = ("auto", "fp8")
MSA_INDEXER_KV_DTYPES = ("auto", "bf16", "fp8")
DENSE_KV_CACHE_DTYPES = {"cpu": (), "cuda": ("fp8", "fp8_e4m3")}
_V4 = "its attention reads compressed states of several tokens, kept in layers of its own beside windows and rings"
_WINDOWS = "layers with a sliding window are mixed with those that select"
_LINEAR = "three of four layers are linear attention, whose state has no host pool"
_NO_CONNECTOR = "its attention backend takes no KV connector"
_DENSE = "Qwen3, with an algorithm that selects for it (algorithm: quest)"
_OWN_CACHE = "its own kernels write the KV cache, which hot buffers replace, and leave queries to the attention layer"
# Models that select positions or look as if hot buffers could serve them, but cannot have any: class -> reason, and the
# nearest model that can.
REFUSED_MODELS = {
    "BeamForCausalLM": (_OWN_CACHE, _DENSE),
    "DeepseekV4ForCausalLM": (_V4, "DeepSeek-V3.2"),
    "DeepseekV4ForConditionalGeneration": (_V4, "DeepSeek-V3.2"),
    "DeepseekV41ForCausalLM": (f"{_V4}, and several layers read the KV of one", "DeepSeek-V3.2"),
    "Dots3NoteForCausalLM": (_WINDOWS, "DeepSeek-V3.2"),
    "Dots3NoteForConditionalGeneration": (_WINDOWS, "DeepSeek-V3.2"),
    "FlintForCausalLM": (_OWN_CACHE, _DENSE),
    "Glm5NextForCausalLM": (_LINEAR, "GLM-5.3"),
    "Glm5NextForConditionalGeneration": (_LINEAR, "GLM-5.3"),
    "MuseSparkForConditionalGeneration": (_OWN_CACHE, _DENSE),
    "Qwen4ExpForCausalLM": (_NO_CONNECTOR, _DENSE),
    "Qwen4ExpForConditionalGeneration": (_NO_CONNECTOR, _DENSE),
    "Step5ForCausalLM": (_WINDOWS, "MiniMax-M3"),
    "Step5ForConditionalGeneration": (_WINDOWS, "MiniMax-M3"),
}
NARROW_KEY_ELEMENTS, NARROW_KEY_HEADS = 128, (32, 64)  # of an indexer whose keys may have 4 bits; heads on CUDA
BUFFER_TOP_K_RATIO = 2  # default device_buffer_size over top_k
DEFAULT_TOP_K = 2048  # default top_k of a dense model, in tokens
DRAFT_METHODS = {"cpu": ("ngram",), "cuda": ("ngram", "ngram_gpu")}  # `--speculative-config`, by device
DSA_DRAFT_METHODS, DENSE_DRAFT_METHODS = ("mtp",), ("eagle", "eagle3")  # in addition; these have draft layers

MIN_LEASE_S = 6  # vLLM sends a heartbeat every sixth of a lease, in whole seconds

# Parsed options by the id of the `VllmConfig`, kept while the `VllmConfig` exists. NOTE: they cannot be an attribute of
# it, because vLLM copies configurations field by field and fails on unknown ones.
_PARSED: dict[int, HiSparseConfig] = {}


class HiSparseConfigError(ValueError):
    """An option is refused; the message names the option, the value got, the value expected and what to do."""

    def __init__(self, option: str, got: object, expected: str, fix: str):
        super().__init__(f"{option}: got {got!r}, expected {expected}. {fix}")


class NixlOptions(TypedDict, total=False):
    """Options of vLLM's NixlConnector that are also read from `kv_connector_extra_config`.

    vLLM does not check them: with a wrong type, it fails after it has loaded the model, or at the first transfer.
    """

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)  # type: ignore[misc]

    backends: Annotated[list[str], Field(min_length=1)]
    engine_ttl: float
    enforce_handshake_compat: bool
    kv_lease_duration: int
    kv_recompute_threshold: int
    num_threads: Annotated[int, Field(ge=0)]


Share = Annotated[float, Field(gt=0, le=1e6)]

NIXL_OPTIONS = frozenset(NixlOptions.__annotations__)


class HiSparseConfig(BaseModel):
    """Options of `HiSparseHostConnector`, from `kv_connector_extra_config`.

    `top_k` and `device_buffer_size` mean what they mean in SGLang's `--hisparse-config`. `host_to_device_ratio` is a
    ratio of bytes here, of tokens there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    top_k: int | None = Field(default=None, gt=0)
    """Tokens attended per query and layer. Default: as many as the model's indexer selects, 2048 for a dense model."""
    device_buffer_size: int | None = Field(default=None, gt=0)
    """Hot rows per request and layer. Default: 2x top_k, or with drafts the selections of a step if these are more."""
    rows_by_layer: list[Share] | None = Field(default=None, min_length=1)
    """Share of the hot rows that each layer of a DSA model gets, relative to the others, for the layers that select.
    Default: all layers get the same number of rows."""
    log_rows_by_layer: bool = False
    """True: log the list for `rows_by_layer` that would miss least, learned from the running requests."""
    elastic: bool = True
    """True: a hot buffer grows with its sequence up to `device_buffer_size`, and beyond while device memory is free.
    False: every request has `device_buffer_size` hot rows from its start to its end."""
    admission: Literal["auto", "off"] = "off"
    """`auto`: requests wait while more running ones would decode fewer tokens per second, as soon as that has been
    measured. `off`: they start as long as there is memory."""
    host_to_device_ratio: float | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Bytes of the host pool divided by bytes of one device's KV cache, both including indexer keys. Each rank of a
    dense model has a pool of this size."""
    host_pool_gib: float | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Size of the host pool in GiB, for all tensor parallel ranks together."""
    host_pool_memory: Literal["auto", "managed", "pinned"] = "auto"
    """Memory of the host pool on a GPU: `managed` is read faster, `pinned` can be shared with other processes and with
    network cards. `auto`: managed where nothing but the GPU of one rank uses the pool."""
    algorithm: str = "dsa"
    """Algorithm that selects positions: a name from `algorithms/registry.py`, or the dotted path of a
    `SparseAlgorithm`."""
    algorithm_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the algorithm."""
    indexer_key_dtype: Literal["auto", "fp4"] = "auto"
    """Form of a DSA model's indexer keys on the device: the model's 8 bits (auto), or 4 bits."""
    full_kv_layers: list[int] | None = None
    """Layers of a dense model that keep their full KV on the device. Default: the layers with full attention in the
    algorithm's paper."""
    prefill_tp_size: int | None = Field(default=None, gt=0)
    """Tensor parallel size of the prefill instances. Default: this instance's."""
    import_buffer_gib: float = Field(default=0.0, ge=0, le=MAX_SIZE)
    """Device memory in GiB of each rank, through which KV of prompts comes from prefill instances into the host
    pool, for hosts without RDMA. 0: it comes directly."""
    tiers: list[Tier] = Field(default_factory=list)
    """Tiers below the host pool, for prefixes that it has no room for, in the order in which they are looked up."""
    tier_buffer_gib: float | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Host memory in GiB through which blocks pass between the host pool and the tiers. Default: 1/32 of the host
    pool, at least 0.5 and at most 4 GiB."""
    tier_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds without a block after which a request computes its prefix instead of waiting for a tier."""
    log_request_stats: bool = False
    """Log one line per finished request: hits, misses and bytes received."""
    selection_trace_dir: str | None = Field(default=None, min_length=1)
    """Directory that gets a trace of every request's selections (`trace.py`); DSA models on the CPU platform."""

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> HiSparseConfig:
        """Parse and check the options without a model.

        Raises:
            HiSparseConfigError: names the first option that is unknown, of the wrong type or out of range.
        """
        options = {key: value for key, value in extra_config.items() if key not in NIXL_OPTIONS}
        _check_lease(extra_config.get("kv_lease_duration", MIN_LEASE_S))
        try:
            config = cls(**options)
            TypeAdapter(NixlOptions).validate_python(
                {name: extra_config[name] for name in NIXL_OPTIONS & extra_config.keys()}
            )
        except ValidationError as error:
            raise _first_error(error) from None
        config._check_size_options()
        _check_algorithm(config)
        _check_tiers(config)
        return config

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> HiSparseConfig:
        """Return the result of `parse` for a complete configuration, which is parsed only once."""
        key = id(vllm_config)
        if key not in _PARSED:
            _PARSED[key] = cls.parse(vllm_config)
            finalize(vllm_config, _PARSED.pop, key)
        return _PARSED[key]

    @classmethod
    def parse(cls, vllm_config: VllmConfig) -> HiSparseConfig:
        """Parse the options, check them against the model and the engine's options, and fill in the defaults.

        Raises:
            HiSparseConfigError: names the first option that is refused.
        """
        assert vllm_config.kv_transfer_config is not None
        config = cls.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        _check_model(vllm_config)
        _check_engine(vllm_config)
        config._check_kv_cache_dtype(vllm_config)
        if config.has_narrow_keys:
            _check_narrow_keys(config, vllm_config)
        config._check_indexer_kv_dtype(vllm_config)
        _check_import_buffer(config, vllm_config)
        if config.tiers:
            _check_prefix_cache(vllm_config)
            _check_own_address(config)
        return config._for_model(vllm_config)

    @cached_property
    def algorithm_class(self) -> type[Selector]:
        return find_algorithm(self.algorithm)

    @cached_property
    def parsed_options(self) -> AlgorithmOptions:
        """Options of the algorithm, with defaults filled in."""
        return self.algorithm_class.Options(**self.algorithm_options)

    @property
    def tokens_per_unit(self) -> int:
        """Number of consecutive tokens that are selected, copied and evicted together."""
        return self.algorithm_class.unit_tokens(self.parsed_options)

    @property
    def dense_unit(self) -> int | None:
        """`tokens_per_unit` of a model in which every KV head has a selection of its own; None for a DSA model."""
        return None if self.algorithm_class.model_family == "mla" else self.tokens_per_unit

    @property
    def has_narrow_keys(self) -> bool:
        """True if the device keeps indexer keys in 4 bits."""
        return self.indexer_key_dtype == "fp4"

    def kv_cache_dtypes(self, device: str) -> tuple[str, ...]:
        """Supported values of `--kv-cache-dtype` on a device ("cpu" or "cuda")."""
        quantised = {"mla": DSA_KV_CACHE_DTYPES, "gqa": DENSE_KV_CACHE_DTYPES}.get(self.algorithm_class.model_family)
        return KV_CACHE_DTYPES[device] + (quantised[device] if quantised else ())

    def make_algorithm(self, shape: AttentionShape, max_tokens: int, max_query_len: int = 1) -> SparseAlgorithm:
        """Create the algorithm; the defaults must be filled in.

        Args:
            shape: sizes of the layers.
            max_tokens: tokens of the longest request.
            max_query_len: tokens that a decoding request computes in a step.

        Raises:
            HiSparseConfigError: the options do not fit the model.
        """
        reason = self.algorithm_class.refuse(self.parsed_options, shape)
        if reason is not None:
            raise HiSparseConfigError(
                "algorithm_options", self.algorithm_options, reason, "Correct algorithm_options for this model."
            )
        return self.algorithm_class(self.parsed_options, shape, self.selection_size, max_tokens, max_query_len)

    @property
    def rows(self) -> int:
        """Hot rows per request and layer; the defaults must be filled in."""
        assert self.device_buffer_size is not None
        return self.device_buffer_size

    def row_shares(self, selects: Sequence[bool]) -> tuple[tuple[float, int], ...]:
        """Return `KVLayout.row_shares` of a model.

        Args:
            selects: for each layer with hot rows, True if it selects, False if it shares the last selection.

        Raises:
            HiSparseConfigError: `rows_by_layer` has another number of entries than there are layers that select.
        """
        starts = [index for index, selecting in enumerate(selects) if selecting]
        shares = [1.0] * len(starts) if self.rows_by_layer is None else self.rows_by_layer
        if len(shares) != len(starts):
            raise HiSparseConfigError(
                "rows_by_layer",
                shares,
                f"{len(starts)} numbers, not {len(shares)}: one for each layer that selects",
                "Correct the list, or remove it for equal rows.",
            )
        return tuple(zip(shares, (end - start for start, end in pairwise([*starts, len(selects)])), strict=True))

    def check_rows_by_layer(self, layout: KVLayout) -> None:
        """Refuse shares with which a layer has too few rows; the defaults must be filled in.

        Args:
            layout: sizes of the model.

        Raises:
            HiSparseConfigError: the layer with the fewest rows cannot hold the selections of a step.
        """
        rows = layout.num_hot_blocks(self.rows) * layout.fewest_rows - layout.max_query_len
        least = layout.max_query_len * self.selection_size
        if self.rows_by_layer is not None and rows < least:
            raise HiSparseConfigError(
                "rows_by_layer",
                self.rows_by_layer,
                f"shares with which every layer has {least} rows for the selections of a step, when device_buffer_size "
                f"is {self.rows}; the layer with the smallest share has {rows}",
                "Raise the smallest shares, or raise device_buffer_size.",
            )

    def num_host_blocks(self, host_block_bytes: int, device_kv_bytes: int, num_pools: int = 1) -> int:
        """Number of blocks of a host pool.

        Args:
            host_block_bytes: bytes of one block, all layers.
            device_kv_bytes: bytes of one device's KV cache.
            num_pools: number of pools of the engine, all of the same size.
        """
        if self.host_pool_gib is not None:
            return int(self.host_pool_gib * 2**30) // (host_block_bytes * num_pools)
        assert self.host_to_device_ratio is not None
        return int(self.host_to_device_ratio * device_kv_bytes) // host_block_bytes

    @property
    def import_buffer_bytes(self) -> int:
        """Bytes of device memory for imports."""
        return int(self.import_buffer_gib * 2**30)

    def tier_buffer_bytes(self, pool_bytes: float) -> int:
        """Bytes of host memory, in addition to the host pools, through which blocks pass to and from the tiers.

        NOTE: `deploy/helm` has the same formula in its template language.

        Args:
            pool_bytes: bytes of all host pools of the engine together.
        """
        if not self.tiers:
            return 0
        if self.tier_buffer_gib is not None:
            return int(self.tier_buffer_gib * 2**30)
        return int(min(max(pool_bytes * BUFFER_SHARE, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES))

    @property
    def selection_size(self) -> int:
        """Tokens of a selection; the defaults must be filled in."""
        assert self.top_k is not None
        return self.top_k

    def controls_admission(self, max_query_len: int) -> bool:
        """Return True if running requests are limited to as many as pay.

        Buffers of a fixed size miss as much with any number of requests. With pages or drafts, hot rows do not tell
        what smaller buffers would miss: a step has several selections, or uses a page and leaves its expiry as it is.

        Args:
            max_query_len: tokens that a decoding request computes in a step.
        """
        return self.admission == "auto" and self.elastic and self.tokens_per_unit == max_query_len == 1

    @property
    def size_option(self) -> tuple[str, float]:
        """The option that sizes the host pool, and its value."""
        name = "host_pool_gib" if self.host_pool_gib is not None else "host_to_device_ratio"
        return name, getattr(self, name)

    def _check_size_options(self) -> None:
        if (self.host_pool_gib is None) != (self.host_to_device_ratio is None):
            return
        got = {"host_pool_gib": self.host_pool_gib, "host_to_device_ratio": self.host_to_device_ratio}
        raise HiSparseConfigError(
            "host_pool_gib / host_to_device_ratio",
            got,
            "exactly one of the two",
            "Set either host_pool_gib (GiB of host memory) or host_to_device_ratio (multiple of the device KV cache).",
        )

    def _check_kv_cache_dtype(self, vllm_config: VllmConfig) -> None:
        device, dtype = vllm_config.device_config.device_type, vllm_config.cache_config.cache_dtype
        dtypes = self.kv_cache_dtypes(device)
        if dtype not in dtypes:
            raise HiSparseConfigError(
                "--kv-cache-dtype",
                dtype,
                f"one of {', '.join(dtypes)} with algorithm '{self.algorithm}' on {device}",
                "Set it to bfloat16, because the checkpoint may ask for another dtype where the option is not given.",
            )
        if vllm_config.cache_config.kv_cache_dtype_skip_layers:
            raise HiSparseConfigError(
                "--kv-cache-dtype-skip-layers",
                vllm_config.cache_config.kv_cache_dtype_skip_layers,
                "none: hot buffers need KV of one dtype in all layers",
                "Remove it.",
            )

    def _check_indexer_kv_dtype(self, vllm_config: VllmConfig) -> None:
        is_msa = self.algorithm_class.model_family == "msa"
        dtypes, got = (
            MSA_INDEXER_KV_DTYPES if is_msa else INDEXER_KV_DTYPES,
            vllm_config.attention_config.indexer_kv_dtype,
        )
        if got not in dtypes:
            raise HiSparseConfigError(
                "--attention-config indexer_kv_dtype",
                got,
                f"{' or '.join(dtypes)}: blocks of indexer keys are read and copied with the layout of these",
                "Remove it.",
            )

    def _for_model(self, vllm_config: VllmConfig) -> HiSparseConfig:
        model, algorithm = vllm_config.model_config, self.algorithm_class
        if algorithm.model_family == "mla":
            updates = {"top_k": _dsa_top_k(self, model), "full_kv_layers": []}
        elif algorithm.model_family == "msa":
            updates = {"top_k": _msa_top_k(self, vllm_config), "full_kv_layers": []}
        else:
            _check_dense_model(self, vllm_config)
            updates = {"top_k": _dense_top_k(self), "full_kv_layers": _full_kv_layers(self, model)}
        if algorithm.model_family != "gqa":
            _check_text_alone(vllm_config)
        _check_trace(self, vllm_config.device_config.device_type)
        for name in ("rows_by_layer", "log_rows_by_layer") if algorithm.model_family != "mla" else ():
            if value := getattr(self, name):
                expected = f"none with algorithm '{self.algorithm}', because only a DSA model's rows can be divided"
                raise HiSparseConfigError(name, value, expected, "Remove it.")
        if vllm_config.speculative_config is not None:
            _check_drafts(self, vllm_config)
        top_k, unit = updates["top_k"], self.tokens_per_unit
        query_len = max_query_len(vllm_config)
        rows = _num_rows(self, top_k, query_len)
        if vllm_config.device_config.device_type == "cuda":
            _check_kernel_limits(top_k, rows, unit, query_len)
        tp_size = _prefill_tp_size(self, vllm_config.parallel_config.tensor_parallel_size)
        updates |= {"device_buffer_size": rows, "prefill_tp_size": tp_size}
        return self.model_copy(update=updates | {"host_pool_memory": _host_pool_memory(self, vllm_config)})


def shares_host_pool(vllm_config: VllmConfig) -> bool:
    """True if all ranks of the engine use one host pool, because the ranks of an MLA model hold the same rows."""
    return vllm_config.model_config.use_mla and vllm_config.parallel_config.tensor_parallel_size > 1


def max_num_running(vllm_config: VllmConfig) -> int:
    """Number of requests that vLLM lets run at once."""
    limits = vllm_config.scheduler_config
    return limits.max_num_active_seqs or limits.max_num_seqs


def max_query_len(vllm_config: VllmConfig) -> int:
    """Return the largest number of tokens that a decoding request computes in a step: one and its drafts."""
    drafts = vllm_config.speculative_config
    return 1 if drafts is None else 1 + drafts.num_speculative_tokens


class _Hidden:
    """Takes the place of a value in an error message, because the value may be a secret."""

    def __repr__(self) -> str:
        return "a value that is not shown"


def _first_error(error: ValidationError) -> HiSparseConfigError:
    detail = error.errors()[0]
    option = ".".join(str(part) for part in detail["loc"])
    got = detail["input"]
    # NOTE: by mistake, a secret may have a wrong name, be in a tier of another type, or in place of the list of tiers.
    is_in_tiers = option.startswith("tiers")
    is_open_tier = is_in_tiers and len(detail["loc"]) > 2 and detail["loc"][2] != "obj"
    if is_open_tier and detail["type"] == "missing":
        got = sorted(got)
    elif (is_in_tiers and not is_open_tier) or (
        detail["type"] == "extra_forbidden" and not isinstance(got, int | float)
    ):
        got = _Hidden()
    if detail["type"] == "extra_forbidden":
        tier = TIER_TYPES.get(str(detail["loc"][2])) if len(detail["loc"]) == 4 else None
        known = ", ".join(sorted(tier.model_fields if tier else [*HiSparseConfig.model_fields, *NIXL_OPTIONS]))
        return HiSparseConfigError(option, got, f"one of the known options: {known}", "Correct the name.")
    if detail["type"] == "missing":
        return HiSparseConfigError(
            option, got, "a value: this option is required", "Add it to kv_connector_extra_config."
        )
    message = {
        "string_pattern_mismatch": "HOST:PORT",  # the only pattern is that of peers
        "union_tag_invalid": f"one of these types: {', '.join(TIER_TYPES)}",
        "union_tag_not_found": f"a tier with a type: {', '.join(TIER_TYPES)}",
    }.get(detail["type"], detail["msg"].removeprefix("Input should be "))
    is_quoted = isinstance(detail["input"], str) and detail["type"] in ("float_type", "int_type", "bool_type")
    message += ", without quotes" if is_quoted else ""
    return HiSparseConfigError(option, got, message, "Correct the value in kv_connector_extra_config.")


def default_buffer_size(top_k: int, query_len: int) -> int:
    """Return the default of `device_buffer_size`.

    Args:
        top_k: tokens of a selection.
        query_len: new tokens of a request in a step.
    """
    return max(BUFFER_TOP_K_RATIO, query_len) * top_k


def _num_rows(config: HiSparseConfig, top_k: int, query_len: int) -> int:
    """Hot rows per request and layer: `device_buffer_size` or its default.

    Args:
        top_k: tokens of a selection.
        query_len: new tokens of a request in a step; the hot buffer must hold the selections of all of them.

    Raises:
        HiSparseConfigError: `device_buffer_size` is too small for these selections.
    """
    unit, default = config.tokens_per_unit, default_buffer_size(top_k, query_len)
    rows = default if config.device_buffer_size is None else config.device_buffer_size
    if rows < query_len * top_k or rows % unit:
        selections = f"{query_len} x top_k ({query_len * top_k}): {query_len - 1} drafts and one token select each"
        multiple = f", a multiple of {unit}" if unit > 1 else ""
        raise HiSparseConfigError(
            "device_buffer_size",
            rows,
            f"at least {selections if query_len > 1 else f'top_k ({top_k})'}{multiple}",
            f"Raise it, or remove it for the default of {default} rows.",
        )
    return rows


def _check_lease(seconds: object) -> None:
    """Refuse a `kv_lease_duration` that is too short for vLLM's heartbeats."""
    if type(seconds) is not int or seconds < MIN_LEASE_S:
        raise HiSparseConfigError(
            "kv_lease_duration",
            seconds,
            f"a whole number of seconds, at least {MIN_LEASE_S}",
            "Correct it on both sides, which must have the same value.",
        )


def _check_algorithm(config: HiSparseConfig) -> None:
    """Refuse an algorithm that is unknown or unusable, and algorithm options that are unknown or out of range."""
    try:
        algorithm = find_algorithm(config.algorithm)
        options = algorithm.Options(**config.algorithm_options)
        check_class(algorithm, options)
    except AlgorithmRefused as error:
        # NOTE: where the author's module fails, the traceback says where.
        raise HiSparseConfigError("algorithm", config.algorithm, str(error), error.advice) from error.__cause__
    except ValidationError as error:
        detail = error.errors()[0]
        option = ".".join(str(part) for part in ("algorithm_options", *detail["loc"]))
        message = detail["msg"].removeprefix("Input should be ")
        if detail["type"] == "extra_forbidden":
            known = ", ".join(algorithm.Options.model_fields) or "none"
            message = f"one of the options of '{config.algorithm}': {known}"
        raise HiSparseConfigError(option, detail["input"], message, "Correct algorithm_options.") from None


def _check_tiers(config: HiSparseConfig) -> None:
    if sum(isinstance(tier, P2PTier) for tier in config.tiers) > 1:
        raise HiSparseConfigError(
            "tiers", [tier.type for tier in config.tiers], "at most one of type p2p", "Name all its peers in one."
        )


def _check_own_address(config: HiSparseConfig) -> None:
    """Refuse an address of this instance at which its peers cannot reach it."""
    for index, tier in enumerate(config.tiers):
        if not isinstance(tier, P2PTier):
            continue
        host, remote = tier.own_host, [peer for peer in tier.peers if not is_loopback(peer.rpartition(":")[0])]
        if is_unspecified(host) or (remote and is_loopback(host)):
            why = f": {remote[0]} is on another host" if remote else ""
            raise HiSparseConfigError(
                f"tiers.{index}.host",
                host,
                f"the address of one of this host's interfaces, at which peers reach this instance{why}",
                "Set host, or the environment variable VLLM_P2P_SIDE_CHANNEL_HOST, to it.",
            )


def _check_prefix_cache(vllm_config: VllmConfig) -> None:
    """Refuse tiers without a prefix cache whose hashes are the same in every engine."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise HiSparseConfigError(
            "--enable-prefix-caching", False, "True with tiers: they hold its blocks", "Set it, or remove tiers."
        )
    if not cache.prefix_caching_hash_algo.startswith("sha256"):
        raise HiSparseConfigError(
            "--prefix-caching-hash-algo",
            cache.prefix_caching_hash_algo,
            "sha256 or sha256_cbor with tiers: other hashes differ from engine to engine, or collide",
            "Remove it, or remove tiers.",
        )


def _dsa_top_k(config: HiSparseConfig, model: ModelConfig) -> int:
    model_top_k = getattr(model.hf_text_config, "index_topk", None)
    if model_top_k is None or not model.use_mla:
        dense = ", ".join(name for name in ALGORITHMS if name not in ("dsa", "msa"))
        fitting = "msa for this model" if _selects_blocks(model) else f"one of {dense} for a dense model"
        raise HiSparseConfigError(
            "algorithm",
            config.algorithm,
            "a model with a DSA indexer (index_topk in its config.json, such as DeepSeek-V3.2 or GLM-5)",
            f"{model.model} has none: set algorithm to {fitting}, serve another model, or remove {CONNECTOR_NAME}.",
        )
    _check_own_selection(config, model_top_k, "index_topk")
    return model_top_k


def block_indexer_misfits(indexer: dict[str, Any], num_kv_heads: int | None) -> Iterator[tuple[str, str]]:
    """Yield the options of a model's `sparse_attention_config` that rule out hot buffers, and what is needed.

    Args:
        indexer: the model's `sparse_attention_config`.
        num_kv_heads: KV heads of the model.
    """
    if indexer.get("sparse_block_size") != MSA_BLOCK_SIZE:
        yield "sparse_block_size", f"{MSA_BLOCK_SIZE}, the page of vLLM's kernels"
    if (indexer.get("sparse_local_block") or 0) < 1:
        yield "sparse_local_block", "at least 1: the newest block must be selected"
    if indexer.get("sparse_num_index_heads") != num_kv_heads:
        yield "sparse_num_index_heads", f"{num_kv_heads}, the KV heads"


def _msa_top_k(config: HiSparseConfig, vllm_config: VllmConfig) -> int:
    """Return the tokens of the selected blocks, after checks of the model's indexer."""
    model = vllm_config.model_config
    if not _selects_blocks(model):
        raise HiSparseConfigError(
            "algorithm",
            config.algorithm,
            "a model whose indexer selects blocks (sparse_attention_config in its config.json, such as MiniMax-M3)",
            f"{model.model} has none: remove algorithm for a DSA model, choose another one for a dense model, "
            f"or remove {CONNECTOR_NAME}.",
        )
    if vllm_config.device_config.device_type != "cuda":
        raise HiSparseConfigError(
            "algorithm",
            config.algorithm,
            "a GPU: vLLM has no code for this model on the CPU",
            "Start it on a machine with a GPU.",
        )
    indexer = model.hf_text_config.sparse_attention_config
    for name, expected in block_indexer_misfits(indexer, model.hf_text_config.num_key_value_heads):
        raise HiSparseConfigError(
            f"sparse_attention_config.{name}",
            indexer.get(name),
            expected,
            f"Serve another model, or remove {CONNECTOR_NAME}.",
        )
    top_k = indexer["sparse_topk_blocks"] * MSA_BLOCK_SIZE
    _check_own_selection(config, top_k, f"sparse_topk_blocks x {MSA_BLOCK_SIZE}")
    return top_k


def _selects_blocks(model: ModelConfig) -> bool:
    """Return True if a model has an indexer that selects blocks for each KV head."""
    return bool(getattr(model.hf_text_config, "sparse_attention_config", None))


def _check_own_selection(config: HiSparseConfig, top_k: int, source: str) -> None:
    """Refuse options that contradict the selection of a model with an indexer.

    Args:
        config: the options.
        top_k: tokens that the indexer selects.
        source: the value's name in the model's configuration.
    """
    if config.full_kv_layers:
        raise HiSparseConfigError(
            "full_kv_layers",
            config.full_kv_layers,
            "none: the layers of a model with an indexer say themselves which of them select",
            "Remove it.",
        )
    if config.top_k not in (None, top_k):
        raise HiSparseConfigError(
            "top_k", config.top_k, f"{top_k}, the model's {source}", f"Remove top_k or set it to {top_k}."
        )


def _check_narrow_keys(config: HiSparseConfig, vllm_config: VllmConfig) -> None:
    """Refuse indexer keys in 4 bits where there are none, or none that fit."""
    model, device = vllm_config.model_config.hf_text_config, vllm_config.device_config.device_type
    head_dim, heads = getattr(model, "index_head_dim", None), getattr(model, "index_n_heads", None)
    reasons = {
        f"algorithm '{config.algorithm}', which has no DSA indexer": config.dense_unit is not None,
        f"indexer keys of {head_dim} elements, not {NARROW_KEY_ELEMENTS}": head_dim != NARROW_KEY_ELEMENTS,
        f"{heads} indexer heads on cuda, not {' or '.join(map(str, NARROW_KEY_HEADS))}": (
            device == "cuda" and heads not in NARROW_KEY_HEADS
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise HiSparseConfigError("indexer_key_dtype", "fp4", f"auto with {reason}", "Remove it.")


def _check_drafts(config: HiSparseConfig, vllm_config: VllmConfig) -> None:
    """Refuse drafts that cannot be verified over hot buffers."""
    device, method = vllm_config.device_config.device_type, vllm_config.speculative_config.method
    kind, with_layers = {
        "mla": ("a DSA model", DSA_DRAFT_METHODS),
        "msa": ("MiniMax-M3", ()),
        "gqa": ("a dense model", DENSE_DRAFT_METHODS),
    }[config.algorithm_class.model_family]
    methods = (*with_layers, *DRAFT_METHODS[device])
    if method not in methods:
        expected = f"{' or '.join(methods)} with {kind} on {device} in this release"
        raise HiSparseConfigError("--speculative-config method", method, expected, "Remove --speculative-config.")
    if not config.algorithm_class.forgets_drafts:
        raise HiSparseConfigError(
            "--speculative-config method",
            method,
            f"none with algorithm '{config.algorithm}', which does not forget rejected drafts (forgets_drafts)",
            "Remove --speculative-config, or choose another algorithm.",
        )
    if method in with_layers and takes_images(vllm_config):
        raise HiSparseConfigError(
            "--speculative-config method",
            method,
            f"{' or '.join(DRAFT_METHODS[device])} with images, audio or video, which no draft model was tried with",
            "Add --language-model-only, or remove --speculative-config.",
        )
    if config.log_rows_by_layer:
        raise HiSparseConfigError(
            "log_rows_by_layer",
            True,
            "False with drafts, which select together in a step",
            "Learn the list without drafts; rows_by_layer takes it with drafts, too.",
        )
    by_batch = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    if by_batch is not None:
        raise HiSparseConfigError(
            "--speculative-config num_speculative_tokens_per_batch_size",
            by_batch,
            "none: as many drafts in every step",
            "Remove it.",
        )
    if vllm_config.speculative_config.parallel_drafting:
        raise HiSparseConfigError(
            "--speculative-config parallel_drafting", True, "False: drafts that follow from each other", "Remove it."
        )
    if vllm_config.speculative_config.use_multi_module_mtp():
        raise HiSparseConfigError(
            "--speculative-config num_speculative_tokens",
            vllm_config.speculative_config.num_speculative_tokens,
            "1 with a checkpoint of several MTP layers: each would draft a token, and a prefill side would leave out a "
            "prompt's last tokens",
            "Set it to 1, with which the first layer drafts.",
        )
    if config.selection_trace_dir is not None:
        raise HiSparseConfigError(
            "selection_trace_dir",
            config.selection_trace_dir,
            "none with --speculative-config",
            "Remove one of the two.",
        )


def _check_dense_model(config: HiSparseConfig, vllm_config: VllmConfig) -> None:
    """Refuse a model whose attention is not plain causal attention over keys that an algorithm can read."""
    model = vllm_config.model_config
    text_config = model.hf_text_config
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if getattr(text_config, "index_topk", None) is not None and model.use_mla:
        raise HiSparseConfigError(
            "algorithm",
            config.algorithm,
            f"none: {model.model} is a model that selects rows itself, for which algorithm is dsa",
            "Remove the option.",
        )
    reasons = {
        "a model with multi-head latent attention": model.use_mla,
        "an encoder or pooling model": model.runner_type != "generate" or model.is_encoder_decoder,
        "a model that selects blocks itself, for which algorithm is msa": _selects_blocks(model),
        "a model with recurrent layers": model.is_hybrid or model.is_attention_free,
        "a model with sliding window layers": (
            model.get_sliding_window() is not None or layer_types != {"full_attention"}
        ),
    }
    for kind, applies in reasons.items():
        if applies:
            raise HiSparseConfigError(
                "algorithm",
                config.algorithm,
                f"a decoder with full attention in every layer, such as Llama or Qwen3; {model.model} is {kind}",
                f"Serve another model, or remove {CONNECTOR_NAME}.",
            )


def _dense_top_k(config: HiSparseConfig) -> int:
    top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
    unit, least = config.tokens_per_unit, config.algorithm_class.min_budget(config.parsed_options)
    if top_k < least or top_k % unit:
        multiple = f"a multiple of {unit} (a unit of '{config.algorithm}'), and " if unit > 1 else ""
        is_known = config.algorithm in ALGORITHMS
        parts = (
            "the sinks, window or page in algorithm_options" if is_known else "unit_tokens or min_budget of the class"
        )
        raise HiSparseConfigError(
            "top_k",
            top_k,
            f"{multiple}at least {least}, the tokens that '{config.algorithm}' always selects",
            f"Correct it, or {parts}.",
        )
    return top_k


def _full_kv_layers(config: HiSparseConfig, model: ModelConfig) -> list[int]:
    num_layers = model.hf_text_config.num_hidden_layers
    layers = config.full_kv_layers
    if layers is None:
        layers = list(range(config.algorithm_class.num_full_kv_layers))
    layers = sorted(set(layers))
    if not set(layers) < set(range(num_layers)):
        raise HiSparseConfigError(
            "full_kv_layers",
            layers,
            f"layers from 0 to {num_layers - 1}, not all of them",
            f"List layers of {model.model}; at least one must be sparse.",
        )
    return layers


def _check_trace(config: HiSparseConfig, device: str) -> None:
    """Refuse to record the selections of KV heads, or of steps in a CUDA graph."""
    if config.selection_trace_dir is not None and (config.dense_unit is not None or device != "cpu"):
        raise HiSparseConfigError(
            "selection_trace_dir",
            config.selection_trace_dir,
            f"none with algorithm '{config.algorithm}' on {device}: selections are recorded of DSA models on the CPU "
            "platform",
            "Remove it, or serve the model with vLLM's CPU build.",
        )


def _check_import_buffer(config: HiSparseConfig, vllm_config: VllmConfig) -> None:
    """Refuse a buffer for imports where nothing is imported."""
    role = vllm_config.kv_transfer_config.kv_role
    if config.import_buffer_gib and role != "kv_consumer":
        raise HiSparseConfigError(
            "import_buffer_gib",
            config.import_buffer_gib,
            f"0 with kv_role {role}: one instance imports nothing",
            "Remove it, or set kv_role to kv_consumer on a decode instance.",
        )


def _host_pool_memory(config: HiSparseConfig, vllm_config: VllmConfig) -> str:
    """Return `host_pool_memory` after a check: `auto` and `managed` only where managed memory can be used."""
    device, kind = vllm_config.device_config.device_type, config.host_pool_memory
    reasons = {
        f"pinned or auto on {device}, because only CUDA has managed memory": device != "cuda",
        "pinned or auto with tiers, because the scheduler's process maps the pool": bool(config.tiers),
        "pinned or auto with --tensor-parallel-size above 1, because the ranks share the pool": (
            shares_host_pool(vllm_config)
        ),
    }
    for expected, applies in reasons.items():
        if applies and kind == "managed":
            raise HiSparseConfigError("host_pool_memory", kind, expected, "Remove it.")
    is_imported = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
    return "pinned" if any(reasons.values()) or (kind == "auto" and is_imported) else kind


def _prefill_tp_size(config: HiSparseConfig, tp_size: int) -> int:
    """Return the prefill side's tensor parallel size, after a check.

    A rank pulls whole blocks, so a dense model's KV heads must be divided among ranks in the same way on both sides.
    All ranks of a DSA model hold the same rows.
    """
    if config.prefill_tp_size is None:
        return tp_size
    larger, smaller = max(config.prefill_tp_size, tp_size), min(config.prefill_tp_size, tp_size)
    expected = f"a multiple or a divisor of --tensor-parallel-size {tp_size}"
    if config.dense_unit is not None:
        expected = f"{tp_size}, the --tensor-parallel-size here: each rank pulls its own KV heads"
    if larger % smaller or (config.dense_unit is not None and larger != smaller):
        raise HiSparseConfigError(
            "prefill_tp_size", config.prefill_tp_size, expected, "Start the prefill instances with such a size."
        )
    return config.prefill_tp_size


def _check_model(vllm_config: VllmConfig) -> None:
    """Refuse models by class, before their layers are built, and loaders that build the model themselves."""
    architecture = vllm_config.model_config.architecture
    if architecture in REFUSED_MODELS:
        reason, nearest = REFUSED_MODELS[architecture]
        raise HiSparseConfigError(
            "--model",
            architecture,
            f"a model that hot buffers can serve: {reason}",
            f"Remove {CONNECTOR_NAME}: vLLM serves this model with full KV. The nearest model with hot buffers is "
            f"{nearest}.",
        )
    load_format = str(vllm_config.load_config.load_format)
    if load_format in OTHER_LOADERS:
        raise HiSparseConfigError(
            "--load-format",
            load_format,
            f"none of {', '.join(OTHER_LOADERS)}, which build the model where hot buffers cannot be attached",
            "Remove it.",
        )


def _check_text_alone(vllm_config: VllmConfig) -> None:
    """Refuse images in prompts of a model that selects by itself."""
    if takes_images(vllm_config):
        raise HiSparseConfigError(
            "--model",
            vllm_config.model_config.architecture,
            "text alone: prompts with images, audio or video were never tried with a model that selects by itself",
            f"Add --language-model-only, or remove {CONNECTOR_NAME}.",
        )


def takes_images(vllm_config: VllmConfig) -> bool:
    """Return True if prompts may have images, audio or video."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and not multimodal.language_model_only


def _check_kernel_limits(top_k: int, rows: int, unit: int, query_len: int) -> None:
    """Refuse sizes that exceed the limits of the CUDA kernels."""
    for option, value, most in (
        ("top_k", top_k, MAX_TOP_K * unit),
        ("device_buffer_size", rows, most_buffer_rows(unit)),
        ("--speculative-config num_speculative_tokens", query_len - 1, most_drafts(top_k, unit)),
    ):
        if value > most:
            raise HiSparseConfigError(option, value, f"at most {most} on cuda", "Lower it.")


def check_connector(vllm_config: VllmConfig) -> None:
    """Refuse options with which vLLM would serve full KV, or hand KV to two connectors, although hot buffers are asked
    for.

    Raises:
        HiSparseConfigError: another connector contains this one, or has taken its place.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector == CONNECTOR_NAME:
        return
    if transfer.has_connector(CONNECTOR_NAME):
        raise HiSparseConfigError(
            "kv_connector",
            transfer.kv_connector,
            f"{CONNECTOR_NAME} itself: it cannot share requests with other connectors",
            f"Set kv_connector to {CONNECTOR_NAME}, with its options in kv_connector_extra_config; to keep prefixes on "
            "disk or elsewhere, set tiers.",
        )
    if vllm_config.cache_config.kv_offloading_size is not None and transfer.kv_connector_extra_config.keys() & {
        "host_pool_gib",
        "host_to_device_ratio",
    }:
        raise HiSparseConfigError(
            "--kv-offloading-size",
            vllm_config.cache_config.kv_offloading_size,
            f"none with {CONNECTOR_NAME}: vLLM replaces it by {transfer.kv_connector}, which keeps full KV on the "
            "device",
            f"Remove it: the host pool keeps prefixes, too. Or remove {CONNECTOR_NAME}.",
        )


def _check_engine(vllm_config: VllmConfig) -> None:
    role = vllm_config.kv_transfer_config.kv_role
    if role == "kv_producer":
        raise HiSparseConfigError(
            "kv_role",
            role,
            "kv_consumer (decode side) or kv_both (one instance)",
            f"Start prefill instances as stock vLLM with NixlConnector, without {CONNECTOR_NAME}.",
        )
    parallel = vllm_config.parallel_config
    for option in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, option) != 1:
            raise HiSparseConfigError(
                f"--{option.replace('_', '-')}",
                getattr(parallel, option),
                "1 in this release",
                "Use --tensor-parallel-size or --data-parallel-size instead.",
            )
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise HiSparseConfigError(
            "--distributed-executor-backend",
            "external_launcher",
            "mp or ray with --tensor-parallel-size above 1",
            "Remove it: one scheduler must manage the host pool for all ranks.",
        )
    device = vllm_config.device_config.device_type
    if device not in KV_CACHE_DTYPES:
        raise HiSparseConfigError("device", device, " or ".join(KV_CACHE_DTYPES), f"Remove {CONNECTOR_NAME}.")
    buffer_device = vllm_config.kv_transfer_config.kv_buffer_device
    if device == "cuda" and role == "kv_consumer" and buffer_device != "cuda":
        raise HiSparseConfigError(
            "kv_buffer_device",
            buffer_device,
            "cuda: NIXL writes into the host pool and the device KV cache themselves",
            "Remove it from --kv-transfer-config.",
        )
    if device == "cuda" and not vllm_config.use_v2_model_runner:
        raise HiSparseConfigError(
            "VLLM_USE_V2_MODEL_RUNNER",
            False,
            "Model Runner V2 on cuda",
            "Remove VLLM_USE_V2_MODEL_RUNNER=0, or the options that vLLM's log names as unsupported by V2.",
        )
    if parallel.use_ubatching:
        raise HiSparseConfigError(
            "--enable-dbo / --ubatch-size",
            parallel.num_ubatches,
            "no microbatches in this release",
            "Remove it: all requests of a step must share one batch, because they share the state of the hot buffers.",
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise HiSparseConfigError(
            "--enable-sleep-mode",
            True,
            "False: device memory that hot buffers, CUDA graphs and other instances know stays where it is",
            "Remove it.",
        )
    if vllm_config.model_config.enable_cumem_allocator:
        raise HiSparseConfigError(
            "--enable-cumem-allocator",
            True,
            "False: with it, /sleep and /release_kv_cache_memory free memory that hot buffers use, even without "
            "--enable-sleep-mode",
            "Remove it, and expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF.",
        )
    if parallel.enable_fault_tolerance:
        raise HiSparseConfigError(
            "--enable-fault-tolerance",
            True,
            "False: each step tells the workers only the changes of block tables, so an engine cannot go on after a "
            "step that failed",
            "Remove it, and let what supervises the engine restart it.",
        )
    if parallel.enable_elastic_ep:
        raise HiSparseConfigError(
            "--enable-elastic-ep",
            True,
            "False: nobody has tried to add or remove ranks of a running engine with hot buffers",
            "Remove it, and start the engine with all of its ranks.",
        )
    if vllm_config.aux_output_config.enabled:
        raise HiSparseConfigError(
            "--enable-return-routed-experts",
            True,
            "False: the host pool and prefill instances keep no experts of the tokens whose KV they have",
            f"Remove it, or remove {CONNECTOR_NAME}.",
        )
    if _is_batch_invariant():
        raise HiSparseConfigError(
            "VLLM_BATCH_INVARIANT",
            True,
            "False: kernels over hot buffers divide their work by the size of the batch, and a dense model's request "
            "attends to all tokens instead of the selected ones in a step with many new tokens",
            f"Remove VLLM_BATCH_INVARIANT=1, or remove {CONNECTOR_NAME}.",
        )
    if vllm_config.attention_config.hisparse_config is not None:
        raise HiSparseConfigError(
            "--attention-config hisparse_config",
            vllm_config.attention_config.hisparse_config,
            f"none: it sets up vLLM's own hot buffers, which would take those of {CONNECTOR_NAME} for their own",
            "Remove it, and set device_buffer_size in kv_connector_extra_config.",
        )
    if vllm_config.cache_config.prefix_match_unit is not None:
        raise HiSparseConfigError(
            "--prefix-match-unit",
            vllm_config.cache_config.prefix_match_unit,
            "none: prefixes are matched in whole blocks of the host pool",
            "Remove it.",
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise HiSparseConfigError(
            "--disable-hybrid-kv-cache-manager",
            True,
            "False",
            "Remove it: hot rows and device-resident KV are two KV cache groups.",
        )


def _is_batch_invariant() -> bool:
    """Return True if the environment asks for results that do not depend on the other requests of a step."""
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT
