"""Prefixes that leave the host pool come back from the tiers below it, with full KV's tokens."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import object_store
import pytest
from conftest import (
    ENGINE_TIMEOUT_S,
    OfflineEngine,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

from tools.harness.processes import LOOPBACK, free_ports

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN, MAX_TOKENS = 1100, 10
LENGTHS = (650, 1021)
BLOCK = {"dsv32": 64, "llama": 128}
# Pools of about two requests: a few others take all of it.
SMALL_POOL = {
    "dsv32": {"host_pool_gib": 0.022},
    "llama": {"host_pool_gib": 0.006, "algorithm": "quest", "top_k": 1152, "device_buffer_size": 1152},
}


def fs_tier(path: Path, quota_gib: float = 1.0) -> dict:
    return {"type": "fs", "path": str(path), "quota_gib": quota_gib, "num_threads": 2}


def args_of(model: str, tiers: list[dict]) -> dict:
    options = {**SMALL_POOL[model], "tiers": tiers, "tier_timeout_s": ENGINE_TIMEOUT_S}
    return hot_args(model, options, max_model_len=MAX_MODEL_LEN)


def ask(engine: OfflineEngine, *prompts: list[int]) -> dict:
    return engine.run({"prompts": list(prompts), "max_tokens": MAX_TOKENS})


def fillers(seed: int) -> list[list[int]]:
    return [make_prompt(900, seed=seed + index) for index in range(4)]


def whole_blocks(model: str, num_tokens: int) -> int:
    """Tokens of a prompt that a prefix cache can have: the last one is computed."""
    return (num_tokens - 1) // BLOCK[model] * BLOCK[model]


def turns(first: list[dict]) -> list[list[int]]:
    """The next turn of each conversation: prompt, reply and a new question."""
    replies = [done["tokens"] for done in first]
    return [make_prompt(n) + reply + make_prompt(21, seed=7) for n, reply in zip(LENGTHS, replies, strict=True)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory, shared_result) -> Callable[[str], list[list[dict]]]:
    """Both turns of both conversations with full KV, by model."""

    def compute(model: str) -> list[list[dict]]:
        with OfflineEngine(tmp_path_factory.mktemp("full"), engine_args(model)) as engine:
            first = ask(engine, *map(make_prompt, LENGTHS))["completions"]
            return [first, ask(engine, *turns(first))["completions"]]

    return lambda model: shared_result(f"two turns for the tiers {model}", lambda: compute(model))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory of its own: engines log beside it."""
    return tmp_path / "disk"


@pytest.mark.parametrize(
    "model", [pytest.param("dsv32", marks=pytest.mark.smoke), pytest.param("llama", marks=pytest.mark.slow)]
)
def test_a_conversation_leaves_the_host_pool_and_comes_back(start, disk: Path, expected, model: str):
    engine = start(args_of(model, [fs_tier(disk)]))
    assert_same_but_rounding(ask(engine, *map(make_prompt, LENGTHS))["completions"], expected(model)[0])
    before = ask(engine, *fillers(100))["counters"]
    for index, prompt in enumerate(turns(expected(model)[0])):
        record = ask(engine, prompt)
        assert_same_but_rounding(record["completions"], expected(model)[1][index : index + 1])
        assert_pools_empty(record)
        # The newest token of a reply has no KV yet.
        num_tokens = whole_blocks(model, LENGTHS[index] + MAX_TOKENS)
        assert record["completions"][0]["num_cached_tokens"] >= num_tokens
    counters = {name: count - before.get(name, 0) for name, count in record["counters"].items()}
    assert counters["tier_loaded_blocks"] >= whole_blocks(model, min(LENGTHS)) // BLOCK[model]
    assert counters["tier_damaged_blocks"] == counters["tier_load_timeouts"] == 0


