"""`vllm-hisparse plan`: options, the table, the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_hisparse.attention.backends import FP8_CAPABILITY, NARROW_KEYS_CAPABILITY, mla_refusal, msa_refusal
from vllm_hisparse.cli.output_files import check_picture
from vllm_hisparse.cli.plan.gpus import GPUS, Gpu
from vllm_hisparse.cli.plan.launch import (
    chart_refusal,
    commands,
    device_remedy,
    gpu_warning,
    helm_values,
    max_num_seqs,
    pair_refusal,
    ray_options,
    replicas_refusal,
    start_refusal,
)
from vllm_hisparse.cli.plan.memory import QUEST_PAGE, System, independent_hit_rate
from vllm_hisparse.cli.plan.models import (
    BF16_CHECKPOINTS,
    CHECKPOINTS,
    FP4_REFUSAL,
    PRESETS,
    QUEST_FULL_KV_LAYERS,
    WEIGHT_DTYPES,
    ModelError,
    ModelShape,
)
from vllm_hisparse.cli.plan.plan import STOCK_MEMORY_UTILIZATION, HitRate, Load, Plan, PlanError, Point
from vllm_hisparse.config import DEFAULT_TOP_K, NARROW_KEY_ELEMENTS, NARROW_KEY_HEADS, default_buffer_size
from vllm_hisparse.layout import MSA_UNIT, most_buffer_rows, most_drafts
from vllm_hisparse.ops.limits import MAX_COLUMNS, MAX_TOP_K
from vllm_hisparse.tier_config import MAX_SIZE

DEFAULT_CONTEXT = 32768
REPLAYED_SIZES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # hot rows, in multiples of top-k
MAX_RATE = 1e6  # requests per second
MAX_SHOWN = 80  # letters of a value in an error message
RANGE_STEPS = 33  # number of lengths that represent a range or a file
SHOWN_MS = 0.05  # less is 0.0 in the table
MIN_WIDTH = 150  # columns of the tables
TITLES = {  # printed above commands and options
    "one instance": "To start one instance",
    "prefill": "Or a prefill/decode pair; its prefill side",
    "decode": "its decode side",
    "router": "its router",
    "helm_values": "Or Helm values for such a pair (helm install -f FILE)",
    "ray_options": "Or arguments of the Ray Serve application",
}
PARTS = {  # part of a step -> label, where its name does not say enough
    "resolve": "finding hot rows",
    "copies": "waiting for copies from the host",
    "other": "other kernels",
}
KV_DTYPES = ("auto", "bfloat16", "fp8")
WEIGHT_CHOICES = ("auto", *WEIGHT_DTYPES)
KEY_DTYPES = ("auto", "fp8", "mxfp4")
NARROW_KEY_DTYPES = ("auto", "fp4")
FP4_GPUS = ("B200", "B300", "GB200")


def plan_command(
    model: Annotated[str, typer.Argument(help=f"Directory, config.json, or one of {', '.join(PRESETS)}.")],
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}, or the JSON file of `vllm-hisparse doctor`.")] = "H200",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of a rank, as in vLLM.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks, with expert parallelism.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help=f"{', '.join(KV_DTYPES)}.")] = "auto",
    indexer_kv_dtype: Annotated[
        str, typer.Option(help=f"Dtype of a DSA model's indexer keys: {', '.join(KEY_DTYPES)}. mxfp4 needs Blackwell.")
    ] = "auto",
    indexer_key_dtype: Annotated[
        str, typer.Option(help="The plugin's option: auto, or fp4 for keys in 4 bits on Hopper.")
    ] = "auto",
    weight_dtype: Annotated[
        str, typer.Option(help=f"{', '.join(WEIGHT_CHOICES)}; auto: as the checkpoint says.")
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.1, max=1.0, help="As in vLLM. Default: 0.92.")
    ] = None,
    device_kv_gib: Annotated[float | None, typer.Option(min=0.1, help="Device memory for KV on each GPU.")] = None,
    import_buffer_gib: Annotated[
        float,
        typer.Option(min=0, max=MAX_SIZE, help="The plugin's import_buffer_gib, for decode instances without RDMA."),
    ] = 0.0,
    host_memory_gib: Annotated[
        float, typer.Option(min=1, max=MAX_SIZE, help="Host memory for KV, of all ranks.")
    ] = 512.0,
    context: Annotated[
        str | None,
        typer.Option(help="Prompt tokens: a number, LOW-HIGH, or a file of lengths. Default: 32768, if the model can."),
    ] = None,
    output_tokens: Annotated[str, typer.Option(help="Answer tokens, in the same way.")] = "1024",
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once. Default: all that fit.")] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=MAX_RATE, help="Requests that arrive per second, instead of --concurrency."),
    ] = None,
    hit_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of selected rows that are in the hot buffer already.")
    ] = None,
    overlap: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of a selection that is selected again in the next step.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(exists=True, help="Trace of selections, from `vllm-hisparse trace record`.")
    ] = None,
    drafts: Annotated[int, typer.Option(min=0, max=7, help="Drafts of a step (MTP).")] = 0,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Probability that a draft is accepted. Default: 0.8.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Tokens that a dense model selects. Default: 2048.")] = None,
    device_buffer_size: Annotated[int | None, typer.Option(min=1, help="Hot rows per request and layer.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As in vLLM, per rank.")] = 1024,
    chart: Annotated[Path | None, typer.Option(help="Picture of tokens/s and latency over concurrency.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict requests at once, latency and tokens/s of a model on given GPUs, and print the commands to start it.

    Compares full KV, vLLM's native HiSparse and vllm_hisparse. Needs no GPU and no network.
    """
    dtypes: dict[str, tuple[str, tuple[str, ...]]]
    dtypes = {"--kv-cache-dtype": (kv_cache_dtype, KV_DTYPES), "--weight-dtype": (weight_dtype, WEIGHT_CHOICES)}
    dtypes["--indexer-kv-dtype"] = (indexer_kv_dtype, KEY_DTYPES)
    dtypes["--indexer-key-dtype"] = (indexer_key_dtype, NARROW_KEY_DTYPES)
    for option, (value, known) in dtypes.items():
        if value not in known:
            raise typer.BadParameter(f"got {value!r}, expected one of {', '.join(known)}", param_hint=option)
    _only_one("--concurrency", concurrency, "--request-rate", request_rate)
    _only_one("--hit-rate", hit_rate, "--overlap", overlap)
    _only_one("--trace", trace, "--hit-rate or --overlap", hit_rate if overlap is None else overlap)
    shape, found_gpu = _model(model, kv_cache_dtype, weight_dtype, indexer_kv_dtype), _gpu(gpu)
    if indexer_kv_dtype != "auto" and not shape.is_dsa:
        raise typer.BadParameter(
            f"got {indexer_kv_dtype}, but {shape.name} has no indexer", param_hint="--indexer-kv-dtype"
        )
    _check_gpu(shape, found_gpu, kv_cache_dtype)
    if has_narrow_keys := indexer_key_dtype == "fp4":
        _check_narrow_keys(shape, found_gpu, indexer_kv_dtype)
    if indexer_kv_dtype == "mxfp4" and not any(name in found_gpu.name for name in FP4_GPUS):
        message = f"got mxfp4, and {found_gpu.name} for --gpu: it needs one of {', '.join(FP4_GPUS)}"
        raise typer.BadParameter(message, param_hint="--indexer-kv-dtype")
    _only_one("--device-kv-gib", device_kv_gib, "--gpu-memory-utilization", gpu_memory_utilization)
    if acceptance is not None and not drafts:
        raise typer.BadParameter(f"got {acceptance}, and no --drafts to accept: add them", param_hint="--acceptance")
    if drafts and not shape.num_draft_layers:
        layers = "no draft layer" if shape.is_dsa else "no draft layer that plan knows: dense models draft with EAGLE"
        raise typer.BadParameter(f"got {drafts}, but {shape.name} has {layers}", param_hint="--drafts")
    if min(drafts, shape.num_draft_layers) > 1 and not shape.refusal:
        message = (
            f"got {drafts}, expected 1: {shape.name} has {shape.num_draft_layers} MTP layers, each of which would "
            "draft a token, and hot buffers take drafts of the first one alone"
        )
        raise typer.BadParameter(message, param_hint="--drafts")
    if top_k is not None and shape.is_dsa and top_k != shape.top_k:
        message = f"got {top_k}, expected the model's index_topk, {shape.top_k}: leave the option out"
        raise typer.BadParameter(message, param_hint="--top-k")
    selected = shape.top_k or top_k or DEFAULT_TOP_K
    if shape.refusal in ("", FP4_REFUSAL):
        _check_sizes(shape, selected, drafts, device_buffer_size)
    answers = lengths(output_tokens, "--output-tokens")
    if context is None and max(answers) >= shape.max_model_len:
        message = (
            f"got {max(answers)} tokens at most, expected fewer than the {shape.max_model_len} that {shape.name} takes"
        )
        raise typer.BadParameter(message, param_hint="--output-tokens")
    if context is None:
        context = str(max(1, min(DEFAULT_CONTEXT, shape.max_model_len - max(answers))))
    prompts = lengths(context, "--context")
    longest = max(prompts) + max(answers)
    load = Load(quantiles(prompts), fmean(answers), longest, concurrency, request_rate)
    rate, locality = _locality(hit_rate, overlap, trace, selected)
    try:
        plan = Plan(
            model=shape,
            gpu=found_gpu,
            load=load,
            hit_rate=rate,
            locality=locality,
            host_gib=host_memory_gib,
            top_k=selected,
            device_buffer_size=device_buffer_size or default_buffer_size(selected, 1 + drafts),
            tensor_parallel=tensor_parallel_size,
            data_parallel=data_parallel_size,
            drafts=drafts,
            acceptance=0.8 if acceptance is None else acceptance,
            gpu_memory_utilization=gpu_memory_utilization or STOCK_MEMORY_UTILIZATION,
            device_kv_gib=device_kv_gib,
            max_num_seqs=max_num_seqs,
            full_kv_layers=0 if shape.is_dsa or shape.refusal else QUEST_FULL_KV_LAYERS,
            has_narrow_keys=has_narrow_keys,
            import_buffer_gib=import_buffer_gib,
        )
    except PlanError as error:
        raise typer.BadParameter(str(error)) from None
    if chart is not None:
        check_picture(chart, "--chart")
    is_preset = not Path(model).exists()
    model = CHECKPOINTS.get(shape.name, model) if is_preset else _directory(model)
    note = ""
    if weight_dtype == "bfloat16" and is_preset and shape.name in BF16_CHECKPOINTS:
        model = BF16_CHECKPOINTS[shape.name]
    elif weight_dtype != "auto":
        note = _weights_note(model, shape, weight_dtype)
    warning, starts = gpu_warning(plan, kv_cache_dtype), commands(plan, model, kv_cache_dtype)
    deployments: dict[str, Any] = {
        "helm_values": None if chart_refusal(plan) else helm_values(plan, model, kv_cache_dtype),
        "ray_options": None if replicas_refusal(plan) else ray_options(plan, model, kv_cache_dtype),
    }
    if as_json:
        found = plan.as_json() | {"verdict": verdict(plan), "gpu_warning": warning or None}
        found |= {"weights_note": note or None, "start_refusal": start_refusal(plan) or None}
        found |= {"pair_refusal": pair_refusal(plan) or None, "commands": starts}
        found |= deployments
        found |= {"helm_refusal": chart_refusal(plan) or None, "ray_refusal": replicas_refusal(plan) or None}
        typer.echo(json.dumps(found, indent=2))
    else:
        show(plan, " ".join(filter(None, (warning, note))), starts, deployments)
    if chart is not None:
        draw(plan, chart)


