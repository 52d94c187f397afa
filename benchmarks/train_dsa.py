"""Trains a small DSA model on Python source code; vLLM serves what it writes.

    python -m benchmarks.train_dsa --output build/models/code-dsa

The order is that of DeepSeek-V3.2's report: a dense model first, on short windows and then on long ones; the indexers
are distilled from its attention while all else is frozen; then everything is trained over the selection. Every stage
runs for a share of `--minutes` and leaves a checkpoint, which a later run with `--resume` goes on from. The draft layer
(MTP) is trained alongside. A part of the windows ends with the repetition of a definition from further up, so that the
model learns to look definitions up.

Writes what vLLM reads (config.json, model.safetensors in bf16, tokenizer.json, tokenizer_config.json) and
training.json: stages with their loss curves, packages with their licences, and on held-out packages perplexity and
agreement of dense and sparse attention, look-ups, and acceptance of drafts. The result file is the same without the
list of packages, and `training.png` shows the curves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from benchmarks.code_corpus import SPECIAL_TOKENS, Package, encode, make_tokenizer, permissive_packages, split
from benchmarks.common import RESULTS, command, gpu_hardware, hardware, versions
from benchmarks.dsa_model import AttentionMode, Model, Shape

MAX_MODEL_LEN = 32768
WEIGHTS_FILE, STAGES_FILE = "model.safetensors", "stages.json"
WARM_UP_SHARE = 0.03  # of a stage, in which the learning rate rises
DRAFT_WEIGHT, INDEX_WEIGHT = 0.3, 0.1  # of their losses beside the language model's
REPEATED_SHARE, REPEATED_TOKENS = 0.5, (64, 400)  # windows that end with a repeated definition, and its length
EVAL_WINDOWS, EVAL_TOKENS = 24, 16384
STAGE_WINDOWS = 6  # of the evaluation after each stage
POSITION_BUCKETS = (0, 1024, 4096, 16384)
LOOKUP_PREFIX = 48  # tokens of a repeated definition after which it is known which one it is
CURVE_POINTS = 60  # of a stage's loss curve

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Stage:
    """One stage of the training.

    Attributes:
        mode: kind of attention; in DISTILL only the indexers are trained.
        share: share of the minutes.
    """

    name: str
    mode: AttentionMode
    num_tokens: int
    batch_size: int
    learning_rate: float
    share: float


STAGES = (
    Stage("dense", AttentionMode.DENSE, 4096, 32, 2e-3, 0.5),
    Stage("dense_long", AttentionMode.DENSE, 16384, 8, 6e-4, 0.12),
    Stage("distill", AttentionMode.DISTILL, 8192, 4, 2e-3, 0.14),
    Stage("sparse", AttentionMode.SPARSE, 16384, 2, 3e-4, 0.24),
)


class Corpus:
    """Windows of a token stream.

    Args:
        tokens: [tokens] uint16, from `encode`.
        definition_ids: tokens that begin a definition.
        device: device on which windows are made.
        seed: seed of the windows.
    """

    def __init__(self, tokens: np.ndarray, definition_ids: list[int], device: torch.device, seed: int):
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        is_definition = torch.isin(self.tokens, torch.tensor(definition_ids, dtype=torch.int16, device=device))
        self.definitions = is_definition.nonzero()[:, 0]
        self.seed, self.generator = seed, torch.Generator(device)
        self.restart()

    def restart(self) -> None:
        """Let the windows begin again with the first one."""
        self.generator.manual_seed(self.seed)

    def windows(self, batch_size: int, num_tokens: int, repeated: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows, a share of which ends with a definition from further up.

        Returns:
            [batch_size, num_tokens] int64; [batch_size] int64, first token of the repetition, `num_tokens` if none.
        """
        starts = self._random(len(self.tokens) - num_tokens, batch_size)
        places = torch.arange(num_tokens, device=self.tokens.device)
        windows = self.tokens[starts[:, None] + places].long()
        length = int(self._random(REPEATED_TOKENS[1] - REPEATED_TOKENS[0], 1)) + REPEATED_TOKENS[0]
        first = torch.searchsorted(self.definitions, starts)
        last = torch.searchsorted(self.definitions, starts + num_tokens - 2 * length)
        chosen = (
            first + (torch.rand(batch_size, generator=self.generator, device=starts.device) * (last - first)).long()
        )
        sources = self.definitions[chosen.clamp(max=len(self.definitions) - 1)] - starts
        repeats = (last > first) & (torch.rand(batch_size, generator=self.generator, device=starts.device) < repeated)
        copied = windows.gather(1, (sources[:, None] + places[:length]).clamp(0, num_tokens - 1))
        windows[:, -length:] = torch.where(repeats[:, None], copied, windows[:, -length:])
        return windows, torch.where(repeats, num_tokens - length, num_tokens)

    def _random(self, high: int, count: int) -> torch.Tensor:
        return torch.randint(max(high, 1), (count,), generator=self.generator, device=self.tokens.device)


