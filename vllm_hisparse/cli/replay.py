"""`vllm-hisparse replay`: hit rates of hot buffers over a trace, and the load of the link to host memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_hisparse.cli.output_files import check_picture
from vllm_hisparse.cli.replay_buffers import SCOPES, Replay, sequences
from vllm_hisparse.cli.replay_layers import DRAFT_LAYER, LEAST_SHARE, LayerMisses, from_others
from vllm_hisparse.cli.replay_layers import by_layer as compare_layers
from vllm_hisparse.cli.replay_policies import POLICIES
from vllm_hisparse.trace import Trace, TraceError

MIN_WIDTH = 120  # columns of the tables
WARM_UP_STEPS = 32
SIZES, MAX_SIZE = [1.0, 2.0, 4.0, 8.0, 16.0], 1024  # of buffers, in top-k
LAYER_CAPTION = (
    "missed: rows per request and layer in a step, with equal shares; controller, best: misses over these, if a slow "
    "controller or one that knows all steps divides the same memory; fixed: the same with the shares below, which "
    "leave each layer its least share; of others: for each file, with the shares of all other files; rows in top-k. "
    "missed differs by about one row at most from the table without --by-layer: here the newest row keeps a place in "
    "its buffer without a copy, there it is copied when it is selected later. A draft layer does not count here, nor "
    "do steps after the last one of the shortest request"
)
CAPTION = (
    "buffers: one per request and layer; pool: one of the same memory for all. missed: rows per request and layer in a "
    "step; MB, ms: what a step of all requests and layers copies, and how long the link takes for it"
)
# Options that one of the two tables ignores.
BUFFER_OPTIONS = ("policy", "pool", "row_bytes", "layers", "requests", "link_gb_s")
LAYER_OPTIONS = ("least_share",)


def replay_command(
    context: typer.Context,
    trace: Annotated[
        list[Path],
        typer.Argument(help="Files of selections, replayed together.", exists=True, dir_okay=False),
    ],
    policy: Annotated[list[str], typer.Option(help=f"{', '.join(POLICIES)}; repeatable.")] = [*POLICIES],  # noqa: B006
    size: Annotated[list[float], typer.Option(min=1, max=MAX_SIZE, help="Hot rows in top-k; repeatable.")] = SIZES,
    pool: Annotated[bool, typer.Option(help="Also share one pool over all requests and layers.")] = True,
    row_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of a row; default: the trace's.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers to scale to; default: the trace's.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a step to scale to.")] = 1,
    link_gb_s: Annotated[float, typer.Option(min=0.001, help="Bandwidth of the link, GB/s (1e9 bytes).")] = 50.0,
    warm_up: Annotated[int, typer.Option(min=0, help="First steps that are not counted.")] = WARM_UP_STEPS,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Instead: LRU, with rows given to the layers that save most misses.")
    ] = False,
    least_share: Annotated[
        float, typer.Option(min=0, max=1, help="With --by-layer: least rows of a layer, over those of a mean layer.")
    ] = LEAST_SHARE,
    plot: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
) -> None:
    """Simulate hot buffers over traces of selections, on the CPU."""
    if unknown := [name for name in policy if name not in POLICIES]:
        raise typer.BadParameter(
            f"got {', '.join(unknown)}, expected any of {', '.join(POLICIES)}", param_hint="--policy"
        )
    if plot is not None and by_layer:
        raise typer.BadParameter(f"got {plot}, and --by-layer, which draws nothing: leave one out", param_hint="--plot")
    refuse_ignored(context, by_layer)
    try:
        traces = [Trace.read(path) for path in trace]
        selections = Trace.join(traces, trace)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
    if not selections.requests:
        raise typer.BadParameter("got no requests, expected at least one", param_hint="TRACE")
    shortest = min(request.num_steps for request in selections.requests)
    if shortest <= warm_up:
        message = f"got {warm_up}, expected fewer than the {shortest} steps of the shortest request"
        raise typer.BadParameter(message, param_hint="--warm-up")
    if by_layer and all(name == DRAFT_LAYER for name in selections.layers):
        message = f"got the layer {DRAFT_LAYER} alone, whose KV stays on the device: no other layer has rows to divide"
        raise typer.BadParameter(message, param_hint="--by-layer")
    if plot is not None:
        check_picture(plot, "--plot")
    if by_layer:
        misses, files = LayerMisses.of(selections), [len(each.requests) for each in traces]
        compared = [compare_layers(misses, each, warm_up, least_share) for each in size]
        if len(files) > 1:
            for row in compared:
                row["of_others"] = from_others(misses, files, row["size"], warm_up, least_share)
        print_table(layer_table(compared, misses))
        for row in compared:
            typer.echo(f'{row["size"]:g} top-k: "rows_by_layer": {row["rows_by_layer"]}')
        return
    scale = (layers or len(selections.layers)) * requests * (row_bytes or selections.row_bytes)
    rows = []
    for replay in replays(selections, policy, size, [*SCOPES] if pool else ["buffers"]):
        rows.append(describe(replay, selections, warm_up, scale, link_gb_s))
    print_table(result_table(rows, f"{selections.model}, top-k {selections.top_k}"))
    if plot is not None:
        plot_rows(rows, plot)


def refuse_ignored(context: typer.Context, by_layer: bool) -> None:
    """Refuse options of the other table.

    Raises:
        BadParameter: names the first of them.
    """
    reason = ", and --by-layer, which ignores it: leave one out"
    if not by_layer:
        reason = ", but not --by-layer, without which it is ignored: add --by-layer or leave this option out"
    for name in BUFFER_OPTIONS if by_layer else LAYER_OPTIONS:
        source, value = context.get_parameter_source(name), context.params[name]
        if source is not None and source.name != "DEFAULT":
            option = f"--{name.replace('_', '-')}" if value is not False else f"--no-{name}"
            shown = ", ".join(value) if isinstance(value, list | tuple) else option if name == "pool" else value
            raise typer.BadParameter(f"got {shown}{reason}", param_hint=option)


def print_table(table: Table) -> None:
    """Print a table without cutting off figures, also where lines are short."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)


