"""Sizes of a model, read from its config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vllm_hisparse.config import REFUSED_MODELS, block_indexer_misfits
from vllm_hisparse.layout import FP8_DS_MLA_ROW_BYTES, MSA_BLOCK_SIZE, MSA_UNIT, indexer_row_bytes, mla_row_bytes
from vllm_hisparse.ops.limits import MAX_TOP_K

BF16, FP8 = 2, 1
MXFP4_GROUP = 32  # elements that share a scale of one byte
# Bytes of a weight by its bits. In 4 bits, weights are assumed to have the scales of MXFP4.
WEIGHT_BYTES = {16: BF16, 8: FP8, 4: 0.5 + 1 / MXFP4_GROUP}
WEIGHT_DTYPES = {"bfloat16": 16, "fp8": 8, "fp4": 4}
FP4_REFUSAL = "blocks of indexer keys are read and copied with the layout of fp8: leave out --indexer-kv-dtype mxfp4"
QUEST_FULL_KV_LAYERS = 2  # layers that keep full KV on the device unless `full_kv_layers` says otherwise
BESIDE = "hf_quant_config"  # file beside config.json, in checkpoints of ModelOpt before 0.31
# Lists of modules that keep 16 bits, in the formats of vLLM
KEPT = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "llm_int8_skip_modules")
LANGUAGE_MODELS = ("model", "model.language_model", "language_model.model")  # names of language models in checkpoints
LOADED_BITS = {"load_in_4bit": 4, "_load_in_4bit": 4, "load_in_8bit": 8, "_load_in_8bit": 8}  # of bitsandbytes
FP8_REFUSAL = "KV in fp8 of a model that selects blocks was never tried: leave out --kv-cache-dtype fp8"

_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}
_GLM5: dict[str, Any] = _V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "max_position_embeddings": 202752,
}


_MINIMAX_M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 524288,
    "sparse_attention_config": {
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
}
_HYV4: dict[str, Any] = _V32 | {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "vocab_size": 120832,
    "hidden_size": 2816,
    "intermediate_size": 6912,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 16,
    "layer_types": ["deepseek_sparse_attention"] * 34,
    "indexer_types": ["full", *(["full", "shared", "shared", "shared"] * 9)[:33]],
    "gated_mla": True,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
    "quantization_config": None,
}


def _dense(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, max_model_len: int = 131072
) -> dict[str, Any]:
    return {
        "architectures": [name],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": max_model_len,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": _V32,
    "GLM-5": _GLM5,
    "GLM-5.2": _GLM5 | {"index_topk_freq": 4, "max_position_embeddings": 1048576},
    "GLM-5.3": _GLM5 | {"index_topk_pattern": "FFSSS" + "FSSS" * 18 + "F", "max_position_embeddings": 1048576},
    "HY-V4": _HYV4,
    "MiniMax-M3": _MINIMAX_M3,
    "Llama-3.1-8B": _dense("LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128256),
    "Llama-3.3-70B": _dense("LlamaForCausalLM", 80, 8192, 28672, 64, 8, 128256),
    "Mistral-7B": _dense("MistralForCausalLM", 32, 4096, 14336, 32, 8, 32768, 32768),
    "Mistral-Small-24B": _dense("MistralForCausalLM", 40, 5120, 32768, 32, 8, 131072, 32768),
    "Qwen2.5-7B": _dense("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 152064, 32768),
    "Qwen2.5-72B": _dense("Qwen2ForCausalLM", 80, 8192, 29568, 64, 8, 152064, 32768),
    "Qwen3-8B": _dense("Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 151936, 40960),
    "Qwen3-32B": _dense("Qwen3ForCausalLM", 64, 5120, 25600, 64, 8, 151936, 40960),
    "Qwen3-30B-A3B": _dense("Qwen3MoeForCausalLM", 48, 2048, 6144, 32, 4, 151936, 40960)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "Qwen3-235B-A22B": _dense("Qwen3MoeForCausalLM", 94, 4096, 12288, 64, 4, 151936, 40960)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    "Qwen2-57B-A14B": _dense("Qwen2MoeForCausalLM", 28, 3584, 18944, 28, 4, 151936, 32768)
    | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
    | {"shared_expert_intermediate_size": 20480},
    "Mixtral-8x7B": _dense("MixtralForCausalLM", 32, 4096, 14336, 32, 8, 32000, 32768)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "GLM-4.5": _dense("Glm4MoeForCausalLM", 92, 5120, 12288, 96, 8, 151552)
    | {"n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    | {"n_shared_experts": 1, "first_k_dense_replace": 3},
    "GLM-4-9B": _dense("Glm4ForCausalLM", 40, 4096, 13696, 32, 2, 151552, 32768),
    "ERNIE-4.5-21B-A3B": _dense("Ernie4_5_MoeForCausalLM", 28, 2560, 12288, 20, 4, 103424)
    | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
    | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
}
CHECKPOINTS = {  # names by which vLLM loads the presets, with weights of the dtype that the preset has
    "DeepSeek-V3.2": "deepseek-ai/DeepSeek-V3.2",
    "GLM-5": "zai-org/GLM-5-FP8",
    "GLM-5.2": "zai-org/GLM-5.2-FP8",
    "GLM-5.3": "zai-org/GLM-5.3",
    "HY-V4": "/path/to/HY-V4",  # no name is known
    "MiniMax-M3": "MiniMaxAI/MiniMax-M3",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "Llama-3.3-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "Mistral-7B": "mistralai/Mistral-7B-Instruct-v0.3",
    "Mistral-Small-24B": "mistralai/Mistral-Small-24B-Instruct-2501",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen2.5-72B": "Qwen/Qwen2.5-72B-Instruct",
    "Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Qwen2-57B-A14B": "Qwen/Qwen2-57B-A14B-Instruct",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "GLM-4.5": "zai-org/GLM-4.5",
    "GLM-4-9B": "zai-org/GLM-4-9B-0414",
    "ERNIE-4.5-21B-A3B": "baidu/ERNIE-4.5-21B-A3B-PT",
}
BF16_CHECKPOINTS = {  # of presets whose weights are in fp8
    "GLM-5": "zai-org/GLM-5",
    "GLM-5.2": "zai-org/GLM-5.2",
    "GLM-5.3": "zai-org/GLM-5.3-BF16",
}
SPARSE_LAYERS = ("deepseek_sparse_attention", "sparse_attention", "sparse", "indexed_attention")  # vLLM's hy_v4
PLAIN_LAYERS = ("full_attention", *SPARSE_LAYERS)  # kinds in `layer_types` that hot buffers can serve
NATIVE_MODELS = (  # classes that vLLM's own HiSparse serves
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm4MoeLiteForCausalLM",
)


SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")  # that every configuration must have
POSITIVE, COUNT = "a whole number above 0", "a whole number, 0 or more"
NAMES, TEXT, OBJECT = "a list of names", "a string", "an object"
TYPES = {  # what a plan reads of config.json
    POSITIVE: (
        *(*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("kv_lora_rank", "index_head_dim", "index_n_heads"),
    ),
    COUNT: (
        *("vocab_size", "intermediate_size", "moe_intermediate_size", "dense_intermediate_size"),
        *("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_experts_per_tok", "moe_k"),
        *("n_shared_experts", "moe_num_shared_experts", "shared_expert_intermediate_size"),
        *("first_k_dense_replace", "moe_layer_start_index", "num_nextn_predict_layers"),
        *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("index_topk", "index_topk_freq", "index_skip_topk_offset"),
    ),
    NAMES: ("architectures", "layer_types", "indexer_types", "mlp_layer_types"),
    TEXT: ("index_topk_pattern",),
    OBJECT: ("sparse_attention_config", "quantization_config"),
}
INDEXER_KEYS = ("index_topk", "sparse_attention_config")  # without these, a model has no indexer
INDEXER_TYPES = {  # the same of `sparse_attention_config`
    POSITIVE: ("sparse_index_dim",),
    COUNT: ("sparse_num_index_heads", "sparse_topk_blocks", "sparse_block_size", "sparse_local_block"),
}


class ModelError(ValueError):
    """No plan is possible for a configuration; the message names the size that is missing or wrong."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that a plan needs. Bytes and FLOPs are for the whole model, without parallelism.

    Attributes:
        name: name of the model in the output.
        num_layers: attention layers.
        num_indexers: layers with an indexer of their own; 0 for a dense model.
        top_k: positions that a model with indexers selects; 0 for a dense model.
        row_bytes: bytes of one token's main KV in one layer.
        key_bytes: bytes of one token's indexer key in one layer; 0 for a dense model.
        index_heads, index_head_dim: heads of an indexer, and elements of its keys; 0 for a dense model.
        num_heads: attention heads.
        bounds_bytes: Quest's bounds of one page in one layer, in bf16 whatever the dtype of the KV; 0 for MLA.
        num_kv_heads: KV heads of a dense model; 1 for a DSA model.
        head_size: elements of a head of a dense model; 0 for MLA.
        max_model_len: tokens of the longest sequence that the model supports.
        dense_weight_bytes: bytes of the weights that every step reads once, whatever its size.
        expert_bytes: bytes of one routed expert in all layers that have experts.
        num_experts, experts_per_token: routed experts of a layer, and those that a token uses; 0 without experts.
        token_flops: multiplications and additions per token, without attention.
        row_flops: multiplications and additions per attended row, in all layers.
        num_draft_layers: MTP layers in the checkpoint of a DSA model.
        num_full_kv_layers: layers of a model with indexers that do not select, and keep their KV on the device.
        has_native: True if vLLM's own HiSparse serves the model.
        refusal: reason why hot buffers cannot serve the model; empty if they can.
        selects_blocks: True if the indexers select blocks for each KV head (MiniMax-M3).
        key_dtype: dtype of indexer keys, as `load` takes it.
        weight_bits: bits of a weight, without its share of a scale.
    """

    name: str
    num_layers: int
    num_indexers: int
    top_k: int
    row_bytes: int
    key_bytes: int
    num_heads: int
    bounds_bytes: int
    num_kv_heads: int
    max_model_len: int
    dense_weight_bytes: float
    expert_bytes: float
    num_experts: int
    experts_per_token: int
    token_flops: float
    row_flops: float
    num_draft_layers: int
    has_native: bool = False
    refusal: str = ""
    num_full_kv_layers: int = 0
    selects_blocks: bool = False
    key_dtype: str = "auto"
    index_heads: int = 0
    index_head_dim: int = 0
    head_size: int = 0
    weight_bits: int = 16

    @property
    def is_dsa(self) -> bool:
        """True if the model has indexers."""
        return self.top_k > 0

    @property
    def has_kv_heads(self) -> bool:
        """True if each KV head has rows of its own, so that tensor parallel ranks hold a share of them each."""
        return not self.is_dsa or self.selects_blocks

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.dense_weight_bytes + self.num_experts * self.expert_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's full KV in all layers, indexer keys included."""
        return self.num_layers * self.row_bytes + self.num_indexers * self.key_bytes

    @classmethod
    def load(
        cls, model: str, kv_dtype: str = "auto", weight_dtype: str = "auto", key_dtype: str = "auto"
    ) -> ModelShape:
        """Read a preset, a model directory or a config.json.

        Args:
            model: name of a preset, in any case, or a path.
            kv_dtype: `auto`, `bfloat16` or `fp8`, as `--kv-cache-dtype`.
            weight_dtype: `auto` (what the configuration says), or a key of `WEIGHT_DTYPES`.
            key_dtype: dtype of indexer keys: `auto`, `fp8` or `mxfp4`.

        Raises:
            ModelError: there is no such model, or a size of its configuration is missing or wrong.
        """
        name, config = _read(model)
        return cls.from_config(name, config, kv_dtype, weight_dtype, key_dtype)

    @classmethod
    def from_config(
        cls, name: str, config: dict[str, Any], kv_dtype: str, weight_dtype: str = "auto", key_dtype: str = "auto"
    ) -> ModelShape:
        """Read a parsed config.json; see `load`."""
        try:
            config = _checked(config)
            refused = refusal(config)
            if not any(_selecting(config)):  # full KV in all layers: a model without indexers
                config = {key: value for key, value in config.items() if key not in INDEXER_KEYS}
            is_mla, selects_blocks = "kv_lora_rank" in config, bool(config.get("sparse_attention_config"))
            is_dsa = selects_blocks or (is_mla and bool(config.get("index_topk")))
            is_told = weight_dtype == "auto"
            bits = _weight_bits(config) if is_told else WEIGHT_DTYPES[weight_dtype]
            attention = (_mla_attention if is_mla else _gqa_attention)(config, kv_dtype)
            kept = _kept_attention(config, attention["projections"]) if is_told else 0.0
            if selects_blocks:
                _add_block_indexers(attention, config, FP8 if key_dtype == "fp8" else BF16)
            elif key_dtype == "mxfp4" and is_dsa:
                attention["kv"]["key_bytes"] = narrow_key_bytes(config["index_head_dim"])
        except KeyError as error:
            raise ModelError(f"{name}: config.json has no {error.args[0]}; no plan can be made for it") from None
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        return cls(
            name=name,
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            max_model_len=config.get("max_position_embeddings", 1 << 17),
            num_full_kv_layers=num_full_kv_layers(config) if is_dsa else 0,
            selects_blocks=selects_blocks,
            key_dtype=key_dtype,
            num_draft_layers=config.get("num_nextn_predict_layers", 0) if is_dsa else 0,
            has_native=is_dsa and next(iter(config.get("architectures", [])), "") in NATIVE_MODELS,
            refusal=refused
            or (FP4_REFUSAL if key_dtype == "mxfp4" else "")
            or (FP8_REFUSAL if selects_blocks and kv_dtype == "fp8" else ""),
            weight_bits=bits,
            **attention["kv"],
            **_weights(config, WEIGHT_BYTES[bits], sum(attention["projections"].values()), kept),
        )


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, without nulls, which mean the default.

    Raises:
        ModelError: a value has a wrong type, or a list a wrong length.
        KeyError: a size is missing.
    """
    _check_types(config, {OBJECT: ("text_config",)})
    config = config | _without_nulls(config.get("text_config") or {}) | {"architectures": config.get("architectures")}
    config = _without_nulls(config)
    if missing := [key for key in SIZES if key not in config]:
        raise KeyError(", ".join(missing))
    _check_types(config, TYPES)
    if blocks := config.get("sparse_attention_config"):
        config["sparse_attention_config"] = blocks = {"sparse_local_block": 0} | _without_nulls(blocks)
        _check_types(blocks, INDEXER_TYPES, "sparse_attention_config.")
        frequency, num_layers = blocks["sparse_attention_freq"], config["num_hidden_layers"]
        is_list = isinstance(frequency, list) and all(isinstance(each, int) for each in frequency)
        if not is_list or len(frequency) != num_layers:
            got = f"a list of {len(frequency)}" if is_list else repr(frequency)
            raise ModelError(
                f"sparse_attention_config.sparse_attention_freq of config.json: got {got}, expected a list of "
                f"{num_layers} whole numbers, one for each layer"
            )
    return config


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _check_types(config: dict[str, Any], types: dict[str, tuple[str, ...]], prefix: str = "") -> None:
    """Refuse values of other types than those of `TYPES`; null has every type."""
    fits: dict[str, Callable[[Any], bool]] = {
        POSITIVE: lambda value: type(value) is int and value > 0,
        COUNT: lambda value: type(value) is int and value >= 0,
        NAMES: lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        TEXT: lambda value: isinstance(value, str),
        OBJECT: lambda value: isinstance(value, dict),
    }
    for expected, keys in types.items():
        for key in keys:
            if (value := config.get(key)) is not None and not fits[expected](value):
                raise ModelError(f"{prefix}{key} of config.json: got {value!r}, expected {expected}")


def _quantization(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the place that describes a checkpoint's quantization, and the description, perhaps empty."""
    source, found = "quantization_config of config.json", config.get("quantization_config") or {}
    if not found and (beside := config.get(BESIDE)):
        source, found = f"quantization of {BESIDE}.json", beside
    inner = found.get("quantization")
    return source, inner if isinstance(inner, dict) else found


