"""How fast KV comes over NIXL from another process of this host, without RDMA: transports of UCX, ways to host memory.

    python -m benchmarks.imports

A process with the data (on the first GPU) and one that reads it (on the last) are started for each choice of UCX's
variables. Ways to the reader's host memory:

* `host`: NIXL reads into pinned host memory, as a decode instance does;
* `device`: NIXL reads into device memory, for comparison;
* `bounce`: NIXL reads into two buffers in device memory, in turns, and the copy engine goes on to pinned host memory;
* `push`: the process with the data writes into the reader's device memory;
* `mapped`: without NIXL, the reader maps the other process's device memory (CUDA IPC), and its copy engine reads from
  there into pinned host memory.

A row has the rate of the second transfer, and the transport that UCX named for it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result

Device = StrEnum("Device", ["cpu", "gpu"])
WAYS = {Device.cpu: ("host",), Device.gpu: ("host", "device", "bounce", "push")}
# UCX's variables, by a name for the rows.
CHOICES: dict[str, dict[str, str]] = {
    "default": {},
    "no TCP data": {"UCX_TLS": "sm,cuda_ipc,cuda_copy,self,tcp", "UCX_PROTO_EMULATION_ENABLE": "n"},
    "GET over IPC": {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"},
    "pipeline": {"UCX_RMA_PPLN_ENABLE": "y"},
    "GET over IPC, pipeline": {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_RMA_PPLN_ENABLE": "y"},
    "GET over IPC, pipeline through device memory": {
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "UCX_RMA_PPLN_ENABLE": "y",
        "UCX_RNDV_FRAG_MEM_TYPES": "cuda",
    },
}
CPU_CHOICES = {"TCP": {"UCX_TLS": "tcp,self"}, "shared memory": {"UCX_TLS": "sm,self,tcp"}}
START_TIMEOUT_S, TIMEOUT_S = 90.0, 40.0

app = typer.Typer(add_completion=False)


@dataclass
class Job:
    """Sizes of a transfer.

    Attributes:
        device: place of the data.
        num_bytes: size of the data.
        piece_bytes: bytes of a descriptor, such as one layer's rows of a block.
        bounce_bytes: bytes of a buffer in device memory.
        num_threads: threads of NIXL's UCX backend; 0: none of its own.
    """

    device: Device
    num_bytes: int
    piece_bytes: int
    bounce_bytes: int
    num_threads: int


class Side:
    """NIXL and the memory of one process.

    Args:
        job: sizes of the transfers.
        name: name of the agent.
    """

    def __init__(self, job: Job, name: str):
        from nixl._api import nixl_agent, nixl_agent_config

        self.job = job
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], num_threads=job.num_threads))

    def register(self, tensor: Any) -> list[Any]:
        """Register a tensor of bytes; returns its pieces."""
        self.agent.register_memory(tensor)
        return list(tensor.split(self.job.piece_bytes))

    def descriptors(self, pieces: Sequence[Any]) -> Any:
        return self.agent.get_xfer_descs(list(pieces))

    def transfer(self, kind: str, local: Any, remote: Any, peer: str) -> None:
        """Read from, or write to, a peer's memory, to the end.

        Raises:
            RuntimeError: it failed, or takes longer than `TIMEOUT_S`.
        """
        handle = self.agent.initialize_xfer(kind, local, remote, peer)
        self.finish(self.start(handle))
        self.agent.release_xfer_handle(handle)

    def start(self, handle: Any) -> Any:
        if self.agent.transfer(handle) == "ERR":
            raise RuntimeError("the transfer could not be started")
        return handle

    def finish(self, handle: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while (state := self.agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR" or time.monotonic() > deadline:
                raise RuntimeError(f"the transfer is in state {state} after {TIMEOUT_S:.0f} s at most")


def hold(connection: Connection, job: Job, environment: dict[str, str]) -> None:
    """Hold data in this process, let the other one read it, and write it to the other one when told to."""
    os.environ |= environment
    import torch

    data = torch.arange(job.num_bytes // 8, dtype=torch.int64, device="cuda:0" if job.device == Device.gpu else "cpu")
    if job.device == Device.gpu:
        from torch.multiprocessing.reductions import reduce_tensor

        connection.send(reduce_tensor(data))
    side = Side(job, "holder")
    pieces = side.register(data.view(torch.uint8))
    connection.send((side.agent.get_agent_metadata(), side.agent.get_serialized_descs(side.descriptors(pieces))))
    for metadata, target in iter(connection.recv, None):
        peer = side.agent.add_remote_agent(metadata)
        try:
            remote = side.agent.deserialize_descs(target)
            local = side.descriptors(pieces)
            side.transfer("WRITE", local, remote, peer.decode() if isinstance(peer, bytes) else peer)
            connection.send(None)
        except Exception as error:  # NIXL has exception classes of its own
            connection.send(str(error))


class Reader:
    """Reads the other process's data in different ways.

    Args:
        holder: connection to `hold`.
        job: sizes of the transfers.
    """

    def __init__(self, holder: Connection, job: Job):
        import torch

        self.job, self._torch, self._holder = job, torch, holder
        self._is_gpu = job.device == Device.gpu
        if self._is_gpu:
            torch.cuda.set_device(torch.cuda.device_count() - 1)
            self._rebuild, self._arguments = holder.recv()
        self.host = torch.zeros(job.num_bytes, dtype=torch.uint8, pin_memory=self._is_gpu)
        self._side = Side(job, "reader")
        self._host_pieces = self._side.register(self.host)
        metadata, descriptors = holder.recv()
        peer = self._side.agent.add_remote_agent(metadata)
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        self._remote = self._side.agent.deserialize_descs(descriptors)

    def measure(self, way: str) -> float:
        """Return GB/s of the second of two transfers.

        Raises:
            RuntimeError: a transfer failed, or brought other bytes.
        """
        work, result = {
            "host": self._to_host,
            "device": self._to_device,
            "bounce": self._bounced,
            "push": self._pushed,
            "mapped": self._mapped,
        }[way]()
        work()
        result.zero_()
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        seconds = time.perf_counter() - start
        expected = self._torch.arange(self.job.num_bytes // 8, dtype=self._torch.int64, device=result.device)
        if not self._torch.equal(result.view(self._torch.int64), expected):
            raise RuntimeError("the transfer brought other bytes")
        return self.job.num_bytes / seconds / 1e9

    def _wait(self) -> None:
        if self._is_gpu:
            self._torch.cuda.synchronize()

    def _to_host(self) -> tuple[Callable[[], None], Any]:
        local = self._side.descriptors(self._host_pieces)
        return lambda: self._side.transfer("READ", local, self._remote, self._peer), self.host

    def _to_device(self) -> tuple[Callable[[], None], Any]:
        target = self._torch.zeros(self.job.num_bytes, dtype=self._torch.uint8, device="cuda")
        local = self._side.descriptors(self._side.register(target))
        return lambda: self._side.transfer("READ", local, self._remote, self._peer), target

    def _bounced(self) -> tuple[Callable[[], None], Any]:
        """Two buffers: one is filled while the other one is copied to the host."""
        job, torch = self.job, self._torch
        piece, num_pieces = job.piece_bytes, job.bounce_bytes // job.piece_bytes
        buffers = [torch.zeros(num_pieces * piece, dtype=torch.uint8, device="cuda") for _ in range(2)]
        pieces = [self._side.register(buffer) for buffer in buffers]
        copies = [torch.cuda.Event(), torch.cuda.Event()]
        remote = [self._remote[index] for index in range(self._remote.descCount())]
        parts = range(0, len(remote), num_pieces)
        handles = []
        for turn, first in enumerate(parts):
            part = self._host_pieces[first : first + num_pieces]
            local = [own[: len(to)] for own, to in zip(pieces[turn % 2], part, strict=False)]
            theirs = self._side.agent.get_xfer_descs(remote[first : first + len(part)], "VRAM")
            handles.append(self._side.agent.initialize_xfer("READ", self._side.descriptors(local), theirs, self._peer))

        def work() -> None:
            for turn, first in enumerate(parts):
                if turn >= 2:
                    copies[turn % 2].synchronize()
                self._side.finish(self._side.start(handles[turn]))
                size = min(num_pieces * piece, job.num_bytes - first * piece)
                to = self.host[first * piece :][:size]
                to.copy_(buffers[turn % 2][:size], non_blocking=True)
                copies[turn % 2].record()

        return work, self.host

    def _pushed(self) -> tuple[Callable[[], None], Any]:
        target = self._torch.zeros(self.job.num_bytes, dtype=self._torch.uint8, device="cuda")
        descriptors = self._side.descriptors(self._side.register(target))
        own = self._side.agent.get_agent_metadata(), self._side.agent.get_serialized_descs(descriptors)

        def work() -> None:
            self._holder.send(own)
            if error := self._holder.recv():
                raise RuntimeError(error)

        return work, target

    def _mapped(self) -> tuple[Callable[[], None], Any]:
        theirs = self._rebuild(*self._arguments).view(self._torch.uint8)

        def work() -> None:
            for own, other in zip(self.host.split(1 << 26), theirs.split(1 << 26), strict=True):
                own.copy_(other, non_blocking=True)
            self._torch.cuda.synchronize(theirs.device)

        return work, self.host


def read(connection: Connection, holder: Connection, job: Job, environment: dict[str, str], way: str) -> None:
    """Measure one way in this process; sends GB/s, or the error."""
    os.environ |= environment
    try:
        connection.send(Reader(holder, job).measure(way))
    except Exception as error:  # NIXL has exception classes of its own
        connection.send(" ".join(str(error).split()) or type(error).__name__)
    holder.send(None)


def transport_of(log: str, is_device: bool, is_write: bool) -> str | None:
    """Return the transport of the largest reads or writes, from the tables that UCX logs (`UCX_PROTO_INFO`)."""
    found, in_table = None, False
    for line in log.splitlines():
        if "remote memory" in line or "active message" in line or "tagged message" in line:
            kind = "remote memory write" if is_write else "remote memory read"
            in_table = kind in line and (is_write or ("into cuda" in line) == is_device)
        columns = [column.strip() for column in line.partition("|")[2].split("|")]
        if in_table and len(columns) == 4 and re.match(r"\d+", columns[0]):
            found = f"{columns[1]}: {columns[2]}"  # the last range is the largest
    return found


def ask_reader(job: Job, variables: dict[str, str], target: Callable[..., None], *args: Any) -> Any:
    """Run `hold` and a reader in two new processes, because UCX reads its variables when it is loaded.

    Args:
        job: sizes of the transfers.
        variables: environment of the process with the data.
        target: function of the reader. It gets a connection for its answer, a connection to `hold`, `job` and `args`.

    Returns:
        The reader's answer; if there is none, why.
    """
    context = multiprocessing.get_context("spawn")
    holder, holder_end = context.Pipe()
    reader, reader_end = context.Pipe()
    processes = [
        context.Process(target=hold, args=(holder_end, job, variables), daemon=True),
        context.Process(target=target, args=(reader_end, holder, job, *args), daemon=True),
    ]
    for process in processes:
        process.start()
    for end in (holder, holder_end, reader_end):
        end.close()
    try:
        answer = reader.recv() if reader.poll(START_TIMEOUT_S) else f"no answer in {START_TIMEOUT_S:.0f} s"
    except EOFError:
        answer = "a process has ended"
    for process in processes:
        process.join(5)  # at its end, it writes the rest of its log
        process.kill()
        process.join()
    return answer


def measure(job: Job, way: str, variables: dict[str, str]) -> dict[str, Any]:
    """Measure one way in two new processes."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "ucx.log"
        logs = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)}
        # NOTE: the side that starts a transfer knows its transport.
        of_holder, of_reader = (logs, {}) if way == "push" else ({}, logs)
        answer = ask_reader(job, variables | of_holder, read, variables | of_reader, way)
        text = log.read_text(errors="replace") if log.is_file() else ""
    transport = None if way == "mapped" else transport_of(text, way in ("device", "bounce"), way == "push")
    if isinstance(answer, str):
        return {"gb_s": None, "transport": transport, "error": answer}
    return {"gb_s": round(answer, 2), "transport": transport, "error": None}


