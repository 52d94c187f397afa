"""Engines for the end-to-end tests: every one runs in a process of its own, the reference once per session."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import pytest
from forks import FORKS, HERE, fork
from offline_engine import serve

MODELS = HERE.parent.parent / "build" / "models"
ENGINE_TIMEOUT_S = 500
MAX_KEPT_ENGINES = 2  # of full KV, by each process that runs tests
VOCABULARY = range(3, 500)
MAX_MODEL_LEN = 4096
TOP_K = 256
# Values of `async_scheduling`: engines of `make test` have vLLM's default.
ASYNC_ALONE = [pytest.param(False, marks=pytest.mark.slow), True]
SCHEDULERS = {False: "Scheduler", True: "AsyncScheduler"}  # vLLM's, by `async_scheduling`

# Mean logprob difference of a request where the engines cannot run the same batches: matrix products of other shapes
# round differently, and the indexer's fp8 keys, its cut at the top-k and the experts' routing turn the last bit into
# another choice, which a few tokens show. Full KV against full KV with another chunk size does so too (test_parity.py).
BATCHING_TOLERANCE = 0.05
TIE_MARGIN = 0.5  # between the two best tokens, for such a choice to swap them

BASE_ENGINE = {
    "max_model_len": MAX_MODEL_LEN,
    "enforce_eager": True,
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 256 * 2**20,
    "seed": 0,
}


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt of its own for every (length, seed)."""
    return random.Random(num_tokens * 1000 + seed).choices(VOCABULARY, k=num_tokens)


def engine_args(model: str = "dsv32", **overrides: Any) -> dict[str, Any]:
    return {**BASE_ENGINE, "model": str(MODELS / model), **overrides}


def hot_args(model: str = "dsv32", options: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Engine arguments with the connector on one instance. Unless asked for, what runs together depends on no times."""
    extra = {"host_pool_gib": 0.25, "device_buffer_size": 320, "admission": "off", **(options or {})}
    transfer = {
        "kv_connector": "HiSparseHostConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return engine_args(model, kv_transfer_config=transfer, **overrides)


class OfflineEngine:
    """An engine in a process of its own, forked from one that has imported vLLM; a context manager.

    Args:
        directory: gets its log.
        in_process: whether scheduler and worker share its process.
        options: others of `offline_engine.py`'s jobs.
    """

    def __init__(self, directory: Path, engine: dict[str, Any], in_process: bool = True, **options: Any):
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))}
        self.log_path = Path(tempfile.mkdtemp(dir=directory)) / "engine.log"
        self._pipe, theirs = FORKS.Pipe()
        job = {"engine": engine, "environment": environment, **options}
        self._process = fork(serve, job, str(self.log_path), theirs)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, phase: dict[str, Any]) -> dict[str, Any]:
        """One phase's record."""
        try:
            self._pipe.send(phase)
            assert self._pipe.poll(ENGINE_TIMEOUT_S), self._message(f"no answer in {ENGINE_TIMEOUT_S} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(self._message("the engine has ended")) from None

    def begin(self, phase: dict[str, Any]) -> None:
        """Start a phase whose record nobody waits for."""
        self._pipe.send(phase)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.join()

    def log_has(self, text: str) -> bool:
        """True if it has logged something."""
        return self.log_path.exists() and text in self.log_path.read_text()

    def end(self) -> None:
        """Let it end by itself, which is to succeed."""
        with suppress(ConnectionError):
            self._pipe.send(None)
        self._process.join(ENGINE_TIMEOUT_S)
        assert self._process.exitcode == 0, self._message(f"exit code {self._process.exitcode}")

    def _message(self, what: str) -> str:
        return "\n".join([what, *self.log_path.read_text().splitlines()[-40:]])


def run_engine(directory: Path, engine: dict[str, Any], phases: list[dict[str, Any]], **options: Any) -> list[dict]:
    """Run phases on an engine of their own; returns one record per phase."""
    with OfflineEngine(directory, engine, **options) as process:
        records = [process.run(phase) for phase in phases]
        process.end()
    return records


def described(server: Any) -> str:
    try:
        return server.describe()
    except Exception as error:  # what failed is the test
        return f"{type(server).__name__} cannot be described: {error}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """The failure of a test says what its servers say of themselves."""
    if call.excinfo is not None and call.when == "call" and not call.excinfo.errisinstance(pytest.skip.Exception):
        for server in getattr(item, "funcargs", {}).values():
            if hasattr(server, "describe"):
                call.excinfo.value.add_note(described(server))
    return (yield)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`run_engine` in the test's own directory."""
    return lambda *args, **kwargs: run_engine(tmp_path, *args, **kwargs)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., OfflineEngine]]:
    """An `OfflineEngine` in the test's own directory."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(OfflineEngine(tmp_path, *args, **kwargs))


@pytest.fixture(scope="session")
def shared_result(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A result under a name: the first test process that wants it computes it, the others wait and read it."""
    base = tmp_path_factory.getbasetemp()
    directory = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def result(name: str, compute: Callable[[], Any]) -> Any:
        path = directory / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(compute()))
        return json.loads(path.read_text())

    return result


