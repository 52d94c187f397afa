"""A soak: hours at saturation with full KV's tokens, flat memory, and nothing left at the end.

    python -m benchmarks.soak --minutes 240

There are always more requests than the host pool has room for: conversations of several turns, streaming sessions,
prefixes that requests share, three priorities (so that requests are preempted), clients that leave, prefix caches that
are emptied, an fs tier that is smaller than what is stored in it, and, if asked for, drafts. Every answer, whole or
broken off, is compared with that of another engine: stock vLLM with full KV, one request at a time. Tokens may differ
at a tie alone: this engine's token is one of full KV's best ones, not farther from the best one than `TIE_MARGIN`, or
full KV chooses it with other chunks of the prompt. The comparison then goes on behind this engine's token. Rows in hot
buffers are compared with the host pool byte by byte, and host blocks that are taken are filled with NaN. Memory and
pools are looked at every minute. With `--system full_kv`, the clients talk to full KV instead, without host pool and
tier; tokens that count as wrong then come from rounding alone. SIGTERM to this process ends the soak early, as if its
time were over.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from enum import StrEnum
from itertools import combinations, takewhile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS, gpu_hardware, write_result
from benchmarks.process_memory import own_mib
from benchmarks.soak_engine import WARM_UP_SHARE, Lengths, serve, serve_full_kv

ROOT = Path(__file__).parents[1]
TIE_MARGIN = {"cpu": 0.5, "gpu": 0.75}  # those of the end-to-end tests
# Shares of full KV's chunk with which it is asked again: chunks round differently.
OTHER_CHUNKS = (1, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
MAX_BACKLOG = 100  # answers that wait for their comparison; with more, the engine waits
MAX_KNOWN = 4000  # answers of full KV that are kept
MIN_SAMPLES = 15  # after warm-up, to speak of a slope
MIN_WARM_UP = 8.0  # minutes; `WARM_UP_SHARE` of a soak, but these at least
FLAT_MIB = 16.0  # growth per hour, or in all of a shorter time, that is no leak
HOST_POOL_GIB = {"cpu": 0.06, "gpu": 0.16}  # less than the requests in flight need together
MAX_SHOWN = 10

Device = StrEnum("Device", ["cpu", "gpu"])
System = StrEnum("System", ["plugin", "full_kv"])
app = typer.Typer(add_completion=False)


def shared_args(device: Device) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for all engines of a soak."""
    args: dict[str, Any] = {"seed": 0, "gpu_memory_utilization": 0.3}
    if device == Device.cpu:
        args = {"seed": 0, "dtype": "float32", "enforce_eager": True, "max_model_len": 1536}
        args |= {"max_num_batched_tokens": 512, "kv_cache_memory_bytes": 64 * 2**20}
    else:
        args |= {"dtype": "bfloat16", "max_model_len": 20480, "max_num_batched_tokens": 8192}
        args |= {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 512 * 2**20}  # not all rows of 32 requests are hot
        args |= {"attention_config": {"backend": "FLASHMLA_SPARSE", "sparse_mla_force_mqa": True}}
        args |= {"hf_overrides": {"max_position_embeddings": 1 << 18}}
        args |= {"kernel_config": {"enable_flashinfer_autotune": False}}
    return args


