"""`vllm-hisparse plan`: sizes against vLLM's own, predictions against committed measurements, refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from benchmarks.plan_calibration import (
    FORMER_KERNEL,
    GROUPS,
    MANAGED_MEMORY,
    UNPREDICTED,
    all_rows,
    decode_batches,
    errors,
    fit,
    fit_hosts,
    forced_hit_rate,
    is_predicted,
    predict_all,
    read_rows,
)
from vllm_hisparse.attention.backends import untried_gpu
from vllm_hisparse.cli.main import app
from vllm_hisparse.cli.plan import command as plan_command
from vllm_hisparse.cli.plan.gpus import GPUS, Gpu
from vllm_hisparse.cli.plan.memory import QUEST_PAGE, KVMemory, System, independent_hit_rate
from vllm_hisparse.cli.plan.models import PRESETS, ModelError, ModelShape, num_indexers
from vllm_hisparse.cli.plan.step_time import CALIBRATION, Step, has_timed_narrow_keys
from vllm_hisparse.kv_manager.blocks.decode_model import bounded_least_squares
from vllm_hisparse.kv_manager.blocks.step_form import StepForm
from vllm_hisparse.kv_manager.usage import Usage
from vllm_hisparse.layout import BLOCK_SIZE
from vllm_hisparse.ops.limits import MAX_HOT_ROWS
from vllm_hisparse.trace import Trace

ROOT = Path(__file__).parents[3]
GIB = 2**30


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def planned(*words: str) -> dict:
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output, parse_constant=not_json)


def refusal(*words: str) -> str:
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_weights_of_deepseek_v32() -> None:
    """671 billion parameters, of which 37 billion work on a token (DeepSeek's model card)."""
    shape = ModelShape.load("deepseek-v3.2", "fp8")
    assert shape.weight_bytes == pytest.approx(671e9, rel=0.01)
    assert shape.token_flops == pytest.approx(2 * 37e9, rel=0.03)
    assert shape.token_bytes == 61 * (656 + 132)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("Llama-3.1-8B", 8.0),
        ("Llama-3.3-70B", 70.6),
        ("Qwen3-32B", 32.8),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235),
        ("Qwen2-57B-A14B", 57.4),
        ("Mixtral-8x7B", 46.7),
        ("GLM-4.5", 355),
        ("GLM-4-9B", 9.4),
        ("ERNIE-4.5-21B-A3B", 21.8),
    ],
)
def test_weights_of_dense_models(preset: str, billions: float) -> None:
    """Parameters as the model cards state them; the embedding is looked up, not read in every step."""
    config = PRESETS[preset]
    embedding = config["hidden_size"] * config["vocab_size"] * 2
    assert ModelShape.load(preset).weight_bytes + embedding == pytest.approx(2e9 * billions, rel=0.02)


def test_bounds_stay_in_bf16() -> None:
    """Quest's bounds take as much of a page of KV in fp8 as of one in bf16."""
    of_dtype = [
        KVMemory(ModelShape.load("Llama-3.1-8B", dtype), 0, 0, 1, 4096, 2048).layout for dtype in ("bfloat16", "fp8")
    ]
    assert of_dtype[0].state_entries == of_dtype[1].state_entries
    assert of_dtype[0].row_bytes == 2 * of_dtype[1].row_bytes


def test_bytes_of_the_table_of_models() -> None:
    """Rows of docs/models.md about presets: full KV, device-resident KV or Quest's bounds, and KV on the host."""
    page = (ROOT / "docs" / "models.md").read_text()
    row = r"^\| ([^|]+?) \| `\w+` \| ([\d,]+) \| ([\d,]+)[^|]* \| ([\d,]+) \|"
    table = re.findall(row, page, re.MULTILINE)
    found = [(name, *(int(cell.replace(",", "")) for cell in cells)) for name, *cells in table]
    assert len(found) >= 12
    for label, full, device, host in found:
        name, *details = label.split(";")[0].split(", ")
        shape = ModelShape.load(name, "fp8" if "fp8 KV" in details else "bfloat16")
        resident = shape.num_indexers * shape.key_bytes or shape.num_layers * shape.row_bytes // QUEST_PAGE
        assert (full, device, host) == (shape.token_bytes, resident, shape.token_bytes), label


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 61),
        ({"index_topk_freq": 4}, 16),
        ({"index_topk_pattern": "FSSF" * 15 + "F"}, 31),
        ({"indexer_types": ["full", "shared", "shared"] * 20 + ["full"]}, 21),
    ],
)
def test_layers_that_share_an_indexer(config: dict, expected: int) -> None:
    assert num_indexers(PRESETS["DeepSeek-V3.2"] | config) == expected


def test_tiny_models_are_read_from_their_directory() -> None:
    directory = ROOT / "benchmarks" / "models" / "code-dsa"
    shape = ModelShape.load(str(directory), "bfloat16")
    config = json.loads((directory / "config.json").read_text())
    assert (shape.num_layers, shape.top_k) == (config["num_hidden_layers"], config["index_topk"])
    assert shape.row_bytes == 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])


def test_a_request_is_as_large_as_its_engine_says() -> None:
    """Bytes of `HotBufferSpec.request_bytes`, which sizes the engine's pool."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec

    shape = ModelShape.load("DeepSeek-V3.2", "fp8")
    memory = KVMemory(shape, 24 * GIB, 88 * GIB, 1, 4096, 2048)
    sizes = {"block_size": memory.layout.block_size, "num_kv_heads": 1, "head_size": 576, "dtype": torch.uint8}
    full = MLAAttentionSpec(state_content_bytes=memory.layout.row_bytes, **sizes)
    spec = HotBufferSpec.from_mla_spec(full, memory.layout, 4096, elastic=True)
    for num_tokens in (100, 4000, 33_001, 131_072):
        assert memory.request_bytes(System.plugin, num_tokens)[0] == spec.request_bytes(num_tokens)


def test_host_memory_limits_the_plugin_alone() -> None:
    memory = KVMemory(ModelShape.load("DeepSeek-V3.2", "fp8"), 24 * GIB, 10 * GIB, 1, 4096, 2048)
    plugin, full = (memory.seats(system, [32_768]) for system in (System.plugin, System.full))
    assert (plugin.running, plugin.bound) == (6, "host memory")
    assert (full.running, full.bound) == (16, "device memory")


@pytest.mark.long
def test_an_import_buffer_takes_device_memory_of_the_plugin_alone() -> None:
    words = ("GLM-5", "--gpu", "B300", "--tensor-parallel-size", "4", "--kv-cache-dtype", "fp8", "--context", "32768")
    without, plan = planned(*words), planned(*words, "--import-buffer-gib", "20")
    seats = [[each["systems"][name]["seats"] for each in (without, plan)] for name in ("full KV", "vllm_hisparse")]
    assert seats[0][0] == seats[0][1] and seats[1][0] > seats[1][1]
    assert '"import_buffer_gib": 20.0' in plan["commands"]["decode"]
    assert plan["ray_options"]["decode"]["hisparse"]["import_buffer_gib"] == 20.0
    assert plan["ray_options"]["prefill"]["env"] == {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}
    assert "env" not in without["ray_options"]["prefill"]
    assert "import_buffer_gib" not in plan["commands"]["one instance"], "it imports nothing"
    assert "import_buffer_gib" not in json.dumps(plan["helm_values"]), "pods share no IPC namespace"
    assert "VLLM_KV_CACHE_LAYOUT=BLHNC" in plan["commands"]["prefill"]
    assert "VLLM_KV_CACHE_LAYOUT" not in plan["commands"]["decode"] + without["commands"]["prefill"]
    sized = [planned(*words, "--device-kv-gib", "20", "--import-buffer-gib", size) for size in ("0", "20")]
    assert sized[0]["systems"]["vllm_hisparse"]["seats"] == sized[1]["systems"]["vllm_hisparse"]["seats"]


def test_a_request_that_waits_leaves_memory_unused() -> None:
    """Against a simulated queue, whose first request waits until it fits."""
    memory = KVMemory(ModelShape.load("DeepSeek-V3.2", "fp8"), 24 * GIB, 88 * GIB, 1, 4096, 2048)
    lengths = [1000] * 7 + [48_000] * 3
    sizes = [memory.request_bytes(System.full, num_tokens)[0] for num_tokens in lengths]
    source, running, counts, waiting = np.random.default_rng(2), [], [], None
    for _ in range(20_000):
        while waiting is None or sum(running) + waiting <= memory.device_bytes:
            running += [] if waiting is None else [waiting]
            waiting = sizes[source.integers(len(sizes))]
        counts.append(len(running))
        running.pop(source.integers(len(running)))
    mean = len(counts) / np.sum(1 / np.array(counts))  # the more run, the sooner one of them ends
    assert memory.seats(System.full, lengths).running == pytest.approx(mean, rel=0.02)
    assert memory.device_bytes / np.mean(sizes) > 1.03 * mean


def test_free_memory_is_lent_to_those_that_need_the_least() -> None:
    memory = KVMemory(ModelShape.load("DeepSeek-V3.2", "fp8"), 24 * GIB, 88 * GIB, 1, 4096, 2048)
    lengths = [1000, 10_000, 60_000, 60_000]
    rows = memory.hot_rows(System.plugin, lengths, 40)
    assert rows[:2] == lengths[:2]
    assert 4096 < min(rows[2:]) < 60_000
    assert memory.hot_rows(System.plugin, [60_000], 40)[0] < min(rows[2:])  # others want less than their share
    used = sum(
        memory.request_bytes(System.plugin, length)[0] + (hot - min(4096, length)) * 61 * 656
        for length, hot in zip(lengths, rows, strict=True)
    )
    assert used * 10 == pytest.approx(24 * GIB, rel=0.03)  # 40 requests


def test_layers_with_full_kv_take_device_memory() -> None:
    shape = ModelShape.load("Llama-3.1-8B")
    few, all_hot = (KVMemory(shape, 24 * GIB, 88 * GIB, 1, 4096, 2048, full_kv_layers=n) for n in (2, 0))
    more = [
        few.request_bytes(System.plugin, n)[0] - all_hot.request_bytes(System.plugin, n)[0] for n in (32_000, 64_000)
    ]
    assert more[1] - more[0] == pytest.approx(32_000 * 2 * shape.row_bytes, rel=0.1)


def test_hit_rate_of_forced_selections() -> None:
    """Against a simulated LRU buffer, with a process like the kernel's: a column moves to one of its own places."""
    num_tokens, top_k, rows, overlap = 12_400, 2048, 4108, 0.3
    source, places = np.random.default_rng(0), 12_288 // top_k
    place, last_use, hits = source.integers(places, size=top_k), np.full(num_tokens, -1), []
    for step in range(60):
        place = np.where(source.random(top_k) < overlap, place, source.integers(places, size=top_k))
        selection, hot = np.arange(top_k) + place * top_k, np.argsort(last_use)[-rows:]
        hits.append(np.isin(selection, hot[last_use[hot] >= 0]).mean())
        last_use[selection] = step
    assert forced_hit_rate(overlap, top_k, rows, num_tokens) == pytest.approx(np.mean(hits[20:]), abs=0.01)
    assert forced_hit_rate(overlap, top_k, num_tokens, num_tokens) == 1.0


