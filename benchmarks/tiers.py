"""How long does a returning conversation wait for its first token? Real engines on this machine.

    python -m benchmarks.tiers

A conversation's first turn is a prompt of `--prefix-tokens`; the second one is asked when its KV is in the host pool,
on disk, in an object store (moto's S3 server on loopback, if it is installed) or in another instance's host pool; or
nowhere, so that it is computed again. Times are from the request to its first token.
All tokens are compared with those of full KV. Absolute times are of a small model on a CPU: compare the tiers of one
row of prefixes with each other.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from contextlib import ExitStack
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
    "llama": {"algorithm": "quest", "top_k": MAX_MODEL_LEN, "device_buffer_size": MAX_MODEL_LEN},
}
MODEL_NAMES = list(SELECTIONS)
PREFIX_TOKENS = [1000, 2000, 3900]
BLOCKS = {"dsv32": (4 * 64 * (576 * 4 + 132), 64), "llama": (4 * 128 * 2 * 2 * 32 * 4, 128)}  # bytes, tokens
HOST_POOL_GIB = 0.25

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
        "enable_prefix_caching": options is not None,
    }
    if options is not None:
        args["kv_transfer_config"] = {
            "kv_connector": "HiSparseHostConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**SELECTIONS[model], **options},
        }
    return args


def ask(engine: Any, prompt: list[int], max_tokens: int, forgets: bool = False) -> dict[str, Any]:
    """A completion, and seconds until it was there.

    Args:
        engine: engine of `tests/e2e/conftest.py`.
        prompt: prompt of the request.
        max_tokens: to generate.
        forgets: True if device and host pool are emptied before; the tiers keep what they have.
    """
    record = engine.run({"prompts": [prompt], "max_tokens": max_tokens, "forgets": forgets})
    return record["completions"][0] | {"seconds": record["seconds"]}


class Case:
    """One tier, with its engines.

    Args:
        stack: ends them.
        tier: tier to measure.
        model: model of `SELECTIONS`.
    """

    def __init__(self, stack: ExitStack, tier: str, model: str):
        self.tier = tier
        self.block_bytes, self.block_size = BLOCKS[model]
        pool = {"host_pool_gib": HOST_POOL_GIB}
        directory, libraries = stack.enter_context(TemporaryDirectory()), []
        offline = _test_module("e2e/conftest").OfflineEngine
        options: list[dict[str, Any]] = [pool]
        if tier == "fs":
            blocks = stack.enter_context(TemporaryDirectory())  # nothing else may be in it
            options = [{**pool, "tiers": [{"type": "fs", "path": blocks, "quota_gib": 4.0}]}]
        elif tier == "obj":
            store, libraries = self._object_store(stack, directory)
            options = [{**pool, "tiers": [store]}]
        elif tier == "p2p":
            options = [{**pool, "tiers": [peer]} for peer in self._peers()]
        how: dict[str, Any] = {"libraries": libraries}
        if tier == "p2p":  # NOTE: each answers the other one while it has nothing to do
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "UCX_TLS": "tcp,shm,self"}
            how = {"in_process": False, "environment": environment}
        self.engines = [
            stack.enter_context(offline(Path(directory), engine_args(model, each), **how)) for each in options
        ]

    def returning(self, prefix: list[int], prompt: list[int], seed: int) -> tuple[list[int], float, float]:
        """The second turn: tokens, milliseconds to the first of them, bytes loaded from a tier."""
        first, last = self.engines[0], self.engines[-1]
        if self.tier != "none":
            ask(first, prefix, 1)
        ask(last, make_prompt(2, seed), 1, forgets=self.tier in ("fs", "obj"))
        done = ask(last, prompt, 1)
        num_blocks = done["num_cached_tokens"] // self.block_size if self.tier in ("fs", "obj", "p2p") else 0
        # NOTE: what was loaded is read by all of these tokens.
        return ask(last, prompt, MAX_TOKENS)["tokens"], 1000 * done["seconds"], num_blocks * self.block_bytes

    def _object_store(self, stack: ExitStack, directory: str) -> tuple[dict[str, Any], list[str]]:
        object_store = _test_module("object_store")
        store = stack.enter_context(object_store.object_store(_free_ports(1)[0]))
        return store, [f"{object_store.library_path(Path(directory))}/{object_store.MISSING_LIBRARY}"]

    def _peers(self) -> list[dict[str, Any]]:
        ports = _free_ports(2)
        names = [f"127.0.0.1:{port}" for port in ports]
        return [{"type": "p2p", "host": "127.0.0.1", "port": port, "peers": names} for port in ports]


def _test_module(name: str) -> Any:
    path = ROOT / "tests" / name
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.name)


def _free_ports(count: int) -> list[int]:
    from tools.harness.processes import free_ports

    return free_ports(count)


@app.command()
def main(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Option(help="Tiny models of build/models.")] = MODEL_NAMES,
    tiers: Annotated[list[str], typer.Option(help="What to measure.")] = TIERS,
    prefix_tokens: Annotated[list[int], typer.Option(help="Tokens of a first turn.")] = PREFIX_TOKENS,
    repeats: Annotated[int, typer.Option(help="Conversations of each kind.")] = 3,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "cpu" / "tiers.json",
    plot: Annotated[Path, typer.Option(help="Plot of the result.")] = ROOT / "docs" / "figures" / "tiers.png",
) -> None:
    """Measure the time to the first token of returning conversations."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    os.environ |= {"UCX_TLS": "tcp,shm,self", "VLLM_NO_USAGE_STATS": "1"}
    jobs = [(model, tier) for model in models for tier in tiers]
    expected: dict[tuple, list[int]] = {}
    rows: list[dict[str, Any]] = []
    for index in track(len(models), "full KV"):
        offline = _test_module("e2e/conftest").OfflineEngine
        with TemporaryDirectory() as directory, offline(Path(directory), engine_args(models[index], None)) as engine:
            for case in conversations(prefix_tokens, repeats):
                expected[models[index], case] = ask(engine, second_turn(*case), MAX_TOKENS)["tokens"]
    for index in track(len(jobs), "tiers"):
        model, tier = jobs[index]
        with ExitStack() as stack:
            rows += measure(Case(stack, tier, model), model, prefix_tokens, repeats, expected)
    show("Returning conversations", [summary(row) for row in rows])
    write_result(output, ctx, "benchmarks.tiers", rows)
    draw(rows, plot)


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


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the time to the first token, for each model and prefix."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys((row["model"], row["prefix_tokens"]) for row in rows))
    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(2.6 * len(kinds), 3), squeeze=False)
    for axis, (model, num_tokens) in zip(axes[0], kinds, strict=True):
        found = {
            row["tier"]: row["ttft_ms"] for row in rows if (row["model"], row["prefix_tokens"]) == (model, num_tokens)
        }
        medians = [found[tier]["median"] for tier in tiers]
        errors = [
            [found[tier]["median"] - found[tier]["p10"] for tier in tiers],
            [found[tier]["p90"] - found[tier]["median"] for tier in tiers],
        ]
        axis.bar(tiers, medians, yerr=errors, color=["#888888", *["#4477aa"] * (len(tiers) - 1)])
        axis.set_yscale("log")
        axis.set_title(f"{model}, {num_tokens} tokens", fontsize=9)
    axes[0][0].set_ylabel("ms to the first token")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"ttft_ms": row["ttft_ms"]["median"], "loaded_bytes": f"{row['loaded_bytes'] / 2**20:.1f} MiB"}


if __name__ == "__main__":
    app()
