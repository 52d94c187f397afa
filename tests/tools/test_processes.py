import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.harness.processes import CALM_NICENESS, LOOPBACK, EngineProcess, ProcessError, ProcessGroup, free_ports

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # of programs in other folders
SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"
WITH_CHILD = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '''{SLEEP}''']).pid); {SLEEP}"
# Its first thread ends at once, a second one goes on for a second and then writes a file.
OUTLIVED = """
import ctypes, os, pathlib, platform, sys, threading
threading.Timer(1, lambda: (pathlib.Path(sys.argv[1]).write_text(''), os._exit(3))).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""
WITH_OUTLIVED_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {OUTLIVED!r}, sys.argv[1]])"
SERVER = """
import http.server, sys, time
time.sleep(float(sys.argv[2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(tmp_path: Path, code: str, *args: str, name: str = "child", health_url: str | None = None) -> EngineProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return EngineProcess(name, command, tmp_path / "logs" / f"{name}.log", health_url=health_url)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as server:
            server.bind((LOOPBACK, port))


def test_free_ports_skip_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports(2)
    monkeypatch.setattr("tools.harness.processes.PORTS", range(min(first, second), min(first, second) + 1))
    with socket.socket() as server:
        server.bind((LOOPBACK, min(first, second)))
        with pytest.raises(RuntimeError, match="0 of 1 ports"):
            free_ports(1)


@pytest.mark.long
def test_waits_for_health(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = python(tmp_path, SERVER, str(port), "0.5", health_url=f"http://{LOOPBACK}:{port}/health")
    waited_for: list[str] = []
    with ProcessGroup() as group:
        group.start(server)
        assert not server.is_healthy()
        group.wait_healthy(60, lambda process: waited_for.append(process.name))
        assert server.is_healthy()
        group.check()
    assert set(waited_for) == {"child"}
    assert server.is_gone()
    assert not server.is_healthy()


@pytest.mark.long
def test_unhealthy_status_is_not_healthy(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = python(tmp_path, SERVER, str(port), "0", health_url=f"http://{LOOPBACK}:{port}/missing")
    with ProcessGroup() as group, pytest.raises(ProcessError, match="child was not healthy after 1 s"):
        group.start(server)
        group.wait_healthy(1)


@pytest.mark.long
def test_health_timeout_tells_the_end_of_the_log(tmp_path: Path) -> None:
    code = f"for i in range(100): print('line', i, flush=True)\n{SLEEP}"
    slow = python(tmp_path, code, name="slow", health_url=f"http://{LOOPBACK}:{free_ports(1)[0]}/health")
    with ProcessGroup() as group:
        group.start(slow)
        wait_until(lambda: slow.last_log_line() == "line 99")
        with pytest.raises(ProcessError) as caught:
            group.wait_healthy(0.1)
    details = caught.value.details()
    assert "slow was not healthy" in details
    assert str(slow.log_path) in details
    assert "line 99" in details
    assert "line 10\n" not in details


@pytest.mark.long
def test_a_member_that_ends_is_an_error_with_its_cause(tmp_path: Path) -> None:
    code = """
    print("(EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1] ValueError: top_k: got 7", flush=True)
    raise RuntimeError("see above")
    """
    failing = python(tmp_path, code, health_url=f"http://{LOOPBACK}:{free_ports(1)[0]}/health")
    with ProcessGroup() as group, pytest.raises(ProcessError, match="child ended with exit code 1") as caught:
        group.start(failing)
        group.wait_healthy(60)
    assert caught.value.first_error == "ValueError: top_k: got 7"
    assert caught.value.log_tail[-1] == "RuntimeError: see above"


def test_first_error_includes_its_continuation(tmp_path: Path) -> None:
    process = python(tmp_path, SLEEP)
    process.log_path.parent.mkdir()
    process.log_path.write_text("x.ValidationError: 1 error\n  Value error, top_k: got 7\nRuntimeError: see above\n")
    assert process.first_error() == "x.ValidationError: 1 error Value error, top_k: got 7"
    process.log_path.write_text("no Error here\n")
    assert process.first_error() is None
    process.log_path.write_text("")
    assert process.first_error() is None, "it has not written anything yet"


def test_log_tail_leaves_out_noise(tmp_path: Path) -> None:
    process = python(tmp_path, SLEEP)
    process.log_path.parent.mkdir()
    process.log_path.write_text(
        'cause\n\nnanobind: leaked 4 instances!\n - leaked type "x"\n - ... skipped remainder\n'
    )
    assert process.log_tail() == ["cause"]


def test_log_lines_lose_prefix_and_colour(tmp_path: Path) -> None:
    process = python(tmp_path, SLEEP)
    process.log_path.parent.mkdir()
    assert process.last_log_line() == ""
    for line in (
        "(Worker pid=7) INFO 11-21 01:42:20 [base_loader.py:82] Loading took 0.2 s",
        "\x1b[2m2026-11-21 01:43:13\x1b[0m \x1b[32m INFO\x1b[0m a::b\x1b[2m:\x1b[0m src/b.rs:9: Loading took 0.2 s",
        "Loading took 0.2 s",
    ):
        process.log_path.write_text(f"{line}\n\n")
        assert process.last_log_line() == "Loading took 0.2 s"


def test_failure_stops_children_and_grandchildren(tmp_path: Path) -> None:
    parent = python(tmp_path, WITH_CHILD, name="parent")
    other = python(tmp_path, SLEEP, name="other")
    with pytest.raises(ZeroDivisionError), ProcessGroup() as group:
        group.start(parent)
        group.start(other)
        wait_until(parent.last_log_line)
        raise ZeroDivisionError
    grandchild = int(parent.last_log_line())
    assert not any(is_alive(pid) for pid in (parent.pid, other.pid, grandchild))


def test_children_of_a_dead_member_are_stopped(tmp_path: Path) -> None:
    parent = python(tmp_path, WITH_CHILD)
    with ProcessGroup() as group:
        group.start(parent)
        wait_until(parent.last_log_line)
        grandchild = int(parent.last_log_line())
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: parent.exit_code is not None)
        assert is_alive(grandchild)
    assert not is_alive(grandchild)


@pytest.mark.long
@pytest.mark.parametrize(("code", "exit_code"), [(OUTLIVED, 3), (WITH_OUTLIVED_CHILD, 0)], ids=["child", "grandchild"])
def test_a_process_is_gone_when_its_last_thread_is(tmp_path: Path, code: str, exit_code: int) -> None:
    """Until then it may hold its port, although the kernel calls it a zombie."""
    end = tmp_path / "end"
    process = python(tmp_path, code, str(end))
    with ProcessGroup() as group:
        group.start(process)
        wait_until(process.is_gone)
        assert end.exists()
        assert process.exit_code == exit_code


@pytest.mark.long
def test_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    stubborn = python(tmp_path, STUBBORN)
    with ProcessGroup(grace_s=0.3) as group:
        group.start(stubborn)
        wait_until(stubborn.last_log_line)
    assert stubborn.exit_code == -signal.SIGKILL


def test_stop_without_start_and_twice(tmp_path: Path) -> None:
    group = ProcessGroup()
    group.stop()
    process = group.start(python(tmp_path, SLEEP))
    group.stop()
    group.stop()
    assert process.exit_code == -signal.SIGTERM


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), ProcessGroup() as group:
        group.start(EngineProcess("missing", [str(tmp_path / "missing")], tmp_path / "missing.log"))


@pytest.mark.long
def test_calms_only_threads_that_never_sleep(tmp_path: Path) -> None:
    code = f"""
    import sys, threading, time
    def poll():
        while True:
            pass
    threading.Thread(target=poll, daemon=True).start()
    ids = f"{{threading.get_native_id()}} {{threading.enumerate()[1].native_id}}\\n"
    sys.stdout.write(ids)  # at once: print writes word by word when Python does not buffer
    {SLEEP}
    """
    process = python(tmp_path, code)
    assert process.calm_polling_threads() == 0
    with ProcessGroup() as group:
        group.start(process)
        wait_until(process.last_log_line)
        sleeping, polling = map(int, process.last_log_line().split())
        wait_until(process.calm_polling_threads)
        assert os.getpriority(os.PRIO_PROCESS, polling) == CALM_NICENESS
        assert os.getpriority(os.PRIO_PROCESS, sleeping) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_the_members(tmp_path: Path, signum: int) -> None:
    code = f"""
    import signal, sys, time
    from pathlib import Path
    from tools.harness.processes import EngineProcess, ProcessGroup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with ProcessGroup(grace_s=0.5) as group:
        print(group.start(EngineProcess("a", [sys.executable, "-c", {STUBBORN!r}], Path("a.log"))).pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, env=ENV) as runner:
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        wait_until(lambda: "ready" in (tmp_path / "a.log").read_text())
        runner.send_signal(signum)
        assert runner.wait(60) != 0
    assert not is_alive(pid)


@pytest.mark.long
def test_exit_without_leaving_the_block_stops_the_members(tmp_path: Path) -> None:
    code = f"""
    import sys
    from pathlib import Path
    from tools.harness.processes import EngineProcess, ProcessGroup
    group = ProcessGroup().__enter__()
    print(group.start(EngineProcess("a", [sys.executable, "-c", {SLEEP!r}], Path("a.log"))).pid)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=ENV, check=True)
    assert not is_alive(int(result.stdout))