@pytest.mark.slow
def test_a_new_engine_finds_the_prefixes_of_the_last_one(start, disk: Path, expected):
    """Even of one that was killed while it stored, once it had stored all, and while it loaded."""
    prompts = list(map(make_prompt, LENGTHS))
    num_blocks = sum(whole_blocks("dsv32", num_tokens) // BLOCK["dsv32"] for num_tokens in LENGTHS)
    for is_time in (partial(has_stored, 4), partial(has_stored, num_blocks), has_read):
        started_at = time.time()
        engine = start(args_of("dsv32", [fs_tier(disk)]))
        engine.begin({"prompts": prompts, "max_tokens": MAX_TOKENS})
        wait_until(partial(engine.log_has, "HiSparse tier:"))
        wait_until(partial(is_time, disk, started_at))
        engine.kill()
    engine = start(args_of("dsv32", [fs_tier(disk)]))
    record = ask(engine, *prompts)
    assert_same_but_rounding(record["completions"], expected("dsv32")[0])
    assert record["counters"]["tier_loaded_blocks"] > 0 and record["counters"]["tier_damaged_blocks"] == 0


def block_files(path: Path) -> list[Path]:
    return list(path.rglob("*.bin"))


def has_stored(num_blocks: int, path: Path, _: float) -> bool:
    return len(block_files(path)) >= num_blocks


def has_read(path: Path, since: float) -> bool:
    """True if a block was read: that sets its file's time."""
    return any(file.stat().st_mtime > since for file in block_files(path))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + ENGINE_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two blocks."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.slow
def test_a_full_disk_changes_no_token(start, small_disk: Path, expected):
    engine = start(args_of("dsv32", [fs_tier(small_disk)]))
    prompts = list(map(make_prompt, LENGTHS))
    ask(engine, *prompts)
    ask(engine, *fillers(200))
    record = ask(engine, *prompts)
    assert_same_but_rounding(record["completions"], expected("dsv32")[0])
    assert_pools_empty(record)
    assert engine.log_has("nothing is stored there")
    assert len(block_files(small_disk)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dsv32", "llama"])
def test_a_replica_has_the_prefix(start, expected, model: str):
    """Then without the replica."""
    ports = free_ports(2)
    addresses = [f"{LOOPBACK}:{port}" for port in ports]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "UCX_TLS": "tcp,shm,self"}
    options = {"in_process": False, "forks": True, "environment": environment}
    tiers = [{"type": "p2p", "host": LOOPBACK, "port": port, "peers": addresses} for port in ports]
    one, other = (start(args_of(model, [tier]), **options) for tier in tiers)
    for engine in (one, other):  # one that is asked before it listens is left alone for half a minute
        wait_until(partial(engine.log_has, "HiSparse tier:"))
    for index, num_tokens in enumerate(LENGTHS):
        prompt, full = make_prompt(num_tokens), expected(model)[0][index : index + 1]
        assert_same_but_rounding(ask(one, prompt)["completions"], full)
        completions = ask(other, prompt)["completions"]
        assert_same_but_rounding(completions, full)
        assert completions[0]["num_cached_tokens"] == whole_blocks(model, num_tokens)
    one.end()
    (completion,) = ask(other, make_prompt(700, seed=3))["completions"]
    assert completion["num_cached_tokens"] == 0 and len(completion["tokens"]) == MAX_TOKENS


@pytest.mark.slow
@pytest.mark.skipif(not object_store.has_server(), reason="moto's server is not installed")
def test_a_prefix_comes_back_from_an_object_store(tmp_path: Path, expected):
    """Another engine finds it, too."""
    library = f"{object_store.library_path(tmp_path)}/{object_store.MISSING_LIBRARY}"
    prompts, full = list(map(make_prompt, LENGTHS)), expected("dsv32")[0]
    with object_store.object_store(*free_ports(1)) as tier:
        for is_first in (True, False):
            with OfflineEngine(tmp_path, args_of("dsv32", [tier]), libraries=[library]) as engine:
                record = ask(engine, *prompts)
                assert_same_but_rounding(record["completions"], full)
                assert_pools_empty(record)
                assert (record["counters"]["tier_loaded_blocks"] == 0) == is_first
                ask(engine, *fillers(300))
                engine.end()
