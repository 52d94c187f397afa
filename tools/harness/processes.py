"""Child processes of a local deployment: ports, health checks, logs, and complete clean-up."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

LOOPBACK = "127.0.0.1"
# NOTE: this range is below the kernel's ephemeral ports, because an outgoing connection could take an ephemeral port
# before the server starts.
PORTS = range(20000, 32000)
POLL_S = 0.25
KILL_TIMEOUT_S = 30.0  # seconds after which a killed process is gone, even on a busy machine
CALM_NICENESS = 10  # gives a thread about a tenth of the CPU time of a computing thread
HEALTH_REQUEST_TIMEOUT_S = 5.0
TAIL_BYTES = 64 * 1024
ANSI_CODE = re.compile(r"\x1b\[[0-9;]*m")
# "(Worker pid=7) INFO 01-31 12:00:00 [file.py:1] text" of vLLM, "2026-01-31 12:00:00  INFO a::b: c.rs:1: text" of the
# router.
LOG_PREFIX = re.compile(
    r"^(\(\w+ pid=\d+\)\s*)?((INFO|DEBUG|WARNING|ERROR) \S+ \S+ \[\S+\]\s*|\S+ \S+\s+[A-Z]+ \S+: \S+:\d+:\s*)?"
)
# Lines that vLLM's processes print at every start and end; they say nothing about a failure.
NOISE = re.compile(r"nanobind|^ - (leaked|\.\.\. skipped)|resource_tracker|\] Route: /")
ERROR_LINE = re.compile(r"^\s*([\w.]*(Error|Exception)\b: .*)")


class ProcessError(RuntimeError):
    """A process ended or did not become healthy; carries the end of its log."""

    def __init__(self, process: EngineProcess, reason: str):
        self.name = process.name
        self.log_path = process.log_path
        self.log_tail = process.log_tail()
        self.first_error = process.first_error()
        super().__init__(f"{process.name} {reason}")
        self.add_note("\n".join(self.log_tail))

    def details(self) -> str:
        """The message with the first error of the log, its last lines and its path."""
        cause = [f"first error in its log: {self.first_error}"] if self.first_error else []
        return "\n".join([str(self), *cause, f"end of {self.log_path}:", *(f"  {line}" for line in self.log_tail)])


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that no process listens on."""
    sockets: list[socket.socket] = []
    try:
        for port in random.sample(PORTS, len(PORTS)):
            if len(sockets) == count:
                break
            candidate = socket.socket()
            sockets.append(candidate)
            try:
                candidate.bind((LOOPBACK, port))
            except OSError:
                sockets.pop().close()
        if len(sockets) < count:
            raise RuntimeError(f"only {len(sockets)} of {count} ports are free in {PORTS.start}-{PORTS.stop - 1}")
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


