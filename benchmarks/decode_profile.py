"""Where does a decode step spend its time on a GPU? Full KV and this plugin, one request, everything hot.

The steps are those of `benchmarks.decode`. They are timed without a profiler first; then the same number of steps is
profiled, and kernel times are summed by name.
"""

from __future__ import annotations

from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from benchmarks.decode import (
    CHUNK_TOKENS,
    DEVICE_SHARE,
    Architecture,
    Engine,
    StepClock,
    describe,
    load_engine,
    make_model_of,
    run_case,
    take_turns,
)
from benchmarks.kernel_profile import device_times

app = typer.Typer(add_completion=False)

SYSTEMS = ("full", "ours")
WARM_UP_STEPS, NUM_STEPS = 32, 96  # of each kind
NAME_LENGTH = 120


class StepProfile(StepClock):
    """Times steps, then profiles the kernels of further steps."""

    def attach(self, scheduler: Any) -> None:
        super().attach(scheduler)
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        update = scheduler.update_from_output

        def profiled(scheduler_output: Any, model_output: Any) -> Any:
            if len(self.seconds) == WARM_UP_STEPS + NUM_STEPS:
                torch.cuda.synchronize()
                self._profiler.start()
            elif len(self.seconds) == WARM_UP_STEPS + 2 * NUM_STEPS:
                torch.cuda.synchronize()
                self._profiler.stop()
            return update(scheduler_output, model_output)

        scheduler.update_from_output = profiled

    def summary(self) -> dict[str, Any]:
        """A step's time without the profiler, its time on the device, launches, and both by kernel.

        NOTE: kernels overlap if a launch does not wait for the previous one, so their sum can exceed the step.
        """
        steps = np.array(self.seconds[WARM_UP_STEPS : WARM_UP_STEPS + NUM_STEPS]) * 1e6
        p10, p50, p90 = np.percentile(steps, (10, 50, 90)).round(1).tolist()
        kernels = self.kernels()
        return {
            "step_us_p10": p10,
            "step_us_p50": p50,
            "step_us_p90": p90,
            "device_us": round(sum(kernel["us"] for kernel in kernels), 1),
            "launches": round(sum(kernel["launches"] for kernel in kernels), 1),
            "kernels": kernels,
        }

    def kernels(self) -> list[dict[str, Any]]:
        """Kernels and copies with their time per step, longest first."""
        times: dict[str, list[float]] = defaultdict(list)
        for name, microseconds in device_times(self._profiler):
            times[name[:NAME_LENGTH]].append(microseconds)
        found = [
            {"name": name, "launches": round(len(us) / NUM_STEPS, 2), "us": round(sum(us) / NUM_STEPS, 2)}
            for name, us in times.items()
        ]
        return sorted(found, key=lambda kernel: -kernel["us"])


def serve_profiles(connection: Connection, system: str, job: dict[str, Any]) -> None:
    """Like `serve_cases`, but profiles the cases."""
    llm = load_engine(system, job)
    connection.send(None)
    for context, requests in iter(connection.recv, None):
        profile = StepProfile()
        run_case(llm, profile.attach, context, requests, job["max_tokens"])
        connection.send(describe(system, job, context, requests) | profile.summary())


@app.command()
def run(
    ctx: typer.Context,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 16000,
    num_layers: Annotated[int, typer.Option(help="Layers of the model.")] = 16,
    kv_dtype: Annotated[str, typer.Option(help="bfloat16 or fp8.")] = "bfloat16",
    device_buffer_size: Annotated[int, typer.Option(help="Hot rows per request and layer.")] = 16384,
    query_noise: Annotated[float, typer.Option(help="Share of noise in the indexer's queries.")] = 0.1,
    model_dir: Annotated[Path, typer.Option(help="Where the model is made.")] = Path("build/models/bench"),
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "decode_profile.json",
) -> None:
    """Profile decode steps of one request with full KV and with hot buffers."""
    job: dict[str, Any] = {
        "architecture": Architecture.dsa.value,
        "model": str(model_dir),
        "model_name": make_model_of(Architecture.dsa, model_dir, num_layers, query_noise),
        "model_class": None,
        "backend": None,
        "chunk": CHUNK_TOKENS,
        "num_layers": num_layers,
        "kv_dtype": kv_dtype,
        "device_kv_gib": 1.0,
        "host_pool_gib": 2.0,
        "device_buffer_size": device_buffer_size,
        "elastic": True,
        "contexts": [context],
        "max_num_seqs": 2,
        "max_tokens": WARM_UP_STEPS + 2 * NUM_STEPS + 32,
        "device_share": DEVICE_SHARE / len(SYSTEMS),
    }
    engines = [Engine(system, job, serve_profiles) for system in SYSTEMS]
    rows = list(take_turns(engines, [(context, 1)], repeats=1))
    write_result(output, ctx, "benchmarks.decode_profile", rows, gpu_hardware())
    show("Decode step", [{name: value for name, value in row.items() if name != "kernels"} for row in rows])


if __name__ == "__main__":
    app()
