"""How local are the selections of a trained DSA model, and what predicts the rows that a step adds?

    python -m benchmarks.locality --trace benchmarks/traces/code-dsa.trace

Traces that an engine recorded (`--engine-trace`) have no ranks below the selection: only hit rates are reported, for
each trace and for all together, the request mix.

Two kinds of rows. *Hit rates* by layer, policy and buffer size; `scope` says whether every request and layer has a
buffer of its own or all share a pool of the same memory. `new_rows` is the share of a selection that the step before
did not have, `new_rows_in_next_ranks` the share of these that ranked below 1.25, 1.5 and 2 times top-k in that step.

*Predictors* name rows that might be copied before the step: `fetched_rows` of them per step are not hot, and they
contain the share `coverage` of the rows that are needed and not hot. `coverage_random` is the share to expect from as
many random rows, `coverage_recent` that of the latest ones. Hot is what the step before selected (`buffer_rows` 0), or
what an LRU buffer holds. The newest row is hot in any case and in none of these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS, show, write_result
from vllm_hisparse.cli.replay import WARM_UP_STEPS, replays
from vllm_hisparse.cli.replay_buffers import SCOPES, PrivateBuffer, first_uses, sequences
from vllm_hisparse.cli.replay_policies import LRFU, LRU, POLICIES, Belady, Selection
from vllm_hisparse.trace import Trace

app = typer.Typer(add_completion=False)
ALL = "all"
DRAFT = "draft"
TEXT, ENGINE = "text", "engine"  # sources of selections: given tokens in torch, or an engine's own tokens
PREDICTED_BUFFERS = (0, 2, 4, 16)  # sizes in top-k for which predictors are counted


class Step:
    """One step of one request, as predictors see it.

    Args:
        trace: selections.
        request_index: index of the request.
        step: number of the step, at least 1.
    """

    def __init__(self, trace: Trace, request_index: int, step: int):
        request = trace.requests[request_index]
        self.trace, self.newest = trace, request.first_position + step
        self.now, self.before = request.positions[:, step], request.positions[:, step - 1]

    def selected(self, layer: int) -> np.ndarray:
        return self._rows(self.now[layer, : self.trace.top_k])

    def previous_layer(self, layer: int) -> np.ndarray | None:
        return self.selected(layer - 1) if layer > 0 else None

    def selected_before(self, layer: int) -> np.ndarray:
        return self._rows(self.before[layer, : self.trace.top_k])

    def previous_layer_before(self, layer: int) -> np.ndarray | None:
        return self.selected_before(layer - 1) if layer > 0 else None

    def runners_up(self, layer: int) -> np.ndarray:
        return self._rows(self.before[layer, self.trace.top_k :])

    def draft_before(self, layer: int) -> np.ndarray | None:
        draft = self.trace.layers.index(DRAFT) if DRAFT in self.trace.layers else layer
        return self.selected_before(draft) if draft != layer else None

    def newest_before(self, layer: int) -> np.ndarray:
        return np.array([self.newest - 1])

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Positions before the newest one: [n] int64."""
        return positions[(positions >= 0) & (positions < self.newest)].astype(np.int64)


PREDICTORS: dict[str, Callable[[Step, int], np.ndarray | None]] = {
    "runners-up of the step before": Step.runners_up,
    "draft layer in the step before": Step.draft_before,
    "previous layer in the step before": Step.previous_layer_before,
    "previous layer in the same step": Step.previous_layer,
    "newest row of the step before": Step.newest_before,
}