@app.command()
def run(
    ctx: typer.Context,
    device: Annotated[Device, typer.Option(help="where the data is: gpu or cpu")] = Device.gpu,
    choice: Annotated[list[str] | None, typer.Option(help="of UCX's variables; repeatable; default: all")] = None,
    way: Annotated[list[str] | None, typer.Option(help="to the reader's memory; repeatable; default: all")] = None,
    mib: Annotated[int, typer.Option(min=1, help="MiB of a transfer")] = 1024,
    piece_kib: Annotated[int, typer.Option(min=4, help="KiB of a descriptor; 41: 64 fp8 rows of one layer")] = 41,
    bounce_mib: Annotated[int, typer.Option(min=1, help="MiB of a buffer in device memory")] = 64,
    threads: Annotated[int, typer.Option(min=0, help="threads of NIXL's UCX backend")] = 0,
    max_s: Annotated[float, typer.Option(help="seconds after which no further case starts")] = 240.0,
    output: Annotated[
        Path | None, typer.Option(help="result file; default: results/<cpu or h100>/imports.json")
    ] = None,
) -> None:
    """Measure the ways to host memory for each choice of UCX's variables."""
    output = output or RESULTS / ("h100" if device == Device.gpu else "cpu") / "imports.json"
    start = time.monotonic()
    piece = piece_kib << 10
    job = Job(device, (mib << 20) // piece * piece, piece, max(bounce_mib << 20, piece), threads)
    choices = CHOICES if device == Device.gpu else CPU_CHOICES
    cases = [(name, each) for name in choice or choices for each in way or WAYS[device]]
    if device == Device.gpu and way is None:
        cases.insert(0, ("default", "mapped"))
    rows: list[dict[str, Any]] = []
    for name, each in cases:
        if time.monotonic() - start > max_s:
            break
        row = {"device": str(device), "choice": name, "way": each, "mib": job.num_bytes >> 20, "piece_kib": piece_kib}
        row |= {"threads": threads, **measure(job, each, choices[name])}
        typer.echo(json.dumps(row), err=True)
        rows.append(row)
        write_result(output, ctx, "benchmarks.imports", rows, gpu_hardware() if device == Device.gpu else None)
    show("Imports", rows)


if __name__ == "__main__":
    app()
