"""Draws the charts of docs/performance.md that no benchmark draws itself, from the committed result files.

python -m tools.performance_charts
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.full_depth import relative_speeds, title

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
COLUMNS = {
    ("ours", "swap_in"): "plugin",
    ("vllm_native", "swap_in"): "vLLM 0.32 native",
    ("vllm_native_roomy", "swap_in"): "native, hash table with room",
    ("bare_gather", "gather"): "copies alone (bare gather)",
}


# Indexer keys, and whether layers have different numbers of hot rows
OPTIONS = {
    ("auto", False): "plugin, default options",
    ("auto", True): "rows by layer",
    ("fp4", True): "rows by layer and keys in 4 bits",
}


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def draw_present_version() -> None:
    """Tokens per second with the plugin's options, case by case, relative to full KV."""
    found = [row for row in rows("full_depth_lrfu_managed") if not row["drafts"]]
    full = [row for row in found if row["system"] == "full"]
    cases = [title(row) for row in sorted(full, key=lambda row: (row["requests"] == 16, row["selection"] == "trace"))]
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    for index, (options, label) in enumerate(OPTIONS.items()):
        own = [row for row in found if (row["indexer_key_dtype"], row["rows_by_layer"] != "equal") == options]
        speeds = {case: speed for (system, case), speed in relative_speeds(own + full).items() if system == "ours"}
        places = [place + 0.27 * (index - 1) for place, case in enumerate(cases) if case in speeds]
        ratios = [speeds[case] for case in cases if case in speeds]
        bars = axis.bar(places, ratios, width=0.25, label=label)
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=8)
    axis.axhline(1, color="grey", linewidth=0.8, label="full KV")
    axis.set(ylabel="tokens/s, full KV = 1", xticks=range(len(cases)), ylim=(0, 3.2))
    axis.set_xticklabels(cases, fontsize=8)
    axis.legend(loc="upper left", ncols=4, fontsize=8)
    figure.savefig(ROOT / "docs" / "figures" / "present_version.png", dpi=120)


def draw_swap_in() -> None:
    """Time of one layer's swap-in against the number of requests, by system."""
    found = [row for row in rows("swap_in_resolve") if row["kernels"] == "now" and row["device_buffer_size"] == 4096]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for (system, op), label in COLUMNS.items():
        points = sorted((r["batch"], r["us_p50"]) for r in found if (r["system"], r["op"]) == (system, op))
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(xscale="log", yscale="log", xlabel="requests", ylabel="microseconds per layer (median)")
    batches = sorted({row["batch"] for row in found})
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(ROOT / "docs" / "figures" / "swap_in_systems.png", dpi=120)


def draw_drafts() -> None:
    """Tokens per second with and without drafts, relative to full KV with as many drafts."""
    found = rows("mtp") + [row for row in rows("full_depth") if row["selection"] == "independent"]
    speeds = {(r["system"], r["context"], r["requests"], r["drafts"]): r["tokens_per_s"] for r in found}
    cases = [(32768, 56), (65536, 28)]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, (context, requests) in enumerate(cases):
        ratios = [
            speeds["ours", context, requests, drafts] / speeds["full", context, requests, drafts] for drafts in range(4)
        ]
        places = [drafts + 0.4 * (index - 0.5) for drafts in range(4)]
        bars = axis.bar(places, ratios, width=0.38, label=f"{requests} x {context // 1024}K")
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=8)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(xlabel="drafts per step (80% accepted)", ylabel="tokens/s, full KV with as many drafts = 1")
    axis.set_xticks(range(4))
    axis.legend()
    figure.savefig(ROOT / "docs" / "figures" / "drafts.png", dpi=120)


if __name__ == "__main__":
    draw_present_version()
    draw_swap_in()
    draw_drafts()
