"""Quality that a selection and hot buffers cost a trained DSA model, on source code that it has not seen.

    python -m benchmarks.code_quality --output benchmarks/results/cpu/code_quality.json

Every system is given the same windows of text (teacher forcing): files of held-out packages, at whose end a definition
from further up is repeated. Four systems: the model in torch with full attention and over the selection; vLLM with full
KV and over hot buffers. vLLM's engines compute one token per request and step (`long_prefill_token_threshold`), so that
the whole window is decoded: over hot buffers every position but the first reads rows that were swapped in.

* `perplexity`, `accuracy`: of the next token, the greedy one; before the repetition.
* `lookup_accuracy`: in the repetition, once 48 tokens of it are known.
* `same_as_full_attention`, `same_as_full_kv`: share of greedy next tokens that are those of full attention in torch,
  and of vLLM with full KV; `widest_tie`: the largest margin between full KV's two best tokens where another one was
  greedy.
* `draft_acceptance`: the draft layer's token after next is the model's own; in torch alone, because
  `trained_drafts.py` measures drafts in vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn import functional as F

from benchmarks.code_corpus import permissive_packages, unseen
from benchmarks.common import RESULTS, show, write_result
from benchmarks.dsa_model import AttentionMode, Model
from benchmarks.selections import load_model, load_shape
from benchmarks.train_dsa import LOOKUP_PREFIX, load_tokenizer, make_corpus

PACKAGES = ("charset-normalizer", "starlette", "uvicorn")
POSITION_BUCKETS = (0, 1024, 4096, 16384)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the counters are read in this process
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # two engines run side by side
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
FULL_ATTENTION, DSA, FULL_KV, HOT = (
    "full attention, torch",
    "DSA, torch",
    "DSA, full KV, vLLM",
    "DSA, hot buffers, vLLM",
)
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Window:
    """Text, and where a definition from further up begins again.

    Attributes:
        tokens: [n + 1] int64. repeat: index of the first token of the repetition.
    """

    tokens: np.ndarray
    repeat: int


@dataclass(frozen=True)
class Prediction:
    """For each token of a window but the first and the last one: [n - 1] each.

    Attributes:
        logprob: float64, of the token. greedy: int64, the most likely token. margin: float64, logprob of the most
        likely token minus that of the next one. accepted: bool, the draft layer foresaw `greedy`; None: there is none.
    """

    logprob: np.ndarray
    greedy: np.ndarray
    margin: np.ndarray
    accepted: np.ndarray | None = None


def in_torch(model: Model, window: Window, mode: AttentionMode) -> Prediction:
    """Compute next tokens in torch, in float32 like the engines."""
    tokens = torch.from_numpy(window.tokens)[None]
    with torch.no_grad():
        hidden, _ = model(tokens[:, :-2], mode)
        drafted, _ = model.draft(hidden, tokens[:, 1:-1], mode)
        logprobs = F.log_softmax(model.lm_head(hidden)[0].double(), -1)
        drafts = model.lm_head(drafted)[0].argmax(-1)
    best, greedy = logprobs.topk(2, -1)
    of_text = logprobs.gather(1, tokens[0, 1:-1, None])[:, 0]
    accepted = torch.cat((torch.zeros(1, dtype=torch.bool), drafts[:-1] == greedy[1:, 0]))
    return Prediction(of_text.numpy(), greedy[:, 0].numpy(), (best[:, 0] - best[:, 1]).numpy(), accepted.numpy())


def in_vllm(model_dir: str, windows: list[Window], hot_rows: int | None) -> tuple[list[Prediction], float | None]:
    """Compute next tokens with an engine that decodes the windows; return its hit rate, too.

    Args:
        model_dir: directory of the model.
        windows: side by side.
        hot_rows: hot rows of each request and layer; None: full KV.
    """
    from vllm import LLM, SamplingParams

    options = {"host_pool_gib": 4.0, "device_buffer_size": hot_rows, "elastic": False}
    connector = {"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    llm = LLM(
        model_dir,
        dtype="float32",
        max_model_len=max(len(window.tokens) for window in windows),
        max_num_seqs=len(windows),
        long_prefill_token_threshold=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
        **({} if hot_rows is None else {"kv_transfer_config": connector}),
    )
    prompts = [{"prompt_token_ids": window.tokens[:-1].tolist()} for window in windows]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=2))
    return [prediction(output) for output in outputs], None if hot_rows is None else hit_rate()


def prediction(output: Any) -> Prediction:
    """Logprobs of one request with `prompt_logprobs`."""
    rows = []
    for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        ranked = sorted(found.items(), key=lambda item: -item[1].logprob)
        (greedy, best), (_, second) = ranked[:2]
        rows.append((found[token].logprob, greedy, best.logprob - second.logprob))
    logprob, greedy, margin = (np.array(column) for column in zip(*rows, strict=True))
    return Prediction(logprob, greedy, margin)


def hit_rate() -> float:
    """Counts of this process's engine so far."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    hits, misses = get_kv_transfer_group().worker.hot_buffer.counts.by_seq.sum(0).tolist()
    return hits / (hits + misses)