@dataclass
class Tally:
    """Sums over steps.

    Attributes:
        steps: number of steps.
        needed: rows that are selected and not hot. fetched: predicted rows that are not hot. covered: rows in both.
        random, recent: rows to expect in both from as many random and latest rows.
    """

    steps: int = 0
    needed: int = 0
    fetched: int = 0
    covered: int = 0
    random: float = 0.0
    recent: int = 0

    def add(self, selected: np.ndarray, predicted: np.ndarray, is_hot: np.ndarray) -> None:
        """Count a step.

        Args:
            selected, predicted: [n] int64 positions.
            is_hot: [newest] bool.
        """
        is_needed = np.zeros(len(is_hot), bool)
        is_needed[selected] = True
        is_needed &= ~is_hot
        fetched = predicted[~is_hot[predicted]]
        cold = (~is_hot).nonzero()[0]
        self.steps += 1
        self.needed += int(is_needed.sum())
        self.fetched += len(fetched)
        self.covered += int(is_needed[fetched].sum())
        self.random += len(fetched) * int(is_needed.sum()) / max(len(cold), 1)
        self.recent += int(is_needed[cold[len(cold) - len(fetched) :]].sum())

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def figures(self) -> dict[str, float]:
        """Means per step, and shares of the needed rows."""
        names = {"coverage": self.covered, "coverage_random": self.random, "coverage_recent": self.recent}
        return {
            "needed_rows": round(self.needed / max(self.steps, 1), 1),
            "fetched_rows": round(self.fetched / max(self.steps, 1), 1),
            **{name: round(found / max(self.needed, 1), 4) for name, found in names.items()},
        }


def hot_masks(steps: list[Selection], num_slots: int) -> Iterator[np.ndarray]:
    """Yield the hot positions before each step except the first: [newest] bool.

    Args:
        steps: steps of one sequence.
        num_slots: slots of an LRU buffer; 0: the selection of the step before is hot.
    """
    num_rows = max(steps[-1].newest + 1, num_slots)
    buffer = PrivateBuffer(num_slots, num_rows, LRU(num_slots, first_uses(steps, num_rows), 1)) if num_slots else None
    if buffer is not None:
        buffer.seed(steps[0].newest)
    for before, selection in pairwise(steps):
        if buffer is not None:
            buffer.select(before)
            yield buffer.slot_of[: selection.newest] >= 0
            continue
        is_hot = np.zeros(selection.newest, bool)
        is_hot[before.rows] = True
        yield is_hot


def predictor_rows(trace: Trace, buffer_rows: list[int], warm_up: int) -> Iterator[dict[str, Any]]:
    """Coverage of every predictor, by layer and over all layers."""
    traced, num_layers = sequences(trace), len(trace.layers)
    for num_slots in buffer_rows:
        tallies = {(name, layer): Tally() for name in PREDICTORS for layer in range(num_layers)}
        for sequence, steps in enumerate(traced):
            request_index, layer = divmod(sequence, num_layers)
            for number, is_hot in enumerate(hot_masks(steps, num_slots), start=1):
                if number < warm_up:
                    continue
                step = Step(trace, request_index, number)
                for name, predict in PREDICTORS.items():
                    if (predicted := predict(step, layer)) is not None:
                        tallies[name, layer].add(step.selected(layer), predicted, is_hot)
        for name in PREDICTORS:
            of_layers = [tallies[name, layer] for layer in range(num_layers)]
            for layer, tally in zip((*trace.layers, ALL), (*of_layers, sum(of_layers, Tally())), strict=True):
                if tally.steps:
                    yield frame(trace, layer) | {"predictor": name, "buffer_rows": num_slots} | tally.figures()


def next_ranks(trace: Trace, warm_up: int) -> tuple[np.ndarray, np.ndarray]:
    """Share of new rows of each layer and of all, and the share of these in each group of ranks and those before it.

    Returns:
        [layers + 1] and [layers + 1, groups - 1] float64.
    """
    num_layers, ends = len(trace.layers), trace.group_ends
    new, selected, found = np.zeros(num_layers), np.zeros(num_layers), np.zeros((num_layers, len(ends)))
    for sequence, steps in enumerate(sequences(trace)):
        layer = sequence % num_layers
        level = np.zeros(steps[-1].newest + 1, np.int64)
        for before, selection in pairwise(steps[warm_up - 1 :]):
            level[:] = len(ends)
            level[before.ranked] = before.levels
            levels = level[selection.rows]
            selected[layer] += len(selection.rows)
            new[layer] += (levels > 0).sum()
            found[layer] += [((levels > 0) & (levels <= group)).sum() for group in range(len(ends))]
    new, selected = np.append(new, new.sum()), np.append(selected, selected.sum())
    found = np.vstack((found, found.sum(0)))[:, 1:]
    return new / np.maximum(selected, 1), found / np.maximum(new, 1)[:, None]


