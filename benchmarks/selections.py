"""Selections of a trained DSA model over held-out source code: which positions each layer's indexer ranks highest.

    python -m benchmarks.selections --model benchmarks/models/code-dsa --output build/selections.npz

Runs the model in torch over the selection (teacher-forced) and keeps, for the last positions of each window, the best
`--ranks` positions of every layer with an indexer, best first. So it shows what vLLM's indexer op does not return: the
positions just below the cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors.torch import load_file

from benchmarks.code_corpus import permissive_packages, unseen
from benchmarks.dsa_model import AttentionMode, Model, Shape, index_scores, rotation
from benchmarks.train_dsa import WEIGHTS_FILE, load_tokenizer, make_corpus

app = typer.Typer(add_completion=False)


def load_shape(model_dir: Path) -> Shape:
    """Sizes of a model that `benchmarks.train_dsa` wrote."""
    config = json.loads((model_dir / "config.json").read_text())
    sizes = {name: config[name] for name in Shape.__dataclass_fields__ if name in config}
    return Shape(**sizes, rope_theta=config["rope_parameters"]["rope_theta"])


def load_model(model_dir: Path, device: torch.device) -> Model:
    """A model that `benchmarks.train_dsa` wrote, in float32."""
    model = Model(load_shape(model_dir)).to(device)
    weights = load_file(model_dir / WEIGHTS_FILE)
    model.load_state_dict({name: weights[name].float() for name in model.state_dict()})
    return model


@torch.no_grad()
def ranked_positions(model: Model, tokens: torch.Tensor, num_steps: int, num_ranks: int) -> np.ndarray:
    """Best positions of the last steps in every layer with an indexer, the draft layer last.

    Args:
        tokens: [1, tokens + 1] int64.
        num_steps: last positions to keep.
        num_ranks: positions to keep for each.

    Returns:
        [layers, num_steps, num_ranks] uint16, best first.
    """
    inputs, found, shared = tokens[:, :-1], [], None
    turn, steps = rotation(inputs.shape[1], model.shape, tokens.device), slice(inputs.shape[1] - num_steps, None)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        x = model.model.embed_tokens(inputs)
        for layer in model.model.layers[:-1]:
            x, _, shared = layer(x, turn, AttentionMode.SPARSE, shared)
            if layer.self_attn.indexer is not None:
                found.append(index_scores(shared, steps).topk(num_ranks, -1).indices[0])
        found.append(
            index_scores(draft_state(model, model.model.norm(x), tokens[:, 1:]), steps).topk(num_ranks).indices[0]
        )
    return torch.stack(found).to(torch.int32).cpu().numpy().astype(np.uint16)


def draft_state(model: Model, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Indexer state of the draft layer."""
    states = []
    hook = model.model.layers[-1].self_attn.indexer.register_forward_hook(lambda *args: states.append(args[-1]))
    model.draft(hidden, tokens, AttentionMode.SPARSE)
    hook.remove()
    return states[0]


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Directory of the model.")],
    output: Annotated[Path, typer.Option(help="File to write (.npz).")],
    windows: Annotated[int, typer.Option(min=1, help="Windows of held-out code.")] = 2,
    num_tokens: Annotated[int, typer.Option(min=512, help="Tokens of a window.")] = 16384,
    num_steps: Annotated[int, typer.Option(min=1, help="Last positions of a window to keep.")] = 512,
    ranks: Annotated[int, typer.Option(min=1, help="Positions to keep per step and layer.")] = 512,
    corpus_mib: Annotated[int, typer.Option(min=1, help="Most text to read.")] = 400,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    seed: Annotated[int, typer.Option()] = 7,
) -> None:
    """Record ranked selections."""
    loaded = load_model(model, torch.device(device))
    tokenizer, packages = load_tokenizer(model, [], loaded.shape), unseen(permissive_packages(corpus_mib << 20), model)
    held_out = make_corpus(packages, tokenizer, corpus_mib << 20, torch.device(device), seed)
    found, texts = [], []
    for _ in range(windows):
        window, _ = held_out.windows(1, num_tokens + 1, 1.0)
        found.append(ranked_positions(loaded, window, num_steps, ranks))
        texts.append(window[0].cpu().numpy().astype(np.uint16))
    np.savez_compressed(output, positions=np.stack(found), tokens=np.stack(texts), top_k=loaded.shape.index_topk)


if __name__ == "__main__":
    app()
