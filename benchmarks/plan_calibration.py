"""Fit the planner's factors to measured rows, and hold its predictions to them.

    python -m benchmarks.plan_calibration

Reads committed results of `benchmarks.full_depth` and `benchmarks.decode`, and fits the factor of each cost of a decode
step (`vllm_hisparse.cli.plan.step_time`) by non-negative least squares of relative errors: first the factors that every
system has, to full KV, then those of each HiSparse. Writes the factors, the predictions beside the measurements, and a
picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS
from vllm_hisparse.cli.plan.command import DENSE_TOP_K
from vllm_hisparse.cli.plan.gpus import GPUS
from vllm_hisparse.cli.plan.memory import KVMemory, System, independent_hit_rate
from vllm_hisparse.cli.plan.models import PRESETS, ModelShape
from vllm_hisparse.cli.plan.step_time import CALIBRATION, STOCK_PARTS, Step

FILES = (
    "h200/full_depth.json",
    "h200/full_depth_shared.json",
    "h200/full_depth_systems.json",
    "h200/mtp.json",
    "h200x2/full_size.json",
    "h200x2/full_size_tp.json",
)
DENSE_FILES = ("h200/decode_llama_32k.json", "h200/decode_llama_32k_small_buffers.json", "h200/decode_llama_128k.json")
SYSTEMS = {"full": System.full, "vllm_native": System.native, "ours": System.plugin}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Measured:
    """A row of a result file, with what a plan needs of it.

    Attributes:
        case: file and row, in words.
        system: what decoded.
        row: the result's row.
        model: sizes of the benchmark's model.
        host_bytes: host pool of a rank.
    """

    case: str
    system: System
    row: dict[str, Any]
    model: ModelShape
    host_bytes: int

    @classmethod
    def read(cls, folder: Path, name: str) -> list[Measured]:
        """Read the rows of a result file."""
        result = json.loads((folder / name).read_text())
        host_bytes = int(_option(result["command"], "--host-pool-gib") * 2**30)
        expert_size = int(_option(result["command"], "--expert-size"))
        return [
            cls(_case(name, row), SYSTEMS[row["system"]], row, _model(row, expert_size), host_bytes)
            for row in result["rows"]
        ]

    @classmethod
    def read_dense(cls, folder: Path, name: str) -> list[Measured]:
        """Read the rows of a result file of `benchmarks.decode` with layers of a Llama and Quest."""
        result = json.loads((folder / name).read_text())
        host_bytes = int(_option(result["command"], "--host-pool-gib") * 2**30)
        config = PRESETS["Llama-3.1-8B"] | {"num_hidden_layers": int(_option(result["command"], "--num-layers"))}
        model = ModelShape.from_config("benchmark", config, "bfloat16")
        common = {"tokens_per_step": 1.0, "drafts": 0, "tensor_parallel": 1, "data_parallel": 1, "overlap": None}
        common |= {"selection": "model", "kernel_ms": {}}
        return [
            cls(_case(name, full), SYSTEMS[row["system"]], full, model, host_bytes)
            for row in result["rows"]
            for full in [common | row | {"settle": row["max_tokens"] // 2 - 24}]
        ]

    @property
    def top_k(self) -> int:
        return self.model.top_k or DENSE_TOP_K

    @property
    def query_len(self) -> int:
        return 1 + self.row["drafts"]

    @property
    def is_mixed(self) -> bool:
        return self.row["context"] == "mixed"

    @property
    def num_tokens(self) -> float:
        """Mean tokens of a request while steps were timed."""
        steps = self.row.get("settle") or 48
        return self.row["context"] + (steps + 24) * self.row["tokens_per_step"]

    @property
    def memory(self) -> KVMemory:
        top_k = self.top_k
        return KVMemory(
            self.model,
            int(self.row["device_kv_gib"] * 2**30),
            self.host_bytes,
            self.row["tensor_parallel"],
            max(self.row["device_buffer_size"], top_k * self.query_len),
            top_k,
            self.row["drafts"],
            self.row["requests"] // self.row["data_parallel"],
        )

    def running(self) -> int:
        """Predict the requests that run at once, on all ranks."""
        start = self.num_tokens - 24 * self.row["tokens_per_step"]  # when the most run
        return self.memory.seats(self.system, round(start)).running * self.row["data_parallel"]

    def step(self, running: float) -> Step:
        """Return the step of one rank with so many requests on all ranks."""
        requests, num_tokens = running / self.row["data_parallel"], round(self.num_tokens)
        rows = self.memory.hot_rows(self.system, num_tokens, int(requests))
        hit_rate = 1.0 if self.system == System.full else self._hit_rate(rows, num_tokens)
        return Step(
            model=self.model,
            gpu=GPUS["H200"],
            system=self.system,
            requests=requests,
            num_tokens=num_tokens,
            top_k=self.top_k,
            drafts=self.row["drafts"],
            missed_rows=(1 - hit_rate) * self.top_k * self.query_len,
            tensor_parallel=self.row["tensor_parallel"],
            data_parallel=self.row["data_parallel"],
        )

    def measured_step(self) -> Step:
        """Return the step with the requests that ran."""
        return self.step(self.row["running_max"])

    def _hit_rate(self, rows: int, num_tokens: int) -> float:
        if self.row["overlap"] is not None:
            return independent_hit_rate(self.row["overlap"], self.model.top_k, rows, num_tokens)
        return self.row["hit_rate"] or 0.83  # a trace's hit rate is given, as by a user; native does not report its own

    @property
    def step_ms(self) -> float:
        return self.row["itl_ms_p50"] * self.row["tokens_per_step"]


def _case(name: str, row: dict[str, Any]) -> str:
    details = f", {row['drafts']} drafts" if row["drafts"] else ""
    details += f", {row['device_buffer_size']} hot rows" if row["device_buffer_size"] != 4096 else ""
    return f"{Path(name).stem}: {row['requests']} x {row['context']} {row['selection']}{details}"


def _option(command: str, name: str) -> float:
    """Return the value of an option of the benchmark, whose rows do not have it."""
    words = command.split()
    return float(words[words.index(name) + 1])


def _model(row: dict[str, Any], expert_size: int) -> ModelShape:
    # Dummy weights route every token to the same 8 experts: the others are never read.
    active = min(8, row["experts"])
    sizes = {"n_routed_experts": active, "num_experts_per_tok": active}
    sizes |= {
        "moe_intermediate_size": expert_size,
        "quantization_config": None,
        "index_topk_freq": row["shared_indexers"],
    }
    config = PRESETS[row.get("model") or "DeepSeek-V3.2"] | sizes
    return ModelShape.from_config("benchmark", config, row["kv_dtype"], "bfloat16")


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimise |a x - b| over x >= 0 with the active-set method of Lawson and Hanson.

    Args:
        a: [rows, columns] float64.
        b: [rows] float64.

    Returns:
        [columns] float64.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    while True:
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gradient.max(initial=-np.inf) <= 1e-10:
            return x / scale
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            blocked = free & (trial <= 0)
            step = (x[blocked] / (x[blocked] - trial[blocked])).min()
            x += step * (trial - x)
            free &= x > 1e-12
        x = trial


Factors = dict[str, dict[str, float]]


def fit(rows: Iterable[Measured]) -> Factors:
    """Fit the factor of every cost.

    Parts that every system has are fitted to the kernel times of full KV, and their sum to its steps; costs that each
    HiSparse adds are fitted to its own steps.
    """
    dense = [row for row in rows if not row.model.is_dsa]
    rows = [row for row in rows if row.model.is_dsa]
    full = [row for row in rows if row.system == System.full]
    factors = {part: _fit_part(part, full) for part in STOCK_PARTS}
    factors["step"] = {"kernels": 1.0}
    sums = np.array([row.measured_step().total_ms(factors) for row in full])
    steps = np.array([row.step_ms for row in full])
    factors["step"]["kernels"] = round(float(np.median(steps / sums)), 4)
    native = _fit_resolve([row for row in rows if row.system == System.native], factors)
    plugin = [row for row in rows if row.system == System.plugin]
    candidates = []
    for hidden, ahead, least in product((0.2, 0.3, 0.4, 0.5, 0.6), (0.0, 0.25, 0.5), (0.25, 0.5, 0.75)):
        copies = {"hidden share of a step": hidden, "share of copies ahead": ahead, "least share": least}
        found = native | _fit_resolve(plugin, factors | {"copies": copies})
        predictions = [predict(row, factors | {"copies": copies, "resolve": found}) for row in plugin]
        off = max(np.abs(errors(predictions, what)).max() for what in ("tokens_per_s", "itl_ms"))
        candidates.append((off, copies, found))
    _, factors["copies"], factors["resolve"] = min(candidates, key=lambda candidate: candidate[0])
    _fit_dense(dense, factors)
    return factors


def _fit_dense(rows: list[Measured], factors: Factors) -> None:
    """Fit what a dense model adds: its reads of all rows with full KV, and the plugin's own work."""
    full = [row for row in rows if row.system == System.full]
    known = np.array([row.measured_step().total_ms(factors) for row in full])
    costs = [{"all rows": row.measured_step().costs()["attention"]["all rows"]} for row in full]
    found = _solve(costs, np.array([row.step_ms for row in full]), known)
    factors["attention"]["all rows"] = round(found["all rows"] / factors["step"]["kernels"], 5)
    plugin = [row for row in rows if row.system == System.plugin]
    steps = [row.measured_step() for row in plugin]
    known = np.array([step.total_ms(factors | {"copies": {}}) for step in steps])
    costs = [step.costs()["resolve"] | step.costs()["copies"] for step in steps]
    found = _solve(costs, np.array([row.step_ms for row in plugin]), known)
    factors["copies"]["units"] = found.pop("units")
    factors["resolve"] |= found


