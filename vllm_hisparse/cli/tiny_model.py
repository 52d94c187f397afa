"""Writes tiny models. They have random weights of useful scale, KV rows like real DSA models, and a real tokenizer."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

MANIFEST = "manifest.json"  # written first with the variant alone, and as a whole when the model is complete
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL_TOKENS = [BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
VOCAB_SIZE = 512
# Attention scores get this standard deviation, so that a head reads a handful of rows instead of averaging them all.
SCORE_STD = 3.0
# Scale of a layer's addition to the residual stream. It is small, so that a selection changed by rounding matters
# little.
RESIDUAL_GAIN = 0.3
EXPERT_GAIN = 0.03
# Attention sinks get this mean, which is near the logarithm of the sum of exp(score) over 2048 rows, and this standard
# deviation: at every length, some heads keep little but their sink, others none of it.
SINK_MEAN, SINK_STD = 12.0, 6.0
# Logits get this standard deviation: the best token stands out, but with a probability well below 1.
LOGIT_STD = 4.0

CORPUS = """\
The full cache of every running request lives in host memory, and a small hot buffer lives on the device. Each decode
step selects the most useful positions, finds which of them are in the buffer, copies the missing rows from the host,
evicts the rows that were not used for the longest time, and attends over what is left. A prompt is read once, in one
or more chunks, and its rows are written to the pool of blocks. When the pool is full, new requests wait in the queue
until a running request has finished, or a request is preempted and later resumed without losing its work. Long ago
people kept their letters in a large house with many rooms. Some letters were read every day, so they stayed on the
table near the window. Others were old, and it took a walk through the garden to find them. One morning a child asked
why the table was so small. If it were large, said the mother, we would need more light, more wood and more time to
look at it. A small table is quick, and the house keeps the rest. Who knows which letter you will want tomorrow? Nobody
can know, but we can remember what you wanted today. The numbers are 0 1 2 3 4 5 6 7 8 9 10 12 16 20 32 50 64 100 128.
"""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ ('<｜Assistant｜>' if message.role == 'assistant' else '<｜User｜>') + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)

COMMON_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

DSA_CONFIG: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "dsv32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "glm": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "indexer_rope_interleave": True,
    },
}

VARIANTS["glm52"] = {**VARIANTS["glm"], "index_topk_freq": 4}
VARIANTS["glm53"] = {**VARIANTS["glm"], "index_topk_pattern": "FFSSS" + "FSSS" * 20}  # a letter for each layer
VARIANTS["qwen3_moe"] = {
    **VARIANTS["qwen3"],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
VARIANTS["mixtral"] = {
    **VARIANTS["llama"],
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
VARIANTS["qwen2_moe"] = {
    **VARIANTS["llama"],
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
VARIANTS["glm4_moe"] = {
    **VARIANTS["llama"],
    **{name: value for name, value in DSA_CONFIG.items() if not name.endswith(("_rank", "head_dim"))},
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 64,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
VARIANTS["ernie45_moe"] = {
    **VARIANTS["llama"],
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1023,
    "moe_layer_interval": 1,
    "use_bias": False,
}
VARIANTS["hyv4"] = {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "pad_token_id": 1,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["deepseek_sparse_attention"] * 65,  # of these and the next, the first ones
    "indexer_types": ["full"] + ["full", "shared", "shared", "shared"] * 16,
    "learnable_sink": True,
    "gated_mla": True,
    "enable_ihc": True,
    "hc_mult": 4,
    "swiglu_limit": 10.0,
}
VARIANTS["hyv4_mixed"] = {
    **VARIANTS["hyv4"],
    "layer_types": ["deepseek_sparse_attention"] * 2 + ["full_attention"] + ["deepseek_sparse_attention"] * 62,
}
VARIANTS["minimax_m3"] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_mtp",  # vLLM's only name for a configuration without images
    "head_dim": 128,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
DENSE_VARIANTS = ("llama", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "ernie45_moe")
WITHOUT_DRAFTS = (*DENSE_VARIANTS, "minimax_m3")  # variants that have no draft layer
HEADS_PER_KV_HEAD = 4  # query heads per KV head in dense variants
M3_HEADS_PER_KV_HEAD, M3_BLOCK, M3_FULL_LAYERS = 16, 128, 2  # the last: leading layers that do not select

Variant = StrEnum("Variant", list(VARIANTS))  # type: ignore[misc]
Dtype = StrEnum("Dtype", ["bfloat16", "float32"])


class OtherModelError(ValueError):
    """A directory holds a model that `make-model` does not replace."""


class Weight(NamedTuple):
    """One tensor of the checkpoint: constant, or normal with a mean and standard deviation gain / sqrt(fan_in)."""

    shape: tuple[int, ...]
    gain: float = 1.0
    constant: float | None = None
    fp32: bool = False
    mean: float = 0.0

    def std(self) -> float:
        return self.gain * self.shape[-1] ** -0.5


def make_model(
    variant: str,
    out_dir: Path | str,
    *,
    num_layers: int = 4,
    num_heads: int = 8,
    index_n_heads: int = 8,
    index_topk: int = 256,
    draft_layers: int = 0,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """Write config, tokenizer and weights to out_dir, unless it already holds exactly this model.

    NOTE: any other model in out_dir is replaced; `check_replaceable` refuses to.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}, expected one of {', '.join(VARIANTS)}")
    if dtype not in list(Dtype):
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(Dtype)}")
    if draft_layers and variant in WITHOUT_DRAFTS:
        raise ValueError(f"draft_layers is {draft_layers}, expected 0 with the variant {variant!r}")
    out_dir = Path(out_dir)
    config = model_config(variant, num_layers, num_heads, index_n_heads, index_topk, draft_layers, dtype)
    manifest = {"variant": variant, "seed": seed, "dtype": dtype, "key": model_key(config, seed)}
    if read_manifest(out_dir) == manifest:
        return out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / MANIFEST, {"variant": variant})
    write_json(out_dir / "config.json", config)
    tokenizer = write_tokenizer(out_dir, config["max_position_embeddings"])
    write_weights(out_dir / "model.safetensors", config, tokenizer, seed)
    write_json(out_dir / MANIFEST, manifest)
    return out_dir