def judge_args(device: Device) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for full KV that computes one request at a time."""
    return shared_args(device) | {"max_num_seqs": 1, "enable_prefix_caching": False}


def engine_args(device: Device, options: dict[str, Any] | None, drafts: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the engine that serves the clients; without options of the connector, full KV."""
    args = shared_args(device) | {"max_num_seqs": 20 if device == Device.cpu else 32, "scheduling_policy": "priority"}
    args["disable_log_stats"] = False
    if options is not None:
        transfer = {"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both"}
        args["kv_transfer_config"] = transfer | {"kv_connector_extra_config": options}
    if drafts:
        args["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    return args


def connector_options(device: Device, pool_gib: float, tier_dir: str, tier_gib: float, drafts: int) -> dict[str, Any]:
    """Options of the connector with an fs tier.

    NOTE: the transfer buffer is smaller than the tier, because a block that is in the buffer is not read from the tier.
    It is also small because its memory grows until all of it has been used, and a soak takes growth for a leak.
    """
    top_k = 256 if device == Device.cpu else 2048
    return {
        "host_pool_gib": pool_gib,
        "device_buffer_size": int(max(1 + drafts, 1.25) * top_k),
        "tiers": [{"type": "fs", "path": tier_dir, "quota_gib": tier_gib, "num_threads": 2}],
        "tier_buffer_gib": tier_gib / 2,
        "admission": "off",
    }


def model_of(device: Device) -> Path:
    """Make a tiny model unless it is there; on a GPU one whose heads and top-k are those that its kernels take."""
    from vllm_hisparse.cli.tiny_model import make_model

    models = ROOT / "build" / "models"
    if device == Device.cpu:
        return make_model("dsv32", models / "dsv32")
    return make_model("dsv32", models / "dsv32-soak", num_heads=64, index_n_heads=64, index_topk=2048)


# NOTE: a session that waits for its next turn keeps its blocks, and vLLM preempts no request that waits.
MAX_SESSIONS = 3
LENGTHS = {
    Device.cpu: Lengths(document=(150, 700), question=(10, 120), answer=(8, 64)),
    Device.gpu: Lengths(document=(2500, 12000), question=(20, 900), answer=(32, 256)),
}


class Judge:
    """Compares answers with full KV's.

    Args:
        full_kv: a connection to `serve_full_kv`.
        tie_margin: largest distance of a token from full KV's best one, in logprobs, that is a tie.
        chunk: tokens of a chunk of full KV.
    """

    def __init__(self, full_kv: Connection, tie_margin: float, chunk: int):
        self._full_kv, self._tie_margin, self._chunk = full_kv, tie_margin, chunk
        self._known: OrderedDict[tuple, dict[str, list]] = OrderedDict()
        self.num_answers, self.num_tokens, self.num_ties, self.num_shown, self.num_wrong = 0, 0, 0, 0, 0
        self.widest_tie, self.largest_difference = 0.0, 0.0
        self.wrong: list[dict[str, Any]] = []

    def compare(self, answer: dict[str, Any]) -> None:
        """Compare one answer, which may have been broken off.

        Raises:
            EOFError, OSError: the engine with full KV has ended; the answer does not count.
        """
        self._compare(answer)
        self.num_answers += 1
        self.num_tokens += len(answer["reply"])

    def _compare(self, answer: dict[str, Any]) -> None:
        tokens, position = answer["reply"], 0
        while position < len(tokens):
            full = self._ask(answer["tokens"] + tokens[:position], answer["max_tokens"] - position)
            rest = tokens[position:]
            same = sum(1 for _ in takewhile(bool, map(int.__eq__, rest, full["tokens"])))
            ours = answer["logprobs"][position : position + same]
            differences = [abs(one - other) for one, other in zip(ours, full["logprobs"], strict=False)]
            self.largest_difference = max(self.largest_difference, float(np.mean(differences or [0.0])))
            position += same
            if position == len(tokens):
                return
            margin = full["distances"][same].get(tokens[position])
            is_near = margin is not None and margin <= self._tie_margin
            is_shown = self._is_chosen(answer["tokens"] + tokens[:position], tokens[position])
            if not is_near and not is_shown:
                self._blame(answer, position, full["tokens"][same], margin)
                return
            self.num_ties += 1
            self.num_shown += is_shown
            self.widest_tie = max(self.widest_tie, margin or 0.0)
            position += 1

    def _blame(self, answer: dict[str, Any], position: int, expected: int, margin: float | None) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MAX_SHOWN:
            names = ("number", "is_session", "max_tokens")
            where = {name: answer[name] for name in names} | {"prompt_tokens": len(answer["tokens"])}
            got = answer["reply"][position]
            where |= {"tokens": answer["tokens"], "reply": answer["reply"]}
            self.wrong.append({**where, "position": position, "got": got, "expected": expected, "margin": margin})

    def _is_chosen(self, prompt: list[int], token: int) -> bool:
        """Return True if full KV chooses a token after a prompt that it computes in some other chunks."""
        for share in OTHER_CHUNKS:
            self._full_kv.send((prompt, 1, int(share * self._chunk)))
            if self._full_kv.recv()["tokens"] == [token]:
                return True
        return False

    def _ask(self, prompt: list[int], max_tokens: int) -> dict[str, list]:
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            self._full_kv.send((prompt, max_tokens, self._chunk))
            self._known[key] = self._full_kv.recv()
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def verdict(judges: Sequence[Judge]) -> dict[str, Any]:
    """Return what all judges have found, as entries of the soak's row."""
    return {
        "compared_answers": sum(judge.num_answers for judge in judges),
        "compared_tokens": sum(judge.num_tokens for judge in judges),
        "ties": sum(judge.num_ties for judge in judges),
        "shown_ties": sum(judge.num_shown for judge in judges),
        "widest_tie": round(max(judge.widest_tie for judge in judges), 3),
        "largest_mean_logprob_difference": round(max(judge.largest_difference for judge in judges), 4),
        "wrong_tokens": sum(judge.num_wrong for judge in judges),
    }


class Comparisons:
    """Comparisons of answers, as many side by side as there are judges. Close it when it is no longer needed.

    After the first comparison that fails, all others fail, too: the soak is over.

    Args:
        judges: the judges; each compares one answer at a time.
    """

    def __init__(self, judges: Sequence[Judge]):
        self._idle: SimpleQueue[Judge] = SimpleQueue()
        for judge in judges:
            self._idle.put(judge)
        self._executor = ThreadPoolExecutor(len(judges))
        self._open: set[Future[None]] = set()
        self._has_failed = Event()

    def __len__(self) -> int:
        """Number of answers that are not compared."""
        return len(self._open)

    def add(self, answer: dict[str, Any]) -> None:
        """Let an idle judge compare an answer, or the first one that becomes idle."""
        self._open.add(self._executor.submit(self._compare, answer))

    def collect(self, timeout_s: float = 0.0) -> None:
        """Forget the comparisons that have ended; wait for the first one to end if none has.

        Args:
            timeout_s: longest time to wait.

        Raises:
            EOFError, OSError: a judge's engine has ended.
        """
        done = wait_for(self._open, timeout_s, FIRST_COMPLETED).done
        failed = {each for each in done if each.exception() is not None}
        self._open -= done - failed
        for each in failed:
            each.result()

    def close(self) -> None:
        """End after the comparisons that have begun; drop the others."""
        self._executor.shutdown(cancel_futures=True)

    def _compare(self, answer: dict[str, Any]) -> None:
        judge = self._idle.get()
        try:
            if self._has_failed.is_set():
                raise EOFError("another comparison has failed")
            judge.compare(answer)
        except BaseException:
            self._has_failed.set()
            raise
        finally:
            self._idle.put(judge)


def warm_up(minutes: list[float]) -> float:
    """Return the minute from which on memory counts: before, pools fill and code is loaded."""
    return max(WARM_UP_SHARE * minutes[-1], MIN_WARM_UP)


def slope_per_hour(minutes: list[float], values: list[float]) -> float | None:
    """The median slope of all pairs of samples after warm-up, per hour; None: there are too few."""
    kept = [pair for pair in zip(minutes, values, strict=True) if pair[0] >= warm_up(minutes)]
    if len(kept) < MIN_SAMPLES:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(kept, 2) if b[0] > a[0]]
    return round(60 * float(np.median(slopes)), 2)