@pytest.mark.long
def test_hit_rate_of_independent_selections() -> None:
    """Against a simulated LRU buffer."""
    num_tokens, top_k, rows, overlap = 4000, 200, 700, 0.8
    source = np.random.default_rng(0)
    selection = source.choice(num_tokens, top_k, replace=False)
    last_use, hits = np.full(num_tokens, -1), []
    for step in range(400):
        stays = source.random(top_k) < overlap
        others = np.setdiff1d(np.arange(num_tokens), selection)
        selection = np.concatenate([selection[stays], source.choice(others, int((~stays).sum()), replace=False)])
        hot = np.argsort(last_use)[-rows:]
        hits.append(np.isin(selection, hot[last_use[hot] >= 0]).mean())
        last_use[selection] = step
    assert independent_hit_rate(overlap, top_k, rows, num_tokens) == pytest.approx(np.mean(hits[100:]), abs=0.01)
    assert independent_hit_rate(overlap, top_k, num_tokens, num_tokens) == 1.0


def test_the_fit_is_the_least_squares_one_where_that_is_positive() -> None:
    source = np.random.default_rng(1)
    a, x = source.random((30, 4)), np.array([0.5, 2.0, 0.1, 1.0])
    assert bounded_least_squares(a, a @ x) == pytest.approx(x)
    found = bounded_least_squares(a, a @ np.array([1.0, -2.0, 0.5, 1.0]))
    gradient = a.T @ (a @ found - a @ np.array([1.0, -2.0, 0.5, 1.0]))
    assert (found >= 0).all() and (gradient > -1e-8).all() and gradient @ found == pytest.approx(0, abs=1e-8)


@pytest.mark.long
def test_factors_come_from_the_committed_results() -> None:
    stored, rows = json.loads(CALIBRATION.read_text()), all_rows()
    for name, found in (("factors", fit(rows)), ("slow_hosts", fit_hosts(rows))):
        assert {part: pytest.approx(costs, rel=1e-3, abs=1e-4) for part, costs in found.items()} == stored[name]


@pytest.mark.slow
def test_rows_of_the_former_kernel_are_predicted_and_not_fitted() -> None:
    rows = all_rows()
    rows = [row for row in rows if row.group != MANAGED_MEMORY]
    present = [row for row in rows if row.group != FORMER_KERNEL or row.system == System.full]
    assert len(rows) - len(present) == 8 and sum(row.has_narrow_keys for row in present) == 6
    assert fit(present) == fit(rows)


def test_predictions_are_held_to_the_measurements() -> None:
    rows, calibration = all_rows(), json.loads(CALIBRATION.read_text())
    predictions = predict_all(rows, calibration["factors"], calibration["slow_hosts"])
    predicted = [each for each in predictions if "not_predicted" not in each]
    assert [each for each in predicted if not is_predicted(each)] == []
    reasons = {each["not_predicted"] for each in predictions if "not_predicted" in each}
    assert reasons <= {reason for systems in UNPREDICTED.values() for reason in systems.values()}
    for what in ("tokens_per_s", "itl_ms"):
        assert np.median(np.abs(errors(predictions, what))) < 0.07
    stored = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["rows"]
    assert stored == predictions


DEEP = ("full depth", MANAGED_MEMORY, "shared indexers", "drafts", "two GPUs")  # groups with 61 layers


def percent(share: float) -> str:
    return f"{share:.1%}" if share else "0%"


def test_the_page_has_the_errors_of_the_result_file() -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    table = [
        line.strip("| ").split(" | ")[1:] for line in page.splitlines() if re.match(r"\|[^|]+\| \d+ \| \d+ \|", line)
    ]
    found = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    *groups, everything = found["errors"]
    assert sorted(table) == sorted(
        [
            str(line["rows"]),
            str(line["not_predicted"]),
            f"{percent(line['tokens_per_s_median'])}, {percent(line['tokens_per_s_worst'])}",
            f"{percent(line['itl_ms_median'])}, {percent(line['itl_ms_worst'])}",
            percent(line["running_worst"]),
        ]
        for line in groups
    )
    text = " ".join(page.split())
    assert f"{found['num_rows']} measured cases, and fits {found['constants']} constants to most of them" in text
    assert everything["rows"] == found["num_rows"]
    left_out = found["errors_left_out"][-1]
    medians, worst = (
        [left_out[f"{what}_{which}"] for what in ("tokens_per_s", "itl_ms")] for which in ("median", "worst")
    )
    assert (
        f"{medians[0]:.1%} and {medians[1]:.1%}. The worst errors are {worst[0]:.0%} and {worst[1]:.0%}, both with 61 "
        "layers. Seven cases are not predicted"
    ) in text and left_out["not_predicted"] == 7
    deep = [line for line in found["errors_left_out"] if line["group"] in DEEP]
    assert len(deep) == len(DEEP)
    deepest = [max(line[f"{what}_worst"] for line in deep) for what in ("tokens_per_s", "itl_ms")]
    assert deepest == worst


LATER = ("full_depth_lrfu_fit:", "full_depth_lrfu_drafts:")


def test_the_present_version_is_predicted() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    cases = [row for row in found["rows"] if row["case"].startswith(("full_depth_lrfu_managed:", *LATER))]
    errors = [100 * (row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] - 1) for row in cases]
    page = " ".join((ROOT / "docs" / "planning.md").read_text().split())
    assert f"The {len(cases)} cases of the [present version]" in page
    assert f"predicted between {-min(errors):.0f}% too low and {max(errors):.0f}% too high" in page


def test_every_row_of_the_result_files_is_predicted_or_says_why() -> None:
    results = ROOT / "benchmarks" / "results"
    names = [name for group in GROUPS.values() for name in group]
    wanted = ("full_depth", "mtp", "full_size", "decode_llama")
    files = [path for folder in ("h200", "h200x2") for path in (results / folder).glob("*.json")]
    assert {f"{path.parent.name}/{path.name}" for path in files if path.name.startswith(wanted)} == {
        *names,
        *(
            f"h200/full_depth_{name}.json"
            for name in (
                *("peers", "peers_drafts", "peers_fit", "fit", "admission_settled"),
                *("equal_shares", "select_positions", "rows_by_layer", "large_pool"),
                "own_copies",
                "equal_rows",
                "lrfu",
            )
        ),  # cases of other files, beside SGLang, on one GPU, after more steps, or with another swap-in
    }
    measured = sum(len(json.loads((results / name).read_text())["rows"]) for name in names)
    assert sum(row.repeats for row in all_rows()) == measured
    assert set(UNPREDICTED) <= set(names)


@pytest.mark.slow
def test_a_dense_row_is_predicted_by_all_others() -> None:
    rows = all_rows()
    left_out = [row for row in rows if row.file.endswith("128k.json") and row.row["requests"] == 8]
    for row in left_out:
        others = [other for other in rows if other is not row]
        assert is_predicted(predict_all([row], fit(others), fit_hosts(others))[0])
    assert len(left_out) == 2


@pytest.mark.parametrize(
    ("name", "system", "context", "requests"),
    [("decode_llama_32k", "full", 32_000, 33), ("decode_llama_128k", "full", 128_000, 8)],
)
def test_steps_of_the_decode_benchmark(name: str, system: str, context: int, requests: int) -> None:
    """The steps are as many as the benchmark timed; requests come in several turns."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200" / f"{name}.json").read_text())["rows"]
    row = next(row for row in rows if (row["system"], row["requests"]) == (system, requests))
    batches = decode_batches(requests, row["running_max"], context, row["max_tokens"])
    assert max(batches) == row["running_max"] and len(batches) == pytest.approx(row["steps"], rel=0.05)


def test_more_misses_take_longer() -> None:
    shape = ModelShape.load("DeepSeek-V3.2", "fp8")
    times = [
        Step(shape, GPUS["H200"], System.plugin, 40, 32_768, 2048, 0, missed, tensor_parallel=8).total_ms()
        for missed in (0, 100, 400, 800, 1600)
    ]
    assert times == sorted(times) and times[-1] > times[0] + 20


def test_copies_from_managed_memory_hide_better() -> None:
    shape = ModelShape.load("DeepSeek-V3.2", "fp8")
    pinned, managed = (
        Step(shape, GPUS["H200"], System.plugin, 56, 32_768, 2048, missed_rows=230, host_is_managed=is_managed)
        for is_managed in (False, True)
    )
    parts = pinned.parts_ms(), managed.parts_ms()
    assert parts[0].pop("copies") > parts[1].pop("copies") + 0.5 and parts[0] == parts[1]
    small = [
        Step(shape, GPUS["H200"], System.plugin, 16, 32_768, 2048, 0, 230, host_is_managed=is_managed)
        for is_managed in (False, True)
    ]
    assert small[0].total_ms() == small[1].total_ms(), "without microbatches, nothing is hidden"


def test_managed_memory_is_expected_where_an_engine_takes_it() -> None:
    """The pool of a rank has to be its own, and smaller than the free memory of its GPU."""
    words = ("DeepSeek-V3.2", "--kv-cache-dtype", "fp8", "--context", "32768", "--hit-rate", "0.8")
    ranks = ("--data-parallel-size", "8")
    weights = planned(*words, *ranks)["weights_gib_per_gpu"]
    free = 8 * (GPUS["H200"].memory_gib - weights - 6)
    notes = {
        size: planned(*words, *ranks, "--host-memory-gib", f"{size:.0f}")["host_memory"]
        for size in (free - 8, free + 8)
    }
    assert [note is None for note in notes.values()] == [False, True]
    (tokens,) = (float(re.search(r"expect ([\d,]+) ", note)[1].replace(",", "")) for note in notes.values() if note)
    fast = planned(*words, *ranks, "--host-memory-gib", f"{free - 8:.0f}")["systems"]["vllm_hisparse"]["tokens_per_s"]
    assert 0.8 * fast < tokens < 0.98 * fast
    assert "is expected to be in managed memory" in " ".join(
        invoke(*words, *ranks, "--host-memory-gib", f"{free - 8:.0f}").output.split()
    )
    small = (*words, "--context", "16384", "--host-memory-gib", "45", "--device-kv-gib", "8")
    sharing = planned(*small, "--tensor-parallel-size", "8")
    assert sharing["host_memory"] is None, "tensor parallel ranks share the pool"
    assert sharing["systems"]["vllm_hisparse"]["running"] >= 24 and sharing["weights_gib_per_gpu"] < 139 - 45 - 6
    assert planned("Llama-3.1-8B", "--host-memory-gib", "50")["host_memory"] is None


def test_layers_that_do_not_select_copy_nothing() -> None:
    """Three of MiniMax-M3's 60 layers keep their KV on the device; each of the others has an indexer."""
    shape = ModelShape.load("MiniMax-M3")
    step = Step(shape, GPUS["H200"], System.plugin, 10, 32_768, 2048, missed_rows=100)
    assert step.copied_bytes == 10 * 100 * 57 * shape.row_bytes
    assert step.exposed_copy_ms(1e3, {"share of copies ahead": 0.0}) == pytest.approx(step.copy_ms)