def _kept_attention(config: dict[str, Any], projections: dict[str, float]) -> float:
    """Return the number of weights in attention that a quantised checkpoint leaves in 16 bits.

    Args:
        config: the checked configuration.
        projections: weights of each module of a layer's attention, by its name.
    """
    _, found = _quantization(config)
    lists = [found[key] for key in KEPT if isinstance(found.get(key), list)]
    patterns = [each for modules in lists for each in modules if isinstance(each, str)]
    return sum(
        size
        for layer in range(config["num_hidden_layers"])
        for name, size in projections.items()
        if any(_keeps(pattern, f"layers.{layer}.self_attn.{name}") for pattern in patterns)
    )


def _keeps(pattern: str, module: str) -> bool:
    """Return whether a pattern of a checkpoint's quantization stands for a module of the language model, or for one
    that contains it.

    Args:
        pattern: `re:` and a regular expression, a name with wildcards, or some parts of a name.
        module: the module's name, without the model's.
    """
    names = [f"{model}.{module}" for model in LANGUAGE_MODELS]
    if pattern.startswith("re:"):
        try:
            return any(re.match(pattern[3:], name) for name in names)
        except re.error:
            return False
    if "*" in pattern:
        return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)


def _weight_bits(config: dict[str, Any]) -> int:
    """Return the bits of a weight, as far as the checkpoint tells.

    Raises:
        ModelError: weights have several widths, an unknown one, or one that is not told.
    """
    source, found = _quantization(config)
    if not found:
        return 16
    names = " ".join(str(found[key]) for key in ("quant_method", "quant_algo") if found.get(key))
    if found.get("quant_method") == "compressed-tensors" and found.get("config_groups") == {}:
        return 16  # nothing but KV is quantised
    bits = _told_bits(found)
    if not bits and (match := re.search(r"(?:fp|int|w)(\d+)", names.lower())):  # fp8, mxfp4, NVFP4, W4A16_AWQ
        bits = [int(match[1])]
    bits = _unique(bits)
    if len(bits) != 1 or type(bits[0]) is not int or bits[0] not in WEIGHT_BYTES:
        told = f"weights of {' and '.join(map(str, bits))} bits" if bits else "an unknown number of bits of a weight"
        raise ModelError(
            f"{source}: got {names or 'no quant_method'} with {told}, expected 4, 8 or 16 "
            "for all weights. Give --weight-dtype to plan with others"
        )
    return bits[0]


