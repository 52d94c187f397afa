"""Writes the draft models (EAGLE, EAGLE-3) of a tiny dense model: they guess some of its tokens, and not all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_hisparse.cli.tiny_model import SCORE_STD

NUM_AUX = 3  # hidden states of the model that vLLM hands to EAGLE-3
ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
LIKENESS = 1.2  # of a token to itself: scores are its square times the root of the head size, others noise around 0
OUTPUT_SHARE = 0.3  # of what EAGLE-3 begins a further draft with, beside the embedding
HIDDEN_SHARE = 0.1  # of what the draft layer gets of the model's hidden state, beside the next token's embedding


def make_draft_model(method: str, model: Path, out_dir: Path) -> Path:
    """Write a draft model: the layers of the model itself for EAGLE, a layer that looks at tokens alone for EAGLE-3.

    Its keys and values have a head for every query head, other than the model's.
    """
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weights[name].unflatten(0, (-1, config["head_dim"]))
            weights[name] = heads.repeat_interleave(repeats, 0).flatten(0, 1)
    tensors = (_eagle if method == "eagle" else _eagle3)(weights)
    out_dir.mkdir(parents=True)
    shutil.copy(model / "tokenizer.json", out_dir)
    shutil.copy(model / "tokenizer_config.json", out_dir)
    config |= {
        "architectures": [ARCHITECTURES[method]],
        "model_type": "llama",
        "num_hidden_layers": config["num_hidden_layers"] if method == "eagle" else 1,
        "num_key_value_heads": config["num_attention_heads"],
        "eagle_aux_hidden_state_layer_ids": list(range(1, NUM_AUX + 1)),  # of EAGLE-3
        "norm_output": True,  # of EAGLE-3: what the next draft begins with
    }
    (out_dir / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, out_dir / "model.safetensors")
    return out_dir


def _eagle(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drafts are as good as the model's tokens, but for what `fc` adds to a token's embedding: drafts depend on all
    keys and values.

    vLLM takes embedding and head from the model; the first layer has no norm at its input, and the last none behind it.
    """
    layers = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers." in name}
    del layers["layers.0.input_layernorm.weight"]
    eye = torch.eye(weights["model.norm.weight"].numel(), dtype=weights["model.norm.weight"].dtype)
    return {"fc.weight": torch.cat([eye, HIDDEN_SHARE * eye], 1), **layers}


def _eagle3(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Only attention reads the embedding: a token attends to tokens like itself, and most of all to itself."""
    norm, prefix = weights["model.norm.weight"], "model.layers.0."
    layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    (num_rows, hidden), dtype = layer["self_attn.q_proj.weight"].shape, norm.dtype
    nothing = torch.zeros(num_rows, hidden, dtype=dtype)
    query = LIKENESS / SCORE_STD * layer["self_attn.q_proj.weight"]
    inputs = {"q_proj": query, "k_proj": query, "v_proj": torch.eye(num_rows, hidden, dtype=dtype)}
    layer |= {f"self_attn.{name}.weight": torch.cat([tensor, nothing], 1) for name, tensor in inputs.items()}
    layer |= {"self_attn.o_proj.weight": torch.eye(hidden, num_rows, dtype=dtype), "hidden_norm.weight": norm}
    fc = torch.cat(
        [torch.zeros(hidden, (NUM_AUX - 1) * hidden, dtype=dtype), HIDDEN_SHARE * torch.eye(hidden, dtype=dtype)], 1
    )
    tensors = {"fc.weight": fc, "norm.weight": OUTPUT_SHARE * norm, "lm_head.weight": weights["lm_head.weight"]}
    return tensors | {f"midlayer.{name}": tensor for name, tensor in layer.items()}