def hit_rows(trace: Trace, policies: list[str], sizes: list[float], warm_up: int) -> Iterator[dict[str, Any]]:
    """Hit rates of some policies, by layer for private buffers, and over all layers."""
    new, in_next = next_ranks(trace, warm_up)
    shares = [f"{end / trace.top_k:g}" for end in trace.group_ends[1:]]
    for replay in replays(trace, policies, sizes, [*SCOPES]):
        selected, missed = (part[:, :, warm_up:].sum() for part in (replay.selected, replay.missed))
        rates = dict(
            zip((*trace.layers, ALL), (*replay.hit_rates(warm_up), 1 - missed / max(selected, 1)), strict=True)
        )
        for index, (layer, rate) in enumerate(rates.items()):
            if replay.scope == "pool" and layer != ALL:
                continue
            yield frame(trace, layer) | {
                "scope": replay.scope,
                "policy": replay.policy,
                "buffer_rows": replay.num_slots,
                "hit_rate": round(float(rate), 4),
                "new_rows": round(float(new[index]), 4),
                "new_rows_in_next_ranks": dict(zip(shares, in_next[index].round(4).tolist(), strict=True)),
            }


def engine_rows(paths: list[Path], sizes: list[float], warm_up: int) -> Iterator[dict[str, Any]]:
    """Hit rates of LRU, of LRFU and of the best policy there can be, of each trace and of all together."""
    recorded = [Trace.read(path) for path in paths]
    mixes = [Trace.join(recorded)] if len(recorded) > 1 else []
    for trace in (*recorded, *mixes):
        for row in hit_rows(trace, [LRU.name, LRFU.name, Belady.name], sizes, warm_up):
            yield {"source": ENGINE, **row}


def frame(trace: Trace, layer: str) -> dict[str, Any]:
    """The columns with which every row begins."""
    contexts = [request.first_position + request.num_steps for request in trace.requests]
    sizes = {"context": max(contexts), "shortest_context": min(contexts), "requests": len(contexts)}
    return {"model": trace.model, "layer": layer, **sizes}


