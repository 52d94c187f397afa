"""How long NIXL's calls take while one, two or four reads of another process's memory run: `start` and `poll`.

    python -m benchmarks.nixl_calls

A decode engine calls NIXL between its steps, so a long call holds up every request. A process with the data (on the
first GPU) and one that reads it (on the last) are started for each case; a read has a quarter of the data. A row has
the longest call of each kind, and the seconds until all reads have ended. The reader polls every millisecond.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.imports import CHOICES, CPU_CHOICES, TIMEOUT_S, Device, Job, Side, ask_reader

ONE_HOST = CHOICES["GET over IPC, pipeline"]
TCP = {Device.gpu: {"UCX_TLS": "tcp,cuda_copy,self"}, Device.cpu: CPU_CHOICES["TCP"]}
NUM_READS = (1, 2, 4)
NUM_PARTS = max(NUM_READS)
POLL_S = 0.001

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """A choice of UCX's variables, and the memory that is read into: `device` or `host`."""

    choice: str
    variables: dict[str, str]
    place: str


def cases(device: Device) -> list[Case]:
    if device == Device.cpu:
        return [Case("default", {}, "host"), Case("tcp", TCP[device], "host")]
    into_device = [("default", {}), ("tcp", TCP[device]), ("one host", ONE_HOST)]
    into_host = [("default", {}), ("one host", ONE_HOST)]
    return [Case(*each, "device") for each in into_device] + [Case(*each, "host") for each in into_host]


def read(connection: Connection, holder: Connection, job: Job, case: Case) -> None:
    """Time the reads in this process; sends rows, or the error."""
    os.environ |= case.variables
    try:
        connection.send(rows_of(holder, job, case.place))
    except Exception as error:  # NIXL has exception classes of its own
        connection.send(" ".join(str(error).split()) or type(error).__name__)
    holder.send(None)


def rows_of(holder: Connection, job: Job, place: str) -> list[dict[str, Any]]:
    import torch

    is_gpu = job.device == Device.gpu
    if is_gpu:
        torch.cuda.set_device(torch.cuda.device_count() - 1)
        holder.recv()  # the handle for CUDA IPC without NIXL
    side = Side(job, "reader")
    target = torch.zeros(
        job.num_bytes,
        dtype=torch.uint8,
        device="cuda" if place == "device" else "cpu",
        pin_memory=is_gpu and place == "host",
    )
    own = side.register(target)
    metadata, descriptors = holder.recv()
    peer = side.agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    remote = side.agent.deserialize_descs(descriptors)
    theirs = [remote[index] for index in range(remote.descCount())]
    size = len(theirs) // NUM_PARTS
    parts = [slice(part * size, (part + 1) * size) for part in range(NUM_PARTS)]
    kind = "VRAM" if is_gpu else "DRAM"

    def handles(num_reads: int) -> list[Any]:
        return [
            side.agent.initialize_xfer(
                "READ", side.descriptors(own[part]), side.agent.get_xfer_descs(theirs[part], kind), peer
            )
            for part in parts[:num_reads]
        ]

    times(side, handles(1))  # the first one also connects
    return [{"reads": num_reads, **times(side, handles(num_reads))} for num_reads in NUM_READS]


def times(side: Side, handles: Sequence[Any]) -> dict[str, float]:
    """Run reads at the same time.

    Returns:
        Seconds: the longest call that started a read, the longest one that polled a read, and all reads together.

    Raises:
        RuntimeError: a read failed, or takes longer than `TIMEOUT_S`.
    """
    begin, starts, polls, waiting = time.perf_counter(), [], [], list(handles)
    for handle in handles:
        start = time.perf_counter()
        side.start(handle)
        starts.append(time.perf_counter() - start)
    while waiting:
        for handle in list(waiting):
            start = time.perf_counter()
            state = side.agent.check_xfer_state(handle)
            polls.append(time.perf_counter() - start)
            if state == "ERR" or start - begin > TIMEOUT_S:
                raise RuntimeError(f"a read is in state {state} after {TIMEOUT_S:.0f} s at most")
            if state == "DONE":
                waiting.remove(handle)
        if waiting:
            time.sleep(POLL_S)
    seconds = time.perf_counter() - begin
    for handle in handles:
        side.agent.release_xfer_handle(handle)
    return {
        "longest_start_s": round(max(starts), 4),
        "longest_poll_s": round(max(polls), 4),
        "seconds": round(seconds, 4),
    }


@app.command()
def run(
    ctx: typer.Context,
    device: Annotated[Device, typer.Option(help="where the data is: gpu or cpu")] = Device.gpu,
    mib: Annotated[int, typer.Option(min=1, help="MiB of a read")] = 64,
    piece_kib: Annotated[
        list[int] | None, typer.Option(help="KiB of a descriptor; repeatable; default: 41 and 1024")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="threads of NIXL's UCX backend; vLLM's default is 4")] = 4,
    output: Annotated[
        Path | None, typer.Option(help="result file; default: results/<cpu or h200>/nixl_calls.json")
    ] = None,
) -> None:
    """Time NIXL's calls for each choice of UCX's variables."""
    output = output or RESULTS / ("h200" if device == Device.gpu else "cpu") / "nixl_calls.json"
    rows: list[dict[str, Any]] = []
    for case in cases(device):
        for kib in piece_kib or (41, 1024):
            piece = kib << 10
            if piece > mib << 20:
                raise typer.BadParameter(f"{kib}: expected at most the {mib} MiB of a read", param_hint="--piece-kib")
            num_bytes = (mib << 20) // piece * piece * NUM_PARTS
            job = Job(device, num_bytes, piece, piece, threads)
            answer = ask_reader(job, case.variables, read, case)
            size = {"choice": case.choice, "place": case.place, "piece_kib": kib, "mib": mib}
            found = [{"error": answer}] if isinstance(answer, str) else answer
            for row in found:
                typer.echo(json.dumps(size | row), err=True)
                rows.append({"device": str(device), **size, "threads": threads, **row})
            write_result(output, ctx, "benchmarks.nixl_calls", rows, gpu_hardware() if device == Device.gpu else None)
    show("NIXL's calls", rows)


if __name__ == "__main__":
    app()