@pytest.mark.parametrize("drafts", [0, 1])
def test_steps_are_divided_where_the_engine_divides_them(drafts: int) -> None:
    """The misses decide, as in the scheduler; models without an indexer in every layer run all steps as a whole."""
    shape, form, tokens = ModelShape.load("DeepSeek-V3.2", "fp8"), StepForm(2048 * 656), 1 + drafts
    for requests, missed in product((23, 24, 40, 128, 129), (0, 1, 10, 18, 20, 60, 61, 62, 100, 102, 2048)):
        step = Step(shape, GPUS["H200"], System.plugin, requests, 4096, 2048, drafts, missed)
        form.measured(Usage(1, 2048 * tokens - missed, missed))
        is_large = 24 <= requests <= 128
        assert step.decodes_in_microbatches == (is_large and not form.runs_whole(requests * tokens)), (requests, missed)
    steps = [Step(shape, GPUS["H200"], System.plugin, 40, 4096, 2048, drafts, missed) for missed in (60, 61)]
    assert [step.decodes_in_microbatches for step in steps] == [False, True]
    whole, divided = (step.parts_ms() for step in steps)
    assert divided["resolve"] > whole["resolve"] and divided["copies"] < whole["copies"]
    for name in ("GLM-5.2", "GLM-5.3", "HY-V4", "MiniMax-M3", "Llama-3.1-8B"):
        shape = ModelShape.load(name)
        assert not Step(shape, GPUS["H200"], System.plugin, 40, 4096, 2048, drafts, 2048).decodes_in_microbatches, name


def test_a_plan_says_where_the_plugin_pays() -> None:
    found = planned("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--context", "65536")
    systems = found["systems"]
    assert set(systems) == {"full KV", "native HiSparse", "vllm_hisparse"}
    assert systems["vllm_hisparse"]["tokens_per_s"] > 1.4 * systems["full KV"]["tokens_per_s"]
    assert systems["full KV"]["seats"] < found["crossover"] <= found["concurrency"]
    assert sum(systems["full KV"]["step_parts_ms"].values()) == pytest.approx(systems["full KV"]["itl_ms"], abs=0.1)
    assert "HiSparseHostConnector" in found["commands"]["decode"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("Mistral-7B", "--gpu", "A100"), "It pays from the first request on. With"),
        (("GLM-5.2", "--tensor-parallel-size", "8"), "It pays from {} requests on; with fewer, stock vLLM is as good."),
    ],
)
def test_the_verdict_names_the_least_number_of_requests(words: tuple[str, ...], expected: str) -> None:
    crossover = planned(*words)["crossover"]
    assert (crossover == 1) == ("first" in expected)
    assert expected.format(crossover) in invoke(*words).output


@pytest.mark.long
def test_a_plan_says_what_was_not_measured() -> None:
    words = ("DeepSeek-V3.2", "--kv-cache-dtype", "fp8", "--tensor-parallel-size")
    assert "more than 2 GPUs" in planned(*words, "8")["confidence"]
    assert "more than 24 experts" in planned(*words, "8")["confidence"]
    assert "Nobody measured" not in planned("Llama-3.1-8B")["confidence"]
    assert "datasheets" in planned(*words, "16", "--gpu", "H100")["confidence"]


def test_a_plan_says_where_steps_wait_for_the_host() -> None:
    """A small model's steps take less than the slowest measured host needs for them; those of large models do not."""
    small = (str(ROOT / "benchmarks" / "models" / "code-dsa"), "--context", "4000", "--concurrency", "1")
    found = planned(*small)
    assert "Steps wait for a slow host: for a step, the GPU needs" in found["waits_for_host"]
    assert found["waits_for_host"] in " ".join(invoke(*small).output.split())
    large = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--concurrency", "1")
    assert planned(*large)["waits_for_host"] is None
    parts = Step(ModelShape.load(small[0]), GPUS["H200"], System.full, 1, 4000, 256).parts_ms()
    fastest = json.loads(CALIBRATION.read_text())["factors"]["host"]["step"]
    assert sum(parts.values()) == pytest.approx(fastest) and parts["waiting for the host"] > 0