def model_config(
    variant: str, num_layers: int, num_heads: int, index_n_heads: int, index_topk: int, draft_layers: int, dtype: str
) -> dict[str, Any]:
    config = {
        **VARIANTS[variant],
        **COMMON_CONFIG,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "dtype": dtype,
    }
    if variant == "qwen2_moe":
        config["head_dim"] = config["hidden_size"] // num_heads  # vLLM's class supports no other value
    if variant in DENSE_VARIANTS:
        return {**config, "num_key_value_heads": max(num_heads // HEADS_PER_KV_HEAD, 1)}
    if variant == "minimax_m3":
        return {**config, **minimax_config(num_layers, max(num_heads // M3_HEADS_PER_KV_HEAD, 1), index_topk)}
    sizes = {
        "num_key_value_heads": num_heads,
        "index_n_heads": index_n_heads,
        "index_topk": index_topk,
        "num_nextn_predict_layers": draft_layers,
    }
    config = {**config, **DSA_CONFIG, **sizes}
    of_layers: dict[str, Any] = {
        name: config[name][:num_layers] for name in ("layer_types", "indexer_types") if name in config
    }
    return {**config, **of_layers}


def minimax_config(num_layers: int, num_kv_heads: int, index_topk: int) -> dict[str, Any]:
    """Return the sizes of MiniMax-M3. NOTE: without experts, which have nothing to do with KV."""
    return {
        "hidden_act": "swigluoai",
        "num_key_value_heads": num_kv_heads,
        "dense_intermediate_size": COMMON_CONFIG["intermediate_size"],
        "moe_layer_freq": [0] * num_layers,
        "num_mtp_modules": 0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": num_kv_heads,
            "sparse_topk_blocks": max(index_topk // M3_BLOCK, 1),
            "sparse_block_size": M3_BLOCK,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [int(layer >= M3_FULL_LAYERS) for layer in range(num_layers)],
        },
    }


def model_key(config: dict[str, Any], seed: int) -> str:
    """Return a key of the parameters and of this file, so that a model of an older recipe is not used."""
    recipe = json.dumps([config, seed], sort_keys=True).encode() + Path(__file__).read_bytes()
    return hashlib.sha256(recipe).hexdigest()


def read_manifest(out_dir: Path) -> dict[str, Any] | None:
    """Return the manifest of a tiny model, or None if there is none or if it is a file of something else."""
    try:
        manifest = json.loads((out_dir / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def check_replaceable(out_dir: Path, variant: str) -> None:
    """Refuse a directory that holds a model, unless it is a tiny model of this variant, complete or not.

    Raises:
        OtherModelError: says what to do.
    """
    if (read_manifest(out_dir) or {}).get("variant") == variant:
        return
    names = (MANIFEST, "config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors")
    if any(found for name in names for found in out_dir.glob(name)):
        raise OtherModelError(
            f"got {out_dir}, which holds another model, expected a new directory or one that holds a tiny model of the "
            f"variant {variant}: name another directory"
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(out_dir: Path, max_length: int) -> "Tokenizer":
    """Write a byte-level BPE. Encoding and decoding keep every text; common English words are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(out_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out_dir / "tokenizer_config.json", settings)
    return tokenizer


def checkpoint_weights(config: dict[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Yield the names and weights of the checkpoint, in a fixed order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", Weight((vocab, hidden), gain=hidden**0.5)
    num_layers, norm = config["num_hidden_layers"], Weight((hidden,), constant=norm_weight(config, 1.0))
    for layer in range(num_layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        if layer >= num_layers:
            yield from draft_weights(config, prefix)
        yield f"{prefix}.input_layernorm.weight", norm
        yield f"{prefix}.post_attention_layernorm.weight", norm
        if "index_topk" in config:
            yield from attention_weights(config, f"{prefix}.self_attn")
            if layer >= num_layers or has_indexer(config, layer):
                yield from indexer_weights(config, f"{prefix}.self_attn.indexer")
        else:
            yield from gqa_weights(config, f"{prefix}.self_attn")
            if (
                "sparse_attention_config" in config
                and config["sparse_attention_config"]["sparse_attention_freq"][layer]
            ):
                yield from block_indexer_weights(config, f"{prefix}.self_attn")
        if config["model_type"] == "hy_v4" and layer < num_layers:
            yield from channel_weights(config, f"{prefix}.hc_attn_layer.hc_pre")
            yield from channel_weights(config, f"{prefix}.hc_mlp_layer.hc_pre")
        yield from feed_forward_weights(config, prefix, layer)
    if config["model_type"] == "hy_v4":
        num_channels = config["hc_mult"]
        yield "model.hc_head.hc_head_fn", Weight((num_channels, num_channels * hidden), fp32=True)
        yield "model.hc_head.hc_head_scale", Weight((1,), constant=0.5, fp32=True)
        yield "model.hc_head.hc_head_base", Weight((num_channels,), constant=-1.0, fp32=True)
    yield "model.norm.weight", norm
    yield "lm_head.weight", Weight((vocab, hidden), gain=LOGIT_STD)


def feed_forward_weights(config: dict[str, Any], prefix: str, layer: int) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a layer's MLP or experts, under the names of the model's class."""
    hidden, model_type = config["hidden_size"], config["model_type"]
    first_with_experts = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0))
    if model_type in ("llama", "qwen3", "minimax_m3_mtp") or layer < first_with_experts:
        yield from mlp_weights(hidden, config["intermediate_size"], f"{prefix}.mlp")
    elif model_type == "mixtral":
        yield from mixtral_weights(config, f"{prefix}.block_sparse_moe")
    else:
        yield from expert_weights(config, f"{prefix}.mlp")


def draft_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    """Yield the weights that a draft layer has and other layers do not (vLLM's deepseek_mtp.py and hy_v4)."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield f"{prefix}.enorm.weight", Weight((hidden,), constant=1.0)
    yield f"{prefix}.hnorm.weight", Weight((hidden,), constant=1.0)
    yield f"{prefix}.eh_proj.weight", Weight((hidden, 2 * hidden))
    if config["model_type"] == "hy_v4":
        yield f"{prefix}.final_layernorm.weight", Weight((hidden,), constant=1.0)
        return
    yield f"{prefix}.embed_tokens.weight", Weight((vocab, hidden), gain=hidden**0.5)
    yield f"{prefix}.shared_head.norm.weight", Weight((hidden,), constant=1.0)
    yield f"{prefix}.shared_head.head.weight", Weight((vocab, hidden), gain=LOGIT_STD)


def has_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """Return True if a layer selects for itself; others share a selection or attend to everything."""
    if types := config.get("indexer_types"):
        return config["layer_types"][layer] != "full_attention" and types[layer] == "full"
    if pattern := config.get("index_topk_pattern"):
        return layer >= len(pattern) or pattern[layer] != "S"
    return max(layer - 1, 0) % config.get("index_topk_freq", 1) == 0


def attention_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, v_dim = config["qk_nope_head_dim"], config["v_head_dim"]
    yield f"{prefix}.q_a_proj.weight", Weight((q_rank, hidden))
    yield f"{prefix}.q_a_layernorm.weight", Weight((q_rank,), constant=1.0)
    yield f"{prefix}.q_b_proj.weight", Weight((heads * (nope + rope), q_rank), gain=SCORE_STD)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", Weight((kv_rank + rope, hidden))
    yield f"{prefix}.kv_a_layernorm.weight", Weight((kv_rank,), constant=1.0)
    yield f"{prefix}.kv_b_proj.weight", Weight((heads * (nope + v_dim), kv_rank))
    yield f"{prefix}.o_proj.weight", Weight((hidden, heads * v_dim), gain=RESIDUAL_GAIN)
    if config.get("learnable_sink"):
        yield f"{prefix}.learnable_sink_param", Weight((heads,), SINK_STD * heads**0.5, fp32=True, mean=SINK_MEAN)
    if config.get("gated_mla"):
        yield f"{prefix}.linear_gate.weight", Weight((heads * v_dim, hidden))


def channel_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    """Gates between the residual channels of HY-V4 and a layer (vLLM's hy_v4/nvidia/hc.py)."""
    num_channels = config["hc_mult"]
    yield f"{prefix}.hc_fn", Weight((2 * num_channels, num_channels * config["hidden_size"]), fp32=True)
    yield f"{prefix}.hc_scale", Weight((2,), constant=0.5, fp32=True)
    yield f"{prefix}.hc_base", Weight((2 * num_channels,), constant=0.0, fp32=True)


def gqa_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    # If queries and keys are normalized, the gain is in the weights of the norm.
    has_norm = config["model_type"].startswith(("qwen3", "minimax_m3")) or config.get("use_qk_norm", False)
    yield f"{prefix}.q_proj.weight", Weight((num_heads * size, hidden), gain=1.0 if has_norm else SCORE_STD)
    yield f"{prefix}.k_proj.weight", Weight((num_kv_heads * size, hidden))
    yield f"{prefix}.v_proj.weight", Weight((num_kv_heads * size, hidden))
    yield f"{prefix}.o_proj.weight", Weight((hidden, num_heads * size), gain=RESIDUAL_GAIN)
    if config["model_type"] == "qwen2_moe":
        yield f"{prefix}.q_proj.bias", Weight((num_heads * size,), constant=0.0)
        yield f"{prefix}.k_proj.bias", Weight((num_kv_heads * size,), constant=0.0)
        yield f"{prefix}.v_proj.bias", Weight((num_kv_heads * size,), constant=0.0)
    if has_norm:
        yield f"{prefix}.q_norm.weight", Weight((size,), constant=norm_weight(config, SCORE_STD))
        yield f"{prefix}.k_norm.weight", Weight((size,), constant=norm_weight(config, 1.0))


def norm_weight(config: dict[str, Any], scale: float) -> float:
    """Return the weight of a norm that multiplies by `scale`; MiniMax-M3's add 1 to theirs."""
    return scale - 1.0 if config["model_type"].startswith("minimax_m3") else scale


def block_indexer_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of MiniMax-M3's indexer, which has a query for each KV head, and one key."""
    hidden, sizes = config["hidden_size"], config["sparse_attention_config"]
    heads, size = sizes["sparse_num_index_heads"], sizes["sparse_index_dim"]
    for name, num_heads in (("q", heads), ("k", 1)):
        yield f"{prefix}.index_{name}_proj.weight", Weight((num_heads * size, hidden))
        yield f"{prefix}.index_{name}_norm.weight", Weight((size,), constant=norm_weight(config, 1.0))


def indexer_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    hidden, heads, dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    yield f"{prefix}.wq_b.weight", Weight((heads * dim, config["q_lora_rank"]))
    yield f"{prefix}.wk.weight", Weight((dim, hidden))
    yield f"{prefix}.k_norm.weight", Weight((dim,), constant=1.0)
    yield f"{prefix}.k_norm.bias", Weight((dim,), constant=0.0)
    yield f"{prefix}.weights_proj.weight", Weight((heads, hidden))


def mlp_weights(
    hidden: int, intermediate: int, prefix: str, gain: float = RESIDUAL_GAIN
) -> Iterator[tuple[str, Weight]]:
    yield f"{prefix}.gate_proj.weight", Weight((intermediate, hidden))
    yield f"{prefix}.up_proj.weight", Weight((intermediate, hidden))
    yield f"{prefix}.down_proj.weight", Weight((hidden, intermediate), gain=gain)


def expert_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    hidden, inner, model_type = config["hidden_size"], config["moe_intermediate_size"], config["model_type"]
    experts = next(config[name] for name in ("n_routed_experts", "num_experts", "moe_num_experts") if name in config)
    yield f"{prefix}.gate.weight", Weight((experts, hidden))
    if "n_routed_experts" in config:
        yield f"{prefix}.gate.e_score_correction_bias", Weight((experts,), constant=0.0, fp32=True)
    if model_type == "ernie4_5_moe":
        yield f"{prefix}.moe_statics.e_score_correction_bias", Weight((1, experts), constant=0.0, fp32=True)
    if model_type == "hy_v4":  # the experts of a layer are in one tensor
        yield f"{prefix}.experts.gate_up_proj", Weight((experts, 2 * inner, hidden))
        yield f"{prefix}.experts.down_proj", Weight((experts, hidden, inner), gain=EXPERT_GAIN)
    else:
        for expert in range(experts):
            yield from mlp_weights(hidden, inner, f"{prefix}.experts.{expert}", EXPERT_GAIN)
    if shared := config.get("n_shared_experts", config.get("moe_num_shared_experts", 0)):
        yield from mlp_weights(hidden, inner * shared, f"{prefix}.shared_experts")
    if model_type == "qwen2_moe":
        yield f"{prefix}.shared_expert_gate.weight", Weight((1, hidden))
        yield from mlp_weights(hidden, config["shared_expert_intermediate_size"], f"{prefix}.shared_expert")


def mixtral_weights(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield f"{prefix}.gate.weight", Weight((experts, hidden))
    for expert in range(experts):
        name = f"{prefix}.experts.{expert}"
        yield f"{name}.w1.weight", Weight((inner, hidden))
        yield f"{name}.w3.weight", Weight((inner, hidden))
        yield f"{name}.w2.weight", Weight((hidden, inner), gain=EXPERT_GAIN)


def write_weights(path: Path, config: dict[str, Any], tokenizer: "Tokenizer", seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    tensors = {}
    for name, weight in checkpoint_weights(config):
        tensor = draw(weight, generator)
        if name == "lm_head.weight":
            tensor[unprintable_ids(tokenizer)] = 0.0
        tensors[name] = tensor if weight.fp32 else tensor.to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def draw(weight: Weight, generator: "torch.Generator") -> "torch.Tensor":
    import torch

    if weight.constant is not None:
        return torch.full(weight.shape, weight.constant)
    return torch.randn(weight.shape, generator=generator) * weight.std() + weight.mean


def unprintable_ids(tokenizer: "Tokenizer") -> list[int]:
    """Return special tokens and bytes outside printable ASCII. Their logits are 0, so greedy decoding never chooses
    them.
    """
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(VOCAB_SIZE))
    return [token_id for token_id, text in texts if not text.isascii() or not text.isprintable() or not text]


def make_model_command(
    variant: Annotated[
        Variant,
        typer.Argument(
            help="dsv32: DeepSeek-V3.2; glm: GLM-5; glm52, glm53: GLM-5.2 and 5.3; hyv4: HY-V4; hyv4_mixed: HY-V4 with "
            "a layer of full attention; minimax_m3: MiniMax-M3 without experts; llama, qwen3: dense models; "
            "qwen3_moe, qwen2_moe, mixtral, glm4_moe, ernie45_moe: the same with experts"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write to.")],
    layers: Annotated[
        int, typer.Option(min=2, help="Layers; the first of a DSA model is dense, the others are MoE.")
    ] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; four share a KV head in a dense model.")] = 8,
    index_heads: Annotated[int, typer.Option(min=1, help="Indexer heads.")] = 8,
    index_topk: Annotated[int, typer.Option(min=1, help="Positions selected per step.")] = 256,
    draft_layers: Annotated[int, typer.Option(min=0, max=1, help="Layers of a DSA model that draft tokens (MTP).")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Data type of the weights.")] = Dtype.bfloat16,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a tiny model with random weights and a tokenizer; nothing to do when it is there already."""
    if draft_layers and variant.value in WITHOUT_DRAFTS:
        message = f"got {draft_layers}, expected 0 with the variant {variant.value}"
        raise typer.BadParameter(message, param_hint="--draft-layers")
    try:
        check_replaceable(out, variant.value)
        path = make_model(
            variant.value,
            out,
            num_layers=layers,
            num_heads=heads,
            index_n_heads=index_heads,
            index_topk=index_topk,
            draft_layers=draft_layers,
            dtype=dtype.value,
            seed=seed,
        )
    except OSError as error:
        message = f"got {out}, expected a directory to write to ({error.strerror})"
        raise typer.BadParameter(message, param_hint="--out") from None
    except OtherModelError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    typer.echo(f"{variant} model in {path}")
