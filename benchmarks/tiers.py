"""How long does a returning conversation wait for its first token? Real engines on this machine.

    python -m benchmarks.tiers

A conversation's first turn is a prompt of `--prefix-tokens`; the second one is asked when its KV is in the host pool,
on disk, in an object store (moto's S3 server on loopback, if it is installed) or in another instance's host pool; or
nowhere, so that it is computed again. Times are the engine's own, from the arrival of the request to its first token.
All tokens are compared with those of full KV. Absolute times are of a small model on a CPU: compare the tiers of one
row of prefixes with each other.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, show, spread, track, write_result

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "build" / "models"
TIERS = ["none", "host", "fs", "obj", "p2p"]
MAX_TOKENS, NEW_TOKENS = 8, 40
MAX_MODEL_LEN = 4096
SELECTIONS = {
    "dsv32": {"device_buffer_size": 320},
    "llama": {"algorithm": "quest", "top_k": 1024, "device_buffer_size": 1024},
}
MODEL_NAMES = list(SELECTIONS)
PREFIX_TOKENS = [1000, 2000, 3900]
LARGE_POOL_GIB = 0.25
START_TIMEOUT_S = 600

app = typer.Typer(add_completion=False)


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(f"{num_tokens} {seed}").choices(range(3, 500), k=num_tokens)


def engine_args(model: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; without options, full KV."""
    args: dict[str, Any] = {
        "model": str(MODELS / model),
        "max_model_len": MAX_MODEL_LEN,
        "enforce_eager": True,
        "dtype": "float32",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 256 * 2**20,
        "disable_log_stats": False,
        "enable_prefix_caching": options is not None,
    }
    if options is not None:
        args["kv_transfer_config"] = {
            "kv_connector": "HiSparseHostConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**SELECTIONS[model], **options},
        }
    return args


def serve(args: dict[str, Any], libraries: list[str], pipe: Connection) -> None:
    """Answer prompts from a pipe: tokens, seconds to the first one, blocks loaded from a tier so far."""
    import ctypes

    for library in libraries:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    from vllm import LLM, SamplingParams

    engine = LLM(**args)
    pipe.send("ready")
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    while (prompt := pipe.recv()) is not None:
        (output,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        loaded = [m.value for m in engine.get_metrics() if m.name == "vllm:hisparse_tier_loaded_blocks"]
        pipe.send((list(output.outputs[0].token_ids), output.metrics.first_token_latency, sum(loaded)))


class Engine:
    """An engine in a process of its own."""

    def __init__(self, args: dict[str, Any], libraries: list[str]):
        self._pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=serve, args=(args, libraries, theirs))
        self._process.start()

    def wait_started(self) -> None:
        assert self._pipe.poll(START_TIMEOUT_S), "the engine did not start"
        self._pipe.recv()

    def ask(self, prompt: list[int]) -> tuple[list[int], float, float]:
        self._pipe.send(prompt)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


@contextmanager
def engines(args: list[dict[str, Any]], libraries: list[str]) -> Iterator[list[Engine]]:
    started = [Engine(each, libraries) for each in args]
    for engine in started:
        engine.wait_started()
    yield started
    for engine in started:
        engine.stop()