def _check_gpu(shape: ModelShape, gpu: Gpu, kv_cache_dtype: str) -> None:
    """Refuse a model or KV dtype with which no attention backend has hot buffers on a GPU."""
    refusal = msa_refusal if shape.selects_blocks else mla_refusal
    if shape.is_dsa and (reason := refusal(gpu.capability)):
        raise typer.BadParameter(f"got {shape.name}, and {gpu.name} for --gpu: {reason}", param_hint="MODEL")
    if kv_cache_dtype == "fp8" and not shape.is_dsa and not shape.refusal and gpu.capability < FP8_CAPABILITY:
        message = f"got fp8, and {gpu.name} for --gpu: hot buffers in fp8 need compute capability 8.9. Leave it out"
        raise typer.BadParameter(message, param_hint="--kv-cache-dtype")


def _check_narrow_keys(shape: ModelShape, gpu: Gpu, indexer_kv_dtype: str) -> None:
    """Refuse indexer keys in 4 bits where the plugin refuses them."""
    heads = " or ".join(map(str, NARROW_KEY_HEADS))
    reasons = {
        f"{indexer_kv_dtype} for --indexer-kv-dtype: they contradict each other, give one": indexer_kv_dtype != "auto",
        f"{shape.name} has no indexer": not shape.is_dsa,
        f"{shape.name} selects blocks: only indexers that select positions have keys in 4 bits": shape.selects_blocks,
        f"{gpu.name} for --gpu: only H100, H200 and others of compute capability 9.0 have a kernel for them": (
            gpu.capability != NARROW_KEYS_CAPABILITY
        ),
        f"{shape.name} has {shape.index_heads} indexer heads and keys of {shape.index_head_dim} elements, expected "
        f"{heads} heads and {NARROW_KEY_ELEMENTS} elements": (
            shape.index_heads not in NARROW_KEY_HEADS or shape.index_head_dim != NARROW_KEY_ELEMENTS
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise typer.BadParameter(f"got fp4, and {reason}", param_hint="--indexer-key-dtype")


def _check_sizes(shape: ModelShape, top_k: int, drafts: int, device_buffer_size: int | None) -> None:
    """Refuse sizes that an engine would refuse at start-up."""
    unit, least = 1 if shape.is_dsa else QUEST_PAGE, top_k * (1 + drafts)
    unit = MSA_UNIT if shape.selects_blocks else unit
    if top_k % unit or top_k > MAX_TOP_K * unit:
        message = f"got {top_k}, expected a multiple of Quest's page of {unit} tokens, at most {MAX_TOP_K * unit}"
        raise typer.BadParameter(message, param_hint="--top-k")
    if drafts > (most := most_drafts(top_k, unit)):
        message = f"got {drafts}, expected at most {most}: a step has room for {MAX_COLUMNS * unit} selected rows"
        raise typer.BadParameter(message, param_hint="--drafts")
    if device_buffer_size is not None and (device_buffer_size < least or device_buffer_size % unit):
        multiple = f"a multiple of {unit}, " if unit > 1 else ""
        raise typer.BadParameter(
            f"got {device_buffer_size}, expected {multiple}at least {least}: {top_k} selected rows of each of "
            f"{1 + drafts} tokens (--drafts {drafts})",
            param_hint="--device-buffer-size",
        )
    if device_buffer_size is not None and device_buffer_size > (most := most_buffer_rows(unit)):
        message = f"got {device_buffer_size}, expected at most {most}, the rows that the kernels take"
        raise typer.BadParameter(message, param_hint="--device-buffer-size")


def _only_one(first: str, value: object, second: str, other: object) -> None:
    if value is not None and other is not None:
        raise typer.BadParameter(
            f"got {value}, and {other} for {second}: they contradict each other, give one", param_hint=first
        )


def _model(model: str, kv_cache_dtype: str, weight_dtype: str, indexer_kv_dtype: str) -> ModelShape:
    try:
        return ModelShape.load(model, kv_cache_dtype, weight_dtype, indexer_kv_dtype)
    except (ModelError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from None


def _directory(model: str) -> str:
    """Return the directory of a model that is given by it, or by its config.json."""
    return str(Path(model).parent) if Path(model).is_file() else model


def _weights_note(model: str, shape: ModelShape, weight_dtype: str) -> str:
    """Return a note if the commands' checkpoint has, or may have, weights of another width than planned; else empty."""
    planned = f"The plan has weights of {shape.weight_bits} bits (--weight-dtype {weight_dtype})"
    try:
        told = ModelShape.load(model if Path(model).exists() else shape.name)
    except ModelError:
        return f"{planned}. The width of the weights in {model} is not known: see that it is the same."
    if told.weight_bytes == shape.weight_bytes:
        return ""
    width = str(told.weight_bits) if told.weight_bits != shape.weight_bits else "16 in attention"
    return f"{planned}, and {model} has {width}: set a checkpoint with such weights in the commands."


def _gpu(gpu: str) -> Gpu:
    try:
        return Gpu.find(gpu)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None


def lengths(text: str, option: str) -> list[int]:
    """Parse the lengths, in tokens, of equally frequent requests.

    Args:
        text: a number, a range LOW-HIGH, or the path of a file with one number per line.
        option: name of the option, for the error message.

    Raises:
        BadParameter: `text` is none of these, or a number is not positive.
    """
    low, is_range, high = text.partition("-")
    try:
        if Path(text).is_file():
            found = [int(word) for word in Path(text).read_text().split()]
        elif not is_range:
            found = [int(low)]
        else:
            first, width = int(low), int(high) - int(low)
            found = [first + width * index // (RANGE_STEPS - 1) for index in range(RANGE_STEPS)] if width >= 0 else []
    except (ValueError, OSError):  # of the name of a file, too
        found = []
    if not found or min(found) < 1 or max(found) >= 1 << 63:
        raise typer.BadParameter(
            f"got {text[:MAX_SHOWN]!r}, expected tokens as a number, as LOW-HIGH, or a file with a number per line",
            param_hint=option,
        )
    return found


def quantiles(values: Sequence[int]) -> tuple[int, ...]:
    """Return the means of at most `RANGE_STEPS` equal parts of the ordered values: a plan is computed for each mean."""
    ordered, count = sorted(values), min(len(values), RANGE_STEPS)
    edges = [len(ordered) * index // count for index in range(count + 1)]
    return tuple(round(fmean(ordered[low:high])) for low, high in pairwise(edges))


def _locality(hit_rate: float | None, overlap: float | None, trace: Path | None, top_k: int) -> tuple[HitRate, str]:
    if hit_rate is not None:
        return lambda rows, tokens: hit_rate, f"a hit rate of {hit_rate:.0%}, whatever the buffer"
    if trace is not None:
        return replayed_hit_rates(trace), f"the trace {trace.name}, replayed with LRFU"
    kept = 0.87 if overlap is None else overlap
    where = "assumed: measure the hit rate of your prompts to know" if overlap is None else "given"
    return lambda rows, tokens: independent_hit_rate(kept, top_k, rows, tokens), (
        f"{kept:.0%} of a selection kept from step to step ({where})"
    )


def replayed_hit_rates(path: Path) -> HitRate:
    """Replay a trace with buffers of several sizes, in multiples of its top-k, and interpolate between them."""
    import numpy as np

    from vllm_hisparse.cli.replay import WARM_UP_STEPS, replays
    from vllm_hisparse.cli.replay_policies import LRFU
    from vllm_hisparse.trace import Trace, TraceError

    try:
        trace = Trace.read(path)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from None
    steps = [request.num_steps for request in trace.requests]
    if min(steps, default=0) == 0 or max(steps) <= WARM_UP_STEPS:
        got = f"requests of {min(steps)} to {max(steps)} steps" if steps else "no requests"
        message = f"got {got}, expected one of more than {WARM_UP_STEPS} steps, which are not counted, and none without"
        raise typer.BadParameter(message, param_hint="--trace")
    rates = []
    for replay in replays(trace, [LRFU.name], [*REPLAYED_SIZES], ["buffers"]):
        missed, selected = replay.missed[:, :, WARM_UP_STEPS:].sum(), replay.selected[:, :, WARM_UP_STEPS:].sum()
        rates.append(1 - missed / max(selected, 1))

    def hit_rate(rows: int, num_tokens: int) -> float:
        # Sizes are multiples of a selection, because requests of the trace are shorter than those of the plan.
        size = rows / trace.top_k if trace.top_k >= 1024 else rows / 2048
        return float(np.interp(size, REPLAYED_SIZES, rates))

    return hit_rate


def show(plan: Plan, warning: str, starts: dict[str, str], deployments: dict[str, Any]) -> None:
    """Print the plan."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, MIN_WIDTH)
    drafts = ""
    if plan.drafts:
        counted = "1 draft" if plan.drafts == 1 else f"{plan.drafts} drafts"
        drafts = f" {counted} per step, accepted with a probability of {plan.acceptance:.0%} each."
    ranks, load = f"{plan.num_gpus} x {plan.gpu.name}", plan.load
    console.print(
        f"[bold]{plan.model.name}[/] on {ranks}: {plan.weights_gib:.1f} GiB of weights and {plan.kv_gib:.1f} GiB for "
        f"KV on each GPU, {plan.host_gib:g} GiB for KV in host memory. Prompts of {load.context:.0f} and answers of "
        f"{load.output:.0f} tokens.{drafts} Locality: {plan.locality}.\n"
    )
    console.print(_summary(plan), _step_table(plan))
    console.print(verdict(plan))
    for note in filter(None, (fewer_requests(plan), plan.host_memory_note, plan.waits_for_host, plan.hosts, warning)):
        console.print(note, markup=False)
    console.print(f"[dim]{plan.confidence} Rates of the GPU: {plan.gpu.source}.[/]")
    if reason := start_refusal(plan):
        text = f"\nThere are no commands, Helm values and Ray options, because no engine would start: {reason}."
        console.print(text, markup=False)
        return
    for title, command in starts.items():
        hosts = " (set PREFILL_HOST and DECODE_HOST first)" if title == "prefill" and "$PREFILL_HOST" in command else ""
        console.print(f"\n[bold]{TITLES[title]}[/]{hosts}")
        console.print(command, markup=False)
    if reason := pair_refusal(plan):
        console.print(f"\nThere is no prefill/decode pair: {reason}.", markup=False)
    refusals = {"helm_values": chart_refusal(plan), "ray_options": replicas_refusal(plan)}
    for title, options in deployments.items():
        console.print(f"\n[bold]{TITLES[title]}[/]")
        text = yaml.safe_dump(options, sort_keys=False).rstrip() if options else f"none: {refusals[title]}"
        console.print(text, markup=False)


def _summary(plan: Plan) -> Table:
    title = f"With {_requests(plan.concurrency)} at once"
    if plan.load.requests_per_s is not None:
        title += f", because {plan.load.requests_per_s:g} arrive per second"
    elif plan.load.concurrency is None:
        title += ", as many as fit"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    memory = ("GPU MiB per\nrequest", "host MiB per\nrequest", "host GiB\nin all")
    for header in ("", *memory, "requests\nthat fit", "limited by", "running", "tokens/s", "ms per token", "hit rate"):
        table.add_column(header, justify="left" if header in ("", "limited by") else "right", no_wrap=True)
    for system in plan.systems:
        seats, point = plan.seats(system), plan.point(system, plan.concurrency)
        hits = "" if point.hit_rate is None else f"{point.hit_rate:.1%}"
        latency = f"{point.itl_ms:.1f}" if math.isfinite(point.itl_ms) else "-"
        sizes = [f"{seats.device_bytes / 2**20:.0f}", "", ""]
        if seats.host_bytes:
            sizes[1:] = f"{seats.host_bytes / 2**20:.0f}", f"{seats.host_bytes * point.running / 2**30:.0f}"
        table.add_row(
            str(system), *sizes, str(seats.running * plan.data_parallel), seats.bound, str(point.running),
            f"{point.tokens_per_s:.0f}", latency, hits,
        )  # fmt: skip
    return table


def _step_table(plan: Plan) -> Table:
    points = {system: plan.point(system, plan.concurrency) for system in plan.systems}
    parts = list(dict.fromkeys(part for point in points.values() for part in point.parts_ms))
    table = Table(
        title="Milliseconds of a step, with the requests that run",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for header in ("", *map(str, points)):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for part in parts:
        if any(p.parts_ms.get(part) for p in points.values()):
            cells = (f"{p.parts_ms[part]:.1f}" if part in p.parts_ms else "" for p in points.values())
            copies = " (native HiSparse: and copies)" if part == "resolve" and System.native in points else ""
            table.add_row(PARTS.get(part, part) + copies, *cells)
    table.add_row("in all", *(f"{sum(p.parts_ms.values()):.1f}" for p in points.values()))
    if any(p.hidden_copy_ms >= SHOWN_MS for p in points.values()):
        cells = (f"{p.hidden_copy_ms:.1f}" if p.hidden_copy_ms >= SHOWN_MS else "" for p in points.values())
        table.add_row("besides, copies that nothing waits for", *cells)
    return table


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def fewer_requests(plan: Plan) -> str:
    """Return a sentence that says with which smaller number of requests at once the plugin decodes more tokens.

    Empty if there is no such number, or if the plugin does not pay with it either.
    """
    point, full = plan.advised, plan.point(System.full, plan.concurrency).tokens_per_s
    if point is None:
        return ""
    most = max_num_seqs(plan, plan.concurrency)
    ratio = f", {point.tokens_per_s / full:.2f}x those of full KV" if full else ""
    selects_rows = plan.model.is_dsa and not plan.model.selects_blocks
    automatic = ""
    if selects_rows and not plan.drafts:
        automatic = f" With the option admission: auto, set {most}, because the engine then finds such a number itself."
    return (
        f"If {point.running} run at once and the others wait, vllm_hisparse gives {point.tokens_per_s:.0f} "
        f"tokens/s{ratio}, because each has more hot rows: the commands have --max-num-seqs {max_num_seqs(plan)} "
        f"instead of {most}.{automatic}"
    )


def verdict(plan: Plan) -> str:
    """Return a sentence that says whether the plugin pays."""
    full = plan.point(System.full, plan.concurrency)
    if plan.model.refusal:
        served = "vLLM serves it" if full.running else "Not one request fits, if every layer has full KV"
        return f"vllm_hisparse does not host {plan.model.name} like this: {plan.model.refusal}. {served}."
    plugin = plan.point(System.plugin, plan.concurrency)
    if not plugin.running:
        more = "more host memory (--host-memory-gib)"
        if plan.seats(System.plugin).bound == "device memory":
            more = f"more device memory for KV ({device_remedy(plan)})"
        return f"Not one request fits: give the plan {more}, or shorter prompts."
    if not full.running:
        return "Full KV cannot run one such request on these GPUs; vllm_hisparse can."
    ratio = plugin.tokens_per_s / full.tokens_per_s
    overload = ""
    if plan.load.requests_per_s is not None and plan.wanted_tokens_per_s > plugin.tokens_per_s:
        overload = (
            f" The arrivals want {plan.wanted_tokens_per_s:.0f} tokens/s, more than these GPUs give: requests queue up."
        )
    return _comparison(plan, full, plugin, ratio) + overload


def _comparison(plan: Plan, full: Point, plugin: Point, ratio: float) -> str:
    requests = _requests(plan.concurrency)
    if plan.crossover is None:
        if plan.advised:
            return f"It pays only if fewer requests run at once: with {requests}, {ratio:.2f}x the tokens/s of full KV."
        best = plan.fewer_requests
        others = f", and {best.tokens_per_s / full.tokens_per_s:.2f}x if {best.running} run at once" if best else ""
        return (
            f"It does not pay: {ratio:.2f}x the tokens/s of full KV with {requests}{others}. Use stock vLLM for this "
            "load."
        )
    waiting = plan.concurrency - full.running
    others = f", while {_requests(waiting)} wait for memory" if waiting else ""
    first = "the first request on"
    if plan.crossover > 1:
        first = f"{_requests(plan.crossover)} on; with fewer, stock vLLM is as good"
    return (
        f"It pays from {first}. With {requests}: "
        f"{ratio:.2f}x full KV's tokens/s. A running request gets a token every {plugin.itl_ms:.1f} ms; with full KV, "
        f"{full.running} run and get one every {full.itl_ms:.1f} ms{others}."
    )


def draw(plan: Plan, path: Path) -> None:
    """Draw tokens/s and inter-token latency over concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for system in plan.systems:
        points = [point for point in plan.curve(system) if point.running]
        x = [point.concurrency for point in points]
        axes[0].plot(x, [point.tokens_per_s for point in points], label=str(system))
        axes[1].plot(x, [point.itl_ms for point in points], label=str(system))
    for axis, label in zip(axes, ("tokens/s", "ms per token of a running request"), strict=True):
        axis.axvline(plan.concurrency, color="grey", linestyle=":", linewidth=1)
        axis.set(xlabel="requests at once", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(
        f"{plan.model.name}, {plan.gpu.name}, prompts of {plan.load.context:.0f} tokens (predicted)", fontsize=10
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
