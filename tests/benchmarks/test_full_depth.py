"""`benchmarks.full_depth` without an engine: cases, clocks, the model's configuration and traces."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer

from benchmarks import full_depth
from benchmarks.full_depth import Case, Clock, ModelName, Selection, merged, relative_speeds, scaled_trace, write_config
from benchmarks.kernel_profile import KernelProfile, times_by_kind
from benchmarks.selection_kernel import TRACE_LAYERS
from vllm_hisparse.cli.replay_layers import LayerMisses
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.trace import Trace


def test_cases_are_parsed() -> None:
    assert Case.parse("500x400") == Case(500, 400, Selection.independent, 0.87)
    assert Case.parse("32768x16+560:0.95") == Case(32768, 16, Selection.independent, 0.95, 560)
    assert Case.parse("35064x56:trace") == Case(35064, 56, Selection.trace)
    assert Case.parse("mixedx900") == Case(0, 900, Selection.independent, 0.87)


@pytest.mark.parametrize(
    "text", ["500", "x", "500x", "500x4+a", "500x4:often", "mixed", "500x4:trace", "mixedx9:trace"]
)
def test_cases_that_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected <context>x<requests>"):
        Case.parse(text)


@pytest.mark.parametrize(("texts", "ranks"), [(["500x4", "500x4:model"], 1), (["500x5"], 2), (["500x0"], 1)])
def test_cases_that_do_not_go_together(texts: list[str], ranks: int) -> None:
    with pytest.raises(typer.BadParameter, match="expected"):
        full_depth.check([Case.parse(text) for text in texts], ranks)


def test_a_clock_times_steps_from_the_first_that_counts() -> None:
    clock = Clock([(0.0, 4, 4), (1.0, 4, 4), (3.0, 2, 2), (3.5, 2, 0), (4.0, 2, 2)])
    summary = clock.summary(2)
    assert summary == {
        "tokens_per_s": round(4 / 3, 1),
        "itl_ms_p50": 1250.0,
        "itl_ms_p99": 2000.0,
        "tokens_per_step": 0.667,
        "running_max": 2,
        "steps": 2,
    }
    assert Clock([(0.0, 4, 4), (1.0, 4, 0)]).summary(1)["tokens_per_s"] is None


def test_a_step_that_accepts_drafts_has_lower_latencies() -> None:
    summary = Clock([(0.0, 4, 4), (1.0, 4, 6), (2.0, 4, 8)]).summary(1)
    assert (summary["tokens_per_s"], summary["tokens_per_step"], summary["running_max"]) == (7.0, 1.75, 4)
    assert summary["itl_ms_p50"] == 500.0


def test_a_clock_notes_the_steps_of_a_scheduler() -> None:
    scheduler = SimpleNamespace(update_from_output=lambda scheduled, output: output)
    clock = Clock()
    clock.attach(scheduler)
    output = SimpleNamespace(sampled_token_ids=[[5], [6, 7]])
    assert scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 3}), output) is output
    assert [(requests, tokens) for _, requests, tokens in clock.ends] == [(2, 3)]


def test_ranks_are_merged() -> None:
    rows = [{"tokens_per_s": 10.0, "itl_ms_p50": 2.0, "hit_rate": None}, {"tokens_per_s": 30.0, "itl_ms_p50": 4.0}]
    rows[1]["hit_rate"] = 0.5
    assert merged(rows) == {"tokens_per_s": 40.0, "itl_ms_p50": 3.0, "hit_rate": None}
    assert merged([{"kernel_ms": {"copies": 2.0, "experts": 1.0}}, {"kernel_ms": {"copies": 4.0}}]) == {
        "kernel_ms": {"copies": 3.0, "experts": 0.5}
    }


def test_speeds_are_relative_to_full_kv_of_the_same_case() -> None:
    def row(system: str, context: int, tokens_per_s: float) -> dict[str, object]:
        case = {"context": context, "requests": 4, "overlap": None, "selection": "trace", "shared_indexers": 1}
        return {"system": system, "tokens_per_s": tokens_per_s, **case}

    rows = [row("ours", 2048, 30.0), row("full", 2048, 20.0), row("full", 4096, 10.0), row("ours", 8192, 5.0)]
    short, long = "4 x 2K,\ntrace", "4 x 4K,\ntrace"
    assert relative_speeds(rows) == {("ours", short): 1.5, ("full", short): 1.0, ("full", long): 1.0}
    assert full_depth.title(rows[0] | {"shared_indexers": 4}) == f"{short},\nshared indexers"


def test_kernel_times_are_summed_by_kind() -> None:
    kernels = [
        ("void hisparse::(anonymous namespace)::resolve_kernel<2, false>(...)", 3000.0),
        ("hisparse::(anonymous namespace)::gather_kernel(hisparse::HostRows)", 8000.0),
        ("hisparse::(anonymous namespace)::stage_rows_kernel(hisparse::HostRows)", 3000.0),
        ("hisparse::(anonymous namespace)::save_rows_kernel(unsigned char const*)", 1000.0),
        ("hisparse::(anonymous namespace)::select_positions_kernel(float const*, long)", 2000.0),
        ("hisparse::(anonymous namespace)::indexer_logits_kernel(hisparse::NarrowKeys)", 1500.0),
        ("hisparse::(anonymous namespace)::insert_keys_kernel(hisparse::NarrowKeys)", 500.0),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 1000.0),
        ("fused_moe_kernel", 2000.0),
        ("nvjet_sm90_tst_8x64_64x16_4x1_v_bz_TNN", 500.0),
        ("triton_poi_fused_0", 250.0),
    ]
    times = times_by_kind(kernels, num_steps=2)
    assert list(times.items()) == [
        ("copies", 6.0),
        ("indexer", 2.0),
        ("resolve", 1.5),
        ("experts", 1.0),
        ("communication", 0.5),
        ("matrix products", 0.25),
        ("other", 0.125),
    ]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> KernelProfile:
    """Kernels run beside each other, inside each other, and after a pause."""
    kernels = [("a", 6000, 9000), ("b", 1000, 4000), ("c", 2000, 3000), ("d", 3000, 5000), ("e", 9500, 9750)]
    events = [
        SimpleNamespace(
            name=name,
            device_type=torch.autograd.DeviceType.CUDA,
            time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda start=start, end=end: end - start),
        )
        for name, start, end in kernels
    ]
    host = SimpleNamespace(device_type=torch.autograd.DeviceType.CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profile = KernelProfile()
    profile._kernel_profiler = SimpleNamespace(stop=lambda: None, events=lambda: [host, *events])
    return profile


def test_a_profile_says_how_long_no_kernel_runs(profile: KernelProfile) -> None:
    assert profile.stop_kernel_profile(2) == {"other": 4.625, "idle": 0.75}


def test_a_profile_names_the_kernels_that_take_longest(profile: KernelProfile) -> None:
    kinds, names = profile.stop_kernel_names(2)
    assert kinds == {"other": 9.25, "idle": 1.5}
    assert list(names.items()) == [("a", 3.0), ("b", 3.0)]


def test_the_model_is_as_asked_for(tmp_path: Path) -> None:
    config = json.loads(
        (write_config(tmp_path / "model", ModelName.deepseek, 5, 4, 96, 4, True) / "config.json").read_text()
    )
    assert config["num_hidden_layers"] == 5 and config["moe_intermediate_size"] == 96
    assert config["n_routed_experts"] == config["num_experts_per_tok"] == 4 and config["index_topk_freq"] == 4
    assert config["num_nextn_predict_layers"] == 1
    config = json.loads((write_config(tmp_path, ModelName.glm, 5, 4, 96, 1, False) / "config.json").read_text())
    assert "index_topk_freq" not in config and config["num_nextn_predict_layers"] == 0
    assert config["architectures"] == ["GlmMoeDsaForCausalLM"] and config["v_head_dim"] == 256


JOB = {
    "model": "some",
    "max_num_seqs": 4,
    "graph_sizes": [4],
    "drafts": 0,
    "quantization": None,
    "max_model_len": 4096,
    "kv_dtype": "fp8",
    "device_kv_gib": 1.0,
    "host_pool_gib": 2.0,
    "host_pool_memory": "auto",
    "device_buffer_size": 4096,
    "elastic": True,
    "admission": "off",
    "indexer_key_dtype": "auto",
    "tensor_parallel": 1,
    "data_parallel": 1,
    "forces_selections": True,
}


def test_layers_get_their_shares_only_if_they_differ() -> None:
    def options(system: full_depth.System, row_shares: list[float] | None) -> dict[str, object]:
        args = full_depth.engine_args(system, JOB | {"row_shares": row_shares})
        return args["kv_transfer_config"]["kv_connector_extra_config"]

    assert options(full_depth.System.ours, [0.5, 1.5])["rows_by_layer"] == [0.5, 1.5]
    assert "rows_by_layer" not in options(full_depth.System.ours, None)
    assert "rows_by_layer" not in options(full_depth.System.vllm_native, [0.5, 1.5])


def test_a_result_says_how_rows_were_divided() -> None:
    names = ("name", "layers", "shared_indexers", "experts", "acceptance", "settle")
    job = JOB | dict.fromkeys(names) | {"rows_by_layer": "code-dsa:7"}
    case = Case.parse("500x4")
    found = [full_depth.describe(system, job, case)["rows_by_layer"] for system in full_depth.System]
    assert found == ["equal", "equal", "code-dsa:7"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("context", "rows_by_layer", "expected"), [(35_064, "code-dsa-8192:3.5", 0.59), (67_832, "code-dsa-4096:7", 0.49)]
)
def test_shares_learned_on_another_trace_save_misses(context: int, rows_by_layer: str, expected: float) -> None:
    shares, size = full_depth.learned_shares(rows_by_layer, 61), float(rows_by_layer.partition(":")[2])
    assert shares is not None and len(shares) == 61
    assert shares[8:] == shares[:-8], "layers with the same selections have different shares"
    assert np.mean(shares) == pytest.approx(1, abs=0.01)
    config = HiSparseConfig(host_pool_gib=96, device_buffer_size=4096, top_k=2048, rows_by_layer=shares)
    for narrow_key_bytes in (None, 68):
        sizes = KVLayout(656, 132, 61, 61, narrow_key_bytes=narrow_key_bytes, row_shares=config.row_shares([True] * 61))
        config.check_rows_by_layer(sizes)  # each layer has room for a selection
    misses = LayerMisses.of(Trace.read(full_depth.TRACES / full_depth.TRACE_FILES[context]))
    misses = misses.of_layers([layer % TRACE_LAYERS for layer in range(61)])  # the kernel's
    assert misses.shared(shares, size, 32) / misses.equal(size, 32) == pytest.approx(expected, abs=0.015)


def test_equal_rows_need_no_shares() -> None:
    assert full_depth.learned_shares("equal", 61) is None


@pytest.mark.parametrize("text", ["code-dsa", "code-dsa:0.5", "code-dsa:nan", "code-dsa-shared:4", "other:4", ""])
def test_traces_that_give_no_shares(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected equal or <trace>:<top-k rows of a mean layer>"):
        full_depth.learned_shares(text, 61)


@pytest.mark.parametrize("context", list(full_depth.TRACE_FILES))
def test_traces_fit_their_contexts(context: int) -> None:
    """A position of a trace stands for eight of the prompt, so that none is beyond it."""
    positions = scaled_trace(context)
    repeat = full_depth.V32["index_topk"] // positions.shape[-1]
    assert positions.dtype == np.int32 and positions.shape[1] == 8
    assert context - 16 * repeat < (positions.max() + 1) * repeat <= context


def test_kinds_of_memory_of_all_ranks() -> None:
    assert full_depth.joined([None, None]) is None and full_depth.joined(["pinned", "pinned"]) == "pinned"
    assert full_depth.joined(["pinned", "managed"]) == "managed and pinned"