def small_pool_gib(block_bytes: int, block_size: int) -> float:
    """Room for one request of the longest kind, and little more."""
    return (MAX_MODEL_LEN // block_size + 4) * block_bytes / 2**30


def block_sizes(model: str) -> tuple[int, int]:
    """Bytes of a host block of the tiny models, and tokens of it."""
    return (4 * 64 * (576 * 4 + 132), 64) if model == "dsv32" else (4 * 128 * 2 * 2 * 32 * 4, 128)


class Case:
    """One tier, with its engines.

    Args:
        stack: ends them.
        tier: what to measure.
        model: of `SELECTIONS`.
    """

    def __init__(self, stack: ExitStack, tier: str, model: str):
        self.tier = tier
        self.block_bytes, block_size = block_sizes(model)
        pool = {"host_pool_gib": small_pool_gib(self.block_bytes, block_size)}
        directory, libraries = stack.enter_context(TemporaryDirectory()), []
        options = [pool]
        if tier == "host":
            options = [{"host_pool_gib": LARGE_POOL_GIB}]
        elif tier == "fs":
            options = [{**pool, "tiers": [{"type": "fs", "path": directory, "quota_gib": 4.0}]}]
        elif tier == "obj":
            store, libraries = self._object_store(stack, directory)
            options = [{**pool, "tiers": [store]}]
        elif tier == "p2p":
            options = [{"host_pool_gib": LARGE_POOL_GIB, "tiers": [peer]} for peer in self._peers()]
        self.engines = stack.enter_context(engines([engine_args(model, each) for each in options], libraries))

    def returning(self, prefix: list[int], prompt: list[int], seed: int) -> tuple[list[int], float, float]:
        """The second turn: tokens, milliseconds to the first of them, bytes loaded."""
        first, last = self.engines[0], self.engines[-1]
        if self.tier != "none":
            first.ask(prefix)
        if self.tier in ("fs", "obj"):
            for index in range(2):
                first.ask(make_prompt(MAX_MODEL_LEN - MAX_TOKENS, 1000 + 10 * seed + index))
        *_, before = last.ask(make_prompt(2, seed))
        tokens, seconds, after = last.ask(prompt)
        return tokens, 1000 * seconds, (after - before) * self.block_bytes

    def _object_store(self, stack: ExitStack, directory: str) -> tuple[dict[str, Any], list[str]]:
        object_store = _test_module("object_store")
        store = stack.enter_context(object_store.object_store(_free_ports(1)[0]))
        return store, [f"{object_store.library_path(Path(directory))}/{object_store.MISSING_LIBRARY}"]

    def _peers(self) -> list[dict[str, Any]]:
        ports = _free_ports(2)
        names = [f"127.0.0.1:{port}" for port in ports]
        return [{"type": "p2p", "host": "127.0.0.1", "port": port, "peers": names} for port in ports]


def _test_module(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "tests"))
    return __import__(name)


def _free_ports(count: int) -> list[int]:
    from vllm_hisparse.cli.processes import free_ports

    return free_ports(count)


@app.command()
def main(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Option(help="Tiny models of build/models.")] = MODEL_NAMES,
    tiers: Annotated[list[str], typer.Option(help="What to measure.")] = TIERS,
    prefix_tokens: Annotated[list[int], typer.Option(help="Tokens of a first turn.")] = PREFIX_TOKENS,
    repeats: Annotated[int, typer.Option(help="Conversations of each kind.")] = 3,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "cpu" / "tiers.json",
) -> None:
    """Measure the time to the first token of returning conversations."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    os.environ |= {"UCX_TLS": "tcp,shm,self", "VLLM_NO_USAGE_STATS": "1"}
    jobs = [(model, tier) for model in models for tier in tiers]
    expected: dict[tuple, list[int]] = {}
    rows: list[dict[str, Any]] = []
    for index in track(len(models), "full KV"):
        with engines([engine_args(models[index], None)], []) as (engine,):
            for case in conversations(prefix_tokens, repeats):
                expected[models[index], case] = engine.ask(second_turn(*case))[0]
    for index in track(len(jobs), "tiers"):
        model, tier = jobs[index]
        with ExitStack() as stack:
            rows += measure(Case(stack, tier, model), model, prefix_tokens, repeats, expected)
    show("Returning conversations", [summary(row) for row in rows])
    write_result(output, ctx, "benchmarks.tiers", rows)


def conversations(prefix_tokens: list[int], repeats: int) -> list[tuple[int, int]]:
    return [(num_tokens, seed) for num_tokens in prefix_tokens for seed in range(repeats)]


def second_turn(num_tokens: int, seed: int) -> list[int]:
    return make_prompt(num_tokens, seed) + make_prompt(NEW_TOKENS, seed)


def measure(
    case: Case, model: str, prefix_tokens: list[int], repeats: int, expected: dict[tuple, list[int]]
) -> list[dict[str, Any]]:
    """One row for each length of a prefix."""
    rows = []
    for num_tokens in prefix_tokens:
        results = [
            case.returning(make_prompt(num_tokens, seed), second_turn(num_tokens, seed), seed)
            for seed in range(repeats)
        ]
        tokens, times, loaded = zip(*results, strict=True)
        same = all(got == expected[model, (num_tokens, seed)] for seed, got in enumerate(tokens))
        rows.append(
            {
                "tier": case.tier,
                "model": model,
                "prefix_tokens": num_tokens,
                "ttft_ms": spread(times),
                "loaded_bytes": int(sum(loaded) / repeats),
                "same_tokens": same,
            }
        )
    return rows


def summary(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"ttft_ms": row["ttft_ms"]["median"], "loaded_bytes": f"{row['loaded_bytes'] / 2**20:.1f} MiB"}


if __name__ == "__main__":
    app()