def is_flat(minutes: list[float], slope: float | None) -> bool | None:
    """Tell if memory did not grow, by its slope per hour; None: there are too few samples.

    In less than an hour, noise makes any slope: there, the growth of the whole time counts.
    """
    hours = (minutes[-1] - warm_up(minutes)) / 60
    return None if slope is None else slope * min(hours, 1.0) <= FLAT_MIB


def summary(samples: list[dict[str, Any]], judges: Sequence[Judge], end: dict[str, Any] | None) -> dict[str, Any]:
    """The row of a soak: the last sample, the comparison, slopes of memory, what is left at the end, all samples.

    Memory of the processes' own decides whether the soak is flat (`own_mib`). PSS would not do, because it falls when
    another process maps the same libraries; RSS falls when the kernel takes back pages of files.

    Args:
        samples: samples so far, at least one.
        judges: judges of the answers.
        end: counts of things left at the end; None: the soak still runs, or broke off.
    """
    minutes = [sample["minute"] for sample in samples]
    kinds = ("rss_mib", "own_mib")
    slopes = {
        f"{kind}_per_hour": slope_per_hour(minutes, [sum(sample[kind].values()) for sample in samples])
        for kind in kinds
    }
    flat = is_flat(minutes, slopes["own_mib_per_hour"])
    state = {"has_ended": end is not None, **slopes, "is_flat": flat, "left_at_end": end}
    wrong = [answer for judge in judges for answer in judge.wrong]
    return samples[-1] | verdict(judges) | state | {"wrong": wrong, "samples": samples}


def is_clean(row: dict[str, Any]) -> bool:
    """True if the soak ended by itself, with full KV's tokens, flat memory and nothing left."""
    left = {name: value for name, value in (row["left_at_end"] or {}).items() if name != "drafts"}
    return (
        row["has_ended"]
        and not row["wrong_tokens"]
        and not row["wrong_rows"]
        and row["is_flat"] is not False
        and (not any(left.values()))
    )