@pytest.mark.long
def test_a_plan_says_that_fewer_requests_give_more_tokens() -> None:
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--overlap")
    few, planned_speed = planned(*words, "0.65"), planned(*words, "0.9")
    number = few["more_tokens_per_s_with"]
    at_number = planned(*words, "0.65", "--concurrency", str(number))["systems"]["vllm_hisparse"]
    assert at_number["tokens_per_s"] > 1.02 * few["systems"]["vllm_hisparse"]["tokens_per_s"]
    output = " ".join(invoke(*words, "0.65").output.split())
    wanted = few["systems"]["vllm_hisparse"]["running"]
    text = (
        f"the commands have --max-num-seqs {number} instead of {wanted}. With the option admission: auto, set {wanted}"
    )
    assert text in output and f"If {number} run at once and the others wait" in output
    assert planned_speed["more_tokens_per_s_with"] is None
    assert num_seqs(few) == {number}, "the commands follow the advice"
    assert num_seqs(planned_speed) == {planned_speed["concurrency"]}
    ranks = planned("Llama-3.1-8B", "--gpu", "B200", "--kv-cache-dtype", "fp8", "--data-parallel-size", "2")
    assert num_seqs(ranks) == {-(-ranks["more_tokens_per_s_with"] // 2)}


def num_seqs(plan: dict) -> set[int]:
    """All values of --max-num-seqs in commands, Helm values and Ray options."""
    lines = [shlex.split(plan["commands"][side]) for side in ("one instance", "decode")]
    lines.append(plan["helm_values"]["decode"]["extraArgs"])
    found = {int(words[words.index("--max-num-seqs") + 1]) for words in lines}
    return found | {plan["ray_options"]["decode"]["engine_kwargs"]["max_num_seqs"]}


@pytest.mark.parametrize(
    ("words", "pays"),
    [
        (("Llama-3.1-8B", "--gpu", "B200", "--kv-cache-dtype", "fp8"), True),
        (("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--overlap", "0.2"), False),
    ],
)
def test_the_verdict_and_the_advice_agree(words: tuple[str, ...], pays: bool) -> None:
    """Fewer requests at once are advised only if the plugin pays with them, and then the verdict says so."""
    found, output = planned(*words), " ".join(invoke(*words).output.split())
    assert found["crossover"] is None and found["more_tokens_per_s_with"]
    for text in ("It pays only if fewer requests run at once", "the commands have --max-num-seqs"):
        assert (text in output) == pays
    assert num_seqs(found) == {found["more_tokens_per_s_with"] if pays else found["concurrency"]}
    for text in ("It does not pay", "Use stock vLLM for this load"):
        assert (text in output) == (not pays)


def test_a_plan_says_where_native_was_not_measured() -> None:
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--hit-rate")
    notes = {rate: planned(*words, rate)["confidence"] for rate in ("0.5", "0.87", "0.99")}
    assert "with 50%, its steps are longer" in notes["0.5"] and "with 99%, its steps are shorter" in notes["0.99"]
    assert "Native HiSparse" not in notes["0.87"]


def test_it_does_not_pay_where_full_kv_fits() -> None:
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--context", "2000")
    found = planned(*words, "--concurrency", "16")
    assert found["crossover"] is None
    assert "It does not pay" in invoke(*words, "--concurrency", "16").output


def test_arrivals_give_the_concurrency() -> None:
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--context", "16384")
    found = planned(*words, "--output-tokens", "500", "--request-rate", "1")
    system = found["systems"]["vllm_hisparse"]
    in_system = 1 * 500 * system["itl_ms"] / 1e3  # Little's law
    assert found["concurrency"] == pytest.approx(in_system, rel=0.1)


@pytest.mark.long
def test_lengths_from_a_file_and_a_range(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("1000\n3000\n8000\n")
    words = ("Llama-3.1-8B", "--gpu", "H100")
    assert "Prompts of 4000" in invoke(*words, "--context", str(tmp_path / "lengths")).output
    assert "Prompts of 6000" in invoke(*words, "--context", "4000-8000").output


def test_arrivals_that_are_too_many_are_named() -> None:
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--request-rate")
    assert "requests queue up" in " ".join(invoke(*words, "20").output.split())
    assert "requests queue up" not in " ".join(invoke(*words, "0.2").output.split())
    assert planned(*words, "20")["wanted_tokens_per_s"] == 20 * 1024


@pytest.mark.long
def test_ranges_are_planned_length_by_length() -> None:
    """Short requests are hot as a whole, so that fewer rows are missed than with all requests of mean length."""
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--concurrency", "64")
    mixed, same = (planned(*words, "--context", text)["systems"] for text in ("1000-59000", "30000"))
    assert mixed["vllm_hisparse"]["hit_rate"] > same["vllm_hisparse"]["hit_rate"]
    assert mixed["full KV"]["device_bytes_per_request"] == pytest.approx(
        same["full KV"]["device_bytes_per_request"], rel=0.01
    )


def merged(base: Any, over: Any) -> Any:
    """Return values with others over them, as helm does."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


@cache
def parser() -> Any:
    """Parser of `vllm serve`."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


STARTED = {
    "dsa": ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8"),
    "drafts": ("GLM-5.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--drafts", "2"),
    "experts": ("GLM-5.3", "--data-parallel-size", "4", "--tensor-parallel-size", "4", "--kv-cache-dtype", "fp8"),
    "dense": ("Llama-3.1-8B", "--device-kv-gib", "20", "--max-num-seqs", "8", "--top-k", "1024"),
    "import buffer": ("DeepSeek-V3.2", "--gpu", "B300", "--tensor-parallel-size", "4", "--import-buffer-gib", "1"),
    "ranks": ("Qwen3-8B", "--data-parallel-size", "4", "--device-buffer-size", "6144"),
    "moe": ("Qwen3-30B-A3B", "--tensor-parallel-size", "2"),
    "refused": ("config.json", "--tensor-parallel-size", "16"),
    "fp4": ("GLM-5", "--tensor-parallel-size", "8", "--gpu", "B200", "--indexer-kv-dtype", "mxfp4"),
    "narrow keys": ("GLM-5", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--indexer-key-dtype", "fp4"),
    "blocks": ("MiniMax-M3", "--tensor-parallel-size", "8", "--indexer-kv-dtype", "fp8"),
}


def needs_of_blocks(language_model_only: bool, attention: Any) -> bool:
    """Return True if an engine is told what MiniMax-M3 with index keys in fp8 needs; both or neither."""
    assert language_model_only == (attention.indexer_kv_dtype == "fp8")
    return language_model_only


@pytest.mark.long
@pytest.mark.parametrize("name", STARTED)
def test_commands_are_taken_by_the_programs_that_get_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parsers of vLLM and of the router, and the schemas of the chart and of the Ray application."""
    from vllm.config import AttentionConfig
    from vllm_hisparse_ray.config import AppConfig
    from vllm_router.launch_router import parse_router_args

    from vllm_hisparse.config import HiSparseConfig

    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(REFUSED["v3"][0]))
    found, drafts = planned(*STARTED[name]), name == "drafts"
    for title, command in found["commands"].items():
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        if title == "router":
            args = parse_router_args(words[1:])
            assert args.vllm_pd_disaggregation and len(args.prefill_urls) == len(args.decode_urls) == 1
            continue
        assert words[:2] == ["vllm", "serve"]
        args = parser().parse_args(words[2:])
        assert bool(args.speculative_config) == drafts
        assert needs_of_blocks(args.language_model_only, args.attention_config) == (name == "blocks")
        if title != "prefill" and name not in ("refused", "fp4"):
            HiSparseConfig.from_extra_config(args.kv_transfer_config.kv_connector_extra_config)
    if name in ("experts", "refused", "fp4"):
        assert found["helm_values"] is found["ray_options"] is None
        return
    chart = ROOT / "deploy" / "helm" / "vllm-hisparse"
    values = merged(yaml.safe_load((chart / "values.yaml").read_text()), found["helm_values"])
    jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))
    decode = found["helm_values"]["decode"]
    assert decode["memoryGiB"] >= decode["hisparse"]["hostPoolGiB"] + decode["overheadGiB"]
    assert decode["hisparse"]["hostPoolGiB"] * decode["replicas"] == 512
    engine = found["helm_values"]["engine"]["extraArgs"]
    assert ("--speculative-config" in engine) == drafts
    args = parser().parse_args([*engine, *decode["extraArgs"]])
    assert needs_of_blocks(args.language_model_only, args.attention_config) == (name == "blocks")
    app = AppConfig.parse(found["ray_options"])
    kwargs = found["ray_options"]["engine_kwargs"]
    needs = kwargs.get("language_model_only", False), AttentionConfig(**kwargs.get("attention_config", {}))
    assert needs_of_blocks(*needs) == (name == "blocks")
    narrow = [decode["hisparse"].get("extraConfig", {}), found["ray_options"]["decode"]["hisparse"]]
    assert [each.get("indexer_key_dtype") for each in narrow] == ["fp4" if name == "narrow keys" else None] * 2
    HiSparseConfig.from_extra_config(app.decode.hisparse)


@pytest.mark.long
@pytest.mark.parametrize("preset", PRESETS)
def test_commands_of_every_preset_are_taken(preset: str) -> None:
    """vLLM's parser takes them, the plugin its options, and the length is one that the model's config.json allows."""
    from vllm_hisparse.config import HiSparseConfig

    shape = ModelShape.load(preset)
    ranks = next(number for number in (8, 4) if shape.num_heads % number == 0)
    words = (preset, "--tensor-parallel-size", str(ranks))
    found, hosted = planned(*words), not shape.refusal
    assert set(found["commands"]) == ({"one instance", "prefill", "decode", "router"} if hosted else {"one instance"})
    for title in found["commands"].keys() - {"router"}:
        command = [word for word in shlex.split(found["commands"][title]) if not re.match(r"[A-Z_]+=", word)]
        args = parser().parse_args(command[2:])
        assert args.max_model_len <= shape.max_model_len
        if hosted and title != "prefill":
            options = HiSparseConfig.from_extra_config(args.kv_transfer_config.kv_connector_extra_config)
            own = "msa" if shape.selects_blocks else "dsa"
            assert options.algorithm == (own if shape.is_dsa else "quest")
    assert bool(found["helm_values"]) == bool(found["ray_options"]) == hosted


@pytest.mark.parametrize("words", [("GLM-5.2", "--tensor-parallel-size", "8", "--drafts", "1"), ("Mistral-7B",)])
def test_the_table_says_what_the_json_says(words: tuple[str, ...]) -> None:
    found, lines = planned(*words), invoke(*words).output.splitlines()
    for system, values in found["systems"].items():
        line = next(line for line in lines if line.strip().startswith(system))
        cells = [float(cell) for cell in re.findall(r" (\d+(?:\.\d+)?)", line)]
        assert values["running"] in cells and min(abs(cell - values["tokens_per_s"]) for cell in cells) < 0.6
    assert not any("…" in line for line in lines), "nothing is cut off"


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpu", "model", "kv_dtype", "backend"),
    [
        ("H200", "Llama-3.1-8B", "fp8", None),
        ("A100", "Llama-3.1-8B", "bfloat16", None),
        ("L40S", "Llama-3.1-8B", "fp8", "TRITON_ATTN"),
        ("B200", "Llama-3.1-8B", "auto", "FLASH_ATTN"),
        ("B300", "Qwen3-30B-A3B", "fp8", "TRITON_ATTN"),
        ("B200", "DeepSeek-V3.2", "fp8", "FLASHMLA_SPARSE"),
        ("GH200", "DeepSeek-V3.2", "fp8", None),
    ],
)
def test_back_ends_that_vllm_would_not_take_first(gpu: str, model: str, kv_dtype: str, backend: str | None) -> None:
    """The printed commands start, over a backend that has run; the output says why, and what start-up warns of."""
    parallel = ("--tensor-parallel-size", "8") if model == "DeepSeek-V3.2" else ()
    found = planned(model, "--gpu", gpu, "--kv-cache-dtype", kv_dtype, *parallel)
    for side in ("one instance", "prefill", "decode"):
        words = shlex.split(found["commands"][side])
        assert (words[words.index("--attention-backend") + 1] if "--attention-backend" in words else None) == backend
    assert found["helm_values"]["engine"].get("attentionBackend") == backend
    assert found["ray_options"]["engine_kwargs"].get("attention_backend") == backend
    warning, words = found["gpu_warning"] or "", ("--gpu", gpu, "--kv-cache-dtype", kv_dtype, *parallel)
    assert warning in " ".join(invoke(model, *words).output.split())
    assert (f"The commands set --attention-backend {backend}." in warning) == (backend is not None)
    of_gpu = untried_gpu(gpu, GPUS[gpu].capability)
    assert bool(of_gpu) == (GPUS[gpu].capability != (9, 0)) and of_gpu in warning
    untried = "vLLM may take FLASHINFER_MLA_SPARSE or FLASH_ATTN_MLA_SPARSE_FA4"
    assert (untried in warning) == (backend == "FLASHMLA_SPARSE")


@pytest.mark.parametrize(
    ("gpu", "head_size", "backend"),
    [("B200", 256, "TRITON_ATTN"), ("B300", 256, "TRITON_ATTN"), ("B200", 192, "FLASH_ATTN"), ("H200", 256, None)],
)
def test_back_ends_that_read_large_heads(tmp_path: Path, gpu: str, head_size: int, backend: str | None) -> None:
    """On SM100, FlashAttention's kernel for heads of 256 elements reads no units."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Llama-3.1-8B"] | {"head_dim": head_size}))
    found = planned(str(tmp_path), "--gpu", gpu)
    words = shlex.split(found["commands"]["decode"])
    assert (words[words.index("--attention-backend") + 1] if "--attention-backend" in words else None) == backend
    assert ("refuses FLASH_ATTN, too" in (found["gpu_warning"] or "")) == (backend == "TRITON_ATTN")


@pytest.mark.parametrize(("model", "tokens"), [("Llama-3.1-8B", 256), ("Qwen3-8B", 256), ("DeepSeek-V3.2", None)])
def test_both_sides_of_a_dense_pair_have_blocks_of_one_size(model: str, tokens: int | None) -> None:
    """A stock prefill instance would have smaller blocks than the plugin chooses."""
    words = ("--tensor-parallel-size", "8") if model == "DeepSeek-V3.2" else ()
    found = planned(model, *words)
    for title in ("prefill", "decode"):
        command = shlex.split(found["commands"][title])
        assert (command[command.index("--block-size") + 1] if "--block-size" in command else None) == (
            None if tokens is None else str(tokens)
        )
    assert "--block-size" not in found["commands"]["one instance"], "the plugin chooses it"
    assert found["helm_values"]["engine"].get("blockSize") == tokens
    assert found["ray_options"]["engine_kwargs"].get("block_size") == tokens


@pytest.mark.long
def test_both_sides_of_a_pair_have_gpus_of_their_own() -> None:
    """The prefill side alone has a side channel."""
    small = planned("Llama-3.3-70B", "--tensor-parallel-size", "4")["commands"]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 " in small["prefill"] and "CUDA_VISIBLE_DEVICES=4,5,6,7 " in small["decode"]
    large = planned("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8")["commands"]
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=$PREFILL_HOST" in large["prefill"] and "$DECODE_HOST:8200" in large["router"]
    assert "SIDE_CHANNEL" not in small["decode"] + large["decode"]
    for words, has_two_hosts in ((("Llama-3.1-8B",), False), (("GLM-5", "--tensor-parallel-size", "8"), True)):
        assert ("set PREFILL_HOST and DECODE_HOST first" in invoke(*words).output) == has_two_hosts


@pytest.mark.parametrize(
    ("model", "dtype", "name"),
    [
        ("GLM-5", "auto", "zai-org/GLM-5-FP8"),
        ("GLM-5", "bfloat16", "zai-org/GLM-5"),
        ("GLM-5.3", "auto", "zai-org/GLM-5.3"),
        ("GLM-5.3", "bfloat16", "zai-org/GLM-5.3-BF16"),
    ],
)
def test_the_commands_load_weights_of_the_planned_dtype(model: str, dtype: str, name: str) -> None:
    found = planned(model, "--gpu", "B300", "--tensor-parallel-size", "8", "--weight-dtype", dtype)
    assert shlex.split(found["commands"]["one instance"])[:3] == ["vllm", "serve", name]
    assert (found["helm_values"]["model"]["id"], found["ray_options"]["model_source"]) == (name, name)


@pytest.mark.parametrize(("model", "fits"), [("GLM-5", False), ("GLM-5.2", True), ("GLM-5.3", True)])
def test_contexts_of_half_a_million_tokens(model: str, fits: bool) -> None:
    assert (invoke(model, "--tensor-parallel-size", "8", "--context", "500000").exit_code == 0) == fits


@pytest.mark.parametrize(("drafts", "counted"), [(1, "1 draft per step"), (2, "2 drafts per step")])
def test_the_output_says_how_many_drafts_a_step_has(drafts: int, counted: str) -> None:
    output = invoke("GLM-5", "--tensor-parallel-size", "8", "--drafts", str(drafts)).output
    assert f"{counted}, accepted with a probability of 80% each." in output


def test_rates_of_a_doctor(tmp_path: Path) -> None:
    report = {"gpu": {"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1}, "rates": {"pinned_rows_gb_s": 12.0}}
    (tmp_path / "doctor.json").write_text(json.dumps(report))
    gpu = Gpu.find(str(tmp_path / "doctor.json"))
    assert (gpu.memory_gib, gpu.rows_gb_s, gpu.memory_tb_s) == (79.1, 12.0, GPUS["H100"].memory_tb_s)
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "16", "--kv-cache-dtype", "fp8", "--overlap", "0.5")
    slow, fast = (planned(*words, "--gpu", gpu)["systems"] for gpu in (str(tmp_path / "doctor.json"), "H100"))
    assert slow["vllm_hisparse"]["tokens_per_s"] < 0.8 * fast["vllm_hisparse"]["tokens_per_s"]
    assert slow["full KV"]["tokens_per_s"] == pytest.approx(fast["full KV"]["tokens_per_s"], rel=0.15)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("DeepSeek-V3.2",), "needs 625.6 GiB on each GPU for weights, and 4 GiB for activations"),
        (("DeepSeek-V3.2", "--hit-rate", "0.5", "--overlap", "0.3"), "got 0.5, and 0.3 for --overlap"),
        (("Llama-3.1-8B", "--concurrency", "4", "--request-rate", "2"), "they contradict each other"),
        (("no/such/model",), "expected a directory, a config.json or one of DeepSeek-V3.2"),
        (("Llama-3.1-8B", "--gpu", "H1000"), "expected one of H200"),
        (("Llama-3.1-8B", "--drafts", "1"), "has no draft layer that plan knows: dense models draft with EAGLE"),
        (("Llama-3.1-8B", "--acceptance", "0.5"), "got 0.5, and no --drafts to accept"),
        (
            ("Llama-3.1-8B", "--device-kv-gib", "70", "--gpu", "H100"),
            "got 70, and H100 for --gpu, which has 79.6 GiB; Llama-3.1-8B needs 14.0 GiB on each for weights: lower",
        ),
        (("Llama-3.1-8B", "--device-kv-gib", "9", "--gpu-memory-utilization", "0.5"), "got 9.0, and 0.5 for --gpu-mem"),
        (("Llama-3.1-8B", "--device-buffer-size", "100"), "expected a multiple of 16, at least 2048"),
        (("GLM-5", "--indexer-kv-dtype", "mxfp4"), "got mxfp4, and H200 for --gpu"),
        (
            ("GLM-5", "--indexer-kv-dtype", "fp8", "--indexer-key-dtype", "fp4"),
            "got fp4, and fp8 for --indexer-kv-dtype",
        ),
        (("GLM-5", "--gpu", "B200", "--indexer-key-dtype", "fp4"), "got fp4, and B200 for --gpu"),
        (("MiniMax-M3", "--gpu", "B200"), "got MiniMax-M3, and B200 for --gpu: vLLM runs it there"),
        (("HY-V4", "--indexer-key-dtype", "fp4"), "got fp4, and HY-V4 has 16 indexer heads"),
        (("Llama-3.1-8B", "--indexer-key-dtype", "fp4"), "got fp4, and Llama-3.1-8B has no indexer"),
        (("Llama-3.1-8B", "--indexer-kv-dtype", "fp8"), "Llama-3.1-8B has no indexer"),
        (("GLM-5", "--gpu", "L40S", "--tensor-parallel-size", "64"), "got GLM-5, and L40S for --gpu"),
        (("Qwen3-8B", "--gpu", "A100", "--kv-cache-dtype", "fp8"), "got fp8, and A100 for --gpu"),
        (("GLM-5", "--tensor-parallel-size", "16", "--drafts", "2", "--device-buffer-size", "4096"), "(--drafts 2)"),
        (("Mixtral-8x7B", "--context", "33000"), "got 34024 tokens at most, expected up to the 32768"),
        (("Llama-3.1-8B", "--top-k", "100"), "expected a multiple of Quest's page of 16 tokens"),
        (("GLM-5", "--drafts", "4", "--tensor-parallel-size", "16"), "expected at most 3"),
        ((str(ROOT / "pyproject.toml"),), "is no JSON"),
        (
            ("Llama-3.1-8B", "--gpu", str(ROOT / "benchmarks" / "models" / "code-dsa" / "config.json")),
            "the report has no GPU: run",
        ),
        (("Llama-3.1-8B", "--tensor-parallel-size", "3"), "expected a divisor of the 32 attention heads"),
        (("GLM-4.5", "--tensor-parallel-size", "6"), "expected a divisor or a multiple of the 8 KV heads"),
        (("Llama-3.1-8B", "--context", "9000-400"), "expected tokens as a number"),
        (("Llama-3.1-8B", "--context", "0"), "expected tokens as a number"),
        (("Llama-3.1-8B", "--context", "200000"), "that Llama-3.1-8B takes"),
        (("DeepSeek-V3.2", "--top-k", "1024", "--tensor-parallel-size", "8"), "expected the model's index_topk, 2048"),
        (("Llama-3.1-8B", "--kv-cache-dtype", "int4"), "expected one of auto, bfloat16, fp8"),
        (("Llama-3.1-8B", "--import-buffer-gib", "140"), "--import-buffer-gib: got 140, and H200 for --gpu"),
        (("Llama-3.1-8B", "--import-buffer-gib", "0.0001"), "got 0.0001, expected at least 0.0586, 2 blocks of all"),
        (("Llama-3.1-8B", "--hit-rate", "1.5"), "'--hit-rate': got '1.5', expected a number less than or equal to 1"),
        (("Llama-3.1-8B", "--hit-rate", "90%"), "got '90%', expected a valid number"),
        (("Llama-3.1-8B", "--host-memory-gib=0"), "got '0', expected a number greater than or equal to 1"),
        (("Llama-3.1-8B", "--host-memory-gib", "nan"), "got 'nan', expected a number"),
        (("Llama-3.1-8B", "--context", "500-"), "got '500-', expected tokens as a number, as LOW-HIGH"),
        (
            ("DeepSeek-V3.2", "--device-kv-gib", "20"),
            "DeepSeek-V3.2 needs 625.6 GiB on each for weights: lower it, raise",
        ),
        (
            ("GLM-5", "--tensor-parallel-size", "8", "--gpu-memory-utilization", "0.4"),
            "vLLM may use 55.9 GiB (0.4 of H200's 139.8 GiB)",
        ),
        (
            ("MiniMax-M3", "--tensor-parallel-size", "4", "--indexer-key-dtype", "fp4"),
            "MiniMax-M3 selects blocks: only",
        ),
        (("Llama-3.1-8B", "--device-kv-gib", "100", "--import-buffer-gib", "40"), "--import-buffer-gib: got 40"),
        (("GLM-5", "--tensor-parallel-size", "8", "--import-buffer-gib", "1"), "got 1, and 16 GPUs for a prefill"),
        (("Qwen3-8B", "--data-parallel-size", "5", "--import-buffer-gib", "1"), "pair, expected up to 8: larger pairs"),
    ],
)
def test_refusals(words: tuple[str, ...], expected: str) -> None:
    assert expected in refusal(*words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--host-memory-gib", "inf"), "--host-memory-gib"),
        (("--host-memory-gib", "nan"), "--host-memory-gib"),
        (("--host-memory-gib", "1e300"), "--host-memory-gib"),
        (("--request-rate", "inf"), "--request-rate"),
        (("--request-rate", "1e308"), "--request-rate"),
        (("--hit-rate", "nan"), "--hit-rate"),
        (("--device-kv-gib", "inf"), "got inf, expected a finite number"),
        (("--context", "4" * 5000), "expected tokens as a number, as LOW-HIGH"),
        (("--context", "4" * 400), "expected tokens as a number, as LOW-HIGH"),
        (("--context", str(ROOT / "benchmarks" / "traces" / "code-dsa.trace")), "expected tokens as a number"),
        (("--gpu", f"{'x' * 5000}.json"), "File name too long"),
        (("--output-tokens", "131072"), "got 131072 tokens at most, expected fewer than the 131072 that"),
        (("--host-memory-gib", "1", "--data-parallel-size", "16"), "1, and 16 ranks, expected at least 1.6: 0.1"),
        (("--trace", str(ROOT / "benchmarks")), "Is a directory"),
    ],
)
def test_numbers_and_names_that_nothing_can_use(words: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("Llama-3.1-8B", *words)
    assert "File name too long" in refusal("x" * 5000)


def test_a_short_model_blames_what_was_given(tmp_path: Path) -> None:
    """Nobody gave --context; the default of --output-tokens is too much."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Llama-3.1-8B"] | {"max_position_embeddings": 100}))
    message = refusal(str(tmp_path))
    assert "--output-tokens" in message and "--context" not in message and "got 1024 tokens at most" in message
    assert planned(str(tmp_path), "--output-tokens", "99")["concurrency"] > 0


def test_pools_are_not_larger_than_the_memory() -> None:
    """Helm values have whole GiB, or tenths of one."""
    for ranks, pool, of_chart in ((2, 0.9, 0.9), (1, 1.9, 1)):
        words = ("Qwen3-8B", "--host-memory-gib", "1.99", "--data-parallel-size", str(ranks), "--context", "2000")
        found = planned(*words)
        assert found["ray_options"]["decode"]["hisparse"]["host_pool_gib"] == pool
        decode = found["helm_values"]["decode"]
        assert (decode["hisparse"]["hostPoolGiB"], decode["memoryGiB"]) == (of_chart, of_chart + 16)
        assert f'"host_pool_gib": {pool}' in found["commands"]["decode"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("--host-memory-gib", "1"),
            "one request of 33792 tokens (--context and --output-tokens) needs 2.5 GiB of host",
        ),
        (("--context", "500-60000", "--host-memory-gib", "4"), "one request of 61056 tokens"),
        (("--device-kv-gib", "0.1"), "needs 0.54 GiB of device memory for KV, and a GPU has 0.10"),
    ],
)
def test_no_commands_of_engines_that_would_not_start(words: tuple[str, ...], reason: str) -> None:
    """An engine needs room for one request of --max-model-len."""
    model = ("DeepSeek-V3.2", "--tensor-parallel-size", "8")
    found = planned(*model, *words)
    assert reason in found["start_refusal"] and found["commands"] == {}
    assert found["helm_values"] is found["ray_options"] is None
    assert found["helm_refusal"] == found["ray_refusal"] == found["start_refusal"]
    shown = " ".join(invoke(*model, *words).output.split())
    assert f"because no engine would start: {found['start_refusal']}." in shown and "vllm serve" not in shown
    device = "--device-kv-gib" in words
    more = "more device memory for KV (raise --device-kv-gib)" if device else "more host memory (--host-memory-gib)"
    assert (more in found["verdict"]) == ("Not one request fits" in found["verdict"])
    assert planned(*model)["start_refusal"] is None


def test_remedies_help() -> None:
    ranks = planned("Qwen3-8B", "--data-parallel-size", "4", "--host-memory-gib", "8")["start_refusal"]
    assert "needs 4.7 GiB of host memory, and a rank has 2: raise --host-memory-gib to 20 at least" in ranks
    assert not planned("Qwen3-8B", "--data-parallel-size", "4", "--host-memory-gib", "20")["start_refusal"]
    buffer = planned("Llama-3.1-8B", "--gpu", "H100", "--import-buffer-gib", "55")
    assert "a GPU has 0.25: lower --import-buffer-gib, or plan" in buffer["start_refusal"]
    assert "raise --tensor-parallel-size or --gpu-memory-utilization" in refusal("Llama-3.3-70B", "--gpu", "H100")
    tight = planned("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--device-kv-gib", "0.5352")["start_refusal"]
    assert "needs 0.54 GiB of device memory for KV, and a GPU has 0.53" in tight


def test_no_pair_whose_prefill_side_would_not_start() -> None:
    """It has full KV on the same GPUs, in the memory that vLLM uses by default."""
    words = ("Llama-3.3-70B", "--tensor-parallel-size", "2", "--gpu", "H100", "--context")
    found = planned(*words, "120000")
    assert list(found["commands"]) == ["one instance"] and found["start_refusal"] is None
    assert "a prefill instance has full KV, one request of 121024 tokens" in found["pair_refusal"]
    assert found["helm_refusal"] == found["ray_refusal"] == found["pair_refusal"]
    shown = " ".join(invoke(*words, "120000").output.split())
    assert f"There is no prefill/decode pair: {found['pair_refusal']}." in shown and "8100" not in shown
    assert list(planned(*words, "12000")["commands"]) == ["one instance", "prefill", "decode", "router"]


def test_models_that_the_plugin_refuses_keep_their_command(tmp_path: Path) -> None:
    """Their layers may need less KV than the full attention that is counted."""
    layers = [f"{'full' if layer % 6 == 5 else 'sliding'}_attention" for layer in range(32)]
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Llama-3.1-8B"] | {"layer_types": layers}))
    found = planned(str(tmp_path), "--gpu", "L40S", "--context", "130000", "--device-kv-gib", "2")
    assert found["not_hosted"] and found["start_refusal"] is found["pair_refusal"] is None
    assert list(found["commands"]) == ["one instance"] and "if every layer has full KV" in found["verdict"]


def test_a_directory_with_the_name_of_a_preset_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "GLM-5"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["GLM-5"]))
    words = ("--tensor-parallel-size", "8", "--gpu", "B300")
    for model in (folder, folder / "config.json"):
        assert f"serve {folder} " in planned(str(model), *words)["commands"]["one instance"]
    found = planned(str(folder), *words, "--weight-dtype", "bfloat16")
    assert f"serve {folder} " in found["commands"]["one instance"]
    assert found["weights_note"].endswith(f"and {folder} has 8: set a checkpoint with such weights in the commands.")


def test_the_charts_whole_gib_hold_a_request() -> None:
    words = ("DeepSeek-V3.2", "--tensor-parallel-size", "8", "--context", "60000", "--host-memory-gib", "4.9")
    found = planned(*words)
    assert found["commands"] and found["ray_options"] and found["helm_values"] is None
    assert "and a rank has 4: raise" in found["helm_refusal"] and found["ray_refusal"] is None


def test_commands_say_that_their_checkpoint_has_other_weights(tmp_path: Path) -> None:
    note = planned("Qwen3-8B", "--weight-dtype", "fp8")["weights_note"]
    assert note.startswith("The plan has weights of 8 bits (--weight-dtype fp8), and Qwen/Qwen3-8B has 16: set a")
    bf16 = ("--weight-dtype", "bfloat16", "--gpu", "B300", "--tensor-parallel-size", "8")
    assert "deepseek-ai/DeepSeek-V3.2 has 8" in planned("DeepSeek-V3.2", *bf16)["weights_note"]
    assert planned("GLM-5", *bf16)["weights_note"] is None, "its checkpoint in bfloat16 is known"
    assert planned("Qwen3-8B", "--weight-dtype", "bfloat16")["weights_note"] is None
    assert planned("Qwen3-8B")["weights_note"] is None
    told = {"quant_method": "fp8", "ignore": ["self_attn"]}
    for quantization, expected in ((told, "has 16 in attention: set"), ({"quant_method": "x"}, "is not known: see")):
        config = PRESETS["Llama-3.1-8B"] | {"quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert expected in planned(str(tmp_path), "--weight-dtype", "fp8")["weights_note"]
    shown = " ".join(invoke("Qwen3-8B", "--weight-dtype", "fp8").output.split())
    assert "set a checkpoint with such weights in the commands." in shown


def test_the_chart_has_no_values_for_more_gpus_than_its_schema_takes() -> None:
    schema = json.loads((ROOT / "deploy" / "helm" / "vllm-hisparse" / "values.schema.json").read_text())
    assert schema["properties"]["decode"]["properties"]["gpus"]["maximum"] == 8
    words = ("GLM-5", "--kv-cache-dtype", "fp8", "--tensor-parallel-size")
    assert planned(*words, "8")["helm_values"]["decode"]["gpus"] == 8
    found = planned(*words, "16")
    assert found["helm_values"] is None and found["ray_options"]["decode"]["gpus"] == 16
    output = " ".join(invoke(*words, "16").output.split())
    assert "none: a pod of the chart has at most 8 GPUs, not 16: use the commands" in output


def test_a_large_concurrency_is_planned_at_once() -> None:
    """All but the requests that fit wait, so the plugin pays from the same number on."""
    words = ("GLM-5.2", "--tensor-parallel-size", "8", "--concurrency")
    found = planned(*words, "1000000")
    most = max(system["seats"] for system in found["systems"].values())
    assert 1 < found["crossover"] <= most
    assert planned(*words, str(most + 50))["crossover"] == found["crossover"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plan.foo", "expected a name that ends with one of"),
        ("plan", "expected a name that ends with one of"),
        ("folder.png", "Is a directory"),
        ("fifo.png", "expected a file"),
        ("file/plan.png", "Not a directory"),
    ],
)
def test_pictures_that_cannot_be_written_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "file").touch()
    monkeypatch.setattr(plan_command, "commands", lambda *_: pytest.fail("work has begun"))
    message = refusal("Llama-3.1-8B", "--chart", str(tmp_path / name))
    assert "--chart" in message and expected in message


def trace_of(path: Path, *num_steps: int) -> str:
    """Write a trace with requests of so many steps; return its name."""
    positions = [(50, np.tile(np.arange(4), (1, steps, 1))) for steps in num_steps]
    Trace.from_ranked("m", 4, 16, ("0",), (4,), positions).write(path)
    return str(path)


@pytest.mark.parametrize(
    ("num_steps", "got"),
    [((), "no requests"), ((0, 40), "requests of 0 to 40"), ((32, 8), "requests of 8 to 32")],
)
def test_traces_without_steps_are_refused(tmp_path: Path, num_steps: tuple[int, ...], got: str) -> None:
    message = refusal("Llama-3.1-8B", "--trace", trace_of(tmp_path / "some.trace", *num_steps))
    assert "--trace" in message and f"got {got}" in message
    planned("Llama-3.1-8B", "--trace", trace_of(tmp_path / "other.trace", 33, 8))


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"gpu": "H100"}, "gpu: got 'H100', expected a valid dictionary"),
        ({"gpu": {"name": None}}, "gpu.name: got None, expected a valid string"),
        ({"rates": [1]}, "rates: got [1], expected a valid dictionary"),
        ({"gpu": {"name": "H100", "memory_gib": "79"}}, "gpu.memory_gib: got '79', expected a valid number"),
        ({"gpu": {"name": "H100", "memory_gib": float("nan")}}, "gpu.memory_gib: got nan, expected a finite number"),
        ({"gpu": {"name": "H100"}, "rates": {"pinned_rows_gb_s": -3}}, "rates.pinned_rows_gb_s: got -3, expected grea"),
        ({"gpu": {"name": "H100"}, "rates": {"pinned_rows_gb_s": "30"}}, "rates.pinned_rows_gb_s: got '30'"),
        ([], "got [], expected an object"),
    ],
)
def test_reports_of_wrong_types_are_refused(tmp_path: Path, report: Any, expected: str) -> None:
    (tmp_path / "doctor.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=re.escape(expected)):
        Gpu.find(str(tmp_path / "doctor.json"))
    assert "--gpu" in refusal("Llama-3.1-8B", "--gpu", str(tmp_path / "doctor.json"))


def test_numbers_that_a_doctor_does_not_know_come_from_the_datasheet() -> None:
    gpu = Gpu.from_doctor({"gpu": {"name": "H100", "memory_gib": None}, "rates": None})
    assert (gpu.memory_gib, gpu.link_gb_s) == (GPUS["H100"].memory_gib, GPUS["H100"].link_gb_s)


def test_several_mtp_layers_draft_one_token(tmp_path: Path) -> None:
    """The engine refuses more drafts."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["DeepSeek-V3.2"] | {"num_nextn_predict_layers": 3}))
    words = (str(tmp_path), "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--drafts")
    assert "--speculative-config" in planned(*words, "1")["commands"]["decode"]
    message = refusal(*words, "2")
    assert "--drafts" in message and "got 2, expected 1:" in message and "has 3 MTP layers" in message


@pytest.mark.parametrize(("model", "unit"), [("GLM-5", 1), ("Llama-3.1-8B", 16), ("MiniMax-M3", 16)])
def test_buffers_are_as_large_as_the_kernels_take(model: str, unit: int) -> None:
    words, most = (model, "--tensor-parallel-size", "8", "--device-buffer-size"), (MAX_HOT_ROWS - BLOCK_SIZE) * unit
    assert f'"device_buffer_size": {most}' in planned(*words, str(most))["commands"]["decode"]
    assert f"expected at most {most}, the rows that the kernels take" in refusal(*words, str(most + unit))


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, 16),
        ({}, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, 16),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}}, 4),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "int4"}]}, "layer_quant_config": {}},
            4,
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4"}},
                "layer_quant_config": {
                    "*k_proj": {"weight": {"dtype": "fp4"}, "output_tensors": {"dtype": "fp8_e4m3"}}
                },
            },
            4,
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}, 4),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8DynamicActivationInt4WeightConfig"}}},
            4,
        ),
        ({"quant_method": "torchao", "quant_type": {"default": "float8_dynamic_activation_float8_weight"}}, 8),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A16_AWQ"}},
            },
            4,
        ),
    ],
)
def test_bits_of_weights(quantization: dict | None, bits: int) -> None:
    """In 4 bits, a weight has half a byte, and a scale of one byte for 32 weights."""
    config = PRESETS["Llama-3.3-70B"] | {"quantization_config": quantization}
    shape, bf16 = (ModelShape.from_config("m", config, "auto", dtype) for dtype in ("auto", "bfloat16"))
    head = 2 * config["hidden_size"] * config["vocab_size"]
    share = {16: 1.0, 8: 0.5, 4: (0.5 + 1 / 32) / 2}[bits]
    assert shape.weight_bits == bits
    assert shape.weight_bytes - head == pytest.approx((bf16.weight_bytes - head) * share)
    assert [ModelShape.from_config("m", config, "auto", dtype).weight_bits for dtype in ("fp8", "fp4")] == [8, 4]