def _fit_part(part: str, rows: list[Measured]) -> dict[str, float]:
    """Fit one part to the profiled kernel times of full KV."""
    rows = [row for row in rows if part in row.row["kernel_ms"]]
    costs = [row.measured_step().costs()[part] for row in rows]
    return _solve(costs, np.array([row.row["kernel_ms"][part] for row in rows]))


def _fit_resolve(rows: list[Measured], factors: Factors) -> dict[str, float]:
    """Fit the costs that a HiSparse adds to its step."""
    steps = [row.measured_step() for row in rows]
    known = np.array([step.total_ms(factors | {"resolve": {}}) for step in steps])
    measured = np.array([row.step_ms for row in rows])
    return _solve([step.costs()["resolve"] for step in steps], measured, known)


def _solve(costs: list[dict[str, float]], measured: np.ndarray, known: np.ndarray | float = 0.0) -> dict[str, float]:
    """Fit factors >= 0 of costs to milliseconds, by relative errors."""
    names = sorted({name for each in costs for name in each})
    table = np.array([[each.get(name, 0.0) for name in names] for each in costs]) / measured[:, None]
    solution = nonnegative_least_squares(table, (measured - known) / measured)
    return {name: round(float(value), 5) for name, value in zip(names, solution, strict=True)}


def predict(row: Measured, factors: Factors) -> dict[str, Any]:
    """Predict a row from its configuration alone (and the hit rate of a trace), beside what was measured."""
    running = row.running()
    step_ms = row.step(running).total_ms(factors)
    tokens_per_step = row.row["tokens_per_step"]
    return {
        "case": row.case,
        "system": str(row.system),
        "measured_tokens_per_s": row.row["tokens_per_s"],
        "predicted_tokens_per_s": round(running * tokens_per_step / step_ms * 1e3, 1),
        "measured_itl_ms": row.row["itl_ms_p50"],
        "predicted_itl_ms": round(step_ms / tokens_per_step, 2),
        "measured_running": row.row["running_max"],
        "predicted_running": running,
    }


