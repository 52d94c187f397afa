"""Trains a small model from scratch to find needles in long contexts, and writes a checkpoint that vLLM can serve.

    python -m benchmarks.train_retrieval --architecture llama --output models/retrieval-llama

The model has a few layers with grouped-query attention. Training starts with short sequences and continues with longer
ones once these are answered; the loss counts answers only. Writes config.json and model.safetensors (bf16) in Hugging
Face's Llama or Qwen3 format, and training.json with command, hardware, versions, loss and accuracy per stage. Seeds are
fixed: on the same kind of machine with the same versions, the same command gives the same weights up to the order of
sums in the kernels. Every stage writes a checkpoint, from which `--resume` continues.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import command, hardware, track, versions
from benchmarks.retrieval_tasks import TASKS, VOCAB_SIZE, examples, training_sequence

Architecture = StrEnum("Architecture", ["llama", "qwen3"])
MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MAX_MODEL_LEN = 32768
NORM_EPS = 1e-6
MAX_WEIGHT_BYTES = 10 * 2**20
WEIGHTS_FILE = "model.safetensors"
STAGES_FILE = "stages.json"  # of a training that has not ended

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": [MODEL_CLASSES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": MAX_MODEL_LEN,
            "rms_norm_eps": NORM_EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "bos_token_id": 0,
            "eos_token_id": VOCAB_SIZE - 1,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Stage:
    """Training at one length: until `goal` of the answer tokens are right, `max_steps` at most."""

    num_tokens: int
    batch_size: int
    max_steps: int
    learning_rate: float
    goal: float = 0.999


# All stages take minutes on an H200; the short ones cost little and teach the lookup.
STAGES = (
    Stage(96, 512, 6000, 1e-3, 0.99),
    Stage(256, 256, 3000, 1e-3, 0.995),
    Stage(1024, 64, 2000, 6e-4),
    Stage(4096, 16, 1500, 4e-4),
    Stage(16384, 8, 1500, 2e-4),
)


class Layer(nn.Module):
    """One decoder layer, with the parameter names of Hugging Face's checkpoints."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, hidden, size = shape, shape.hidden_size, shape.head_size
        self.self_attn = nn.Module()
        for name, heads in (
            ("q_proj", shape.num_heads),
            ("k_proj", shape.num_kv_heads),
            ("v_proj", shape.num_kv_heads),
        ):
            self.self_attn.add_module(name, nn.Linear(hidden, heads * size, bias=False))
        self.self_attn.o_proj = nn.Linear(shape.num_heads * size, hidden, bias=False)
        if shape.architecture == "qwen3":
            self.self_attn.q_norm, self.self_attn.k_norm = nn.RMSNorm(size, NORM_EPS), nn.RMSNorm(size, NORM_EPS)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(hidden, shape.intermediate_size, bias=False)
        self.mlp.up_proj = nn.Linear(hidden, shape.intermediate_size, bias=False)
        self.mlp.down_proj = nn.Linear(shape.intermediate_size, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(hidden, NORM_EPS)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        attn = self.self_attn
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        if self.shape.architecture == "qwen3":
            query, key = attn.q_norm(query), attn.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        per_group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(per_group, 1), value.repeat_interleave(per_group, 1)
        out = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True)
        return attn.o_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Llama, or Qwen3 with its norms of queries and keys."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.model.norm = nn.RMSNorm(shape.hidden_size, NORM_EPS)
        self.lm_head = nn.Linear(shape.hidden_size, VOCAB_SIZE, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * shape.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale if "embed" in name else scale * parameter.shape[1] ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states: [batch, tokens, hidden_size]."""
        cos, sin = rotation(tokens.shape[1], self.shape, tokens.device)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)


def rotation(num_tokens: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding: [num_tokens, head_size] each."""
    exponents = torch.arange(0, shape.head_size, 2, device=device) / shape.head_size
    angles = torch.arange(num_tokens, device=device)[:, None] * shape.rope_theta**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Batches(Dataset):
    """The batches of a stage, each with its own seed: tokens and mask, [batch_size, num_tokens] each.

    Args:
        stage: the stage.
        seed: base seed of all batches.
        rehearsal: share of batches that have the shorter sequences of earlier stages, with the same number of tokens.
    """

    def __init__(self, stage: Stage, seed: int, rehearsal: float = 0.0):
        self.stage, self.seed, self.rehearsal = stage, seed, rehearsal
        self.shorter = [other.num_tokens for other in STAGES if other.num_tokens < stage.num_tokens]

    def __len__(self) -> int:
        return self.stage.max_steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng, num_tokens = np.random.default_rng([self.seed, self.stage.num_tokens, step]), self.stage.num_tokens
        if self.shorter and self.rehearsal and rng.random() < self.rehearsal:
            num_tokens = int(rng.choice(self.shorter))
        batch_size = self.stage.batch_size * self.stage.num_tokens // num_tokens
        sequences = (training_sequence(rng, num_tokens) for _ in range(batch_size))
        tokens, masks = zip(*sequences, strict=True)
        return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(masks))


