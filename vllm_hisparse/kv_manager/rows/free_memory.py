"""Host memory that this engine may still take, limited by the host, by its container and by the engines beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")
MANAGED_POOL = "hisparse-managed-pool"  # name of the file whose size is that of the filled managed memory
FREE_MEMORY_SHARE = 0.95  # share of the free memory of host and container that host pools may take
# By cgroup version: files with the memory limits, the file with the used bytes, and the entries of memory.stat that
# count page cache, which the kernel gives up first.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
_PAGE_CACHE = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}


class FreeMemory(NamedTuple):
    """Bytes that can be taken, and the words for an error message that say what limits them."""

    num_bytes: int
    source: str


def free_memory(proc: Path = PROC) -> FreeMemory:
    """The smaller of the host's free memory and the memory that the cgroups of this process leave.

    NOTE: psutil is not enough, because it knows only the host; the kernel kills a process beyond a container's limit.
    """
    candidates = [FreeMemory(psutil.virtual_memory().available, "free host memory")]
    for version, directory in _cgroups(proc):
        left = _left_of(version, directory)
        if left is not None:
            candidates.append(FreeMemory(left, f"what the memory limit of cgroup {directory} leaves"))
    return min(candidates)


def _cgroups(proc: Path) -> Iterator[tuple[int, Path]]:
    """Version and directory of each memory cgroup of this process, from its own up to the topmost mounted here."""
    mounts = dict(_cgroup_mounts(proc))
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2 if not controllers else 1
            if version not in mounts or (controllers and "memory" not in controllers.split(",")):
                continue
            root, mount_point = mounts[version]
            # NOTE: without a cgroup namespace, the path is the host's, but a container's mount shows only its own part.
            is_below = path.startswith(root.rstrip("/") + "/")
            directory = mount_point / (path[len(root) :] if is_below else "").strip("/")
            while directory.is_relative_to(mount_point):
                yield version, directory
                directory = directory.parent


def _cgroup_mounts(proc: Path) -> Iterator[tuple[int, tuple[str, Path]]]:
    """For each mounted memory controller: its version, the cgroup that is mounted, and the mount point."""
    with suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            mount, _, filesystem = line.partition(" - ")
            root, mount_point = mount.split()[3:5]
            kind, _, options = filesystem.split(" ")[:3]  # NOTE: the one between them may be empty
            if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
                yield 2 if kind == "cgroup2" else 1, (root, Path(mount_point))


def _left_of(version: int, directory: Path) -> int | None:
    """Bytes that one cgroup's limit leaves, where page cache does not count as used; None without a limit."""
    limits = [limit for name in _LIMITS[version] if (limit := _read_int(directory / name)) is not None]
    used = _read_int(directory / _USAGE[version])
    if not limits or used is None:
        return None
    page_cache = 0
    with suppress(OSError):
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        page_cache = sum(int(stat.get(name, 0)) for name in _PAGE_CACHE[version])
    return max(0, min(limits) - max(0, used - page_cache))


def _read_int(path: Path) -> int | None:
    """The number in a file; None if the file contains "max" or cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def engines_beside() -> list[psutil.Process]:
    """Processes of the other data parallel ranks that the same process started on this host.

    NOTE: the processes are searched for, because vLLM tells the ranks of a dense model nothing about each other.
    """
    engine = psutil.Process()
    with suppress(psutil.Error):
        if not _is_engine(engine):  # a tensor parallel rank is a process of its own
            engine = engine.parent() or engine
        if _is_engine(engine):
            parent = engine.parent()
            return [child for child in parent.children() if child != engine and _is_engine(child)] if parent else []
    return []


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "EngineCore_DP" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def host_pool_bytes(engine: psutil.Process, proc: Path = PROC) -> int:
    """Bytes of memory that an engine and its ranks have taken already for its host pool, as far as it is filled or
    pinned.

    A pool that several ranks map counts once.
    """
    num_kib = 0
    managed: dict[tuple[int, int], int] = {}
    with suppress(psutil.Error):
        for process in [engine, *engine.children(recursive=True)]:
            directory = proc / str(process.pid)
            with suppress(OSError):
                lines = (directory / "smaps_rollup").read_text().splitlines()
                num_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:"))
            managed |= _managed_pools(directory / "fd")
    return num_kib * 1024 + sum(managed.values())


def _managed_pools(files: Path) -> dict[tuple[int, int], int]:
    """Sizes of the files that managed memory keeps open, by their identity, because a forked process has them, too."""
    found = {}
    with suppress(OSError):
        for file in files.iterdir():
            with suppress(OSError):
                if str(file.readlink()).startswith(f"/memfd:{MANAGED_POOL}"):
                    status = file.stat()
                    found[status.st_dev, status.st_ino] = status.st_size
    return found
