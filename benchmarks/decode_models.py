"""Random models for the decode benchmark, whose queries select similar positions from step to step.

With plain random weights, every token makes a new selection. Here a few dimensions of the hidden state are the same for
all tokens, and queries are computed from them; `query_noise` scales the part that depends on the token. Keys do not
depend on these dimensions.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

NUM_SHARED, SHARED_VALUE = 8, 4.0  # hidden dimensions that are the same for all tokens
NUM_QUERY, QUERY_GAIN = 16, 3.0  # query dimensions that are computed from these

LLAMA = {  # one layer of Llama-3.1-8B (its config.json); a small vocabulary
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1 << 18,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
LLAMA_QUERY_STD, SLOW_PAIRS = 3.0, 40  # rotary pairs from this one on turn by less than 0.1 in a case


def make_dsa_model(model_dir: Path, num_layers: int, query_noise: float, num_heads: int = 64) -> Path:
    """A DSA model. Indexer queries and head weights are computed from the shared dimensions, main attention is not."""
    from safetensors.torch import load_file, save_file

    from vllm_hisparse.cli.tiny_model import make_model

    make_model("dsv32", model_dir, num_layers=num_layers, num_heads=num_heads, index_n_heads=num_heads, index_topk=2048)
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][:, :NUM_SHARED] = SHARED_VALUE
    for name, weight in weights.items():
        if name.endswith("self_attn.q_a_proj.weight"):
            weight[:NUM_QUERY, NUM_SHARED:] = 0
            weight[:NUM_QUERY, :NUM_SHARED] *= QUERY_GAIN
            weight[NUM_QUERY:, :NUM_SHARED] = 0
        elif name.endswith("indexer.wq_b.weight"):
            weight[:, NUM_QUERY:] *= query_noise
        elif name.endswith("indexer.weights_proj.weight"):
            weight[:, NUM_SHARED:] *= query_noise
        elif name.endswith("self_attn.q_b_proj.weight"):
            weight[:, :NUM_QUERY] = 0
        elif name.endswith(("indexer.wk.weight", "kv_a_proj_with_mqa.weight")):
            weight[:, :NUM_SHARED] = 0
    (model_dir / "manifest.json").unlink()  # it describes the model before the changes
    save_file(weights, path, metadata={"format": "pt"})
    return model_dir


def make_llama_model(model_dir: Path, num_layers: int, query_noise: float) -> Path:
    """A dense model with the layers of Llama-3.1-8B. Only slow rotary pairs of a query are shared, so that selections
    do not rotate away within a case."""
    from safetensors.torch import save_file

    from vllm_hisparse.cli.tiny_model import checkpoint_weights, make_model

    make_model("llama", model_dir, num_layers=num_layers)  # tokenizer and base configuration
    (model_dir / "manifest.json").unlink()
    config = json.loads((model_dir / "config.json").read_text()) | LLAMA | {"dtype": "bfloat16"}
    (model_dir / "config.json").write_text(json.dumps(config, indent=2))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, weight in checkpoint_weights(config):
        if weight.constant is not None:
            tensor = torch.full(weight.shape, weight.constant, device=device)
        else:
            tensor = torch.randn(weight.shape, generator=generator, device=device) * weight.std()
        if name == "model.embed_tokens.weight":
            tensor[:, :NUM_SHARED] = SHARED_VALUE
        elif name.endswith("q_proj.weight"):
            share_queries(tensor, query_noise, config["head_dim"])
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            tensor[:, :NUM_SHARED] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:NUM_SHARED] = 0
        weights[name] = tensor.bfloat16().cpu()
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir


def share_queries(weight: torch.Tensor, query_noise: float, head_dim: int) -> None:
    """Make the slow rotary pairs of a query projection, [heads * head_dim, hidden], read the shared dimensions."""
    hidden = weight.shape[1]
    shared = weight[:, :NUM_SHARED].clone() * (hidden / NUM_SHARED) ** 0.5 / SHARED_VALUE
    pairs = torch.arange(head_dim, device=weight.device) % (head_dim // 2)
    slow = (pairs >= SLOW_PAIRS * head_dim // 128).repeat(len(weight) // head_dim)
    weight *= query_noise
    weight[:, :NUM_SHARED] = shared * slow[:, None]
    weight *= LLAMA_QUERY_STD