@pytest.fixture(scope="session")
def full_kv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OfflineEngine]]:
    """The full-KV engine of a model and dtype: stock vLLM KV management, no connector, nothing cached.

    The last few stay for other tests; one that waits for its next phase sleeps.
    """
    kept: dict[tuple[str, str], OfflineEngine] = {}

    def engine(model: str = "dsv32", dtype: str = "float32") -> OfflineEngine:
        found = kept.pop((model, dtype), None)
        if found is None:
            if len(kept) == MAX_KEPT_ENGINES:
                kept.pop(next(iter(kept))).kill()
            args = engine_args(model, dtype=dtype, enable_prefix_caching=False)
            found = OfflineEngine(tmp_path_factory.mktemp("full"), args)
        kept[model, dtype] = found
        return found

    yield engine
    for each in kept.values():
        each.kill()


@pytest.fixture(scope="session")
def reference(full_kv: Callable[..., OfflineEngine], shared_result) -> Callable[..., list[dict[str, Any]]]:
    """Completions of the full-KV engine."""

    def completions(
        lengths: list[int], max_tokens: int, model: str = "dsv32", dtype: str = "float32", seed: int = 0
    ) -> list[dict[str, Any]]:
        phase = {"prompts": [make_prompt(length, seed) for length in lengths], "max_tokens": max_tokens}
        name = f"reference {model} {dtype} {max_tokens} {seed} {lengths}"
        return shared_result(name, lambda: full_kv(model, dtype).run(phase)["completions"])

    return completions


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    """Identical greedy tokens, and every logprob within `tolerance`, request by request."""
    assert len(got) == len(expected)
    for index, (ours, full) in enumerate(zip(got, expected, strict=True)):
        assert ours["tokens"] == full["tokens"], f"request {index}"
        worst = max(abs(a - b) for a, b in zip(ours["logprobs"], full["logprobs"], strict=True))
        assert worst <= tolerance, f"request {index}: logprobs differ by {worst}"


def assert_same_but_rounding(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Identical greedy tokens up to a tie, and logprobs within `BATCHING_TOLERANCE` in the mean, request by request.

    After a tie another text follows, which is not compared. At most one request in five, and one more, may meet a tie.
    The closest ties do not count, because logprobs that move by `BATCHING_TOLERANCE` swap such tokens.
    """
    assert len(got) == len(expected)
    num_ties = 0
    for index, (ours, full) in enumerate(zip(got, expected, strict=True)):
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, ours["tokens"], full["tokens"])))
        if same < len(full["tokens"]):
            margin = full["margins"][same]
            assert margin <= TIE_MARGIN, f"request {index}: token {same} differs and is no tie"
            num_ties += margin > 2 * BATCHING_TOLERANCE
        pairs = zip(ours["logprobs"][:same], full["logprobs"][:same], strict=True)
        mean = sum(abs(a - b) for a, b in pairs) / max(same, 1)
        assert mean <= BATCHING_TOLERANCE, f"request {index}: logprobs differ by {mean} in the mean"
    assert num_ties <= len(got) // 5 + 1


def assert_pools_empty(record: dict[str, Any]) -> None:
    """Every block is back, in both pools and on the worker."""
    in_use = {name: value for name, value in record["pools"].items() if name != "host_blocks_cached"}
    assert in_use == dict.fromkeys(in_use, 0)
    assert record["worker_requests"] == 0