def figures(windows: list[Window], found: list[Prediction], dense: list[Prediction]) -> dict[str, Any]:
    """Return the figures of a system over all windows.

    Args:
        windows: text.
        found: predictions of a system.
        dense: predictions of full attention.
    """
    text = [slice(0, window.repeat - 1) for window in windows]  # entry i is of token i + 1
    looked_up = [slice(window.repeat - 1 + LOOKUP_PREFIX, None) for window in windows]
    is_right = [part.greedy == window.tokens[1:-1] for part, window in zip(found, windows, strict=True)]
    is_same = [part.greedy == other.greedy for part, other in zip(found, dense, strict=True)]
    row = {
        "perplexity": perplexity([part.logprob[place] for part, place in zip(found, text, strict=True)]),
        "accuracy": mean(is_right, text),
        "lookup_accuracy": mean(is_right, looked_up),
        "same_as_full_attention": mean(is_same, text),
        "draft_acceptance": None,
    }
    if found[0].accepted is not None:
        row["draft_acceptance"] = mean([part.accepted for part in found], text)
    for first, last in pairwise(POSITION_BUCKETS):
        places = [slice(first, min(last, place.stop)) for place in text]
        if any(place.start < place.stop for place in places):
            row[f"perplexity_{first}_{last}"] = perplexity(
                [part.logprob[place] for part, place in zip(found, places, strict=True)]
            )
    return row


def differences(found: list[Prediction], reference: list[Prediction]) -> dict[str, Any]:
    """Compare hot buffers with full KV at all positions."""
    logprobs, margins, same = [], [], []
    for part, other in zip(found, reference, strict=True):
        is_same = part.greedy == other.greedy
        same.append(is_same)
        margins.append(other.margin[~is_same])
        logprobs.append(np.abs(part.logprob - other.logprob))
    margins, logprobs = np.concatenate(margins), np.concatenate(logprobs)
    return {
        "same_as_full_kv": round(float(np.concatenate(same).mean()), 6),
        "other_greedy_tokens": len(margins),
        "widest_tie": round(float(margins.max(initial=0)), 6),
        "logprob_difference_mean": float(f"{logprobs.mean():.3g}"),
        "logprob_difference_max": float(f"{logprobs.max():.3g}"),
    }


def mean(parts: list[np.ndarray], places: list[slice]) -> float:
    return round(float(np.concatenate([part[place] for part, place in zip(parts, places, strict=True)]).mean()), 4)


def perplexity(logprobs: list[np.ndarray]) -> float:
    return round(float(np.exp(-np.concatenate(logprobs).mean())), 4)


def rows(model_dir: Path, windows: list[Window], hot_rows: int) -> Iterator[dict[str, Any]]:
    """A row per system, full attention first."""
    model, found = load_model(model_dir, torch.device("cpu")), {}
    for name, mode in ((FULL_ATTENTION, AttentionMode.DENSE), (DSA, AttentionMode.SPARSE)):
        found[name] = [in_torch(model, window, mode) for window in windows]
        yield {"system": name, **figures(windows, found[name], found[FULL_ATTENTION])}
    os.environ.update(ENVIRONMENT)  # before the engines' processes import torch
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        engines = [processes.submit(in_vllm, str(model_dir), windows, rows) for rows in (None, hot_rows)]
        (found[FULL_KV], _), (found[HOT], rate) = (engine.result() for engine in engines)
    yield {"system": FULL_KV, **figures(windows, found[FULL_KV], found[FULL_ATTENTION])}
    yield {
        "system": HOT,
        **figures(windows, found[HOT], found[FULL_ATTENTION]),
        **{"hot_rows": hot_rows, "hit_rate": round(rate, 4)},
        **differences(found[HOT], found[FULL_KV]),
    }


def held_out_windows(model_dir: Path, num_windows: int, num_tokens: int, seed: int) -> list[Window]:
    """Windows of source code that the model has not seen, each with a repetition.

    Args:
        model_dir: directory of the model.
        num_windows: number of windows.
        num_tokens: tokens of each.
        seed: seed of the places and repetitions.
    """
    packages = [package for package in unseen(permissive_packages(1 << 30), model_dir) if package.name in PACKAGES]
    tokenizer = load_tokenizer(model_dir, [], load_shape(model_dir))
    corpus = make_corpus(packages, tokenizer, 1 << 30, torch.device("cpu"), seed)
    drawn = []
    for _ in range(num_windows):
        tokens, repeat = corpus.windows(1, num_tokens + 1, 1.0)
        drawn.append(Window(tokens[0].numpy(), int(repeat[0])))
    return drawn


@app.command()
def main(
    ctx: typer.Context,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = Path("benchmarks/models/code-dsa"),
    windows: Annotated[int, typer.Option(min=2, help="Of text; vLLM splits a prompt only beside another.")] = 2,
    num_tokens: Annotated[int, typer.Option(min=512, help="Tokens of a window.")] = 6144,
    hot_rows: Annotated[int, typer.Option(min=256, help="Hot rows per request and layer.")] = 512,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "cpu" / "code_quality.json",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Measure, write, show."""
    drawn = held_out_windows(model, windows, num_tokens, seed)
    frame = {"model": model.name, "windows": windows, "context": num_tokens}
    found = [frame | row for row in rows(model, drawn, hot_rows)]
    write_result(output, ctx, "benchmarks.code_quality", found)
    columns = ("system", "perplexity", "accuracy", "lookup_accuracy", "same_as_full_attention", "draft_acceptance")
    show("Quality", [{name: row[name] for name in columns} for row in found])


if __name__ == "__main__":
    app()