def layer_table(rows: list[dict[str, Any]], misses: LayerMisses) -> Table:
    """One line for each size."""
    title = f"rows by layer: {', '.join(misses.layers)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, caption=LAYER_CAPTION, caption_justify="left", pad_edge=False)
    shares = ("controller", "best", "fixed")
    for header in ("top-k", "missed", *shares, "of others", "controller's rows", "best rows"):
        table.add_column(header, justify="right", no_wrap=not header.endswith(("rows", "others")))
    for row in rows:
        sizes = (" ".join(f"{each:g}" for each in row[name]) for name in ("controller_sizes", "best_sizes"))
        figures = (f"{row['size']:g}", f"{row['missed']:.1f}", *(f"{row[name]:.2f}" for name in shares))
        others = " ".join(f"{each:.2f}" for each in row.get("of_others", ())) or "–"
        table.add_row(*figures, others, *sizes)
    return table


def replays(trace: Trace, policies: list[str], sizes: list[float], scopes: list[str]) -> list[Replay]:
    """Replay every policy with every size and scope; sizes are multiples of top-k."""
    traced, cases = sequences(trace), list(product(scopes, policies, sizes))
    return [
        Replay.run(trace, traced, policy, scope, round(size * trace.top_k))
        for scope, policy, size in track(cases, "replay", console=Console(stderr=True), transient=True)
    ]


def describe(replay: Replay, trace: Trace, first_step: int, scale: int, link_gb_s: float) -> dict[str, Any]:
    """Return one line of the table.

    Args:
        replay: the replay.
        trace: the trace that was replayed.
        first_step: steps before it are not counted.
        scale: bytes of a row times layers times requests.
        link_gb_s: bandwidth of the link.
    """
    missed, rates = replay.missed_per_step(first_step), replay.hit_rates(first_step)
    selected = replay.selected[:, :, first_step:].sum()
    return {
        "scope": replay.scope,
        "policy": replay.policy,
        "hot_rows": replay.num_slots,
        "size": replay.num_slots / trace.top_k,
        "hit_rate": float(1 - replay.missed[:, :, first_step:].sum() / max(selected, 1)),
        "worst_layer": f"{rates.min():.1%} ({trace.layers[rates.argmin()]})",
        "missed_rows": missed,
        "mb": missed * scale / 1e6,
        "ms": missed * scale / link_gb_s / 1e6,
    }


def result_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the table of all lines."""
    table = Table(title=title, box=box.SIMPLE_HEAD, caption=CAPTION, caption_justify="left", pad_edge=False)
    for header in ("", "policy", "hot rows", "hits", "worst layer", "missed", "MB", "ms"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        figures = (f"{row['missed_rows']:.1f}", f"{row['mb']:.2f}", f"{row['ms']:.3f}")
        names = (row["scope"], row["policy"], f"{row['hot_rows']} ({round(row['size'], 2):g}x)")
        table.add_row(*names, f"{row['hit_rate']:.1%}", row["worst_layer"], *figures)
    return table


def plot_rows(rows: list[dict[str, Any]], output: Path) -> None:
    """Plot hit rate and link time over size; dashed lines are for a pool."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    names = list(dict.fromkeys((row["scope"], row["policy"]) for row in rows))
    colours = {policy: f"C{index}" for index, policy in enumerate(POLICIES)}
    for axis, column, label in zip(axes, ("hit_rate", "ms"), ("hit rate", "ms per step on the link"), strict=True):
        for scope, policy in names:
            line = [row for row in rows if (row["scope"], row["policy"]) == (scope, policy)]
            style = {"color": colours[policy], "linestyle": "--" if scope == "pool" else "-", "marker": "o"}
            series = [row["size"] for row in line], [row[column] for row in line]
            axis.plot(*series, **style, label=f"{policy}, {scope}")
        axis.set_xscale("log", base=2)
        axis.set(xlabel="hot rows per request and layer, in top-k", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)
