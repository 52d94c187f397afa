"""HY-V4: transformers' tokens; KV of a layer of full attention through preemption and from the host; drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import (
    MODELS,
    OfflineEngine,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_TOKENS = 12
HOT_BLOCKS = 14  # 321 rows of 2304 B in three layers, 24 to a block as wide as the KV of a full layer and two keys


def halves(weight: torch.Tensor, first: int, size: int) -> None:
    """Reorder the rotary rows of a weight, in place: vLLM rotates neighbours, transformers halves.

    Args:
        weight: [..., rows] or [..., rows, elements].
        first: index of the first rotary row.
        size: number of rotary rows.
    """
    order = torch.cat((torch.arange(first, first + size, 2), torch.arange(first + 1, first + size, 2)))
    weight[..., first : first + size, :] = weight[..., order, :].clone()


@torch.no_grad()
def transformers_model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODELS / "hyv4", dtype=torch.float32)
    config = model.config
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    for layer in model.model.layers:
        attention, indexer = layer.self_attn, layer.self_attn.indexer
        halves(attention.q_b_proj.weight.unflatten(0, (-1, nope + rope)), nope, rope)
        halves(attention.kv_a_proj_with_mqa.weight, config.kv_lora_rank, rope)
        if indexer is not None:
            halves(indexer.wq_b.weight.unflatten(0, (-1, indexer.head_dim)), indexer.head_dim - rope, rope)
            halves(indexer.wk.weight, indexer.head_dim - rope, rope)
    return model


def test_full_kv_is_the_model_of_transformers(reference):
    """Prompts that fit into a selection: transformers' indexer keys are not quantised."""
    lengths, model = [5, 65, 200], transformers_model()
    for length, completion in zip(lengths, reference(lengths, MAX_TOKENS, model="hyv4"), strict=True):
        tokens = make_prompt(length) + completion["tokens"]
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, length - 1 : -1].float().log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == completion["tokens"]
        chosen = logprobs.gather(-1, torch.tensor(completion["tokens"])[:, None])[:, 0]
        assert (chosen - torch.tensor(completion["logprobs"])).abs().max() < 1e-4


def test_kv_of_a_full_layer_survives_preemption_and_comes_back_from_the_host(run):
    """Three requests do not fit on the device; their second turns find their prefixes in the host pool alone."""
    first = {"prompts": [make_prompt(length) for length in (610, 620, 630)], "max_tokens": 60}
    others = {"prompts": [make_prompt(900, seed=seed) for seed in range(3)], "max_tokens": 4}
    again = {"prompts": [prompt + make_prompt(41, seed=7) for prompt in first["prompts"]], "max_tokens": MAX_TOKENS}
    engine = hot_args("hyv4_mixed", num_gpu_blocks_override=3 * (HOT_BLOCKS + 10) + 1, max_model_len=1024)
    records = run(engine, [first, others, again], row_check={"every": 8, "corrupt": False})
    expected = run(engine_args("hyv4_mixed"), [first, others, again])
    for record, full in zip(records, expected, strict=True):
        assert_same_but_rounding(record["completions"], full["completions"])
        assert_pools_empty(record)
        assert record["wrong_rows"] == 0
    counters = [record["counters"] for record in records]
    assert counters[0]["resumed_requests"] >= 1 and counters[0]["recomputed_tokens"] == 0
    assert counters[2]["host_prefix_tokens"] - counters[1].get("host_prefix_tokens", 0) >= 64


def test_drafts(tmp_path: Path):
    from vllm_hisparse.cli.tiny_model import make_model

    model = str(make_model("hyv4", tmp_path / "hyv4", draft_layers=1))
    phase = {"prompts": [make_prompt(length) for length in (65, 763, 1201)], "max_tokens": 24}
    drafts = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "disable_log_stats": False,
        "enable_prefix_caching": False,
    }
    with OfflineEngine(tmp_path, engine_args(model, enable_prefix_caching=False)) as engine:
        full = engine.run(phase)
    with OfflineEngine(tmp_path, hot_args(model, {"device_buffer_size": 768}, **drafts)) as engine:
        record = engine.run(phase)
    assert_same_but_rounding(record["completions"], full["completions"])
    assert_pools_empty(record)
    assert record["drafts"]["drafted"] > 0 < record["counters"]["cache_misses"]