@pytest.mark.parametrize(
    ("quantization", "got"),
    [
        ({"quant_method": "gptq", "bits": 3}, "got gptq with weights of 3 bits"),
        ({"quant_method": "quark", "bits": [4]}, "got quark with weights of [4] bits"),
        ({"quant_method": "quark"}, "got quark with an unknown number of bits"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
                "layer_quant_config": {"*experts*": {"weight": {"dtype": "fp4"}}},
            },
            "got quark with weights of 8 and 4 bits",
        ),
        ({"quant_method": "torchao", "quant_type": 3}, "got torchao with an unknown number of bits"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "AutoQuant"}}}, "got torchao with an unknown"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            },
            "got MIXED_PRECISION with weights of 8 and 4 bits",
        ),
        ({"quantization": {"quant_algo": "MIXED_PRECISION"}}, "got MIXED_PRECISION with an unknown number of bits"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}, "of 4 and 8 bits"),
        ({"config_groups": {"a": {"weights": None}, "b": 3}}, "got no quant_method with an unknown number of bits"),
    ],
)
def test_bits_that_are_unknown_are_refused(quantization: dict, got: str) -> None:
    config = PRESETS["Llama-3.3-70B"] | {"quantization_config": quantization}
    with pytest.raises(ModelError, match=f"quantization_config of config.json: .*{re.escape(got)}"):
        ModelShape.from_config("m", config, "auto")
    assert ModelShape.from_config("m", config, "auto", "fp8").weight_bits == 8