def all_rows(folder: Path = RESULTS) -> list[Measured]:
    """Read all rows that calibrate the planner."""
    rows = [row for name in FILES for row in Measured.read(folder, name) if not row.is_mixed]
    return rows + [row for name in DENSE_FILES for row in Measured.read_dense(folder, name)]


def errors(predictions: list[dict[str, Any]], what: str) -> np.ndarray:
    """Return predicted over measured, minus 1: [rows] float64."""
    pairs = [(each[f"predicted_{what}"], each[f"measured_{what}"]) for each in predictions]
    return np.array([predicted / measured - 1 for predicted, measured in pairs])


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Predictions beside measurements.")] = RESULTS / "plan.json",
    factors_file: Annotated[Path, typer.Option(help="Factors that the planner reads.")] = CALIBRATION,
    picture: Annotated[Path | None, typer.Option(help="Picture of predicted over measured.")] = Path(
        "docs/figures/plan.png"
    ),
) -> None:
    """Fit, predict, and write both."""
    rows = all_rows()
    factors = fit(rows)
    predictions = [predict(row, factors) for row in rows]
    source = {"date": datetime.now(UTC).date().isoformat(), "command": "python -m benchmarks.plan_calibration"}
    source |= {"sources": [*FILES, *DENSE_FILES], "gpu": "NVIDIA H200"}
    factors_file.write_text(json.dumps(source | {"factors": factors}, indent=2) + "\n")
    output.write_text(json.dumps(source | {"rows": predictions}, indent=2) + "\n")
    for what in ("tokens_per_s", "itl_ms", "running"):
        off = np.abs(errors(predictions, what))
        typer.echo(f"{what}: median error {np.median(off):.1%}, largest {off.max():.1%}, {len(off)} rows")
    if picture:
        plot(predictions, picture)


def plot(predictions: list[dict[str, Any]], picture: Path) -> None:
    """Draw predicted over measured tokens/s and inter-token latency."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for axis, what, label in zip(
        axes, ("tokens_per_s", "itl_ms"), ("tokens/s", "inter-token latency, ms"), strict=True
    ):
        for system in System:
            chosen = [each for each in predictions if each["system"] == system]
            measured = [each[f"measured_{what}"] for each in chosen]
            axis.scatter(measured, [each[f"predicted_{what}"] for each in chosen], label=str(system), alpha=0.7)
        low, high = axis.get_xlim()
        axis.plot([low, high], [low, high], color="grey", linewidth=1)
        axis.fill_between([low, high], [0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high], color="grey", alpha=0.12)
        axis.set(xscale="log", yscale="log", xlabel=f"measured {label}", ylabel=f"predicted {label}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    app()
