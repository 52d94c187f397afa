"""LoRA adapters and the base model of a dense model side by side, with n-gram drafts; structured output with drafts.

Quest attends to everything, so that full KV is the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MODELS, assert_same, make_prompt
from feature_servers import MAX_MODEL_LEN, Pair, num_cached
from safetensors.torch import save_file
from servers import completion

from tools.harness.deployment import MODEL_NAME
from tools.harness.processes import ProcessGroup

pytestmark = pytest.mark.e2e

MODEL = "qwen3"
BLOCK = 128
OPTIONS = {
    "host_pool_gib": 0.1,
    "algorithm": "quest",
    "top_k": MAX_MODEL_LEN,
    "device_buffer_size": 4 * MAX_MODEL_LEN,  # what a step with three drafts may select
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ADAPTERS = ("one", "other")
NAMES = (MODEL_NAME, *ADAPTERS)
TOLERANCE = 1e-3  # of logprobs, where other batches round differently
RANK, NUM_TOKENS, MAX_TOKENS = 4, 450, 16
WHOLE_BLOCKS = NUM_TOKENS // BLOCK * BLOCK


def make_adapter(path: Path, seed: int) -> None:
    """An adapter of the attention's projections that is strong enough to change every text."""
    config = json.loads((MODELS / MODEL / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    num_heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    num_heads["v"] = num_heads["k"]
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in num_heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(heads * head_dim, RANK, generator=generator) * 0.3
    path.mkdir()
    save_file(weights, str(path / "adapter_model.safetensors"))
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": [f"{name}_proj" for name in num_heads],
        "bias": "none",
        "base_model_name_or_path": MODEL,
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter_config))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(directory / name, seed)
    args = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    args += ["--lora-modules", *(f"{name}={directory / name}" for name in ADAPTERS)]
    # Else the model's text may be spaces to the end.
    args += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    with ProcessGroup() as group:
        drafts = ["--speculative-config", json.dumps(DRAFTS)]
        yield Pair(group, tmp_path_factory.mktemp("logs"), MODEL, OPTIONS, args, drafts)


@pytest.fixture(autouse=True)
def leaves_nothing(pair: Pair) -> Iterator[None]:
    yield
    pair.hot.wait_empty()


@pytest.mark.slow
def test_lora_adapters_have_prefixes_of_their_own(pair: Pair):
    """The same prompt of two adapters and of the base model: each finds its own KV, on the device and in the host pool,
    then in the tier, and none finds another's."""
    prompt = make_prompt(NUM_TOKENS, seed=50)
    full = [completion(pair.full.complete(prompt, MAX_TOKENS, model=name)) for name in NAMES]
    assert len({tuple(one["tokens"]) for one in full}) == len(NAMES), "the adapters are to change the text"
    for name, expected in zip(NAMES, full, strict=True):
        for is_known in (False, True):
            reply = pair.hot.complete(prompt, MAX_TOKENS, model=name)
            assert_same([completion(reply)], [expected], TOLERANCE)
            assert num_cached(reply) == (WHOLE_BLOCKS if is_known else 0)
    pair.hot.forget()
    for name, expected in zip(NAMES, full, strict=True):
        loaded = pair.hot.metric("hisparse_tier_loaded_blocks")
        reply = pair.hot.complete(prompt, MAX_TOKENS, model=name)
        assert_same([completion(reply)], [expected], TOLERANCE)
        assert pair.hot.metric("hisparse_tier_loaded_blocks") == loaded + WHOLE_BLOCKS // BLOCK


def test_lora_adapters_run_in_one_batch(pair: Pair):
    """Adapters share batches, and some drafts are accepted.

    NOTE: without the base model, which gets an adapter's weights in such a batch of stock vLLM's CPU engine.
    """
    prompt = (make_prompt(17, seed=51) * 40)[:NUM_TOKENS]
    accepted = pair.hot.metric("spec_decode_num_accepted_tokens")
    full = [completion(pair.full.complete(prompt, MAX_TOKENS, model=name)) for name in ADAPTERS]
    assert full[0]["tokens"] != full[1]["tokens"]
    with ThreadPoolExecutor() as executor:
        calls = [executor.submit(pair.hot.complete, prompt, MAX_TOKENS, model=name) for name in ADAPTERS * 2]
        assert_same([completion(call.result()) for call in calls], full * 2, TOLERANCE)
    assert pair.hot.metric("spec_decode_num_accepted_tokens") > accepted


SCHEMA = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"enum": ["hot", "host"]}, "minItems": 4, "maxItems": 6}},
    "required": ["rows"],
    "additionalProperties": False,
}
TEXT = "Each decode step selects the most useful positions and copies the missing rows from the host. " * 12
GRAMMARS = {"regex": "(abc){4,6}-[0-9]{3}", "choice": ["hot rows", "host rows"], "json": SCHEMA}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_structured_output_with_drafts(pair: Pair, kind: str):
    """Drafts that the grammar does not allow are dropped; the text is that of full KV without drafts."""
    prompt = TEXT
    body: dict[str, Any] = {"structured_outputs": {kind: GRAMMARS[kind]}, "ignore_eos": False}
    drafted = pair.hot.metric("spec_decode_num_draft_tokens")
    hot, full = pair.ask(lambda server: server.complete(prompt, 80, **body)["choices"][0])
    assert hot["text"] == full["text"] and hot["finish_reason"] == full["finish_reason"] == "stop"
    if kind == "regex":
        assert re.fullmatch(GRAMMARS[kind], hot["text"])
    elif kind == "choice":
        assert hot["text"] in GRAMMARS[kind]
    else:
        assert 4 <= len(json.loads(hot["text"])["rows"]) <= 6
    if kind != "choice":
        assert pair.hot.metric("spec_decode_num_draft_tokens") > drafted
