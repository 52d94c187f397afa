"""A configuration that cannot work is refused before the engine serves, with the option, the value and the fix."""

from __future__ import annotations

import json

import pytest
from conftest import BASE_ENGINE, assert_same_but_rounding, hot_args, make_prompt

from vllm_hisparse.cli.tiny_model import VOCAB_SIZE, make_model

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_pool_gib": 0.01}, r"host_pool_gib: got 0.01, expected a host pool of at least .*max_model_len 4096"),
        ({"host_pool_gib": 100_000.0}, r"host_pool_gib: got 100000.0, expected a host pool of at most .*free host"),
        ({"top_k": 64}, r"top_k: got 64, expected 256"),
    ],
)
def test_refused(run, options, message):
    with pytest.raises(AssertionError, match=message):
        run(hot_args(options=options), [])


def test_a_layer_that_hot_buffers_lack_is_refused_before_weights_are_loaded(run, tmp_path):
    """A model with ALiBi whose directory has no weights: the layer is named, not the missing file."""
    make_model("llama", tmp_path / "bloom", num_layers=2)
    (tmp_path / "bloom" / "model.safetensors").unlink()
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "n_layer": 3, "n_head": 4, "dtype": "float32"}
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", **sizes}
    (tmp_path / "bloom" / "config.json").write_text(json.dumps(config))
    engine = hot_args(options={"algorithm": "quest", "top_k": 256})
    with pytest.raises(AssertionError, match=r"Attention \(.*h\.0.*\) with alibi_slopes=.*, expected causal attention"):
        run({**engine, "model": str(tmp_path / "bloom")}, [])


def test_host_pool_as_a_ratio_of_the_device_cache(run, reference):
    """Ratio of bytes: rows and indexer keys of all layers on the host, over all that the device's cache holds."""
    ratio, device_bytes = 0.25, BASE_ENGINE["kv_cache_memory_bytes"]
    host_block = 64 * 4 * (576 * 4 + 132)  # 64 tokens, 4 layers, fp32 rows and indexer keys
    options = {"host_pool_gib": None, "host_to_device_ratio": ratio}
    record = run(hot_args(options=options), [{"prompts": [make_prompt(700)], "max_tokens": 8}])[0]
    assert_same_but_rounding(record["completions"], reference([700], 8))
    num_blocks = record["peaks"]["host_blocks_free"] + record["pools"]["host_blocks_cached"]
    unused = ratio * device_bytes - num_blocks * host_block
    assert 0 <= unused < 2 * host_block, "the device's cache is whole blocks of vLLM's, so it may be a little smaller"