class EngineProcess:
    """A server in a process group of its own, with a log file.

    Args:
        name: its name in messages.
        command: program and arguments.
        log_path: stdout and stderr together; overwritten at start.
        env: environment variables, in addition to those of this process.
        health_url: answers 200 once the server is ready. None: the server counts as ready as soon as it runs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        env: Mapping[str, str] | None = None,
        health_url: str | None = None,
    ):
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self.env = dict(env or {})
        self.health_url = health_url
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, which is also the id of the process group; None before the start."""
        return None if self._child is None else self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the process runs."""
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Start the process without waiting for it to become healthy."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
            )

    def is_healthy(self) -> bool:
        """Return True if the process runs and its health URL answers 200."""
        if self._child is None or self.exit_code is not None:
            return False
        if self.health_url is None:
            return True
        try:
            with urllib.request.urlopen(self.health_url, timeout=HEALTH_REQUEST_TIMEOUT_S) as response:
                return response.status == 200
        except OSError:
            return False

    def send_signal(self, signum: int) -> None:
        """Signal all processes of the group, including those that outlived the first one."""
        if self.pid is None or self.is_gone():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def is_gone(self) -> bool:
        """Return True if all processes of the group have ended, and with them their threads, memory and sockets."""
        if self._child is None:
            return True
        has_ended = self._child.poll() is not None  # reaps it
        return has_ended and not any(_group_members(self._child.pid))

    def calm_polling_threads(self) -> int:
        """Lower the priority of the threads that busy-poll; returns their number.

        NOTE: call this while the server is idle; main threads are not changed. NIXL's progress thread never sleeps and
        runs on the engine's cores: on a small machine it would take half of their time.
        """
        return 0 if self.pid is None else calm_polling_threads(self.pid)

    def log_tail(self, num_lines: int = 15) -> list[str]:
        """The last lines of the log that are not noise."""
        return self._log_lines()[-num_lines:]

    def last_log_line(self) -> str:
        """The last line of the log without time, level and source."""
        lines = self._log_lines()
        return LOG_PREFIX.sub("", lines[-1]) if lines else ""

    def first_error(self) -> str | None:
        """The first exception in the log; later ones are usually its consequences."""
        lines = [LOG_PREFIX.sub("", line) for line in self._log_lines(max_bytes=None)]
        for line, next_line in zip(lines, [*lines, ""][1:], strict=True):
            if error := ERROR_LINE.match(line):
                return error[1] + (f" {next_line.strip()}" if next_line.startswith(" ") else "")
        return None

    def _log_lines(self, max_bytes: int | None = TAIL_BYTES) -> list[str]:
        if not self.log_path.is_file():
            return []
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(0 if max_bytes is None else max(0, size - max_bytes))
            text = ANSI_CODE.sub("", log.read().decode(errors="replace"))
        return [line.rstrip() for line in text.splitlines() if line.strip() and not NOISE.search(line)]


class ProcessGroup:
    """A context manager that stops its processes together.

    All of them are stopped at the end of the block, on an exception, and on Ctrl-C, SIGTERM or SIGHUP.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, *, grace_s: float = 15.0):
        self.grace_s = grace_s
        self.processes: list[EngineProcess] = []
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        atexit.register(self.stop)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGHUP):
                self._previous_handlers[signum] = signal.signal(signum, _exit_on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers.clear()
        atexit.unregister(self.stop)

    def start(self, process: EngineProcess) -> EngineProcess:
        """Start a process and add it to the group."""
        self.processes.append(process)
        process.start()
        return process

    def check(self, within_s: float = 0.0) -> None:
        """Raise if a member has ended.

        Args:
            within_s: seconds to wait for a member that is about to end.

        Raises:
            ProcessError: the first member that has ended.
        """
        deadline = time.monotonic() + within_s
        while True:
            for process in self.processes:
                if process.exit_code is not None:
                    raise ProcessError(process, f"ended with exit code {process.exit_code}")
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_S)

    def wait_healthy(self, timeout_s: float, on_wait: Callable[[EngineProcess], None] | None = None) -> None:
        """Wait until every member is healthy.

        Args:
            timeout_s: seconds for all of them together.
            on_wait: called several times per second with a member that is not healthy yet.

        Raises:
            ProcessError: a member has ended, or was not healthy in time.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(self.processes)
        while waiting := [process for process in waiting if not process.is_healthy()]:
            self.check()
            if time.monotonic() > deadline:
                raise ProcessError(waiting[0], f"was not healthy after {timeout_s:g} s")
            if on_wait is not None:
                on_wait(waiting[0])
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop all members and their children: SIGTERM, then SIGKILL after the grace time."""
        try:
            self._signal_and_wait(signal.SIGTERM, self.grace_s)
        finally:  # a second Ctrl-C skips the grace time, but still kills everything
            self._signal_and_wait(signal.SIGKILL, KILL_TIMEOUT_S)

    def _signal_and_wait(self, signum: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.send_signal(signum)
        while not all(process.is_gone() for process in self.processes) and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)


def calm_polling_threads(group_id: int) -> int:
    """Like `EngineProcess.calm_polling_threads`, for any process group."""
    before = dict(_thread_usage(group_id))
    time.sleep(POLL_S)
    num_calmed = 0
    for thread, (run_ns, num_sleeps) in _thread_usage(group_id):
        run_ns_before, num_sleeps_before = before.get(thread, (run_ns, num_sleeps))
        if num_sleeps == num_sleeps_before and run_ns > run_ns_before:
            num_calmed += 1
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, CALM_NICENESS)
    return num_calmed


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _group_members(group_id: int) -> Iterator[int]:
    """Process ids of a group, without zombies.

    NOTE: a process whose first thread has ended looks like a zombie until its other threads have ended, too.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        state, group, num_threads = fields[0], int(fields[2]), int(fields[17])
        if group == group_id and (state not in "ZX" or num_threads > 1):
            yield int(stat.parent.name)


def _thread_usage(group_id: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """CPU time in nanoseconds and number of voluntary sleeps of a group's threads (not main threads), by thread id."""
    for process in _group_members(group_id):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            if int(thread.name) == process:
                continue
            try:
                run_ns = int((thread / "schedstat").read_text().split()[0])
                status = (thread / "status").read_text()
            except OSError:  # ended meanwhile
                continue
            sleeps = re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", status, re.MULTILINE)
            yield int(thread.name), (run_ns, int(sleeps[1]) if sleeps else 0)
