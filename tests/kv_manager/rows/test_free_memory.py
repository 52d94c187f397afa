"""Made-up cgroup trees of both versions, and real processes in the place of data parallel ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm_hisparse.kv_manager.rows.free_memory import FreeMemory, engines_beside, free_memory, host_pool_bytes

MIB = 2**20
HOST = 64 * 1024 * MIB
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture(autouse=True)
def free_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST))


def make_proc(tmp_path: Path, version: int, path: str, root: str = "/") -> Path:
    """/proc of a process in a cgroup, with the hierarchy mounted below `tmp_path`."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    mount = tmp_path / "mount"
    mount.mkdir(exist_ok=True)
    others = "22 1 0:20 / /proc rw,nosuid - proc proc rw\n30 23 0:29 / /other rw - cgroup cgroup rw,cpu,cpuacct\n"
    kind = "cgroup2 cgroup2 rw,nsdelegate" if version == 2 else "cgroup cgroup rw,memory"
    (proc / "self" / "mountinfo").write_text(f"{others}31 23 0:30 {root} {mount} rw,relatime shared:9 - {kind}\n")
    lines = {1: f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n0::/elsewhere\n", 2: f"4:cpuset:/\n0::{path}\n"}
    (proc / "self" / "cgroup").write_text(lines[version])
    return proc


def make_cgroup(tmp_path: Path, version: int, path: str, limit: int | str, used: int, **stat: int) -> Path:
    """Sizes in MiB; a limit that is a string as it is."""
    directory = tmp_path / "mount" / path
    directory.mkdir(parents=True, exist_ok=True)
    limits, usage = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    (directory / limits).write_text(f"{limit if isinstance(limit, str) else limit * MIB}\n")
    (directory / usage).write_text(f"{used * MIB}\n")
    prefix = "total_" if version == 1 else ""
    lines = [f"{prefix}{name} {value * MIB}" for name, value in stat.items()]
    own = ["active_file 999999999", "inactive_file 999999999"] if version == 1 else []  # v1: without its children's
    (directory / "memory.stat").write_text("\n".join([*own, "anon 7", *lines]) + "\n")
    return directory


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_leaves_what_is_not_used(tmp_path: Path, version: int) -> None:
    directory = make_cgroup(tmp_path, version, "pod", 1000, 300)
    left = FreeMemory(700 * MIB, f"what the memory limit of cgroup {directory} leaves")
    assert free_memory(make_proc(tmp_path, version, "/pod")) == left


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_is_not_used(tmp_path: Path, version: int) -> None:
    make_cgroup(tmp_path, version, "pod", 1000, 900, active_file=100, inactive_file=250, shmem=500)
    assert free_memory(make_proc(tmp_path, version, "/pod")).num_bytes == 450 * MIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "used", "left"),
    [
        ((500, 2000, 4000), (100, 100, 100), 400),
        ((2000, 500, 4000), (100, 100, 100), 400),
        ((2000, 3000, 500), (100, 100, 100), 400),
        ((2000, 3000, 4000), (100, 100, 3900), 100),  # its neighbours use the limit up
    ],
)
def test_the_nearest_limit_of_the_path_counts(
    tmp_path: Path, version: int, limits: tuple[int, ...], used: tuple[int, ...], left: int
) -> None:
    for path, limit, usage in zip(("a/b/c", "a/b", "a"), limits, used, strict=True):
        make_cgroup(tmp_path, version, path, limit, usage)
    assert free_memory(make_proc(tmp_path, version, "/a/b/c")).num_bytes == left * MIB


@pytest.mark.parametrize(("version", "unlimited"), [(1, UNLIMITED_V1), (2, "max")])
def test_no_limit_leaves_the_host(tmp_path: Path, version: int, unlimited: str) -> None:
    make_cgroup(tmp_path, version, "pod", unlimited, 300)
    assert free_memory(make_proc(tmp_path, version, "/pod")) == FreeMemory(HOST, "free host memory")