def _told_bits(found: dict[str, Any]) -> list[Any]:
    """Return all widths of weights that the quantization of a checkpoint tells, in any of vLLM's formats."""
    bits = [found.get("bits"), found.get("w_bit")]
    bits += [width for key, width in LOADED_BITS.items() if found.get(key)]
    bits += [each.get("num_bits") for each in _weights_of(found.get("config_groups"), "weights")]
    # Quark: dtypes such as fp8_e4m3 and int4, for all layers, and for those that differ.
    quark = [found.get("global_quant_config"), *_values(found.get("layer_quant_config"))]
    dtypes = [each.get("dtype") for each in _weights_of(dict(enumerate(quark)), "weight")]
    bits += [_number(r"(\d+)", dtype) for dtype in dtypes]
    # ModelOpt with several algorithms, such as FP8 and W4A16_AWQ.
    layers = [each for each in _values(found.get("quantized_layers")) if isinstance(each, dict)]
    bits += [_number(r"(?:fp|int|w)(\d+)", each.get("quant_algo")) for each in layers]
    # TorchAO: int4_weight_only, Float8DynamicActivationFloat8WeightConfig.
    for each in _values(found.get("quant_type")):
        name = each.get("_type") if isinstance(each, dict) else each
        bits.append(_number(r"(\d+)weight", str(name).replace("_", "")))
    return [each for each in bits if each is not None]


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else []