def plot(rows: list[dict[str, Any]], output: Path, top_k: int) -> None:
    """Hit rates by policy, those of LRU by layer, and coverage of the predictors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8.4))
    axes = axes.flatten()
    plot_engine(axes[3], [row for row in rows if row["source"] == ENGINE and row["layer"] == ALL], top_k)
    rows = [row for row in rows if row["source"] == TEXT]
    hits = [row for row in rows if "policy" in row]
    for policy, scope in [*((name, "buffers") for name in POLICIES), ("lru", "pool"), ("belady", "pool")]:
        line = [row for row in hits if (row["layer"], row["policy"], row["scope"]) == (ALL, policy, scope)]
        style = {"linestyle": "--" if scope == "pool" else "-", "color": f"C{[*POLICIES].index(policy)}"}
        plot_line(axes[0], line, top_k, f"{policy}, {scope}", **style)
    for layer in dict.fromkeys(row["layer"] for row in hits if row["layer"] != ALL):
        line = [row for row in hits if (row["layer"], row["policy"], row["scope"]) == (layer, "lru", "buffers")]
        plot_line(axes[1], line, top_k, f"layer {layer}" if layer.isdigit() else layer)
    plot_coverage(axes[2], [row for row in rows if "predictor" in row and row["buffer_rows"] == 0])
    axes[0].set_title("mean of the layers")
    axes[1].set_title("LRU, a buffer per request and layer")
    axes[2].set_title("new rows among predicted ones")
    axes[3].set_title("an engine's own tokens, LRU, by context")
    for axis in axes:
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def plot_engine(axis: Any, rows: list[dict[str, Any]], top_k: int) -> None:
    """Hit rate of LRU by context, and in one pool for all contexts."""
    contexts = dict.fromkeys((row["shortest_context"], row["context"]) for row in rows)
    for index, (shortest, longest) in enumerate(contexts):
        name = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        for scope, line_style in (("buffers", "-"), ("pool", "--")):
            case = ("lru", scope, shortest, longest)
            names = ("policy", "scope", "shortest_context", "context")
            line = [row for row in rows if tuple(row[name] for name in names) == case]
            plot_line(axis, line, top_k, f"{name}, {scope}", linestyle=line_style, color=f"C{index}")


def plot_line(axis: Any, line: list[dict[str, Any]], top_k: int, label: str, **style: Any) -> None:
    """Hit rate by size of a buffer."""
    sizes, rates = [row["buffer_rows"] / top_k for row in line], [row["hit_rate"] for row in line]
    axis.plot(sizes, rates, marker="o", markersize=3, label=label, **style)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="hot rows per request and layer, in top-k", ylabel="hit rate", ylim=(0, 1))


def plot_coverage(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Bars by layer; a mark at the share that as many of the latest rows would have."""
    names = [name for name in PREDICTORS if name != "newest row of the step before"]
    layers, width = list(dict.fromkeys(row["layer"] for row in rows)), 0.8 / len(names)
    for index, name in enumerate(names):
        bars = [row for row in rows if row["predictor"] == name]
        places = [layers.index(row["layer"]) + (index - 1.5) * width for row in bars]
        axis.bar(places, [row["coverage"] for row in bars], width, label=name)
        label = "as many latest rows" if index == 0 else None
        axis.plot(places, [row["coverage_recent"] for row in bars], "k_", markersize=5, label=label)
    axis.set_xticks(range(len(layers)), layers)
    axis.set(xlabel="layer", ylabel="coverage", ylim=(0, 1))


@app.command()
def main(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Option(help="File of selections.")] = Path("benchmarks/traces/code-dsa.trace"),
    engine_trace: Annotated[list[Path], typer.Option(help="Of an engine; repeatable.")] = [],  # noqa: B006
    size: Annotated[list[float], typer.Option(min=1, help="Hot rows in top-k; repeatable.")] = [1, 2, 4, 8, 16],  # noqa: B006
    warm_up: Annotated[int, typer.Option(min=1, help="First steps that are not counted.")] = WARM_UP_STEPS,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "locality.json",
    picture: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
) -> None:
    """Replay a trace and look for predictors of its new rows."""
    selections = Trace.read(trace)
    rows = list(hit_rows(selections, [*POLICIES], size, warm_up))
    rows += predictor_rows(selections, [times * selections.top_k for times in PREDICTED_BUFFERS], warm_up)
    rows = [{"source": TEXT, **row} for row in rows] + list(engine_rows(engine_trace, size, warm_up))
    write_result(output, ctx, "benchmarks.locality", rows)
    mean = [row for row in rows if row["layer"] == ALL]
    columns = ("context", "requests", "scope", "policy", "buffer_rows", "hit_rate")
    show("Hit rates", [{name: row[name] for name in columns} for row in mean if "policy" in row])
    columns = (
        "predictor",
        "buffer_rows",
        "needed_rows",
        "fetched_rows",
        "coverage",
        "coverage_random",
        "coverage_recent",
    )
    show("Predictors", [{name: row[name] for name in columns} for row in mean if "predictor" in row])
    if picture is not None:
        plot(rows, picture, selections.top_k)


if __name__ == "__main__":
    app()
