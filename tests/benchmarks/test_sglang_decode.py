"""`benchmarks.sglang_decode` without SGLang: memory, the file of steps, the model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.full_depth import Case
from benchmarks.sglang_decode import Memory, System, engine_args, write_config
from benchmarks.sglang_scheduler import StepFile


def make_job(tmp_path: Path, **changes: object) -> dict:
    job = {"name": "DeepSeek-V3.2", "model_dir": str(tmp_path / "model"), "layers": 61, "experts": 8}
    job |= {"expert_size": 1024, "shared_indexers": 1, "quantization": None, "kv_dtype": "fp8", "device_kv_gib": 24.0}
    job |= {"device_buffer_size": 4096, "ratio": 8, "reserved": 32, "drafts": 0, "max_model_len": 70_000}
    return job | {"max_num_seqs": 56} | changes


def test_memory_is_what_sglang_makes_of_it(tmp_path: Path) -> None:
    """SGLang counts the rows of the device pool, and the index keys of all tokens that the host pool holds."""
    job = make_job(tmp_path)
    full, hisparse = (Memory.plan(system, job) for system in System)
    assert full.tokens == full.logical_tokens == (24 * 2**30) // (61 * (656 + 132)) // 64 * 64
    assert full.running(32_768) == 16 and full.host_gib == 0
    assert hisparse.tokens == (24 * 2**30) // (61 * (656 + 132 * 8)) // 64 * 64
    assert hisparse.logical_tokens == 8 * hisparse.tokens
    assert hisparse.running(32_768) >= 56 and hisparse.running(65_536) >= 28
    assert hisparse.host_gib == pytest.approx(73.6, abs=0.1)


@pytest.mark.parametrize("changes", [{"ratio": 2}, {"drafts": 2}])
def test_fewer_requests_fit_with_a_small_host_pool_or_with_drafts(tmp_path: Path, changes: dict) -> None:
    job = make_job(tmp_path)
    assert Memory.plan(System.sglang, job | changes).running(32_768) < Memory.plan(System.sglang, job).running(32_768)


def test_the_systems_differ_in_hisparse_alone(tmp_path: Path) -> None:
    job, cases = make_job(tmp_path), [Case.parse("32768x56"), Case.parse("32768x16+560")]
    args = {system: engine_args(system, job, Memory.plan(system, job), cases) for system in System}
    own = {"enable_hisparse", "hisparse_config"}
    assert set(args[System.sglang]) - set(args[System.sglang_full]) == own
    different = {name for name, value in args[System.sglang_full].items() if args[System.sglang][name] != value}
    assert different == {"max_total_tokens"}
    options = json.loads(args[System.sglang]["hisparse_config"])
    assert options == {"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 8}
    assert {16, 56} <= set(args[System.sglang]["cuda_graph_bs_decode"])


def test_the_model_has_the_sizes_of_the_other_systems(tmp_path: Path) -> None:
    config = json.loads((write_config(make_job(tmp_path, layers=4)) / "config.json").read_text())
    assert (config["num_hidden_layers"], config["n_routed_experts"], config["moe_intermediate_size"]) == (4, 8, 1024)
    assert config["n_group"] == config["topk_group"] == 4 and config["index_topk"] == 2048


def test_steps_are_read_by_another_process(tmp_path: Path) -> None:
    writer = StepFile(tmp_path / "steps", create=True)
    for index, size in enumerate((3, 4, 4, 4)):
        writer.add(float(index), size, size, 9 - index)
    reader = StepFile(tmp_path / "steps")
    assert len(reader) == 4
    assert reader.rows(1, 3).tolist() == [[1.0, 4.0, 4.0, 8.0], [2.0, 4.0, 4.0, 7.0]]
    summary = reader.clock(4).summary(2)
    assert (summary["tokens_per_s"], summary["running_max"], summary["steps"]) == (4.0, 4, 2)