def test_a_limit_above_the_host_leaves_the_host(tmp_path: Path) -> None:
    make_cgroup(tmp_path, 2, "pod", 2 * HOST // MIB, 300)
    assert free_memory(make_proc(tmp_path, 2, "/pod")) == FreeMemory(HOST, "free host memory")


def test_beyond_memory_high_a_process_stands_still(tmp_path: Path) -> None:
    (make_cgroup(tmp_path, 2, "pod", 1000, 300) / "memory.high").write_text(str(800 * MIB))
    assert free_memory(make_proc(tmp_path, 2, "/pod")).num_bytes == 500 * MIB


def test_a_limit_that_was_lowered_leaves_nothing(tmp_path: Path) -> None:
    make_cgroup(tmp_path, 2, "pod", 200, 300)
    assert free_memory(make_proc(tmp_path, 2, "/pod")).num_bytes == 0


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("path", "root"),
    [("/", "/"), ("/kube/pod7", "/kube/pod7"), ("/kube/pod7/app", "/kube/pod7"), ("/../pod8", "/"), ("/pod9", "/kube")],
)
def test_a_container_sees_its_own_part_of_the_tree(tmp_path: Path, version: int, path: str, root: str) -> None:
    make_cgroup(tmp_path, version, ".", 1000, 300)
    assert free_memory(make_proc(tmp_path, version, path, root)).num_bytes == 700 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_unreadable_files_leave_the_host(tmp_path: Path, version: int) -> None:
    directory = make_cgroup(tmp_path, version, "pod", 1000, 300)
    for path in directory.glob("memory.*"):
        path.unlink()
    proc = make_proc(tmp_path, version, "/pod")
    assert free_memory(proc).num_bytes == HOST
    (proc / "self" / "cgroup").unlink()
    (proc / "self" / "mountinfo").unlink()
    assert free_memory(proc).num_bytes == HOST


def test_a_mount_without_a_source_is_none_of_a_cgroup(tmp_path: Path) -> None:
    """The kernel writes nothing for it, as after `mount -t tmpfs "" /mnt`."""
    make_cgroup(tmp_path, 2, "pod", 1000, 300)
    proc = make_proc(tmp_path, 2, "/pod")
    with (proc / "self" / "mountinfo").open("a") as file:
        file.write("63 43 0:39 / /mnt rw,relatime - tmpfs  rw\n")
    assert free_memory(proc).num_bytes == 700 * MIB


def test_this_machine_can_be_read() -> None:
    assert 0 < free_memory().num_bytes <= HOST


# A process that starts "ranks" as vLLM does; the first one says whom it finds, from itself or from a rank of its own.
PARENT = textwrap.dedent("""
    import json, mmap, multiprocessing, sys, time
    from setproctitle import setproctitle
    from vllm_hisparse.kv_manager.rows.free_memory import engines_beside, host_pool_bytes

    def engine(name, barrier, results, in_rank):
        setproctitle(f"VLLM::{name}")
        pool = mmap.mmap(-1, 64 << 20)
        for start in range(0, len(pool) // 2, mmap.PAGESIZE):
            pool[start] = 1
        barrier.wait()
        if name != "EngineCore_DP0":
            time.sleep(60)
        elif in_rank:
            multiprocessing.get_context("spawn").Process(target=look, args=("VLLM::Worker_TP1", results)).start()
        else:
            look("VLLM::EngineCore_DP0", results)
        time.sleep(60)

    def look(title, results):
        setproctitle(title)
        results.put([(other.pid, host_pool_bytes(other)) for other in engines_beside()])

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        names, in_rank = sys.argv[2:], sys.argv[1] == "rank"
        barrier, results = context.Barrier(len(names)), context.Queue()
        ranks = [context.Process(target=engine, args=(name, barrier, results, in_rank), daemon=False) for name in names]
        for rank in ranks:
            rank.start()
        found = dict(results.get(timeout=60))
        print(json.dumps([found.get(rank.pid) for rank in ranks]))
        for child in ranks:
            child.terminate()
""")


@pytest.mark.long
@pytest.mark.parametrize("place", ["engine", "rank"])
def test_finds_the_ranks_beside_it_and_what_they_have_taken(tmp_path: Path, place: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    names = ["EngineCore_DP0", "EngineCore_DP1", "EngineCore_DP2", "DPCoordinator"]
    command = [sys.executable, str(script), place, *names]
    own, *others, coordinator = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert own is None and coordinator is None
    assert all(32 * MIB <= taken < 40 * MIB for taken in others) and len(others) == 2


def test_a_process_that_is_no_engine_has_none_beside_it() -> None:
    assert engines_beside() == []


def test_an_engine_that_is_gone_has_taken_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        engine = psutil.Process(process.pid)
    assert host_pool_bytes(engine) == 0