@pytest.mark.parametrize(
    ("algorithm", "bits"),
    [("NVFP4", 4), ("W4A16_NVFP4", 4), ("W4A8_AWQ", 4), ("fp8_pb_wo", 8), ("MXFP8", 8)],
)
def test_bits_are_read_beside_config_json(tmp_path: Path, algorithm: str, bits: int) -> None:
    """ModelOpt before 0.31 writes them to a file of their own, which vLLM reads if config.json does not tell."""
    config = PRESETS["Llama-3.1-8B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert ModelShape.load(str(tmp_path)).weight_bits == bits
    assert ModelShape.load(str(tmp_path / "config.json")).weight_bits == bits
    told = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config | told))
    assert ModelShape.load(str(tmp_path)).weight_bits == 4


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (
            {"quantization": {"quant_algo": "MIXED_PRECISION"}},
            "hf_quant_config.json: got MIXED_PRECISION with an",
        ),
        ({"quantization": {"quant_algo": None}}, "hf_quant_config.json: got no quant_method with an unknown"),
        ([], "hf_quant_config.json is no configuration of a model: got a list"),
    ],
)
def test_files_beside_config_json_that_tell_no_bits_are_refused(tmp_path: Path, content: Any, got: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Llama-3.1-8B"]))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=re.escape(got)):
        ModelShape.load(str(tmp_path))


@pytest.mark.parametrize(
    ("kept", "share"),
    [
        ({"ignore": ["lm_head", "model.layers.*.self_attn*"]}, 1.0),
        ({"ignore": ["re:.*self_attn.*"]}, 1.0),
        ({"ignore": ["re:model[.]layers[.][0-7][.]self_attn[.].*"]}, 0.1),
        ({"ignore": ["re:("]}, 0.0),
        ({"ignored_layers": ["self_attn"]}, 1.0),
        (
            {"modules_to_not_convert": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(20)]},
            0.25 * 64 / 144,
        ),
        ({"exclude_modules": ["model.layers.1*"]}, 11 / 80),  # 1, and 10 to 19
        ({"exclude": ["lm_head", "model.layers.7.mlp", 3]}, 0.0),
        ({"ignore": ["model.language_model.layers.*.self_attn*"]}, 1.0),
        ({"ignore": [r"re:.*language_model\.layers.*self_attn.*"]}, 1.0),
        ({"ignore": ["*q_proj", "*k_proj", "*v_proj"]}, 80 / 144),
        ({"ignore": None, "exclude": 3}, 0.0),
    ],
)
def test_attention_that_a_checkpoint_leaves_in_16_bits(tmp_path: Path, kept: dict, share: float) -> None:
    """With --weight-dtype, all weights have this width."""
    config = PRESETS["Llama-3.3-70B"]
    hidden, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    attention = config["num_hidden_layers"] * heads * hidden * size
    told = {"quant_method": "fp8"} | kept
    inline, plain = (
        ModelShape.from_config("m", config | {"quantization_config": each}, "auto")
        for each in (told, {"quant_method": "fp8"})
    )
    assert inline.weight_bytes - plain.weight_bytes == pytest.approx(share * attention)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"} | kept}))
    assert ModelShape.load(str(tmp_path)).weight_bytes == pytest.approx(inline.weight_bytes)
    assert ModelShape.load(str(tmp_path), weight_dtype="fp8").weight_bytes == pytest.approx(plain.weight_bytes)