def _weights_of(groups: Any, key: str) -> list[dict[str, Any]]:
    """Return the descriptions of weights in groups of layers. If a group has several, they are applied in turn, and the
    last one tells how weights are stored."""
    found = [group.get(key) for group in _values(groups) if isinstance(group, dict)]
    last = [each[-1] if isinstance(each, list) and each else each for each in found]
    return [each for each in last if isinstance(each, dict)]


def _unique(values: list[Any]) -> list[Any]:
    """Return the values without repetitions, in their order; a value may be a list."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _number(pattern: str, text: Any) -> int | None:
    match = re.search(pattern, str(text).lower())
    return int(match[1]) if match else None


def narrow_key_bytes(index_head_dim: int) -> int:
    """Return the bytes of an indexer key in 4 bits: its elements, and a scale of one byte for each group of them."""
    return index_head_dim // 2 + index_head_dim // MXFP4_GROUP


def refusal(config: dict[str, Any]) -> str:
    """Return why hot buffers cannot serve a model, as far as its config.json tells; empty if they can."""
    architecture = next(iter(config.get("architectures") or []), "")
    if architecture in REFUSED_MODELS:
        return REFUSED_MODELS[architecture][0]
    kinds = [kind for kind in config.get("layer_types") or [] if kind not in PLAIN_LAYERS]
    if kinds:
        return f"{len(kinds)} of its layers are {' and '.join(sorted(set(kinds)))}, not plain attention"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return f"its layers have a sliding window of {config['sliding_window']} tokens"
    if config.get("attn_logit_softcapping"):
        return "its attention caps logits"
    if config.get("sparse_attention_config"):
        return _block_refusal(config)
    if config.get("kv_lora_rank") is not None:
        if not (config.get("index_topk") and any(_selecting(config))):
            return "its latent attention has no indexer: nothing selects positions"
        return _selection_refusal(config["index_topk"], 1)
    if config["num_hidden_layers"] <= QUEST_FULL_KV_LAYERS:
        return (
            f"its {config['num_hidden_layers']} layers are not more than the {QUEST_FULL_KV_LAYERS} that keep full KV "
            "with Quest: none would have hot rows"
        )
    return ""


def _block_refusal(config: dict[str, Any]) -> str:
    """Return why hot buffers cannot serve a model that selects blocks, as the engine says at start-up."""
    indexer, kv_heads = config["sparse_attention_config"], config.get("num_key_value_heads")
    if not any(_selecting(config)):
        return "no layer has an indexer (sparse_attention_freq): nothing selects positions"
    for name, expected in block_indexer_misfits(indexer, kv_heads):
        return f"its {name} is {indexer.get(name)}, not {expected}"
    if indexer["sparse_topk_blocks"] < 1:
        return f"its sparse_topk_blocks is {indexer['sparse_topk_blocks']}, not at least 1"
    return _selection_refusal(indexer["sparse_topk_blocks"] * MSA_BLOCK_SIZE, MSA_UNIT)


def _selection_refusal(top_k: int, unit: int) -> str:
    """Return the refusal of an indexer that selects more positions than the kernels take; empty if it does not."""
    most = MAX_TOP_K * unit
    return f"its indexer selects {top_k} positions, more than the {most} that the kernels take" if top_k > most else ""


def _read(model: str) -> tuple[str, dict[str, Any]]:
    for name, config in PRESETS.items():
        if model.lower() in (name.lower(), CHECKPOINTS.get(name, name).lower()):
            return name, config
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"got {model!r}, expected a directory, a config.json or one of {', '.join(PRESETS)}")
    config = _read_object(path)
    config.pop(BESIDE, None)
    beside = path.with_name(f"{BESIDE}.json")
    if path.name == "config.json" and not config.get("quantization_config") and beside.is_file():
        config[BESIDE] = _read_object(beside)
    return path.parent.name if path.name == "config.json" else path.stem, config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no configuration of a model: got a {type(found).__name__}, expected an object")
    return found


def num_full_kv_layers(config: dict[str, Any]) -> int:
    """Count the layers of a model with indexers that do not select.

    They are those of HY-V4 that `layer_types` does not list as sparse, and those of MiniMax-M3 without an indexer.
    """
    return len(_selecting(config)) - sum(_selecting(config))


def _selecting(config: dict[str, Any]) -> list[bool]:
    """For each layer of a model with indexers, True if it attends to selected positions, its own or another's."""
    num_layers = config["num_hidden_layers"]
    if blocks := config.get("sparse_attention_config"):
        return [bool(selects) for selects in blocks["sparse_attention_freq"]]
    if config.get("model_type") != "hy_v4":
        return [True] * num_layers
    return [kind in SPARSE_LAYERS for kind in config.get("layer_types") or [""] * num_layers]


