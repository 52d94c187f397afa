"""Transfers over NIXL between two processes, on one host or two, like those of a prefill/decode pair.

The side with the data listens on a TCP port and sends its NIXL agent's metadata; the other side reads the data.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import socket
import struct
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from vllm_hisparse.cli.doctor.checks import in_one_line
from vllm_hisparse.cli.doctor.report import Report, Status

TRANSFER_BYTES = 256 << 20
NUM_PIECES = 64
TCP_GB_S = 2.0  # a lower rate means that NIXL uses TCP
TIMEOUT_S, EXIT_S = 60.0, 10.0


class Transfer(NamedTuple):
    """A read of a peer's memory: GB/s, and UCX's transport and device, such as `rc_mlx5/mlx5_0:1` or `tcp/eth0`."""

    gb_s: float
    transport: str


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        chunks = b""
        while len(chunks) < count:
            chunk = connection.recv(count - len(chunks))
            if not chunk:
                raise ConnectionError("the peer has closed the connection")
            chunks += chunk
        return chunks

    (length,) = struct.unpack("<Q", exactly(8))
    if length > 64 << 20:
        raise ConnectionError(f"the peer announces {length} bytes: it is no doctor")
    return exactly(length)


class Source:
    """Memory of this process, registered with NIXL so that other processes can read it.

    Args:
        device: `cuda` or `cpu`.
    """

    def __init__(self, device: str):
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        self.tensor = torch.arange(TRANSFER_BYTES // 8, dtype=torch.int64, device=device)
        self.agent = nixl_agent(f"doctor-source-{time.time_ns()}", nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory(self.tensor)
        pieces = list(self.tensor.view(NUM_PIECES, -1).unbind())
        self.descriptors = self.agent.get_serialized_descs(self.agent.get_xfer_descs(pieces))

    def answer(self, connection: socket.socket) -> None:
        """Send the metadata, and wait until the reader is done."""
        _send(connection, self.agent.get_agent_metadata())
        _send(connection, self.descriptors)
        _receive(connection)


def serve(port: int, device: str, host: str = "", once: bool = False, ready: Any = None) -> None:
    """Let peers read from this process, once or until it is interrupted."""
    source = Source(device)
    with socket.create_server((host, port)) as listener:
        if ready is not None:
            ready.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # a reader that leaves or hangs must not end the service
                connection.settimeout(TIMEOUT_S)
                source.answer(connection)
            if once:
                return


def read_from(host: str, port: int) -> Transfer:
    """Read a peer's memory into host memory, in a new process, because UCX reads its logging options when it is loaded.

    Raises:
        RuntimeError: the peer does not answer, the transfer fails, or the bytes that arrive are wrong.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        process = context.Process(target=_report_read, args=(host, port, sender), daemon=True)
        log = Path(directory) / "ucx.log"
        before = {name: os.environ.get(name) for name in ("UCX_PROTO_INFO", "UCX_LOG_FILE")}
        os.environ |= {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)}
        try:
            process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        sender.close()
        try:
            answer = receiver.recv() if receiver.poll(3 * TIMEOUT_S) else "the reading process does not answer"
            process.join(EXIT_S)  # at its end, it writes the rest of the log
        except EOFError:
            answer = "the reading process has ended"
        finally:
            process.kill()
            process.join()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return Transfer(answer, transport_of(log.read_text() if log.is_file() else ""))


def transport_of(log: str) -> str:
    """Return the transport of large reads, from the tables of protocols that UCX logs (`UCX_PROTO_INFO`)."""
    found, in_table = "unknown transport", False
    for line in log.splitlines():
        if "remote memory" in line or "active message" in line or "tagged message" in line:
            in_table = "remote memory read" in line
        columns = [column.strip() for column in line.partition("|")[2].split("|")]
        if in_table and len(columns) == 4 and re.match(r"\d+", columns[0]):
            found = columns[2]  # the last range is the largest
    return found


def _write_to_stderr() -> None:
    """Send what this process prints to stderr, because NIXL logs to stdout, which is the report's with `--json`."""
    os.dup2(2, 1)


def _report_read(host: str, port: int, sender: Connection) -> None:
    _write_to_stderr()
    try:
        sender.send(_read(host, port))
    except Exception as error:  # NIXL has exception classes of its own
        sender.send(in_one_line(error))