def loss_and_accuracy(model: Model, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and share of correct tokens, over the answers."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        hidden = model(tokens[:, :-1])[mask[:, 1:]]
        logits = model.lm_head(hidden).float()
    targets = tokens[:, 1:][mask[:, 1:]]
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


def train_stage(
    model: Model, optimizer: torch.optim.Optimizer, stage: Stage, batches: Batches, num_workers: int
) -> dict[str, Any]:
    """Train at one length; returns the record of the stage."""
    device = next(model.parameters()).device
    loader = DataLoader(batches, batch_size=None, num_workers=num_workers, pin_memory=device.type == "cuda")
    start, recent, loss = time.perf_counter(), [], torch.zeros(())
    for step, batch in zip(track(stage.max_steps, f"{stage.num_tokens} tokens"), loader, strict=True):
        rate = stage.learning_rate * min((step + 1) / 100, 1.0, 2 * (1 - step / stage.max_steps) + 0.05)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, accuracy = loss_and_accuracy(model, *(part.to(device, non_blocking=True) for part in batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-49:], accuracy.detach()]
        if step % 500 == 499:
            typer.echo(f"step {step + 1}: loss {loss.item():.4f}, accuracy {accuracy.item():.4f}", err=True)
        if step % 25 == 24 and len(recent) == 50 and float(torch.stack(recent).mean()) >= stage.goal:
            break
    return {
        **asdict(stage),
        "steps": step + 1,
        "seconds": round(time.perf_counter() - start, 1),
        "loss": round(loss.item(), 5),
        "token_accuracy": round(float(torch.stack(recent).mean()), 5),
    }


@torch.no_grad()
def task_accuracy(model: Model, task: str, context: int, num: int, seed: int) -> int:
    """Number of examples in which every answer token is the best one, given the correct tokens before it."""
    correct = 0
    for example in examples(task, context, num, seed):
        tokens = torch.tensor([example.prompt + example.answer], device=next(model.parameters()).device)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, len(example.prompt) :] = True
        correct += int(loss_and_accuracy(model, tokens, mask)[1] == 1.0)
    return correct


def save(model: Model, output: Path) -> int:
    """Write the checkpoint; returns the bytes of the weights.

    Raises:
        ValueError: the weights are too large for the repository.
    """
    output.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    if num_bytes > MAX_WEIGHT_BYTES:
        raise ValueError(
            f"the weights take {num_bytes} bytes, expected at most {MAX_WEIGHT_BYTES}: choose smaller sizes"
        )
    save_file(weights, output / WEIGHTS_FILE, metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(model.shape.hf_config(), indent=2) + "\n")
    return num_bytes


def load(model: Model, checkpoint: Path) -> list[dict[str, Any]]:
    """Load the weights of an unfinished training; returns its finished stages."""
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(checkpoint / WEIGHTS_FILE).items()})
    return json.loads((checkpoint / STAGES_FILE).read_text())


def stages_up_to(max_context: int, max_steps: int | None, batch_tokens: int | None) -> list[Stage]:
    """The stages for contexts of `max_context` tokens, shortened for trials."""
    stages = []
    for stage in STAGES:
        if stage.num_tokens > max_context:
            break
        changes = asdict(stage)
        if max_steps is not None:
            changes["max_steps"] = max_steps
        if batch_tokens is not None:
            changes["batch_size"] = math.ceil(batch_tokens / stage.num_tokens)
        stages.append(Stage(**changes))
    return stages


@app.command()
def main(
    ctx: typer.Context,
    output: Annotated[Path, typer.Option(help="Directory of the model.")],
    architecture: Annotated[Architecture, typer.Option(help="Model class.")] = Architecture.llama,
    num_layers: Annotated[int, typer.Option(min=2)] = 4,
    hidden_size: Annotated[int, typer.Option(min=16)] = 256,
    intermediate_size: Annotated[int, typer.Option(min=16)] = 640,
    num_heads: Annotated[int, typer.Option(min=1)] = 8,
    num_kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_size: Annotated[int, typer.Option(min=8)] = 64,
    rope_theta: Annotated[float, typer.Option(min=1.0)] = 1e6,
    rehearsal: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of each stage's batches in shorter sequences.")
    ] = 0.0,
    resume: Annotated[Path | None, typer.Option(help="Checkpoint to continue from.")] = None,
    max_context: Annotated[int, typer.Option(min=96, help="Longest stage.")] = 16384,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps per stage; for trials.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=96, help="Tokens per step; for trials.")] = None,
    num_examples: Annotated[int, typer.Option(min=1, help="Examples per task and context at the end.")] = 100,
    num_workers: Annotated[int, typer.Option(min=0, help="Processes that make batches.")] = 6,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a model, measure its accuracy and write both."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(seed)
    shape = Shape(
        architecture.value, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_size, rope_theta
    )
    model = Model(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=STAGES[0].learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    stages = stages_up_to(max_context, max_steps, batch_tokens)
    done, num_bytes = [] if resume is None else load(model, resume), 0
    for stage in stages[len(done) :]:
        done.append(train_stage(model, optimizer, stage, Batches(stage, seed, rehearsal), num_workers))
        num_bytes = save(model, output)
        (output / STAGES_FILE).write_text(json.dumps(done, indent=2) + "\n")
        typer.echo(json.dumps(done[-1]), err=True)
    (output / STAGES_FILE).unlink()
    contexts = [stage.num_tokens for stage in stages if stage.num_tokens >= 256] or [stages[-1].num_tokens]
    accuracy = [
        {
            "task": task,
            "context": context,
            "correct": task_accuracy(model, task, context, num_examples, seed + 1),
            "total": num_examples,
        }
        for task in TASKS
        for context in contexts
    ]
    record = {
        "command": command(ctx, "benchmarks.train_retrieval"),
        "hardware": hardware(),
        "versions": versions(),
        "weight_bytes": num_bytes,
        "stages": done,
        "accuracy": accuracy,
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()
