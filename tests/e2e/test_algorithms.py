"""Dense models: with a budget of everything every algorithm is full attention, whatever brought the KV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import (
    OfflineEngine,
    assert_pools_empty,
    assert_same,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = pytest.mark.e2e

EVERYTHING = 4096
LENGTHS = [1, 5, 16, 17, 127, 128, 129, 777, 1100]
MAX_TOKENS = 20  # more than a page
HOST_BLOCK_BYTES = 128 * 4 * 2 * 2 * 32 * 4  # tokens, layers, key and value, KV heads, elements, fp32

# With and without a KV cache group of full-KV layers; small intervals, so that generated tokens are clustered, too.
ALGORITHMS = {
    "quest": {},
    "cluster_kv": {"algorithm_options": {"update_interval": 8, "clusters_per_update": 2}},
    "streaming_llm": {},
    "pq_cache": {"full_kv_layers": [1]},
    "oracle": {},
}
QUICK = ("quest",)  # the algorithms whose engines `make test` starts


def dense_args(algorithm: str, options: dict | None = None, model: str = "llama", **overrides) -> dict:
    extra = {"algorithm": algorithm, "top_k": EVERYTHING, "device_buffer_size": EVERYTHING, **(options or {})}
    return hot_args(model, options=extra, **overrides)


def first_turn() -> dict:
    return {"prompts": [make_prompt(length) for length in LENGTHS], "max_tokens": MAX_TOKENS}


def second_turn(replies: list[dict]) -> dict:
    """Prompt, reply and a new question of the longer conversations."""
    pairs = zip(LENGTHS[4:], replies[4:], strict=True)
    return {"prompts": [make_prompt(n) + done["tokens"] + make_prompt(41, 7) for n, done in pairs], "max_tokens": 8}


@pytest.fixture(scope="module")
def conversation(tmp_path_factory, shared_result) -> list[list[dict]]:
    """Full KV, stock backend: the replies to both turns."""

    def compute() -> list[list[dict]]:
        with OfflineEngine(tmp_path_factory.mktemp("full"), engine_args("llama")) as engine:
            first = engine.run(first_turn())["completions"]
            return [first, engine.run(second_turn(first))["completions"]]

    return shared_result("both turns of the algorithms", compute)


@pytest.mark.parametrize(
    "algorithm", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_budget_of_everything_is_full_attention(run, conversation, algorithm):
    """Tokens are those of full KV, with chunked prefill and again from the prefix cache."""
    engine = dense_args(algorithm, ALGORITHMS[algorithm])
    records = run(engine, [first_turn(), second_turn(conversation[0])])
    for record, full in zip(records, conversation, strict=True):
        assert_same(record["completions"], full)
        assert_pools_empty(record)
    served = sum(done["num_cached_tokens"] for done in records[1]["completions"])
    assert served == sum(done["num_cached_tokens"] for done in conversation[1]) > 0


@pytest.mark.slow
def test_evicted_units_come_back(run):
    """A buffer that holds no more than the selection gives the tokens of a buffer that holds everything."""
    phase = {"prompts": [make_prompt(length) for length in (64, 777, 1100)], "max_tokens": 40}
    records = [
        run(dense_args("quest", {"top_k": 256, "device_buffer_size": size, "elastic": False}), [phase])[0]
        for size in (256, EVERYTHING)
    ]
    assert_same(records[0]["completions"], records[1]["completions"])
    assert records[0]["counters"]["cache_misses"] > records[1]["counters"]["cache_misses"]


@pytest.mark.smoke
def test_what_fits_the_budget_is_exact(run, reference):
    """Short requests beside one that the budget cuts."""
    lengths = [100, 200, 1500]
    engine = dense_args("quest", {"top_k": 256, "device_buffer_size": 256})
    done = run(engine, [{"prompts": [make_prompt(n) for n in lengths], "max_tokens": MAX_TOKENS}])[0]["completions"]
    full = reference(lengths, MAX_TOKENS, model="llama")
    assert_same(done[:2], full[:2])
    assert max(abs(a - b) for a, b in zip(done[2]["logprobs"], full[2]["logprobs"], strict=True)) > 1e-3


@pytest.mark.slow
def test_requests_that_do_not_run_take_no_memory(run, reference):
    """State for as many requests of the longest length as may run would not fit in this machine, or in the cache."""
    lengths, num_seqs, max_model_len = [5, 129, 777], 512, 32_768
    sizes = {"max_num_seqs": num_seqs, "max_model_len": max_model_len, "kv_cache_memory_bytes": 2**30}
    record = run(dense_args("oracle", **sizes), [{"prompts": list(map(make_prompt, lengths)), "max_tokens": 12}])[0]
    assert_same(record["completions"], reference(lengths, 12, model="llama"))
    assert_pools_empty(record)
    all_keys_bytes = num_seqs * max_model_len * HOST_BLOCK_BYTES // 2 // 128
    assert record["virtual_bytes"] < all_keys_bytes, record["virtual_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "block_size", "num_blocks"),
    [("oracle", 128, 3 * 3 + 6), ("quest", 32, 3 * 9 + 4)],
)
def test_a_request_is_preempted_where_blocks_for_state_run_out(run, algorithm, block_size, num_blocks):
    """Hot buffers do not grow here; state does, past 256 and 512 tokens. The tokens are those of one that has room."""
    phase = {"prompts": [make_prompt(length) for length in (500, 510, 250)], "max_tokens": 40}
    options = {"top_k": 256, "device_buffer_size": 256, "elastic": False, "full_kv_layers": []}
    engine = dense_args(algorithm, options, block_size=block_size, max_model_len=1024)
    (wide,) = run(engine, [phase])
    (tight,) = run({**engine, "num_gpu_blocks_override": 1 + num_blocks}, [phase])
    assert wide["counters"].get("resumed_requests", 0) == 0 < tight["counters"]["resumed_requests"]
    assert_same_but_rounding(tight["completions"], wide["completions"])
    for record in (wide, tight):
        assert_pools_empty(record)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "ernie45_moe"])
def test_other_dense_models(run, reference, model):
    lengths = [17, 777]
    record = run(dense_args("quest", model=model), [{"prompts": list(map(make_prompt, lengths)), "max_tokens": 12}])[0]
    assert_same(record["completions"], reference(lengths, 12, model=model))


@pytest.mark.slow
def test_bf16(run, reference):
    """Another order of keys in vLLM's blocks where the CPU has AMX, whose kernel rounds attention weights to 8 bits."""
    lengths = [65, 777]
    engine = dense_args("oracle", dtype="bfloat16")
    record = run(engine, [{"prompts": list(map(make_prompt, lengths)), "max_tokens": 12}])[0]
    assert_same_but_rounding(record["completions"], reference(lengths, 12, model="llama", dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "options"), [("quest", {}), ("cluster_kv", {"full_kv_layers": []})])
def test_preempted_requests_resume(run, reference, algorithm, options):
    """The host pool runs out while requests decode: one is preempted and loses only the blocks the others need."""
    lengths, max_tokens = [500, 510, 250], 150
    pool = {"host_pool_gib": 12 * HOST_BLOCK_BYTES / 2**30, **options}
    record = run(
        dense_args(algorithm, pool, max_model_len=1024),
        [{"prompts": [make_prompt(length) for length in lengths], "max_tokens": max_tokens}],
    )[0]
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens, model="llama"))
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1


def test_an_algorithm_of_ones_own(run, reference, tmp_path):
    """The example of docs/algorithms.md, named by its dotted path."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (tmp_path / "own_algorithm.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1))
    lengths = [100, 200, 1500]
    phase = {"prompts": [make_prompt(n) for n in lengths], "max_tokens": MAX_TOKENS}
    record = run(dense_args("own_algorithm.MeanPage"), [phase], python_path=[str(tmp_path)])[0]
    assert_same(record["completions"], reference(lengths, MAX_TOKENS, model="llama"))