def losses(
    model: Model, forward: Any, windows: torch.Tensor, mode: AttentionMode
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy of the next token, of the draft's token after next, and the indexers' loss."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        hidden, index_loss = forward(windows[:, :-2], mode)
        drafted, draft_index_loss = model.draft(hidden, windows[:, 1:-1], mode)
        logits, draft_logits = model.lm_head(hidden), model.lm_head(drafted)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:-1].flatten())
    draft_loss = F.cross_entropy(draft_logits.flatten(0, 1).float(), windows[:, 2:].flatten())
    return loss, draft_loss, index_loss + draft_index_loss


def train_stage(model: Model, stage: Stage, corpus: Corpus, seconds: float, compiled: bool) -> dict[str, Any]:
    """Train for so many seconds; returns what happened, with the loss curve."""
    distills = stage.mode == AttentionMode.DISTILL
    for parameter in model.trunk_parameters():
        parameter.requires_grad_(not distills)
    parameters = model.indexer_parameters() if distills else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.05)
    forward = torch.compile(model) if compiled and stage is STAGES[0] else model
    curve, start, step, done = [], time.perf_counter(), 0, 0.0
    while done < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * min(done / WARM_UP_SHARE + 0.02, 1.02 - done)
        windows, _ = corpus.windows(stage.batch_size, stage.num_tokens + 2, REPEATED_SHARE)
        loss, draft_loss, index_loss = losses(model, forward, windows, stage.mode)
        total = index_loss if distills else loss + DRAFT_WEIGHT * draft_loss + INDEX_WEIGHT * index_loss
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        curve.append([step, *(round(float(value.detach()), 4) for value in (loss, draft_loss, index_loss))])
        if step == 1:
            start = time.perf_counter()  # the first step compiles
        done = (time.perf_counter() - start) / seconds
        if step % 100 == 0:
            typer.echo(f"{stage.name} {done:.0%} step {curve[-1]}", err=True)
    return {
        "stage": stage.name,
        **{name: value for name, value in asdict(stage).items() if name not in ("name", "share")},
        "seconds": round(time.perf_counter() - start, 1),
        "steps": step,
        "tokens": step * stage.batch_size * stage.num_tokens,
        "loss": round(float(np.mean([row[1] for row in curve[-20:]])), 4),
        "draft_loss": round(float(np.mean([row[2] for row in curve[-20:]])), 4),
        "index_loss": round(float(np.mean([row[3] for row in curve[-20:]])), 4),
        "curve": curve[:: max(len(curve) // CURVE_POINTS, 1)],
    }


@torch.no_grad()
def predictions(
    model: Model, windows: torch.Tensor, mode: AttentionMode
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Negative log likelihood of each next token in one batch of windows, the greedy next token, and the draft's greedy
    token after next; [batch, tokens - 2] each."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        hidden, _ = model(windows[:, :-2], mode)
        drafted, _ = model.draft(hidden, windows[:, 1:-1], mode)
        logits, draft_logits = model.lm_head(hidden).float(), model.lm_head(drafted)
    nll = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:-1], reduction="none")
    return nll, logits.argmax(-1), draft_logits.argmax(-1)


def evaluate(model: Model, corpus: Corpus, num_windows: int, num_tokens: int) -> list[dict[str, Any]]:
    """Dense and sparse attention on the same held-out windows, every time the same, a row per mode."""
    corpus.restart()
    sums: dict[AttentionMode, list[dict[str, float]]] = {AttentionMode.DENSE: [], AttentionMode.SPARSE: []}
    for _ in range(num_windows):
        windows, repeats = corpus.windows(1, num_tokens + 2, 1.0)
        dense_greedy = None
        for mode, found in sums.items():
            nll, greedy, drafted = predictions(model, windows, mode)
            dense_greedy = greedy if dense_greedy is None else dense_greedy
            found.append(_window_figures(nll[0], greedy[0], drafted[0], dense_greedy[0], windows[0], int(repeats[0])))
    return [{"mode": mode.value, **_mean(found)} for mode, found in sums.items()]


def _window_figures(
    nll: torch.Tensor,
    greedy: torch.Tensor,
    drafted: torch.Tensor,
    dense_greedy: torch.Tensor,
    window: torch.Tensor,
    repeat: int,
) -> dict[str, float]:
    """Figures of one window; the repetition counts for the look-up alone."""
    text = slice(0, min(repeat, len(nll)))
    figures = {
        "nll": float(nll[text].mean()),
        "same_as_dense": float((greedy == dense_greedy)[text].float().mean()),
        "draft_acceptance": float((drafted[:-1] == greedy[1:])[text].float().mean()),
    }
    for first, last in pairwise(POSITION_BUCKETS):
        if first < text.stop:
            figures[f"nll_{first}_{last}"] = float(nll[first : min(last, text.stop)].mean())
    if repeat + LOOKUP_PREFIX < len(nll):
        looked_up = slice(repeat + LOOKUP_PREFIX, len(nll))
        figures["lookup_accuracy"] = float((greedy[looked_up] == window[1:-1][looked_up]).float().mean())
    return figures


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    """Means over windows; losses become perplexities."""
    means = {}
    for name in dict.fromkeys(name for figures in found for name in figures):
        mean = float(np.mean([figures[name] for figures in found if name in figures]))
        is_loss = name.startswith("nll")
        means[name.replace("nll", "perplexity")] = round(float(np.exp(mean)) if is_loss else mean, 4)
    return means


def export(model: Model, output: Path) -> int:
    """Write configurations and weights as vLLM reads them; returns the bytes of the weights."""
    last = f"model.layers.{model.shape.num_hidden_layers}"
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    weights[f"{last}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{last}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, output / WEIGHTS_FILE, metadata={"format": "pt"})
    configurations = {"config.json": model.shape.hf_config(MAX_MODEL_LEN), "tokenizer_config.json": tokenizer_config()}
    for name, configuration in configurations.items():
        (output / name).write_text(json.dumps(configuration, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in weights.values())


def tokenizer_config() -> dict[str, Any]:
    """Facts that transformers needs beside tokenizer.json; a text begins with no special token, and ends with one."""
    begin, end = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
    }


def load(model: Model, checkpoint: Path) -> list[dict[str, Any]]:
    """Take the weights of a training that goes on; returns its stages."""
    weights, names = load_file(checkpoint / WEIGHTS_FILE), model.state_dict().keys()
    model.load_state_dict({name: weights[name].float() for name in names})
    return json.loads((checkpoint / STAGES_FILE).read_text())


def definition_ids(tokenizer: Any) -> list[int]:
    """Tokens that begin a function definition."""
    return [token_id for token, token_id in tokenizer.get_vocab().items() if token in ("def", "Ġdef", "ĊĊdef", "Ċdef")]


def load_tokenizer(output: Path, training: list[Package], shape: Shape) -> Any:
    """The tokenizer in `output`; made of the packages where there is none."""
    from tokenizers import Tokenizer

    path = output / "tokenizer.json"
    if not path.is_file():
        make_tokenizer(training, shape.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def make_corpus(packages: list[Package], tokenizer: Any, max_bytes: int, device: torch.device, seed: int) -> Corpus:
    """Windows over the packages' text, of which at most `max_bytes` or so are read."""
    tokens = encode(packages, tokenizer, max_bytes)
    typer.echo(f"{len(packages)} packages, {len(tokens) / 1e6:.1f}M tokens", err=True)
    return Corpus(tokens, definition_ids(tokenizer), device, seed)


def perplexities(evaluation: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of each mode, under the names of a stage's figures."""
    return {f"perplexity_{figures['mode']}": figures["perplexity"] for figures in evaluation}


def result_rows(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per stage, without its curve."""
    return [{name: value for name, value in record.items() if name != "curve"} for record in stages]


def write_record(record: dict[str, Any], path: Path) -> None:
    """The result file of a training: what training.json says, without the packages and the curves."""
    names = ("command", "date", "hardware", "versions", "weight_bytes", "parameters", "evaluation")
    rows = result_rows(record["stages"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**{name: record[name] for name in names}, "rows": rows}, indent=2) + "\n")


def plot(stages: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss curves, stage after stage."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    seen = 0.0
    for record in stages:
        steps, losses, draft_losses, index_losses = (list(column) for column in zip(*record["curve"], strict=True))
        tokens = [seen + step * record["batch_size"] * record["num_tokens"] / 1e6 for step in steps]
        seen += record["tokens"] / 1e6
        axes[0].plot(tokens, losses, label=record["stage"])
        axes[0].plot(tokens, draft_losses, alpha=0.3, color=axes[0].lines[-1].get_color())
        if any(index_losses):
            axes[1].plot(tokens, index_losses, label=record["stage"])
    axes[0].set(title="next token (pale: draft layer)", xlabel="million tokens", ylabel="cross entropy", ylim=(0.5, 5))
    axes[1].set(title="indexers, sum over layers", xlabel="million tokens", ylabel="cross entropy with attention")
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def remaining(done: list[dict[str, Any]], only: list[str]) -> Iterator[Stage]:
    finished = {record["stage"] for record in done}
    return (stage for stage in STAGES if stage.name not in finished and (not only or stage.name in only))


@app.command()
def main(
    ctx: typer.Context,
    output: Annotated[Path, typer.Option(help="Directory of the model.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="Of all stages together.")] = 25.0,
    stage: Annotated[list[str], typer.Option(help="Only these stages; repeatable.")] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in the output directory.")] = False,
    shared_indexers: Annotated[bool, typer.Option(help="GLM-5.2's: one indexer for four layers.")] = False,
    corpus_mib: Annotated[int, typer.Option(min=1, help="Most text to read.")] = 400,
    eval_tokens: Annotated[int, typer.Option(min=512, help="Tokens of a window of the evaluation.")] = EVAL_TOKENS,
    eval_windows: Annotated[int, typer.Option(min=1, help="Windows of the evaluation.")] = EVAL_WINDOWS,
    stage_windows: Annotated[int, typer.Option(min=1, help="Of the one after each stage.")] = STAGE_WINDOWS,
    max_tokens: Annotated[int | None, typer.Option(min=256, help="Longest window of a stage; for trials.")] = None,
    compiled: Annotated[bool, typer.Option(help="Compile the dense model.")] = True,
    result: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "train_dsa.json",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train, measure, write."""
    torch.manual_seed(seed)
    output.mkdir(parents=True, exist_ok=True)
    shape = Shape(index_topk_freq=4 if shared_indexers else 1)
    max_bytes, place = corpus_mib << 20, torch.device(device)
    packages = permissive_packages(max_bytes)
    in_training, held_out = split(packages)
    tokenizer = load_tokenizer(output, in_training, shape)
    training = make_corpus(in_training, tokenizer, max_bytes, place, seed)
    unseen = make_corpus(held_out, tokenizer, max_bytes, place, seed + 1)
    model = Model(shape).to(device)
    done = load(model, output) if resume else []
    for item in remaining(done, stage):
        if max_tokens is not None:
            item = Stage(**{**asdict(item), "num_tokens": min(item.num_tokens, max_tokens), "batch_size": 1})
        done.append(train_stage(model, item, training, item.share * minutes * 60, compiled))
        done[-1] |= perplexities(evaluate(model, unseen, stage_windows, eval_tokens))
        export(model, output)
        (output / STAGES_FILE).write_text(json.dumps(done) + "\n")
        typer.echo(json.dumps({name: value for name, value in done[-1].items() if name != "curve"}), err=True)
    record = {
        "command": command(ctx, "benchmarks.train_dsa"),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware() | (gpu_hardware() if device == "cuda" else {}),
        "versions": versions(),
        "weight_bytes": export(model, output),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "stages": done,
        "evaluation": evaluate(model, unseen, eval_windows, eval_tokens),
        "packages": [
            {"package": item.name, "licence": item.licence, "held_out": item in held_out} for item in packages
        ],
    }
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    write_record(record, result)
    plot(done, output / "training.png")
    typer.echo(json.dumps(record["evaluation"], indent=1))


if __name__ == "__main__":
    app()