def _read(host: str, port: int) -> float:
    """Read a peer's memory into this process's host memory and return GB/s."""
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    target = torch.zeros(TRANSFER_BYTES // 8, dtype=torch.int64)
    agent = nixl_agent(f"doctor-target-{time.time_ns()}", nixl_agent_config(backends=["UCX"]))
    agent.register_memory(target)
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        remote = agent.add_remote_agent(_receive(connection))
        descriptors = agent.deserialize_descs(_receive(connection))
        local = agent.get_xfer_descs(list(target.view(NUM_PIECES, -1).unbind()))
        _transfer(agent, local, descriptors, remote)  # sets up the connections
        start = time.perf_counter()
        _transfer(agent, local, descriptors, remote)
        seconds = time.perf_counter() - start
        _send(connection, b"done")
    if not torch.equal(target, torch.arange(target.numel())):
        raise RuntimeError("the transfer brought other bytes")
    return TRANSFER_BYTES / seconds / 1e9


def _transfer(agent: Any, local: Any, remote: Any, name: Any) -> None:
    handle = agent.initialize_xfer("READ", local, remote, name.decode() if isinstance(name, bytes) else name)
    agent.transfer(handle)
    deadline = time.monotonic() + TIMEOUT_S
    while (state := agent.check_xfer_state(handle)) != "DONE":
        if state == "ERR" or time.monotonic() > deadline:
            raise RuntimeError(f"the transfer is in state {state}")
        time.sleep(0.0002)
    agent.release_xfer_handle(handle)


def is_installed() -> bool:
    """Return True if NIXL can be imported; `check_versions` says what to do if it cannot."""
    return importlib.util.find_spec("nixl") is not None


def serve_once(device: str, ready: Connection) -> None:
    """Serve one reader of this host; send the port, or what is wrong."""
    _write_to_stderr()
    try:
        serve(0, device, "127.0.0.1", once=True, ready=ready)
    except Exception as error:  # NIXL has exception classes of its own
        ready.send(in_one_line(error))


def check_two_processes(report: Report, device: str) -> None:
    """Read from another process of this host."""
    kind = "GPU memory" if device == "cuda" else "host memory"
    name = f"NIXL from another process's {kind}"
    if not is_installed():
        report.add(name, Status.note, "not tried: nixl is not installed")
        return
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve_once, args=(device, sender), daemon=True)
    process.start()
    sender.close()  # so that the end of the other process is seen
    try:
        if not receiver.poll(TIMEOUT_S):
            raise RuntimeError("the other process does not answer")
        answer = receiver.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        _add_rate(report, name, "nixl_local_gb_s", read_from("127.0.0.1", answer))
    except Exception as error:  # the other process may raise or end, too
        advice = "A prefill/decode pair would not work here. Try UCX_TLS=tcp,shm,self (cuda_copy with a GPU)."
        found = "the other process has ended" if isinstance(error, EOFError) else in_one_line(error)
        report.add(name, Status.error, found, advice)
    finally:
        process.kill()
        process.join()


def check_peer(report: Report, peer: str) -> None:
    """Read from a doctor that serves on another host."""
    host, _, port = peer.rpartition(":")
    name = f"NIXL from {peer}"
    if not is_installed():
        report.add(name, Status.error, "not tried: nixl is not installed", "pip install nixl")
        return
    try:
        _add_rate(report, name, "nixl_peer_gb_s", read_from(host, int(port)))
    except Exception as error:
        advice = "Run `vllm-hisparse doctor --serve PORT` there, and open this port and UCX's between the hosts."
        report.add(name, Status.error, in_one_line(error), advice)


def _add_rate(report: Report, name: str, key: str, transfer: Transfer) -> None:
    rate = report.rates[key] = transfer.gb_s
    is_tcp, slow = transfer.transport.startswith("tcp"), rate < TCP_GB_S
    advice = f"32K tokens of DeepSeek-V3.2 take {32768 * 61 * 656 / rate / 1e9:.1f} s."
    if is_tcp:
        advice = f"It fell back to TCP: {advice} RDMA, or on one host CUDA IPC, is faster."
    elif slow:
        advice = f"As slow as TCP: {advice}"
    bad = is_tcp or slow
    report.add(
        name, Status.warning if bad else Status.ok, f"{rate:.2f} GB/s, {transfer.transport}", advice if bad else ""
    )