def test_latent_attention_that_a_checkpoint_leaves_in_16_bits() -> None:
    """The indexers are a part of it."""
    config, plain = PRESETS["DeepSeek-V3.2"], {"quant_method": "fp8"}
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    output = layers * heads * config["v_head_dim"] * hidden
    fields = "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"
    query, latent, nope, rope, value, index = (config[field] for field in fields)
    others = hidden * query + query * heads * (nope + rope) + hidden * (latent + rope) + latent * heads * (nope + value)
    indexer = query * config["index_n_heads"] * index + hidden * (index + config["index_n_heads"])
    found = {}
    for name, kept in (("none", []), ("output", ["*o_proj"]), ("all", ["*self_attn*"])):
        shape = ModelShape.from_config("m", config | {"quantization_config": plain | {"ignore": kept}}, "fp8")
        found[name] = shape.weight_bytes
    assert found["output"] - found["none"] == pytest.approx(output)
    assert found["all"] - found["none"] == pytest.approx(output + layers * (others + indexer))


def test_odd_files_of_a_checkpoint(tmp_path: Path) -> None:
    config, broken = PRESETS["Llama-3.1-8B"], tmp_path / "hf_quant_config.json"
    (tmp_path / "config.json").write_text(json.dumps(config | {"hf_quant_config": "x"}))
    assert ModelShape.load(str(tmp_path)).weight_bits == 16
    broken.write_text("no JSON")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert ModelShape.load(str(tmp_path)).weight_bits == 8, "config.json tells, so the other file is not read"
    nested = config | {"quantization_config": {"quant_method": "fp8"}, "text_config": {"quantization_config": None}}
    assert ModelShape.from_config("m", nested, "auto").weight_bits == 8


def test_a_plan_says_how_weights_in_4_bits_are_counted(tmp_path: Path) -> None:
    config = PRESETS["Llama-3.1-8B"] | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    four, bf16 = planned(str(tmp_path)), planned(str(tmp_path), "--weight-dtype", "bfloat16")
    assert "a scale of one byte for every 32" in four["confidence"] and "4 bits" not in bf16["confidence"]
    assert four["weights_gib_per_gpu"] < 0.35 * bf16["weights_gib_per_gpu"]


def test_heads_without_elements_are_named() -> None:
    config = PRESETS["Llama-3.1-8B"] | {"head_dim": None, "hidden_size": 31}
    with pytest.raises(
        ModelError, match=r"^m: hidden_size of config\.json: got 31, expected at least the 32 attention"
    ):
        ModelShape.from_config("m", config, "auto")


def of_blocks(**changes: Any) -> dict[str, Any]:
    """Configuration of MiniMax-M3 with other sizes of its indexers."""
    preset = PRESETS["MiniMax-M3"]
    return preset | {"sparse_attention_config": preset["sparse_attention_config"] | changes}


