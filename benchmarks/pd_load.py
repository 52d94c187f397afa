"""Prefill/decode pairs under load: this plugin, full KV and vLLM's native HiSparse behind one stock prefill engine.

    python -m benchmarks.pd_load

The prefill engine has the first GPU. The decode engines share the second one and are measured one after the other;
the others are idle meanwhile. A router (vllm-router) stands before each pair. vLLM's own load generator sends random
prompts of 4K to 32K tokens for answers of 256 to 2,000 tokens, from as many clients as a case says. Prefix caches are
off. Times of transfers are whole prompts' for the plugin, and those of NIXL's reads for the other systems. Their bytes
per second are of one transfer, also while there are others. With `--fault`, the decode engine is killed, or told to
end, in the middle of each case, and started again.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import requests
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.full_depth import System
from benchmarks.serving import (
    DISCONNECTED,
    Attempts,
    Device,
    Gauges,
    Sizes,
    bench_serve,
    force_selections,
    kv_bytes,
    log_directory,
    make_model,
    metrics,
    needed,
    server,
    ucx_variables,
    wait_healthy,
)
from tools.harness.deployment import MODEL_NAME, PREFILL_CONNECTOR, hisparse_connector, pd_router
from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

START_TIMEOUT_S, CASE_TIMEOUT_S, SETTLE_TIMEOUT_S = 500.0, 300.0, 60.0
DRAIN_S = 120  # seconds that an engine has for its requests when it is told to end
END_TIMEOUT_S = DRAIN_S + 60.0
MIDDLE_SHARE = 0.4  # of a case's requests, after which its fault comes
NUM_WARMUPS = 2  # requests before those of a case, because the first transfer waits for a handshake
# With the router's defaults, a dead engine gets requests for three minutes, and none for two minutes when it is back.
ROUTER_ARGS = ("--health-check-interval-secs", "5", "--health-failure-threshold", "2")

Fault = StrEnum("Fault", ["kill", "drain"])
app = typer.Typer(add_completion=False)


def decode_connector(system: System, sizes: Sizes, import_buffer_gib: float = 0.0) -> dict[str, Any]:
    """Return the `--kv-transfer-config` of a decode engine; the plugin's has an import buffer of this size."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    if system == System.full:
        return nixl
    if system == System.ours:
        options = {"host_pool_gib": sizes.host_pool_gib, "device_buffer_size": sizes.device_buffer_size}
        if import_buffer_gib:
            options["import_buffer_gib"] = import_buffer_gib
        return hisparse_connector(**options, admission="off")
    native = {"kv_connector": "HiSparseConnector", "kv_role": "kv_both"}
    native["kv_connector_extra_config"] = {"host_pool_gib": sizes.host_pool_gib}
    both = {"connectors": [nixl, native]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": both}


def make_router(name: str, log_dir: Path, prefill_url: str, decode_url: str) -> tuple[EngineProcess, str]:
    """Return a router, not started, and its base URL. A decode engine that dies gets no requests after ten seconds, and
    gets requests again ten seconds after it is back."""
    port, prometheus_port = free_ports(2)
    router = pd_router(log_dir, port, prometheus_port, prefill_url, decode_url, name)
    router.command += ROUTER_ARGS
    return router, f"http://{LOOPBACK}:{port}"


class Pair:
    """A decode engine behind its router; the prefill engine is shared.

    Args:
        group: group of all processes.
        system: system of the decode engine.
        model: directory of the model.
        sizes: sizes of model and memory.
        log_dir: directory of the logs.
        prefill_url: base URL of the prefill engine.
        import_buffer_gib: device memory for imports of the plugin.
    """

    def __init__(
        self,
        group: ProcessGroup,
        system: System,
        model: Path,
        sizes: Sizes,
        log_dir: Path,
        prefill_url: str,
        import_buffer_gib: float,
    ):
        self.system, self._group, self._sizes = system, group, sizes
        args = ["--no-enable-prefix-caching", "--shutdown-timeout", str(DRAIN_S)]
        if sizes.device == Device.gpu:
            args += [*kv_bytes(sizes.device_kv_gib), "--max-num-batched-tokens", "2048"]
        if system == System.vllm_native:
            buffers = {"hisparse_config": {"device_buffer_size": sizes.device_buffer_size}}
            args += ["--attention-config", json.dumps(buffers)]
        connector = decode_connector(system, sizes, import_buffer_gib)
        self.engine, self.url = server(f"decode-{system}", model, sizes, log_dir, 1, connector, args)
        self.router, self.router_url = make_router(f"router-{system}", log_dir, prefill_url, self.url)
        group.start(self.engine)

    def wait(self) -> None:
        """Wait until the engine and its router are ready."""
        wait_healthy(self.engine, START_TIMEOUT_S)
        force_selections(self.url, self._sizes)
        self._group.start(self.router)
        wait_healthy(self.router, START_TIMEOUT_S)
        if not answers(self.router_url):  # the first transfer waits for a handshake, which is no case's
            raise RuntimeError(f"the router of {self.engine.name} gave no answer in {SETTLE_TIMEOUT_S:.0f} s")

    def restart(self) -> None:
        """Start the engine again, after it has ended."""
        self.engine.start()
        wait_healthy(self.engine, START_TIMEOUT_S)
        force_selections(self.url, self._sizes)


class Breaker:
    """Ends a decode engine in the middle of a case, and starts it again.

    Args:
        pair: the decode engine and its router.
        fault: way to end it.
        num_requests: requests of the case.
    """

    def __init__(self, pair: Pair, fault: Fault, num_requests: int):
        self._pair, self._fault, self._num_requests = pair, fault, num_requests
        self._load_has_ended = threading.Event()
        executor = ThreadPoolExecutor(1)
        self._outcome = executor.submit(self._run)
        executor.shutdown(wait=False)

    def wait(self) -> dict[str, Any]:
        """Return what happened, when the load has ended and the engine is back.

        Raises:
            RuntimeError: too few requests finished, or the engine did not end or did not come back.
        """
        self._load_has_ended.set()
        return self._outcome.result()

    def _run(self) -> dict[str, Any]:
        name = "vllm:request_success_total"
        first = metrics(self._pair.url).get(name, 0.0)
        enough = NUM_WARMUPS + MIDDLE_SHARE * self._num_requests
        while (num_finished := (found := metrics(self._pair.url)).get(name, 0.0) - first) < enough:
            if self._load_has_ended.wait(0.25):
                raise RuntimeError(f"{num_finished:g} requests finished under load, expected {enough:g} before a fault")
        start, engine = time.monotonic(), self._pair.engine
        in_flight = round(found.get("vllm:num_requests_running", 0.0) + found.get("vllm:num_requests_waiting", 0.0))
        if self._fault == Fault.kill:
            engine.send_signal(signal.SIGKILL)
        else:
            os.kill(engine.pid, signal.SIGTERM)
        while not engine.is_gone():
            if time.monotonic() > start + END_TIMEOUT_S:
                raise RuntimeError(f"{engine.name} has not ended {END_TIMEOUT_S:.0f} s after the fault {self._fault}")
            time.sleep(0.1)
        seconds = round(time.monotonic() - start, 1)
        outcome = {"in_flight_at_fault": in_flight, "exit_code": engine.exit_code, "ended_after_s": seconds}
        self._pair.restart()
        return outcome | {"back_after_s": round(time.monotonic() - start, 1)}


def measure(
    pair: Pair, model: Path, log_dir: Path, prefill_url: str, case: dict[str, Any], fault: Fault | None
) -> dict[str, Any]:
    """Let the load generator ask a pair.

    Args:
        pair: the decode engine and its router.
        model: directory with the tokenizer.
        log_dir: directory of the load generator's log.
        prefill_url: base URL of the prefill engine.
        case: tokens of prompts and answers (shortest and longest), clients, requests, seed.
        fault: fault in the middle; None: none.
    """
    (shortest, longest), (fewest, most) = case["context"], case["output"]
    means = {"input": (shortest + longest) // 2, "output": (fewest + most) // 2}
    ratios = {"input": (longest - shortest) / (longest + shortest), "output": (most - fewest) / (most + fewest)}
    options = {
        "random-input-len": means["input"],
        "random-output-len": means["output"],
        "random-range-ratio": json.dumps({name: round(ratio, 6) for name, ratio in ratios.items()}),
        "num-prompts": case["requests"],
        "max-concurrency": case["concurrency"],
        "num-warmups": NUM_WARMUPS,
        "seed": case["seed"],
    }
    log = log_dir / f"load-{pair.system}-{case['concurrency']}.log"
    with Gauges(pair.url) as decode, Gauges(prefill_url) as prefill:
        breaker = Breaker(pair, fault, case["requests"]) if fault else None
        try:
            result = bench_serve(pair.router_url, model, log, options, CASE_TIMEOUT_S)
        finally:
            outcome = breaker.wait() if breaker else {}
        if breaker:
            outcome["answers_again"] = answers(pair.router_url)
    is_ours = pair.system == System.ours
    counters = {"transfers": (decode, "nixl_xfer_time_seconds_count")}
    counters |= {"transfer_failures": (decode, "nixl_num_failed_transfers_total")}
    counters |= {"transfers_expired": (prefill, "nixl_num_kv_expired_reqs_total")}
    if is_ours:
        names = ("transfers", "transfer_failures", "transfers_refused", "transfers_expired")
        counters = {name: (decode, f"hisparse_{name}_total") for name in names}
    return {
        "tokens_per_s": round(result["output_throughput"], 1),
        "ttft_ms_p50": round(result["median_ttft_ms"], 1),
        "ttft_ms_p99": round(result["p99_ttft_ms"], 1),
        "itl_ms_p50": round(result["median_itl_ms"], 2),
        "itl_ms_p99": round(result["p99_itl_ms"], 2),
        "tpot_ms_p50": round(result["median_tpot_ms"], 2),
        "running_max": decode.peak("num_requests_running"),
        "waiting_max": decode.peak("num_requests_waiting"),
        "preempted": None if fault else decode.growth("num_preemptions_total"),
        "prefill_waiting_max": prefill.peak("num_requests_waiting"),
        "host_blocks_max": decode.peak("hisparse_host_blocks_used") if is_ours else None,
        **{name: None if fault else gauges.growth(counter) for name, (gauges, counter) in counters.items()},
        **transfer_speed(pair.system, None if fault else decode),
        "seconds": round(result["duration"], 1),
        "completed": result["completed"],
        "failed": result["failed"],
        **outcome,
        "left_on_prefill": left(prefill_url),
    }


def transfer_speed(system: System, decode: Gauges | None) -> dict[str, float | None]:
    """Return the mean time of transfers in milliseconds, and their bytes over the sum of their times in GB/s.

    Args:
        system: system of the decode engine.
        decode: its metrics; None: its counters began anew.
    """
    histogram, byte_names = "nixl_xfer_time", ["nixl_bytes_transferred_sum"]
    if system == System.ours:
        histogram = "hisparse_transfer_time"
        byte_names = [f"hisparse_transfer_bytes_to_{place}_total" for place in ("host", "device")]
    names = (f"{histogram}_seconds_sum", *byte_names)
    seconds, *num_bytes = ((decode and decode.added(name)) or 0.0 for name in names)
    return {
        "transfer_ms_mean": decode and decode.mean_ms(histogram),
        "transfer_gb_per_s": round(sum(num_bytes) / 1e9 / seconds, 3) if seconds else None,
    }


def answers(url: str) -> bool:
    """Return True if a router gets an answer in time."""
    body = {"model": MODEL_NAME, "prompt": list(range(5, 305)), "max_tokens": 4, "ignore_eos": True}
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(DISCONNECTED):
            reply = requests.post(f"{url}/v1/completions", json=body, timeout=SETTLE_TIMEOUT_S)
            if reply.ok and reply.json().get("choices"):
                return True
        time.sleep(1)
    return False


def left(url: str) -> float | None:
    """Return the share of an engine's blocks that do not come back in time, after its requests; None: not known."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        # NOTE: an idle engine reports nothing, and its leases do not run out, so a tiny request stirs it.
        body = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 1}
        share = None
        with suppress(DISCONNECTED):
            requests.post(f"{url}/v1/completions", json=body, timeout=SETTLE_TIMEOUT_S).raise_for_status()
            time.sleep(1)
            share = metrics(url).get("vllm:kv_cache_usage_perc")
        if not share or time.monotonic() > deadline:
            return share


def measured(
    attempts: Attempts,
    what: str,
    work: Callable[[], dict[str, Any]],
    fault: Fault | None,
    processes: Sequence[EngineProcess] = (),
) -> dict[str, Any] | None:
    """Return what some work, which needs processes, finds. If it fails, other cases go on, but not after a fault, whose
    engine may be gone."""
    if not fault:
        return attempts.run(what, work, processes)
    with needed(processes):
        return work()


def span(text: str) -> tuple[int, int]:
    """From `<shortest>:<longest>`."""
    try:
        shortest, _, longest = text.partition(":")
        return int(shortest), int(longest or shortest)
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, expected <shortest>:<longest> tokens") from None


@app.command()
def run(
    ctx: typer.Context,
    system: Annotated[list[System], typer.Option(help="decode engines; repeatable")] = list(System),  # noqa: B006
    concurrency: Annotated[list[int], typer.Option(help="clients; repeatable")] = [8, 16, 32],  # noqa: B006
    context: Annotated[str, typer.Option(help="tokens of a prompt, shortest:longest")] = "4096:32768",
    output_tokens: Annotated[str, typer.Option(help="tokens of an answer, shortest:longest")] = "256:2000",
    rounds: Annotated[float, typer.Option(help="requests of each client")] = 2.0,
    fault: Annotated[Fault | None, typer.Option(help="kill or drain the decode engine in the middle")] = None,
    device: Annotated[Device, typer.Option(help="cpu: tiny models")] = Device.gpu,
    layers: Annotated[int, typer.Option(help="layers of DeepSeek-V3.2's size")] = 16,
    experts: Annotated[int, typer.Option(help="experts of a layer")] = 8,
    expert_size: Annotated[int, typer.Option(help="hidden size of an expert")] = 1024,
    device_kv_gib: Annotated[float, typer.Option(help="device memory for KV of a decode engine")] = 2.5,
    host_pool_gib: Annotated[float, typer.Option(help="host memory for KV of a decode engine")] = 12.0,
    prefill_kv_gib: Annotated[float, typer.Option(help="device memory for KV of the prefill engine")] = 10.0,
    device_buffer_size: Annotated[int, typer.Option(help="hot rows per request and layer")] = 4096,
    import_buffer_gib: Annotated[float, typer.Option(help="device memory for imports of the plugin")] = 0.0,
    prefill_layout: Annotated[
        str | None, typer.Option(help="VLLM_KV_CACHE_LAYOUT of the prefill engine, such as BLHNC")
    ] = None,
    overlap: Annotated[float, typer.Option(help="probability that a position stays selected")] = 0.87,
    max_s: Annotated[float, typer.Option(help="seconds after which no further case starts")] = 480.0,
    logs: Annotated[Path | None, typer.Option(help="directory that gets all logs")] = None,
    model_dir: Annotated[Path, typer.Option(help="directory of the model")] = Path("build/models/pd-load"),
    output: Annotated[
        Path | None, typer.Option(help="result file; default: results/<cpu or h100x2>/pd_load.json")
    ] = None,
) -> None:
    """Measure every system with every number of clients; the result file is written after every case.

    The exit code is 1 if an engine did not start or has ended, or a case failed.
    """
    start = time.monotonic()
    output = output or RESULTS / ("h100x2" if device == Device.gpu else "cpu") / "pd_load.json"
    contexts, outputs = span(context), span(output_tokens)
    longest = -(-(contexts[1] + outputs[1] + 64) // 64) * 64
    sizes = Sizes(
        device, layers, experts, expert_size, longest, max(concurrency), device_kv_gib, host_pool_gib,
        device_buffer_size, overlap,
    )  # fmt: skip
    model = make_model(model_dir, sizes)
    hardware = gpu_hardware() if device == Device.gpu else None
    described = {"ucx": ucx_variables()} if device == Device.gpu else {}
    rows: list[dict[str, Any]] = []
    attempts = Attempts()
    with ExitStack() as stack:
        log_dir = log_directory(stack, logs)
        group = stack.enter_context(ProcessGroup())
        args = ["--no-enable-prefix-caching"]
        if device == Device.gpu:
            args += [*kv_bytes(prefill_kv_gib), "--max-num-batched-tokens", "8192"]
        prefill, prefill_url = server("prefill", model, sizes, log_dir, 0, PREFILL_CONNECTOR, args, False)
        if prefill_layout is not None:
            prefill.env["VLLM_KV_CACHE_LAYOUT"] = prefill_layout
        group.start(prefill)
        pairs = [Pair(group, name, model, sizes, log_dir, prefill_url, import_buffer_gib) for name in system]
        wait_healthy(prefill, START_TIMEOUT_S)
        typer.echo(f"prefill is ready after {time.monotonic() - start:.0f} s", err=True)
        for pair in pairs:
            attempts.run(f"start of {pair.system}", pair.wait)
            typer.echo(f"{pair.system} is ready after {time.monotonic() - start:.0f} s", err=True)
        for clients in concurrency:
            for pair in pairs:
                if time.monotonic() - start > max_s:
                    continue
                case = {"context": contexts, "output": outputs, "concurrency": clients, "seed": clients}
                case["requests"] = max(round(rounds * clients), 1)
                row = {"system": str(pair.system), "context": context, "output": output_tokens}
                row |= {"concurrency": clients, "requests": case["requests"], "fault": fault and str(fault)}
                buffer_gib = import_buffer_gib if pair.system == System.ours else None
                row |= {"import_buffer_gib": buffer_gib, "prefill_layout": prefill_layout}
                found = measured(
                    attempts,
                    f"{pair.system}, {clients} clients",
                    lambda pair=pair, case=case: measure(pair, model, log_dir, prefill_url, case, fault),
                    fault,
                    [prefill, pair.engine, pair.router],
                )
                if found is not None:
                    rows.append(row | found | sizes.described() | described)
                    typer.echo(json.dumps(rows[-1]), err=True)
                    write_result(output, ctx, "benchmarks.pd_load", rows, hardware)
    names = (
        "system",
        "concurrency",
        "tokens_per_s",
        "ttft_ms_p50",
        "itl_ms_p50",
        "itl_ms_p99",
        "running_max",
        "failed",
    )
    if rows:
        show("Under load", [{name: row[name] for name in names} for row in rows])
    attempts.end()


if __name__ == "__main__":
    app()