@app.command()
def run(
    ctx: typer.Context,
    minutes: Annotated[float, typer.Option(help="how long")] = 240.0,
    device: Annotated[Device, typer.Option(help="cpu or gpu")] = Device.cpu,
    system: Annotated[
        System, typer.Option(help="full_kv: shows how often full KV's own rounding makes tokens that count as wrong")
    ] = System.plugin,
    host_pool_gib: Annotated[
        float | None, typer.Option(help="host pool, less than requests need together; default: 0.06 (cpu), 0.16 (gpu)")
    ] = None,
    tier_gib: Annotated[float, typer.Option(help="quota of the fs tier")] = 0.2,
    drafts: Annotated[int, typer.Option(min=0, help="n-gram drafts of a step")] = 0,
    async_scheduling: Annotated[bool, typer.Option(help="on the CPU platform: two batches in flight")] = False,
    live: Annotated[int, typer.Option(min=1, help="requests in flight")] = 32,
    judges: Annotated[int, typer.Option(min=1, help="engines with full KV that compare answers, side by side")] = 1,
    sample_s: Annotated[float, typer.Option(help="seconds between two looks at the memory")] = 60.0,
    seed: Annotated[int, typer.Option(help="of the clients")] = 0,
    trace_python: Annotated[
        bool, typer.Option(help="write what Python allocated after warm-up; makes the engine slower")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="result file; default: results/<cpu or h100>/soak.json")] = None,
) -> None:
    """Run a soak; the result file is written after every sample. SIGTERM ends it early."""
    output = output or RESULTS / ("cpu" if device == Device.cpu else "h100") / "soak.json"
    pool_gib = HOST_POOL_GIB[device] if host_pool_gib is None else host_pool_gib
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    defaults |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if device == Device.cpu:
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        defaults |= {"NUMBA_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(ROOT / "build" / "numba")}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    model, context = {"model": str(model_of(device))}, get_context("spawn")
    hardware = gpu_hardware() if device == Device.gpu else None
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as tier_dir:
        options = connector_options(device, pool_gib, tier_dir, tier_gib, drafts)
        job = {
            "engine": model | engine_args(device, options if system == System.plugin else None, drafts),
            "async_on_cpu": async_scheduling and device == Device.cpu,
            "max_sessions": MAX_SESSIONS,
            "tier_dir": tier_dir,
            "lengths": vars(LENGTHS[device]),
            "num_live": live,
            "seed": seed,
            "seconds": 60 * minutes,
            "sample_s": sample_s,
            "trace_python": trace_python,
        }
        engine, engine_end = context.Pipe()
        full_kv, full_kv_ends = zip(*(context.Pipe() for _ in range(judges)), strict=True)
        full_kv_args = model | judge_args(device)
        processes = [
            context.Process(target=serve_full_kv, args=(end, full_kv_args), daemon=True) for end in full_kv_ends
        ]
        processes.append(context.Process(target=serve, args=(engine_end, job), daemon=True))
        for process, its_end in zip(processes, [*full_kv_ends, engine_end], strict=True):
            process.start()
            its_end.close()
        signal.signal(signal.SIGTERM, lambda *_: send_end(engine))
        panel = [Judge(each, TIE_MARGIN[device], full_kv_args["max_num_batched_tokens"]) for each in full_kv]
        end, comparisons = None, Comparisons(panel)
        described = {"device": str(device), "system": str(system), "model": "tiny dsv32", "drafts": drafts}
        described |= {"live": live, "seed": seed, "host_pool_gib": pool_gib if system == System.plugin else None}
        described |= {"async_scheduling": async_scheduling or device == Device.gpu, "judges": judges}
        try:
            for connection in full_kv:
                connection.recv()
            while end is None or len(comparisons):
                is_waiting = end is not None or len(comparisons) >= MAX_BACKLOG
                comparisons.collect(1.0 if is_waiting else 0.0)
                if not is_waiting and engine.poll(1):
                    kind, content = engine.recv()
                    if kind == "answer":
                        comparisons.add(content)
                    elif kind == "sample":
                        own = sum(own_mib(process.pid) for process in processes[:judges])
                        samples.append(content | {"full_kv_own_mib": round(own, 1)})
                        row = described | summary(samples, panel, None) | {"backlog": len(comparisons)}
                        write_result(output, ctx, "benchmarks.soak", [row], hardware)
                        typer.echo(
                            json.dumps({k: v for k, v in row.items() if k not in ("samples", "wrong")}), err=True
                        )
                    elif kind == "growth":
                        described |= content
                    elif kind == "end":
                        end = content
                        if samples:  # what is left is known, though answers still wait for their comparison
                            row = described | summary(samples, panel, end) | {"backlog": len(comparisons)}
                            write_result(output, ctx, "benchmarks.soak", [row], hardware)
        except (EOFError, OSError) as error:
            end = None
            typer.echo(f"an engine has ended before its time ({error!r})", err=True)
        row = described | summary(samples, panel, end) | {"backlog": len(comparisons)} if samples else None
        if row is not None:
            write_result(output, ctx, "benchmarks.soak", [row], hardware)
            typer.echo(json.dumps({k: v for k, v in row.items() if k not in ("samples",)}), err=True)
        for connection in (engine, *full_kv):
            send_end(connection)
        for process in processes:
            process.join(60)
            process.kill()
        comparisons.close()
    if row is None or not is_clean(row):
        raise typer.Exit(1)


def send_end(connection: Connection) -> None:
    """Tell a process to end, if it has not."""
    with suppress(OSError):
        connection.send(None)


if __name__ == "__main__":
    app()
