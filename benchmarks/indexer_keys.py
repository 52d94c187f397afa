"""Measures of indexer keys in 4 bits: their accuracy, and the time of the kernel that scores them.

    python -m benchmarks.indexer_keys quality
    python -m benchmarks.indexer_keys run --output benchmarks/results/h200/indexer_keys.json

`quality` runs a trained DSA model in torch, teacher-forced over source code that it has not seen, with the indexer's
keys as computed, in 8 bits (queries, too, as vLLM does) and in 4 bits, before and after a Hadamard rotation. Columns
are those of `code_quality.py`; `same_next_token` is the share of greedy next tokens that are those with keys as
computed, `selection_agreement` the share of selected positions that these keys select as well, in the same layer over
the same hidden states, `selection_agreement_by_layer` the same, the draft layer last.

`run` times one launch of the paged logits kernel on a GPU, and DeepGEMM's on keys in 8 bits, as vLLM calls it. Both are
replayed from CUDA graphs, over as many copies of the keys as exceed the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.dsa_model import AttentionMode, IndexerState, Model, index_scores
from vllm_hisparse.cpu import indexer_scores
from vllm_hisparse.layout import BLOCK_SIZE
from vllm_hisparse.ops import indexer_keys

app = typer.Typer(add_completion=False)

FULL_ATTENTION, EXACT = "full attention", "exact"
SAMPLED_QUERIES = 32  # one in so many is asked which positions it selects
Recode = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # of queries and keys


def in_8_bits(values: torch.Tensor, floor: float) -> torch.Tensor:
    scale = indexer_scores.ue8m0_scale(values.abs().amax(-1), floor)[..., None]
    return indexer_scores.quantize(values, scale).float() * scale


def in_4_bits(keys: torch.Tensor) -> torch.Tensor:
    values, scales = indexer_keys.dequantize(*indexer_keys.quantize(keys))
    return values.float() * scales[..., None]


def rotated(values: torch.Tensor) -> torch.Tensor:
    """By a Hadamard matrix of a power of two rows; scores stay the same."""
    matrix = torch.ones(1, 1)
    while len(matrix) < values.shape[-1]:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix) * 0.5**0.5
    return values @ matrix


KEY_DTYPES: dict[str, Recode] = {
    EXACT: lambda query, key: (query, key),
    "fp8": lambda query, key: (in_8_bits(query, 1e-10), in_8_bits(key, 1e-4)),
    "fp4": lambda query, key: (in_8_bits(query, 1e-10), in_4_bits(key)),
    "fp4, rotated": lambda query, key: (in_8_bits(rotated(query), 1e-10), in_4_bits(rotated(key))),
}


@dataclass
class Recoding:
    """Forward hook of a model's indexers, which recodes queries and keys and compares selections.

    Attributes:
        agreement: share of selected positions in each call of each indexer, in model order; NaN where every
            position is selected.
    """

    recode: Recode
    agreement: dict[torch.nn.Module, list[float]] = field(default_factory=dict)

    def __call__(self, indexer: torch.nn.Module, inputs: Any, state: IndexerState) -> IndexerState:
        query, key, weights = state
        recoded = (*self.recode(query, key), weights)
        top_k = indexer.shape.index_topk
        places = slice(top_k, key.shape[1], SAMPLED_QUERIES)
        shares = self.agreement.setdefault(indexer, [])
        if key.shape[1] > top_k:
            expected, found = (index_scores(each, places).topk(top_k, -1).indices for each in (state, recoded))
            is_both = torch.zeros_like(index_scores(state, places), dtype=torch.bool).scatter_(-1, expected, True)
            shares.append(is_both.gather(-1, found).float().mean().item())
        return recoded


@app.command()
def quality(
    ctx: typer.Context,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = Path("benchmarks/models/code-dsa"),
    contexts: Annotated[list[int], typer.Option(min=2048, help="Tokens of a window.")] = [2048, 6144, 16384],  # noqa: B006
    num_tokens: Annotated[int, typer.Option(help="Tokens of all windows of a context.")] = 16384,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "indexer_keys.json",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Measure, write, show."""
    from benchmarks import code_quality  # NOTE: imported here so that `run` needs no corpus

    trained = code_quality.load_model(model, torch.device("cpu"))
    found: list[dict[str, Any]] = []
    for context in contexts:
        windows = code_quality.held_out_windows(model, max(num_tokens // context, 1), context, seed)
        for row in quality_rows(trained, windows):
            frame = {"model": model.name, "windows": len(windows), "tokens": len(windows) * context, "context": context}
            found.append(frame | row)
            write_result(output, ctx, "benchmarks.indexer_keys quality", found)
    columns = ("context", "key_dtype", "perplexity", "lookup_accuracy", "draft_acceptance", "same_next_token")
    columns = (*columns, "selection_agreement")
    show("Indexer keys", [{name: row[name] for name in columns} for row in found])


def quality_rows(model: Model, windows: list[Any]) -> Iterator[dict[str, Any]]:
    """A row for full attention, and one for each way to keep the keys.

    Args:
        model: in float32.
        windows: text, `code_quality.Window` each.
    """
    from benchmarks.code_quality import in_torch

    dense = [in_torch(model, window, AttentionMode.DENSE) for window in windows]
    rows = {FULL_ATTENTION: (dense, None)}
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    for name, recode in KEY_DTYPES.items():
        recoding = Recoding(recode)
        hooks = [indexer.register_forward_hook(recoding) for indexer in indexers]
        rows[name] = [in_torch(model, window, AttentionMode.SPARSE) for window in windows], recoding
        for hook in hooks:
            hook.remove()
        if name == EXACT:
            yield _row(FULL_ATTENTION, windows, *rows[FULL_ATTENTION], dense, rows[EXACT][0], indexers)
        yield _row(name, windows, *rows[name], dense, rows[EXACT][0], indexers)


def _row(
    name: str,
    windows: list[Any],
    found: list[Any],
    recoding: Recoding | None,
    dense: list[Any],
    exact: list[Any],
    indexers: list[torch.nn.Module],
) -> dict[str, Any]:
    from benchmarks.code_quality import figures, mean

    text = [slice(0, window.repeat - 1) for window in windows]
    same = [part.greedy == other.greedy for part, other in zip(found, exact, strict=True)]
    row = {"key_dtype": name, **figures(windows, found, dense), "same_next_token": mean(same, text)}
    by_layer = None
    if recoding is not None:
        by_layer = [round(float(np.mean(recoding.agreement[indexer])), 4) for indexer in indexers]
    row["selection_agreement"] = None if by_layer is None else round(float(np.mean(by_layer)), 4)
    row["selection_agreement_by_layer"] = by_layer
    return row


@dataclass(frozen=True)
class Launch:
    """Inputs of one launch, on the GPU.

    Attributes:
        wide, narrow: [num_blocks, BLOCK_SIZE, bytes of a key] uint8, the same keys in 8 and in 4 bits.
        query: [requests, queries, heads, 128] fp8. weights: [requests * queries, heads] float32.
        seq_lens: [requests, queries] int32. block_table: [requests, blocks] int32.
    """

    wide: torch.Tensor
    narrow: torch.Tensor
    query: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def random(cls, requests: int, context: int, queries: int, heads: int) -> Launch:
        """Random keys in blocks in random order."""
        device, num_blocks = torch.device("cuda"), requests * context // BLOCK_SIZE
        wide = torch.empty(num_blocks, BLOCK_SIZE * indexer_keys.WIDE_KEY_BYTES, dtype=torch.uint8, device=device)
        narrow = torch.empty(num_blocks, BLOCK_SIZE * indexer_keys.KEY_BYTES, dtype=torch.uint8, device=device)
        for part in torch.arange(num_blocks, device=device).split(2048):
            keys = torch.randn(len(part), BLOCK_SIZE, indexer_keys.HEAD_DIM, device=device)
            scale = indexer_scores.ue8m0_scale(keys.abs().amax(-1), 1e-4)
            elements = indexer_scores.quantize(keys, scale[..., None])
            wide[part] = torch.cat((elements.view(torch.uint8).flatten(1), scale.view(torch.uint8)), 1)
        indexer_keys.narrow_blocks(wide, narrow)
        return cls(
            wide.unflatten(1, (BLOCK_SIZE, -1)),
            narrow.unflatten(1, (BLOCK_SIZE, -1)),
            torch.randn(requests, queries, heads, indexer_keys.HEAD_DIM, device=device).to(indexer_keys.FP8),
            torch.rand(requests * queries, heads, device=device),
            (torch.full((requests, 1), context, device=device) - torch.arange(queries, device=device).flip(0)).int(),
            torch.randperm(num_blocks, device=device).int().view(requests, -1),
        )

    def in_4_bits(self, context: int) -> torch.Tensor:
        """[requests * queries, context] float32."""
        return indexer_keys.paged_logits(
            self.narrow, self.query, self.weights, self.seq_lens, self.block_table, context
        )

    def in_8_bits(self, context: int) -> Callable[[], torch.Tensor]:
        """DeepGEMM's kernel as vLLM calls it; its schedule is made once for all layers of a step."""
        from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata
        from vllm.utils.platform_utils import num_compute_units

        schedule = get_paged_mqa_logits_metadata(self.seq_lens, BLOCK_SIZE, num_compute_units(0))
        # NOTE: vLLM 0.33 has no such parameter, and never cleans logits.
        options = {"clean_logits": False} if "clean_logits" in signature(fp8_fp4_paged_mqa_logits).parameters else {}
        return lambda: fp8_fp4_paged_mqa_logits(
            (self.query, None),
            self.wide.unsqueeze(-2),
            self.weights,
            self.seq_lens,
            self.block_table,
            schedule,
            max_model_len=context,
            **options,
        )


def launch_us(launches: list[Callable[[], Any]], samples: int) -> float:
    """Median time of one of the launches, which are replayed one after another from a CUDA graph."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000)  # so that the graph is launched before its start is recorded
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(launches))
    return float(np.median(times[samples // 5 :]))


@app.command()
def run(
    ctx: typer.Context,
    output: Annotated[Path, typer.Option(help="Result file.")],
    requests: Annotated[list[int], typer.Option(min=1)] = [1, 8, 32, 56],  # noqa: B006
    contexts: Annotated[list[int], typer.Option(min=64)] = [32768, 65536, 131072],  # noqa: B006
    queries: Annotated[list[int], typer.Option(min=1, max=8, help="Of a request.")] = [1, 2],  # noqa: B006
    heads: Annotated[int, typer.Option(help="Of the indexer.")] = 64,
    samples: Annotated[int, typer.Option(min=5)] = 25,
) -> None:
    """Time, write, show."""
    found: list[dict[str, Any]] = []
    copies_bytes = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    for num_queries, num_requests, context in product(queries, requests, contexts):
        key_bytes = num_requests * context * indexer_keys.KEY_BYTES
        copies = [
            Launch.random(num_requests, context, num_queries, heads) for _ in range(-(-copies_bytes // key_bytes))
        ]
        visible = slice(context - num_queries + 1)  # to every query; beyond, the kernels may write anything
        logits, expected = copies[0].in_4_bits(context)[:, visible], copies[0].in_8_bits(context)()[:, visible]
        difference = ((logits - expected).float().norm() / expected.float().norm()).item()
        narrow_us = launch_us([partial(each.in_4_bits, context) for each in copies], samples)
        wide_us = launch_us([each.in_8_bits(context) for each in copies], samples)
        row = {"queries": num_queries, "requests": num_requests, "context": context, "heads": heads}
        row |= {"fp8_us": round(wide_us, 2), "fp4_us": round(narrow_us, 2), "ratio": round(narrow_us / wide_us, 3)}
        row |= {"fp4_gb_per_s": round(key_bytes / narrow_us / 1000, 1), "logits_difference": round(difference, 4)}
        found.append(row)
        write_result(output, ctx, "benchmarks.indexer_keys run", found, gpu_hardware())
        del copies, logits, expected
    show("One launch", found)


if __name__ == "__main__":
    app()