def num_indexers(config: dict[str, Any]) -> int:
    """Count the layers with an indexer of their own, as vLLM reads `indexer_types`, the pattern and the frequency."""
    num_layers = config["num_hidden_layers"]
    if types := config.get("indexer_types"):
        return sum(kind != "shared" and selects for kind, selects in zip(types, _selecting(config), strict=False))
    if pattern := config.get("index_topk_pattern"):
        return sum(letter != "S" for letter in pattern[:num_layers])
    frequency, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    return sum(max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers))


def _mla_attention(config: dict[str, Any], kv_dtype: str) -> dict[str, Any]:
    latent, rope, heads = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_attention_heads"]
    nope, value, hidden = config["qk_nope_head_dim"], config["v_head_dim"], config["hidden_size"]
    layers, query = config["num_hidden_layers"], config.get("q_lora_rank")
    queries = {"q_a_proj": hidden * query, "q_b_proj": query * heads * (nope + rope)} if query else {}
    projections: dict[str, float] = queries or {"q_proj": hidden * heads * (nope + rope)}
    projections |= {"g_proj": hidden * heads * value} if config.get("gated_mla") else {}
    projections |= {"kv_a_proj_with_mqa": hidden * (latent + rope), "kv_b_proj": latent * heads * (nope + value)}
    projections |= {"o_proj": heads * value * hidden}
    kv = {
        "num_indexers": 0,
        "top_k": config.get("index_topk") or 0,
        "row_bytes": mla_row_bytes(latent, rope, BF16),
        "key_bytes": 0,
        "bounds_bytes": 0,
        "num_kv_heads": 1,
        "row_flops": 2.0 * layers * heads * (2 * latent + rope),
    }
    if kv["top_k"]:
        index_dim, index_heads = config["index_head_dim"], config["index_n_heads"]
        kv |= {"num_indexers": num_indexers(config), "key_bytes": indexer_row_bytes(index_dim)}
        kv |= {"index_heads": index_heads, "index_head_dim": index_dim}
        kv["row_bytes"] = FP8_DS_MLA_ROW_BYTES if kv_dtype == "fp8" else kv["row_bytes"]
        indexer = (query or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
        projections["indexer"] = kv["num_indexers"] * indexer / layers  # of a mean layer
    elif kv_dtype == "fp8":
        kv["row_bytes"] = mla_row_bytes(latent, rope, FP8)
    return {"kv": kv, "projections": projections}


def _gqa_attention(config: dict[str, Any], kv_dtype: str) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads, size = config.get("num_key_value_heads", heads), config.get("head_dim") or hidden // heads
    if not size:
        raise ModelError(f"hidden_size of config.json: got {hidden}, expected at least the {heads} attention heads")
    element = FP8 if kv_dtype == "fp8" else BF16
    return {
        "kv": {
            "num_indexers": 0,
            "top_k": 0,
            "row_bytes": 2 * kv_heads * size * element,
            "key_bytes": 0,
            "bounds_bytes": 2 * kv_heads * size * BF16,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "row_flops": 4.0 * config["num_hidden_layers"] * heads * size,
        },
        "projections": {
            name: hidden * size * number
            for name, number in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads), ("o_proj", heads))
        },
    }