REFUSED = {
    "v3": (PRESETS["DeepSeek-V3.2"] | {"index_topk": None}, "no indexer"),
    "step5": (PRESETS["Llama-3.1-8B"] | {"architectures": ["Step5ForCausalLM"]}, "a sliding window are mixed"),
    "vision": (
        {"architectures": ["Step5ForConditionalGeneration"], "text_config": PRESETS["Llama-3.1-8B"]},
        "a sliding window are mixed",
    ),
    "gemma": (PRESETS["Qwen3-8B"] | {"layer_types": ["sliding_attention", "full_attention"] * 18}, "18 of its layers"),
    "mistral": (PRESETS["Llama-3.1-8B"] | {"sliding_window": 4096}, "sliding window of 4096"),
    "two layers": (PRESETS["Llama-3.1-8B"] | {"num_hidden_layers": 2}, "its 2 layers are not more than the 2 that"),
    "one layer": (PRESETS["Llama-3.1-8B"] | {"num_hidden_layers": 1}, "none would have hot rows"),
    "many positions": (PRESETS["DeepSeek-V3.2"] | {"index_topk": 100_000}, "selects 100000 positions, more than the 4"),
    "no sparse layer": (PRESETS["HY-V4"] | {"layer_types": ["full_attention"] * 34}, "nothing selects positions"),
    "blocks of no layer": (of_blocks(sparse_attention_freq=[0] * 60), "nothing selects positions"),
    "small blocks": (of_blocks(sparse_block_size=64), "its sparse_block_size is 64, not 128"),
    "few heads": (of_blocks(sparse_num_index_heads=2), "its sparse_num_index_heads is 2, not 4, the KV heads"),
    "old blocks": (of_blocks(sparse_local_block=0), "its sparse_local_block is 0, not at least 1"),
    "no blocks": (of_blocks(sparse_topk_blocks=0), "its sparse_topk_blocks is 0, not at least 1"),
    "many blocks": (of_blocks(sparse_topk_blocks=513), "selects 65664 positions, more than the 65536"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_hosted_is_planned_with_full_kv(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = (str(tmp_path), "--context", "8000", "--tensor-parallel-size", "16")
    found = planned(*words)
    assert reason in found["not_hosted"] and found["crossover"] is None
    assert list(found["systems"]) == ["full KV"] and found["systems"]["full KV"]["tokens_per_s"] > 0
    assert list(found["commands"]) == ["one instance"] and "HiSparse" not in found["commands"]["one instance"]
    assert "does not host" in " ".join(invoke(*words).output.split())


def test_fp8_kv_of_a_dense_model_takes_half() -> None:
    fp8, bf16 = (planned("Llama-3.1-8B", "--kv-cache-dtype", dtype)["systems"] for dtype in ("fp8", "bfloat16"))
    host = [plan["vllm_hisparse"]["host_bytes_per_request"] for plan in (fp8, bf16)]
    assert host[0] == pytest.approx(host[1] / 2, rel=0.02)


def test_vllms_own_hisparse_is_planned_where_it_hosts_the_model(tmp_path: Path) -> None:
    names = ("DeepseekV32ForCausalLM", "SomeSparseForCausalLM")
    systems = []
    for name in names:
        (tmp_path / "config.json").write_text(json.dumps(PRESETS["DeepSeek-V3.2"] | {"architectures": [name]}))
        systems.append(planned(str(tmp_path), "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8")["systems"])
    assert list(systems[0]) == ["full KV", "native HiSparse", "vllm_hisparse"]
    assert list(systems[1]) == ["full KV", "vllm_hisparse"]


@pytest.mark.long
def test_more_gpus_than_a_host_has_are_named() -> None:
    words = ("GLM-5.2", "--kv-cache-dtype", "fp8", "--tensor-parallel-size")
    assert planned(*words, "8")["hosts"] is None
    assert "need a host with as many GPUs" in planned(*words, "16")["hosts"]
    dense = planned("Llama-3.1-8B", "--tensor-parallel-size", "16")["hosts"]
    assert dense == "16 tensor parallel ranks are on several hosts, which was never tried."
    assert "--data-parallel-address" in planned(*words, "4", "--data-parallel-size", "4")["hosts"]


def test_fp4_keys_are_planned_without_the_plugin() -> None:
    words = ("GLM-5", "--tensor-parallel-size", "8", "--gpu", "B200", "--kv-cache-dtype", "fp8", "--indexer-kv-dtype")
    fp4, fp8 = (planned(*words, dtype) for dtype in ("mxfp4", "fp8"))
    assert list(fp4["systems"]) == ["full KV", "native HiSparse"] and "layout of fp8" in fp4["not_hosted"]
    full = [plan["systems"]["full KV"]["device_bytes_per_request"] for plan in (fp4, fp8)]
    assert full[0] / full[1] == (656 + 68) / (656 + 132)


def test_keys_in_4_bits() -> None:
    from vllm_hisparse.config import HiSparseConfig
    from vllm_hisparse.ops.indexer_keys import KEY_BYTES

    words = ("GLM-5", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--context", "100000")
    fp4, fp8 = (planned(*words, "--indexer-key-dtype", dtype) for dtype in ("fp4", "auto"))
    assert list(fp4["commands"]) == ["one instance", "prefill", "decode", "router"]
    for title in ("one instance", "decode"):
        words = [word for word in shlex.split(fp4["commands"][title]) if not re.match(r"[A-Z_]+=", word)]
        extra = parser().parse_args(words[2:]).kv_transfer_config
        assert HiSparseConfig.from_extra_config(extra.kv_connector_extra_config).indexer_key_dtype == "fp4"
    assert "indexer_key_dtype" not in fp4["commands"]["prefill"]
    plugin = [plan["systems"]["vllm_hisparse"] for plan in (fp4, fp8)]
    saved = 101_024 * 78 * (132 - KEY_BYTES)  # bytes of a request
    assert plugin[1]["device_bytes_per_request"] - plugin[0]["device_bytes_per_request"] == pytest.approx(
        saved, rel=0.1
    )
    assert plugin[1]["host_bytes_per_request"] == plugin[0]["host_bytes_per_request"]
    assert [plan["systems"]["full KV"]["seats"] for plan in (fp4, fp8)] == [fp8["systems"]["full KV"]["seats"]] * 2
    assert ("4 bits were not timed" in fp4["confidence"]) != has_timed_narrow_keys()
    assert "4 bits" not in fp8["confidence"]


def test_without_measurements_bytes_make_the_difference_of_narrow_keys() -> None:
    factors = json.loads(CALIBRATION.read_text())["factors"]
    factors["indexer"] = {name: value for name, value in factors["indexer"].items() if "narrow" not in name}
    shape = ModelShape.load("DeepSeek-V3.2", "fp8")
    wide, narrow, full = (
        Step(shape, GPUS["H200"], system, 40, 32_768, 2048, drafts=1, has_narrow_keys=is_narrow)
        for system, is_narrow in ((System.plugin, False), (System.plugin, True), (System.full, True))
    )
    keys_ms = 40 * 32_768 * 61 * 132 / 4.8e9
    factor = factors["step"]["kernels"] * (factors["indexer"]["keys"] + factors["indexer"]["keys of drafts"])
    indexers = [step.parts_ms(factors)["indexer"] for step in (wide, narrow, full)]
    assert indexers[0] - indexers[1] == pytest.approx(keys_ms * (132 - 68) / 132 * factor)
    assert indexers[2] == indexers[0]
    factors["indexer"] |= {"narrow keys": 0.0, "narrow keys of drafts": 0.0}
    assert wide.parts_ms(factors)["indexer"] - narrow.parts_ms(factors)["indexer"] == pytest.approx(keys_ms * factor)


def measured_file(folder: Path, *changes: dict[str, Any]) -> str:
    """A result file with one row of the plugin at full depth for each of these changes; returns its name."""
    source = json.loads((ROOT / "benchmarks" / "results" / "h200" / "full_depth.json").read_text())
    row = next(row for row in source["rows"] if (row["system"], row["context"]) == ("ours", 32_768))
    (folder / "full_depth.json").write_text(json.dumps(source | {"rows": [row | each for each in changes]}))
    return "full_depth.json"


def test_rows_with_other_options_are_other_cases(tmp_path: Path) -> None:
    same, full = {"admission": "off", "tokens_per_s": 3000.0}, {"system": "full", "admission": "auto", "hit_rate": None}
    changes = {}, same, {"admission": "auto"}, {"indexer_key_dtype": "fp4"}, full
    rows = read_rows(tmp_path, "full depth", measured_file(tmp_path, *changes))
    assert [row.repeats for row in rows] == [2, 1, 1, 1]
    assert [row.is_limited for row in rows] == [False, True, False, False]
    assert [row.has_narrow_keys for row in rows] == [False, False, True, False]
    first, limited, narrow, _ = rows
    assert limited.case == f"{first.case}, admission auto" and narrow.case == f"{first.case}, keys in 4 bits"


def test_more_requests_with_narrow_keys_fit(tmp_path: Path) -> None:
    factors = json.loads(CALIBRATION.read_text())["factors"]
    changes = [{"device_kv_gib": 8.0, "requests": 200, "indexer_key_dtype": dtype} for dtype in ("auto", "fp4")]
    wide, narrow = read_rows(tmp_path, "full depth", measured_file(tmp_path, *changes))
    assert narrow.running(factors) > 1.2 * wide.running(factors)
    assert narrow.measured_step().total_ms(factors) == pytest.approx(wide.measured_step().total_ms(factors), rel=0.03)


@pytest.mark.slow
def test_narrow_keys_get_factors_of_their_own() -> None:
    """Rows of which a step takes what planted factors give; no other factor changes."""
    rows = [row for row in all_rows() if not row.has_narrow_keys]
    found, narrow = fit(rows), []
    planted = found | {"indexer": found["indexer"] | {"narrow keys": 2.5, "narrow keys of drafts": 0.8}}
    for row in rows:
        if row.group in ("full depth", "drafts") and row.system == System.plugin and row.output is None:
            own = replace(row, row=row.row | {"indexer_key_dtype": "fp4"})
            step_ms = own.measured_step().total_ms(planted)
            narrow.append(replace(own, row=own.row | {"itl_ms_p50": step_ms / own.row["tokens_per_step"]}))
    assert {part: pytest.approx(costs, abs=1e-3) for part, costs in fit(rows + narrow).items()} == planted
    without_drafts = [row for row in narrow if not row.row["drafts"]]
    assert "narrow keys of drafts" not in fit(rows + without_drafts)["indexer"]


@pytest.mark.long
def test_a_limit_is_where_tokens_per_s_are_most(tmp_path: Path) -> None:
    """With 100 requests of 12K tokens and little locality, fewer than fit give the most tokens/s."""
    case = {"context": 12_000, "requests": 100, "overlap": 0.3}
    rows = read_rows(tmp_path, "full depth", measured_file(tmp_path, case, case | {"admission": "auto"}))
    factors = fit(all_rows())
    free, limited = (row.predict(factors) for row in rows)
    assert limited["predicted_running"] < free["predicted_running"] <= 100
    assert limited["predicted_tokens_per_s"] > 1.1 * free["predicted_tokens_per_s"]
    speeds = [running / rows[1].step(running).total_ms(factors) * 1e3 for running in range(1, 101)]
    assert 0.98 * max(speeds) <= limited["predicted_tokens_per_s"] <= max(speeds) + 0.1
    assert fit([*all_rows(), rows[1]]) == factors
    near = limited | {"measured_tokens_per_s": limited["predicted_tokens_per_s"], "measured_running": 1}
    assert is_predicted(near) and not is_predicted({name: near[name] for name in near if name != "is_limited"})


def test_a_size_that_is_null_has_its_default() -> None:
    """Transformers does the same: old checkpoints without grouped queries have null for the number of KV heads."""
    config = PRESETS["Llama-3.1-8B"]
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "text_config"))
    without = {key: value for key, value in config.items() if key not in nulls}
    assert ModelShape.from_config("m", config | nulls, "auto") == ModelShape.from_config("m", without, "auto")
    assert ModelShape.from_config("m", config | nulls, "auto").num_kv_heads == config["num_attention_heads"]


@pytest.mark.parametrize("value", [0, -3, "32", 32.0, True])
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads"])
def test_a_size_that_is_no_number_of_something_is_named(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"^m: {name} of config.json: got {value!r}, expected a whole number above 0$"):
        ModelShape.from_config("m", PRESETS["Llama-3.1-8B"] | {name: value}, "auto")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text_config": [1]}, "text_config of config.json: got [1], expected an object"),
        ({"intermediate_size": "14336"}, "intermediate_size of config.json: got '14336', expected a whole number, 0"),
        ({"vocab_size": "128"}, "vocab_size of config.json: got '128'"),
        ({"num_experts": "8"}, "num_experts of config.json: got '8'"),
        ({"mlp_layer_types": 5}, "mlp_layer_types of config.json: got 5, expected a list of names"),
        ({"index_topk": "2048"}, "index_topk of config.json: got '2048'"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers of config.json: got '1'"),
        ({"index_topk_freq": "4"}, "index_topk_freq of config.json: got '4'"),
        ({"indexer_types": 5}, "indexer_types of config.json: got 5, expected a list of names"),
        ({"index_topk_pattern": 5}, "index_topk_pattern of config.json: got 5, expected a string"),
        ({"sparse_attention_config": [1]}, "sparse_attention_config of config.json: got [1], expected an object"),
        ({"quantization_config": "fp8"}, "quantization_config of config.json: got 'fp8', expected an object"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(changes: dict, expected: str) -> None:
    with pytest.raises(ModelError, match=f"^m: {re.escape(expected)}"):
        ModelShape.from_config("m", PRESETS["DeepSeek-V3.2"] | changes, "auto")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sparse_topk_blocks": None}, "config.json has no sparse_topk_blocks"),
        ({"sparse_attention_freq": None}, "config.json has no sparse_attention_freq"),
        ({"sparse_attention_freq": 1}, "sparse_attention_freq of config.json: got 1, expected a list of 60"),
        ({"sparse_attention_freq": [1] * 59}, "got a list of 59, expected a list of 60 whole numbers"),
        ({"sparse_attention_freq": ["1"] * 60}, "expected a list of 60 whole numbers"),
        ({"sparse_block_size": "128"}, "sparse_attention_config.sparse_block_size of config.json: got '128'"),
        ({"sparse_index_dim": 0}, "sparse_attention_config.sparse_index_dim of config.json: got 0"),
    ],
)
def test_wrong_indexers_of_blocks_are_named(changes: dict, expected: str) -> None:
    with pytest.raises(ModelError, match=re.escape(expected)):
        ModelShape.from_config("m", of_blocks(**changes), "auto")


def test_a_model_without_sizes_is_refused() -> None:
    with pytest.raises(ModelError, match="has no qk_rope_head_dim"):
        config = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "kv_lora_rank": 4}
        ModelShape.from_config("tiny", config, "auto")


@pytest.mark.long
def test_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("Llama-3.1-8B", "--gpu", "H100", "--chart", str(tmp_path / "plan.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_minimax_m3_keeps_keys_and_full_layers_on_the_device() -> None:
    """60 layers of 4 KV heads of 128 elements; 57 of them have an indexer with one key of 128 elements."""
    shape = ModelShape.load("MiniMax-M3")
    assert (shape.top_k, shape.num_indexers, shape.num_full_kv_layers, shape.num_kv_heads) == (2048, 57, 3, 4)
    assert (shape.token_bytes, shape.key_bytes) == (137_472, 256) and shape.is_dsa and shape.has_kv_heads
    memory = KVMemory(shape, 80 * GIB, 900 * GIB, 1, 4096, 2048)
    full, host = memory.request_bytes(System.full, 1 << 17)
    assert (full, host) == (137_472 << 17, 0)
    assert memory.request_bytes(System.plugin, 1 << 17) == (1281 * 128 * 20_736, 137_472 << 17)
    divided = KVMemory(shape, 80 * GIB, 900 * GIB, 4, 4096, 2048)
    token_bytes = 57 * 512 + 3 * 512 + 57 * 256  # keys are the same on all ranks
    assert divided.request_bytes(System.full, 1 << 17) == (token_bytes << 17, 0)
    assert divided.request_bytes(System.plugin, 1 << 17)[1] == 4 * (token_bytes << 17)
    assert ModelShape.load("MiniMax-M3", key_dtype="fp8").token_bytes == 137_472 - 57 * 128
    assert ModelShape.load("MiniMax-M3").weight_bytes == pytest.approx(2 * 427e9, rel=0.05)
