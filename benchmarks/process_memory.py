"""Memory of a process, by kind, and what grew in Python: which part of a soak's memory grows."""

from __future__ import annotations

import ctypes
import gc
import re
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

NUM_LARGEST = 10  # places in Python, and types of objects, that `PythonGrowth` names
NUM_FRAMES = 4  # of a place

MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (?P<permissions>\S+) \S+ \S+ \S+ *(?P<path>.*)")
# Beginnings of paths of shared memory, which is in no file system: of `mmap`, `memfd_create`, POSIX and System V.
SHARED = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV")


def own_mib(pid: int | str = "self") -> float:
    """MiB of a process that are in no file: its heap, and memory that it may share, such as a host pool.

    Memory that a process maps twice counts twice, as in its RSS.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = {words[0]: int(words[1]) for words in lines if words and words[0] in ("RssAnon:", "RssShmem:")}
    return round(sum(sizes.values()) / 1024, 1)


def kinds_mib() -> dict[str, float]:
    """MiB of this process's own memory by kind; together they are `own_mib`.

    Returns:
        `heap`: malloc's main arena. `anonymous`: other private memory, such as large arrays, the arenas of threads and
        their stacks. `of_files`: changed pages of libraries. `shared <name>`: each kind of shared memory.
    """
    kinds: Counter[str] = Counter()
    kind, field = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = MAPPING.fullmatch(line)
        if mapping is None:
            name, value, *_ = line.split()
            kinds[kind] += int(value) if name == field else 0
        elif mapping["permissions"].endswith("s"):
            path = mapping["path"].removesuffix(" (deleted)")
            kind, field = f"shared {path.rpartition('/')[2]}", "Rss:" if path.startswith(SHARED) else "Anonymous:"
        else:
            names = {"": "anonymous", "[heap]": "heap", "[stack]": "anonymous"}
            kind, field = names.get(mapping["path"], "of_files"), "Anonymous:"
    return {kind: round(kib / 1024, 1) for kind, kib in sorted(kinds.items()) if kib}


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def malloc_mib() -> dict[str, float]:
    """MiB of glibc's malloc: `arenas` of all threads, of these `in_use` and `free`, and `mapped` for large blocks."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    sizes = {"arenas": info.arena, "in_use": info.uordblks, "free": info.fordblks, "mapped": info.hblkhd}
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def memory() -> dict[str, Any]:
    """MiB of this process and its children, by name, their shared memory files, threads, open files, device memory.

    Memory that was freed goes back to the system first, so that what grows is in use. `objects` are Python's.
    `pinned_mib` is that of torch's allocator of pinned memory.
    """
    import torch

    gc.collect()
    num_objects = len(gc.get_objects())
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found: dict[str, Any] = {"rss_mib": Counter(), "own_mib": Counter(), "threads": 0, "open_files": 0}
    shared: dict[str, int] = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            name, rss, own_memory = process.name(), process.memory_info().rss, own_mib(process.pid)
            num_threads, num_files, maps = process.num_threads(), process.num_fds(), process.memory_maps()
        except (psutil.Error, OSError):  # a child has ended meanwhile
            continue
        name = "engine" if process == own else name
        found["rss_mib"][name] += round(rss / 2**20, 1)
        found["own_mib"][name] += own_memory
        found["threads"] += num_threads
        found["open_files"] += num_files
        shared |= {each.path: each.rss for each in maps if each.path.startswith("/dev/shm/")}
    found["objects"] = num_objects
    found |= {"shm_files": len(shared), "shm_mib": round(sum(shared.values()) / 2**20, 1)}
    found |= {name: dict(found[name]) for name in ("rss_mib", "own_mib")}
    found |= {"kinds_mib": kinds_mib(), "malloc_mib": malloc_mib()}
    if torch.cuda.is_available():
        found["device_mib"] = round(torch.cuda.memory_reserved() / 2**20, 1)
        pinned = torch.cuda.host_memory_stats()
        names = {"allocated": "allocated_bytes.current", "active": "active_bytes.current"}
        found["pinned_mib"] = {name: round(pinned.get(key, 0) / 2**20, 1) for name, key in names.items()}
    return found


class PythonGrowth:
    """Traces what Python allocates in this process from now on; this makes it slower."""

    def __init__(self) -> None:
        tracemalloc.start(NUM_FRAMES)
        self._before, self._types_before = self._look()

    def begin(self) -> None:
        """Compare with this moment."""
        self._before, self._types_before = self._look()

    def largest(self) -> dict[str, Any]:
        """Return the places and types that grew most since `begin`.

        Returns:
            `python_kib`: the place in the code, innermost frame last, and KiB. `python_objects`: type and number of
            objects with references to others.
        """
        now, types_now = self._look()
        places = [
            (" < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(each.traceback)), each.size_diff)
            for each in now.compare_to(self._before, "traceback")
        ]
        places.sort(key=lambda place: -place[1])  # places that shrank come last
        types_now.subtract(self._types_before)
        return {
            "python_kib": {place: round(size / 1024, 1) for place, size in places[:NUM_LARGEST]},
            "python_objects": dict(types_now.most_common(NUM_LARGEST)),
        }

    def close(self) -> None:
        """Trace no more."""
        tracemalloc.stop()

    def _look(self) -> tuple[tracemalloc.Snapshot, Counter[str]]:
        gc.collect()
        types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
        return tracemalloc.take_snapshot(), types