def _add_block_indexers(attention: dict[str, Any], config: dict[str, Any], element: int) -> None:
    """Add MiniMax-M3's indexers, which have a query for each KV head and one key, to the sizes of its attention."""
    sizes, num_sparse = config["sparse_attention_config"], sum(_selecting(config))
    key, queries = sizes["sparse_index_dim"], sizes["sparse_num_index_heads"]
    attention["kv"] |= {
        "num_indexers": num_sparse,
        "top_k": sizes["sparse_topk_blocks"] * sizes["sparse_block_size"],
        "key_bytes": key * element,
        "bounds_bytes": 0,
    }
    indexer = config["hidden_size"] * key * (queries + 1)
    attention["projections"]["indexer"] = num_sparse * indexer / config["num_hidden_layers"]  # of a mean layer


def _weights(config: dict[str, Any], weight: float, attention: float, kept: float) -> dict[str, Any]:
    """Return the fields of `ModelShape` about weights.

    Args:
        config: the checked configuration.
        weight: bytes of a quantised weight.
        attention: number of weights in a mean layer's attention.
        kept: number of weights in all layers' attention that have 16 bits.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = _first(config, "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    size = config.get("moe_intermediate_size") or config.get("intermediate_size", 0)
    first_with_experts = _first(config, "first_k_dense_replace", "moe_layer_start_index")
    first_with_experts = config.get("mlp_layer_types", []).count("dense") or first_with_experts
    if isinstance(has_experts := config.get("moe_layer_freq"), list):
        first_with_experts = has_experts.count(0)
    dense_layers = min(first_with_experts, layers) if experts else layers
    moe_layers = layers - dense_layers
    head = hidden * config.get("vocab_size", 0)  # a step does not read the whole embedding
    dense_size = config.get("dense_intermediate_size") or config.get("intermediate_size", 0)
    dense = layers * attention + dense_layers * 3 * hidden * dense_size
    shared = size * _first(config, "n_shared_experts", "moe_num_shared_experts")
    dense += moe_layers * 3 * hidden * (shared or config.get("shared_expert_intermediate_size", 0))
    expert = moe_layers * 3 * hidden * size if experts else 0
    per_token = min(_first(config, "num_experts_per_tok", "moe_k"), experts)
    return {
        "dense_weight_bytes": dense * weight + kept * (BF16 - weight) + head * BF16,
        "expert_bytes": float(expert * weight),
        "num_experts": experts,
        "experts_per_token": per_token,
        "token_flops": 2.0 * (dense + head + per_token * expert),
    }


def _first(config: dict[str, Any], *names: str) -> int:
    """Return the first of these values that a configuration has, because model classes use different names for it."""
    return next((config[name] for name in names if config.get(name)), 0)
