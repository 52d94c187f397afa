import re
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from vllm.config import AttentionConfig, SpeculativeConfig, VllmConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.config.utils import is_init_field
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, _TEXT_GENERATION_MODELS

from vllm_hisparse.algorithms.base import AttentionShape
from vllm_hisparse.algorithms.streaming_llm import StreamingLLM
from vllm_hisparse.compat.model_loading import OTHER_LOADERS
from vllm_hisparse.config import (
    CONNECTOR_NAME,
    NIXL_OPTIONS,
    REFUSED_MODELS,
    HiSparseConfig,
    HiSparseConfigError,
    max_num_running,
)

GIB = {"host_pool_gib": 2.0}
REFUSED_PARALLELISM = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
PARALLELISM = ("tensor_parallel_size", "data_parallel_size")


class EngineConfig(SimpleNamespace):
    """The part of a `VllmConfig` that is read; like it, it can be referenced weakly."""


def engine(extra_config: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """A `VllmConfig` of a DSA model with index_topk 256; `changes` are `section__option=value`."""
    config = EngineConfig(
        kv_transfer_config=SimpleNamespace(
            kv_connector=CONNECTOR_NAME,
            kv_role="kv_consumer",
            kv_buffer_device="cuda",
            kv_connector_extra_config=GIB if extra_config is None else extra_config,
        ),
        model_config=SimpleNamespace(
            model="some/model",
            architecture="DeepseekV32ForCausalLM",
            use_mla=True,
            runner_type="generate",
            is_encoder_decoder=False,
            is_hybrid=False,
            is_attention_free=False,
            enable_sleep_mode=False,
            enable_cumem_allocator=False,
            get_sliding_window=lambda: None,
            multimodal_config=None,
            hf_text_config=SimpleNamespace(index_topk=256, num_hidden_layers=4),
        ),
        parallel_config=SimpleNamespace(
            distributed_executor_backend=None,
            use_ubatching=False,
            num_ubatches=1,
            enable_fault_tolerance=False,
            enable_elastic_ep=False,
            **dict.fromkeys((*PARALLELISM, *REFUSED_PARALLELISM), 1),
        ),
        use_v2_model_runner=True,
        speculative_config=None,
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            prefix_match_unit=None,
            kv_cache_dtype_skip_layers=[],
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
        ),
        attention_config=SimpleNamespace(indexer_kv_dtype="auto", hisparse_config=None),
        aux_output_config=AuxOutputConfig(),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    for path, value in changes.items():
        section, _, option = path.partition("__")
        setattr(getattr(config, section) if option else config, option or section, value)
    return config


def refusal(extra_config: dict[str, Any] | None = None, **changes: Any) -> str:
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_vllm_config(engine(extra_config, **changes))
    return str(refused.value)


def test_options_are_parsed_once_per_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engine(), engine({**GIB, "top_k": 256})
    config = HiSparseConfig.from_vllm_config(first)
    assert HiSparseConfig.from_vllm_config(second) is not config
    monkeypatch.setattr(HiSparseConfig, "parse", lambda *_: pytest.fail("parsed again"))
    assert HiSparseConfig.from_vllm_config(first) is config


def test_vllm_can_copy_a_configuration_that_was_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiSparseConfig, "parse", classmethod(lambda cls, _: cls(host_pool_gib=1)))
    config = VllmConfig()
    HiSparseConfig.from_vllm_config(config)
    for name in vars(config):  # as `replace` in the same module does
        is_init_field(VllmConfig, name)


def parse_refusal(extra_config: dict[str, Any]) -> str:
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_extra_config(extra_config)
    return str(refused.value)


def check_parts(message: str, option: str, got: str, expected: str, fix: str) -> None:
    """A message says option, value got, value expected and what to do, in that order."""
    assert message.startswith(f"{option}: got {got}, expected "), message
    _, _, rest = message.partition(", expected ")
    assert expected in rest and fix in rest and rest.index(expected) < rest.rindex(fix), message


def test_defaults_come_from_the_model() -> None:
    config = HiSparseConfig.from_vllm_config(engine())
    assert (config.top_k, config.device_buffer_size, config.rows) == (256, 512, 512)
    assert (config.algorithm, config.log_request_stats) == ("dsa", False)


def test_options_win_over_defaults() -> None:
    options = {**GIB, "top_k": 256, "device_buffer_size": 256, "log_request_stats": True}
    config = HiSparseConfig.from_vllm_config(engine(options))
    assert (config.top_k, config.rows, config.log_request_stats) == (256, 256, True)


def test_is_frozen() -> None:
    config = HiSparseConfig.from_vllm_config(engine())
    with pytest.raises(ValidationError, match="frozen"):
        config.top_k = 1


def test_nixl_options_pass_through() -> None:
    options = {
        "backends": ["UCX", "LIBFABRIC"],
        "engine_ttl": -1,
        "enforce_handshake_compat": False,
        "kv_lease_duration": 6,
        "kv_recompute_threshold": 0,
        "num_threads": 0,  # NIXL's default: no thread beside its progress thread
    }
    assert options.keys() == NIXL_OPTIONS
    extra_config = {**GIB, **options}
    assert HiSparseConfig.from_vllm_config(engine(extra_config)).host_pool_gib == 2.0
    assert extra_config == {**GIB, **options}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("backends", "UCX", "a valid list"),
        ("backends", [], "at least 1 item"),
        ("engine_ttl", "3600", "a valid number"),
        ("enforce_handshake_compat", "false", "a valid boolean"),
        ("kv_recompute_threshold", "64", "a valid integer"),
        ("num_threads", "4", "a valid integer"),
        ("num_threads", -1, "greater than or equal to 0"),
    ],
)
def test_refuses_nixl_options_that_vllm_would_not_check(name: str, value: Any, expected: str) -> None:
    check_parts(parse_refusal({**GIB, name: value}), name, repr(value), expected, "kv_connector_extra_config")


@pytest.mark.parametrize(
    "name", ["topk", "device_bufer_size", "Top_K", "host_pool_gb", "model_config", "eviction_policy", ""]
)
def test_refuses_unknown_options(name: str) -> None:
    message = parse_refusal({**GIB, name: 7})
    check_parts(message, name, "7", "one of the known options: ", "Correct the name.")
    assert all(option in message for option in (*HiSparseConfig.model_fields, *NIXL_OPTIONS))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top_k", "256", "a valid integer"),
        ("top_k", 256.0, "a valid integer"),
        ("top_k", True, "a valid integer"),
        ("top_k", 0, "greater than 0"),
        ("device_buffer_size", [512], "a valid integer"),
        ("device_buffer_size", -1, "greater than 0"),
        ("indexer_key_dtype", "fp8", "'auto' or 'fp4'"),
        ("host_pool_memory", "huge", "'auto', 'managed' or 'pinned'"),
        ("elastic", 1, "a valid boolean"),
        ("elastic", "no", "a valid boolean"),
        ("host_pool_gib", "2", "a valid number"),
        ("host_pool_gib", 0, "greater than 0"),
        ("host_pool_gib", float("nan"), "finite number"),
        ("host_pool_gib", 1e308, "less than or equal to 17179869184"),
        ("host_to_device_ratio", -2.0, "greater than 0"),
        ("host_to_device_ratio", 1e308, "less than or equal to 17179869184"),
        ("import_buffer_gib", 1e308, "less than or equal to 17179869184"),
        ("tier_buffer_gib", 1e308, "less than or equal to 17179869184"),
        ("algorithm", 3, "a valid string"),
        ("full_kv_layers", 2, "a valid list"),
        ("full_kv_layers", ["0"], "a valid integer"),
        ("algorithm_options", [], "a valid dictionary"),
        ("log_request_stats", 1, "a valid boolean"),
        ("log_request_stats", "true", "a valid boolean"),
        ("rows_by_layer", 2.5, "a valid list"),
        ("rows_by_layer", [], "at least 1 item"),
        ("log_rows_by_layer", "yes", "a valid boolean"),
        ("selection_trace_dir", True, "a valid string"),
        ("selection_trace_dir", "", "at least 1 character"),
    ],
)
def test_refuses_wrong_types_and_values(name: str, value: Any, expected: str) -> None:
    extra_config = {name: value} if name.startswith("host") else {**GIB, name: value}
    message = parse_refusal(extra_config)
    assert message.startswith(name)
    got = value[0] if isinstance(value, list) and name == "full_kv_layers" else value
    check_parts(message, message.partition(":")[0], repr(got), expected, "Correct the value")


@pytest.mark.parametrize("extra_config", [{}, {**GIB, "host_to_device_ratio": 4.0}])
def test_wants_exactly_one_size(extra_config: dict[str, Any]) -> None:
    got = {"host_pool_gib": None, "host_to_device_ratio": None, **extra_config}
    name = "host_pool_gib / host_to_device_ratio"
    check_parts(parse_refusal(extra_config), name, repr(got), "exactly one of the two", "Set either host_pool_gib")


def test_refuses_options_of_an_algorithm_without_any() -> None:
    message = parse_refusal({**GIB, "algorithm_options": {"pages": 4}})
    check_parts(
        message, "algorithm_options.pages", "4", "one of the options of 'dsa': none", "Correct algorithm_options."
    )


def test_reports_the_parse_error_before_the_model() -> None:
    assert refusal({"top": 1}, model_config__use_mla=False).startswith("top: got 1")


@pytest.mark.parametrize("size", [1, 255])
def test_refuses_a_buffer_below_top_k(size: int) -> None:
    message = refusal({**GIB, "device_buffer_size": size})
    check_parts(message, "device_buffer_size", str(size), "at least top_k (256)", "default of 512 rows")


@pytest.mark.parametrize("top_k", [1, 128, 255, 257])
def test_refuses_another_top_k_than_the_models(top_k: int) -> None:
    message = refusal({**GIB, "top_k": top_k, "device_buffer_size": 1024})
    check_parts(message, "top_k", str(top_k), "256, the model's index_topk", "Remove top_k or set it to 256.")


@pytest.mark.parametrize(
    "changes",
    [{"model_config__hf_text_config": SimpleNamespace()}, {"model_config__use_mla": False}],
)
def test_refuses_models_without_an_indexer(changes: dict[str, Any]) -> None:
    message = refusal(**changes)
    check_parts(message, "algorithm", "'dsa'", "index_topk in its config.json", f"or remove {CONNECTOR_NAME}.")
    assert "set algorithm to one of cluster_kv, oracle, pq_cache, quest, streaming_llm for a dense model" in message
    assert "some/model has none" in message


@pytest.mark.parametrize("option", REFUSED_PARALLELISM)
def test_refuses_parallelism(option: str) -> None:
    message = refusal(**{f"parallel_config__{option}": 2})
    check_parts(message, f"--{option.replace('_', '-')}", "2", "1 in this release", "Use --tensor-parallel-size or")


@pytest.mark.parametrize("option", PARALLELISM)
def test_takes_parallelism(option: str) -> None:
    assert HiSparseConfig.from_vllm_config(engine(**{f"parallel_config__{option}": 2})).top_k == 256


@pytest.mark.parametrize(("tp_size", "prefill"), [(1, None), (2, None), (1, 8), (8, 1), (2, 4), (4, 2), (3, 3)])
def test_number_of_prefill_ranks(tp_size: int, prefill: int | None) -> None:
    options = GIB if prefill is None else {**GIB, "prefill_tp_size": prefill}
    config = HiSparseConfig.from_vllm_config(engine(options, parallel_config__tensor_parallel_size=tp_size))
    assert config.prefill_tp_size == (prefill or tp_size)


@pytest.mark.parametrize(("tp_size", "prefill"), [(2, 3), (4, 6)])
def test_refuses_prefill_ranks_that_do_not_map(tp_size: int, prefill: int) -> None:
    message = refusal({**GIB, "prefill_tp_size": prefill}, parallel_config__tensor_parallel_size=tp_size)
    check_parts(message, "prefill_tp_size", str(prefill), f"divisor of --tensor-parallel-size {tp_size}", "Start the")


@pytest.mark.parametrize(("gib", "expected"), [(None, 0), (0, 0), (0.5, 1 << 29), (2, 2 << 30)])
def test_import_buffer(gib: float | None, expected: int) -> None:
    options = GIB if gib is None else {**GIB, "import_buffer_gib": gib}
    config = HiSparseConfig.from_vllm_config(engine(options, kv_transfer_config__kv_role="kv_consumer"))
    assert config.import_buffer_bytes == expected


def test_refuses_an_import_buffer_of_negative_size() -> None:
    message = refusal({**GIB, "import_buffer_gib": -0.5})
    check_parts(message, "import_buffer_gib", "-0.5", "greater than or equal to 0", "Correct the value")


def test_refuses_an_import_buffer_where_nothing_is_imported() -> None:
    message = refusal({**GIB, "import_buffer_gib": 0.5}, kv_transfer_config__kv_role="kv_both")
    check_parts(message, "import_buffer_gib", "0.5", "0 with kv_role kv_both", "kv_consumer on a decode instance")


def test_refuses_layers_with_a_dtype_of_their_own() -> None:
    message = refusal(cache_config__kv_cache_dtype_skip_layers=["0"])
    check_parts(message, "--kv-cache-dtype-skip-layers", "['0']", "KV of one dtype in all layers", "Remove it.")


def test_refuses_the_hot_buffers_of_vllm() -> None:
    theirs = AttentionConfig(hisparse_config={}).hisparse_config
    message = refusal(attention_config__hisparse_config=theirs)
    check_parts(message, "--attention-config hisparse_config", repr(theirs), "none: it", "device_buffer_size")


def test_refuses_ranks_with_a_scheduler_each() -> None:
    launcher = {"parallel_config__distributed_executor_backend": "external_launcher"}
    message = refusal(**launcher, parallel_config__tensor_parallel_size=2)
    check_parts(message, "--distributed-executor-backend", "'external_launcher'", "mp or ray", "Remove it")
    assert HiSparseConfig.from_vllm_config(engine(**launcher)).top_k == 256


@pytest.mark.parametrize("seconds", [5, 30.0, "30", True, None])
def test_refuses_a_lease_that_is_no_number_of_seconds(seconds: Any) -> None:
    message = refusal({**GIB, "kv_lease_duration": seconds})
    check_parts(message, "kv_lease_duration", repr(seconds), "at least 6", "both sides")


def test_refuses_the_prefill_role():
    message = refusal(kv_transfer_config__kv_role="kv_producer")
    assert "kv_role: got 'kv_producer', expected kv_consumer" in message
    assert "NixlConnector" in message


def drafts(method: str = "ngram", num_speculative_tokens: int = 3) -> dict[str, Any]:
    return {
        "speculative_config": SimpleNamespace(
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            num_speculative_tokens_per_batch_size=None,
            parallel_drafting=False,
            use_multi_module_mtp=lambda: False,
        ),
    }


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("eagle3", {}, "mtp or ngram with a DSA model on cpu in this release"),
        (
            "medusa",
            {"device_config__device_type": "cuda"},
            "mtp or ngram or ngram_gpu with a DSA model on cuda in this release",
        ),
    ],
)
def test_refuses_drafts_that_it_cannot_verify(method: str, changes: dict[str, Any], expected: str) -> None:
    message = refusal(**changes, **drafts(method))
    check_parts(message, "--speculative-config method", repr(method), expected, "Remove --speculative-config.")


def test_refuses_to_learn_rows_by_layer_with_drafts() -> None:
    config = engine({**GIB, "log_rows_by_layer": True}, **drafts())
    with pytest.raises(HiSparseConfigError) as error:
        HiSparseConfig.from_vllm_config(config)
    check_parts(str(error.value), "log_rows_by_layer", "True", "False with drafts", "Learn the list without drafts")


def test_refuses_a_number_of_drafts_that_depends_on_the_batch() -> None:
    by_batch = drafts()
    by_batch["speculative_config"].num_speculative_tokens_per_batch_size = [[1, 8, 3], [9, 256, 1]]
    option = "--speculative-config num_speculative_tokens_per_batch_size"
    check_parts(refusal(**by_batch), option, "[[1, 8, 3], [9, 256, 1]]", "none: as many drafts", "Remove it.")


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("mtp", {}, "eagle or eagle3 or ngram with a dense model on cpu in this release"),
        ("draft_model", {}, "eagle or eagle3 or ngram with a dense model on cpu in this release"),
        (
            "medusa",
            {"device_config__device_type": "cuda"},
            "eagle or eagle3 or ngram or ngram_gpu with a dense model on cuda in this release",
        ),
    ],
)
def test_refuses_drafts_of_dense_models_that_it_cannot_verify(
    method: str, changes: dict[str, Any], expected: str
) -> None:
    message = dense_refusal({"algorithm": "quest"}, **changes, **drafts(method))
    check_parts(message, "--speculative-config method", repr(method), expected, "Remove --speculative-config.")


@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle3"])
def test_accepts_drafts_of_dense_models(method: str) -> None:
    config = HiSparseConfig.from_vllm_config(dense_engine({"algorithm": "quest"}, **drafts(method)))
    assert config.rows == 4 * config.top_k


def test_refuses_drafts_that_do_not_follow_from_each_other() -> None:
    parallel = drafts("eagle3")
    parallel["speculative_config"].parallel_drafting = True
    message, option = dense_refusal({"algorithm": "quest"}, **parallel), "--speculative-config parallel_drafting"
    check_parts(message, option, "True", "False: drafts that follow from each other", "Remove it.")


@pytest.mark.parametrize(("num_layers", "num_drafts", "is_refused"), [(3, 2, True), (3, 1, False), (1, 2, False)])
def test_refuses_drafts_of_several_mtp_layers(num_layers: int, num_drafts: int, is_refused: bool) -> None:
    """Each drafts one token, and vLLM lets a prefill side leave out the last tokens of a prompt."""
    changes = drafts("mtp", num_drafts)
    changes["speculative_config"].draft_model_config = SimpleNamespace(
        hf_config=SimpleNamespace(num_nextn_predict_layers=num_layers)
    )
    changes["speculative_config"].use_multi_module_mtp = MethodType(
        SpeculativeConfig.use_multi_module_mtp, changes["speculative_config"]
    )
    if is_refused:
        option = "--speculative-config num_speculative_tokens"
        check_parts(refusal(**changes), option, "2", "1 with a checkpoint of several MTP layers", "Set it to 1")
    else:
        assert HiSparseConfig.from_vllm_config(engine(**changes)).rows == max(2, 1 + num_drafts) * 256


NARROW = {**GIB, "indexer_key_dtype": "fp4"}


def narrow_engine(head_dim: int = 128, heads: int = 64, **changes: Any) -> SimpleNamespace:
    config = engine(NARROW, **{"kv_transfer_config__kv_role": "kv_both", **changes})
    model = config.model_config.hf_text_config
    model.index_head_dim, model.index_n_heads = head_dim, heads
    return config


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_indexer_keys_in_4_bits_on_the_cpu(heads: int) -> None:
    assert HiSparseConfig.from_vllm_config(narrow_engine(heads=heads)).has_narrow_keys
    assert not HiSparseConfig.from_vllm_config(engine()).has_narrow_keys


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 64}, "auto with indexer keys of 64 elements, not 128"),
        ({"heads": 4, "device_config__device_type": "cuda"}, "auto with 4 indexer heads on cuda, not 32 or 64"),
    ],
)
def test_refuses_indexer_keys_in_4_bits(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(HiSparseConfigError) as error:
        HiSparseConfig.from_vllm_config(narrow_engine(**sizes))
    check_parts(str(error.value), "indexer_key_dtype", "'fp4'", reason, "Remove it.")


CUDA = {"device_config__device_type": "cuda", "kv_transfer_config__kv_role": "kv_both"}
TIERS = {"tiers": [{"type": "fs", "path": "/tmp/tier", "quota_gib": 1}]}
MANAGED = {**GIB, "host_pool_memory": "managed"}


@pytest.mark.parametrize(
    ("options", "changes", "memory"),
    [
        ({}, {}, "auto"),
        ({"host_pool_memory": "managed"}, {}, "managed"),
        ({"host_pool_memory": "pinned"}, {}, "pinned"),
        ({}, {"device_config__device_type": "cpu"}, "pinned"),
        ({}, {"parallel_config__tensor_parallel_size": 2}, "pinned"),
        (TIERS, {}, "pinned"),
        (TIERS, {"kv_transfer_config__kv_role": "kv_consumer"}, "pinned"),
        ({}, {"kv_transfer_config__kv_role": "kv_consumer"}, "pinned"),
        ({"import_buffer_gib": 1.0}, {"kv_transfer_config__kv_role": "kv_consumer"}, "pinned"),
        ({"host_pool_memory": "managed"}, {"kv_transfer_config__kv_role": "kv_consumer"}, "managed"),
    ],
)
def test_memory_of_the_host_pool(options: dict[str, Any], changes: dict[str, Any], memory: str) -> None:
    """Nothing but the GPU of one rank can use managed memory for certain."""
    config = HiSparseConfig.from_vllm_config(engine({**GIB, **options}, **{**CUDA, **changes}))
    assert config.host_pool_memory == memory


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({}, {"device_config__device_type": "cpu"}, "pinned or auto on cpu, because only CUDA has managed memory"),
        ({}, {"parallel_config__tensor_parallel_size": 2}, "because the ranks share the pool"),
        (
            {"tiers": [{"type": "fs", "path": "/tmp/tier", "quota_gib": 1}]},
            {},
            "because the scheduler's process maps the pool",
        ),
    ],
)
def test_refuses_managed_memory_that_others_use(options: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    message = refusal({**MANAGED, **options}, **{**CUDA, **changes})
    check_parts(message, "host_pool_memory", "'managed'", reason, "Remove it.")


def test_refuses_indexer_keys_in_4_bits_without_an_indexer() -> None:
    message = dense_refusal({"algorithm": "quest", "indexer_key_dtype": "fp4"})
    expected = "auto with algorithm 'quest', which has no DSA indexer"
    check_parts(message, "indexer_key_dtype", "'fp4'", expected, "Remove it.")


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0, "greater than 0"),
        (-1.0, "greater than 0"),
        (1e308, "less than"),
        (float("inf"), "a finite"),
        ("1", "a valid"),
    ],
)
def test_refuses_shares_of_rows_that_are_no_numbers_above_0(share: Any, expected: str) -> None:
    message = parse_refusal({**GIB, "rows_by_layer": [1, share]})
    check_parts(message, "rows_by_layer.1", repr(share), expected, "Correct the value")


@pytest.mark.parametrize(("name", "value"), [("rows_by_layer", [1.0, 2.0]), ("log_rows_by_layer", True)])
def test_refuses_to_divide_rows_of_dense_models(name: str, value: Any) -> None:
    message = dense_refusal({"algorithm": "quest", name: value})
    check_parts(message, name, repr(value), "none with algorithm 'quest'", "Remove it.")


class Unforgetting(StreamingLLM):
    forgets_drafts = False


def test_refuses_drafts_that_an_algorithm_does_not_forget() -> None:
    name = f"{__name__}.Unforgetting"
    message, option = dense_refusal({"algorithm": name}, **drafts()), "--speculative-config method"
    expected = f"none with algorithm '{name}', which does not forget rejected drafts (forgets_drafts)"
    check_parts(message, option, "'ngram'", expected, "Remove --speculative-config, or choose another algorithm.")


def test_the_buffer_holds_the_selections_of_all_drafts() -> None:
    assert HiSparseConfig.from_vllm_config(engine(GIB, **drafts(num_speculative_tokens=1))).rows == 512
    assert HiSparseConfig.from_vllm_config(engine(GIB, **drafts())).rows == 4 * 256
    assert HiSparseConfig.from_vllm_config(engine({**GIB, "device_buffer_size": 1024}, **drafts())).rows == 1024
    message = refusal({**GIB, "device_buffer_size": 1000}, **drafts())
    expected = "at least 4 x top_k (1024): 3 drafts and one token select each"
    check_parts(message, "device_buffer_size", "1000", expected, "Raise it, or remove it for the default of 1024 rows.")


def test_refuses_traces_of_drafts() -> None:
    message = refusal({**GIB, "selection_trace_dir": "/tmp/traces"}, **drafts())
    expected = "none with --speculative-config"
    check_parts(message, "selection_trace_dir", "'/tmp/traces'", expected, "Remove one of the two.")


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_ds_mla", "int8", "float32"])
def test_refuses_quantised_kv(dtype: str) -> None:
    message = refusal(cache_config__cache_dtype=dtype)
    check_parts(message, "--kv-cache-dtype", repr(dtype), "one of auto, bfloat16, float16 with", "Set it to bfloat16")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_accepts_unquantised_kv(dtype: str) -> None:
    assert HiSparseConfig.from_vllm_config(engine(cache_config__cache_dtype=dtype)).top_k == 256


@pytest.mark.parametrize(
    ("changes", "option", "got", "expected"),
    [
        (
            {"parallel_config__use_ubatching": True, "parallel_config__num_ubatches": 2},
            "--enable-dbo / --ubatch-size",
            "2",
            "no microbatches",
        ),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode", "True", "False: device memory"),
        ({"model_config__enable_cumem_allocator": True}, "--enable-cumem-allocator", "True", "False: with it, /sleep"),
        ({"parallel_config__enable_fault_tolerance": True}, "--enable-fault-tolerance", "True", "a step that failed"),
        ({"parallel_config__enable_elastic_ep": True}, "--enable-elastic-ep", "True", "nobody has tried to add"),
        (
            {"aux_output_config": AuxOutputConfig(enable_return_routed_experts=True)},
            "--enable-return-routed-experts",
            "True",
            "no experts of the tokens",
        ),
        ({"cache_config__prefix_match_unit": 16}, "--prefix-match-unit", "16", "none: prefixes are matched"),
        (
            {"attention_config__indexer_kv_dtype": "mxfp4"},
            "--attention-config indexer_kv_dtype",
            "'mxfp4'",
            "auto or fp8",
        ),
        (
            {"device_config__device_type": "cuda", "kv_transfer_config__kv_buffer_device": "cpu"},
            "kv_buffer_device",
            "'cpu'",
            "cuda: NIXL writes into the host pool",
        ),
        (
            {"device_config__device_type": "cuda", "use_v2_model_runner": False},
            "VLLM_USE_V2_MODEL_RUNNER",
            "False",
            "Model Runner V2 on cuda",
        ),
    ],
)
def test_refuses_what_hot_buffers_do_not_support(changes: dict[str, Any], option: str, got: str, expected: str) -> None:
    check_parts(refusal(**changes), option, got, expected, "Remove")


def test_refuses_to_be_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    check_parts(refusal(), "VLLM_BATCH_INVARIANT", "True", "False: kernels over hot buffers", "Remove VLLM_BATCH")


def test_refuses_one_kv_cache_group() -> None:
    message = refusal(scheduler_config__disable_hybrid_kv_cache_manager=True)
    check_parts(message, "--disable-hybrid-kv-cache-manager", "True", "False", "Remove it")


@pytest.mark.parametrize(
    ("option", "value", "num_blocks"),
    [
        ("host_pool_gib", 1.0, 1024),
        ("host_pool_gib", 0.5, 512),
        ("host_to_device_ratio", 2.5, 250),
        ("host_to_device_ratio", 0.001, 0),
    ],
)
def test_sizes_the_host_pool(option: str, value: float, num_blocks: int) -> None:
    config = HiSparseConfig.from_extra_config({option: value})
    assert config.num_host_blocks(host_block_bytes=2**20, device_kv_bytes=100 * 2**20 + 5) == num_blocks
    assert config.size_option == (option, value)


def test_an_integer_is_a_size() -> None:
    config = HiSparseConfig.from_extra_config({"host_pool_gib": 2})
    assert config.num_host_blocks(2**30, 0) == 2
    assert config.num_host_blocks(2**20, 0, num_pools=8) == 256


@pytest.mark.parametrize("option", ["host_pool_gib", "host_to_device_ratio"])
def test_infinite_pool_is_refused(option):
    with pytest.raises(HiSparseConfigError, match=option):
        HiSparseConfig.from_extra_config({option: float("inf")})


def test_records_selections_of_dsa_models_on_the_cpu_alone() -> None:
    options = {**GIB, "selection_trace_dir": "traces"}
    assert HiSparseConfig.from_vllm_config(engine(options)).selection_trace_dir == "traces"
    on_cuda = refusal(options, device_config__device_type="cuda")
    of_dense_model = dense_refusal({**options, "algorithm": "quest"})
    for message, place in ((on_cuda, "'dsa' on cuda"), (of_dense_model, "'quest' on cpu")):
        check_parts(message, "selection_trace_dir", "'traces'", f"none with algorithm {place}", "Remove it")


# Dense models


def dense_engine(extra_config: dict[str, Any], **changes: Any) -> SimpleNamespace:
    model = {"hf_text_config": SimpleNamespace(num_hidden_layers=4), "architecture": "LlamaForCausalLM"}
    changes = {**{f"model_config__{name}": value for name, value in model.items()}, **changes}
    return engine({**GIB, **extra_config}, model_config__use_mla=changes.pop("model_config__use_mla", False), **changes)


def dense_refusal(extra_config: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_vllm_config(dense_engine(extra_config, **changes))
    return str(refused.value)


def test_ranks_of_a_dense_model_may_have_managed_memory() -> None:
    """Each rank has a host pool of its own."""
    changes = {**CUDA, "parallel_config__tensor_parallel_size": 2}
    assert HiSparseConfig.from_vllm_config(dense_engine({"algorithm": "quest"}, **changes)).host_pool_memory == "auto"


@pytest.mark.parametrize(
    ("algorithm", "full_kv_layers", "unit"),
    [
        ("quest", [0, 1], 16),
        ("cluster_kv", [0, 1], 1),
        ("streaming_llm", [], 16),
        ("pq_cache", [], 1),
        ("oracle", [], 1),
    ],
)
def test_defaults_of_dense_models(algorithm: str, full_kv_layers: list[int], unit: int) -> None:
    config = HiSparseConfig.from_vllm_config(dense_engine({"algorithm": algorithm}))
    assert (config.top_k, config.rows, config.tokens_per_unit) == (2048, 4096, unit)
    assert config.full_kv_layers == full_kv_layers


def test_refuses_other_prefill_ranks_of_dense_models() -> None:
    message = dense_refusal({"algorithm": "quest", "prefill_tp_size": 2})
    check_parts(message, "prefill_tp_size", "2", "1, the --tensor-parallel-size here", "Start the prefill instances")
    options = {"algorithm": "quest", "prefill_tp_size": 2}
    HiSparseConfig.from_vllm_config(dense_engine(options, parallel_config__tensor_parallel_size=2))


def test_options_of_dense_models() -> None:
    extra = {"algorithm": "quest", "top_k": 96, "algorithm_options": {"page_size": 32}, "full_kv_layers": [3, 0, 3]}
    config = HiSparseConfig.from_vllm_config(dense_engine(extra))
    assert (config.top_k, config.rows, config.tokens_per_unit, config.full_kv_layers) == (96, 192, 32, [0, 3])
    algorithm = config.make_algorithm(AttentionShape(4, 2, 16, torch.float32), 1000)
    assert (type(algorithm).__name__, algorithm.num_selected, algorithm.max_units) == ("Quest", 3, 32)


@pytest.mark.parametrize("name", ["qest", "package.qest", ".qest", "..qest"])
def test_refuses_unknown_algorithms_with_the_known_ones(name: str) -> None:
    message = parse_refusal({**GIB, "algorithm": name})
    known = "one of cluster_kv, dsa, msa, oracle, pq_cache, quest, streaming_llm"
    advice = "Correct the path, or set PYTHONPATH" if name == "package.qest" else "Correct the name."
    check_parts(message, "algorithm", repr(name), known, advice)
    assert ("No module named 'package'" in message) == (name == "package.qest")


@pytest.mark.parametrize(
    ("algorithm", "name", "value", "expected"),
    [
        ("quest", "page_size", 0, "greater than or equal to 1"),
        ("quest", "page_size", 16.0, "a valid integer"),
        ("quest", "pagesize", 16, "one of the options of 'quest': page_size"),
        ("streaming_llm", "sink_tokens", -1, "greater than or equal to 0"),
        ("pq_cache", "num_bits", 9, "less than or equal to 8"),
        ("cluster_kv", "update_interval", 0, "greater than or equal to 1"),
        ("oracle", "page_size", 16, "one of the options of 'oracle': none"),
    ],
)
def test_refuses_algorithm_options(algorithm: str, name: str, value: Any, expected: str) -> None:
    message = parse_refusal({**GIB, "algorithm": algorithm, "algorithm_options": {name: value}})
    check_parts(message, f"algorithm_options.{name}", repr(value), expected, "Correct algorithm_options.")


@pytest.mark.parametrize(
    ("extra_config", "top_k", "expected"),
    [
        ({"algorithm": "quest"}, 15, "a multiple of 16 (a unit of 'quest'), and at least 16, the tokens"),
        ({"algorithm": "quest"}, 100, "a multiple of 16"),
        ({"algorithm": "streaming_llm"}, 16, "at least 32"),
        ({"algorithm": "cluster_kv"}, 335, "at least 336"),
        ({"algorithm": "pq_cache"}, 63, "at least 64"),
    ],
)
def test_refuses_a_budget_below_what_is_always_selected(extra_config: dict, top_k: int, expected: str) -> None:
    message = dense_refusal({**extra_config, "top_k": top_k})
    check_parts(message, "top_k", str(top_k), expected, "Correct it, or the sinks, window or page")


@pytest.mark.parametrize("size", [96, 136])
def test_refuses_a_buffer_that_is_no_whole_number_of_pages(size: int) -> None:
    message = dense_refusal({"algorithm": "quest", "top_k": 128, "device_buffer_size": size})
    check_parts(message, "device_buffer_size", str(size), "at least top_k (128), a multiple of 16", "256 rows")


@pytest.mark.parametrize("layers", [[4], [-1], [0, 9], [0, 1, 2, 3]])
def test_refuses_full_kv_layers_out_of_range(layers: list[int]) -> None:
    message = dense_refusal({"algorithm": "quest", "full_kv_layers": layers})
    check_parts(message, "full_kv_layers", repr(layers), "layers from 0 to 3, not all of them", "at least one must be")


def test_refuses_full_kv_layers_of_a_dsa_model() -> None:
    message = refusal({**GIB, "full_kv_layers": [0]})
    check_parts(
        message, "full_kv_layers", "[0]", "none: the layers of a model with an indexer say themselves", "Remove it."
    )


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model_config__use_mla": True}, "multi-head latent attention"),
        ({"model_config__runner_type": "pooling"}, "an encoder or pooling model"),
        ({"model_config__is_encoder_decoder": True}, "an encoder or pooling model"),
        ({"model_config__is_hybrid": True}, "recurrent layers"),
        ({"model_config__is_attention_free": True}, "recurrent layers"),
        ({"model_config__get_sliding_window": lambda: 512}, "sliding window layers"),
        (
            {
                "model_config__hf_text_config": SimpleNamespace(
                    num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]
                )
            },
            "sliding window layers",
        ),
    ],
)
def test_refuses_models_that_an_algorithm_does_not_support(changes: dict[str, Any], kind: str) -> None:
    message = dense_refusal({"algorithm": "quest"}, **changes)
    check_parts(message, "algorithm", "'quest'", kind, "Serve another model")


def test_refuses_an_algorithm_for_a_model_that_selects_rows_itself() -> None:
    message = refusal({**GIB, "algorithm": "quest"})
    check_parts(
        message, "algorithm", "'quest'", "selects rows itself, for which algorithm is dsa", "Remove the option."
    )


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", "fp8", "one of auto, bfloat16, float16 with algorithm 'quest' on cpu"),
        ("cuda", "fp8_e5m2", "one of auto, bfloat16, fp8, fp8_e4m3 with algorithm 'quest' on cuda"),
        ("cuda", "int8_per_token_head", "one of auto, bfloat16, fp8, fp8_e4m3"),
    ],
)
def test_refuses_other_quantised_kv_of_dense_models(device: str, dtype: str, expected: str) -> None:
    changes = {"device_config__device_type": device, "cache_config__cache_dtype": dtype}
    check_parts(
        dense_refusal({"algorithm": "quest"}, **changes),
        "--kv-cache-dtype",
        repr(dtype),
        expected,
        "Set it to bfloat16",
    )


def test_dense_models_keep_kv_in_fp8_on_cuda() -> None:
    changes = {"device_config__device_type": "cuda", "cache_config__cache_dtype": "fp8"}
    assert HiSparseConfig.from_vllm_config(dense_engine({"algorithm": "quest"}, **changes)).top_k


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", sorted(REFUSED_MODELS))
def test_refuses_models_by_name(architecture: str, device: str) -> None:
    changes = {"model_config__architecture": architecture, "device_config__device_type": device}
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_vllm_config(engine(**changes))
    reason, nearest = REFUSED_MODELS[architecture]
    check_parts(str(refused.value), "--model", f"'{architecture}'", reason, "vLLM serves this model with full KV")
    assert str(refused.value).endswith(f"The nearest model with hot buffers is {nearest}.")


def test_refused_models_have_a_row_in_the_table_of_models() -> None:
    """Classes that select positions have rows with "refused", the others a sentence."""
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    refused = "".join(line for line in page.splitlines() if "| refused: " in line)
    named = re.findall(r"`(\w+?)(?:…|ForCausalLM)`", refused)
    assert len(named) >= 6
    for architecture, (_, nearest) in REFUSED_MODELS.items():
        family = next((name for name in named if architecture.startswith(f"{name}For")), None)
        if family is None:
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", architecture.split("For")[0])
            assert re.search(rf"\b{name}\b.* refused by name", " ".join(page.split())), architecture
        else:
            (row,) = (line for line in page.splitlines() if re.search(rf"`{family}(…|ForCausalLM)`", line))
            assert f"nearest: {nearest.split(',')[0]} |" in row, row


def test_no_class_of_a_refused_family_is_forgotten() -> None:
    """Both releases' classes that answer; classes that draft are loaded for one of them only."""
    classes = [*_TEXT_GENERATION_MODELS.items(), *_MULTIMODAL_MODELS.items()]
    families = {module for name, (module, _) in classes if name in REFUSED_MODELS}
    assert {name for name, (module, _) in classes if module in families} <= set(REFUSED_MODELS)


def test_refuses_images_where_the_model_selects_but_not_its_text() -> None:
    multimodal = SimpleNamespace(language_model_only=False)
    message = refusal(GIB, model_config__multimodal_config=multimodal)
    check_parts(message, "--model", "'DeepseekV32ForCausalLM'", "text alone", "Add --language-model-only")
    message = minimax_refusal(model_config__multimodal_config=multimodal)
    check_parts(message, "--model", "'Blocks'", "text alone", "Add --language-model-only")
    multimodal.language_model_only = True
    assert HiSparseConfig.from_vllm_config(engine(GIB, model_config__multimodal_config=multimodal)).top_k == 256


def test_a_dense_model_with_images_and_no_algorithm_is_told_to_choose_one() -> None:
    images = {"model_config__multimodal_config": SimpleNamespace(language_model_only=False)}
    check_parts(dense_refusal({}, **images), "algorithm", "'dsa'", "a model with a DSA indexer", "quest")


def test_dense_models_take_images_but_not_with_draft_models() -> None:
    images = {"model_config__multimodal_config": SimpleNamespace(language_model_only=False)}
    assert HiSparseConfig.from_vllm_config(dense_engine({"algorithm": "quest"}, **images)).top_k
    HiSparseConfig.from_vllm_config(dense_engine({"algorithm": "quest"}, **images, **drafts("ngram")))
    message = dense_refusal({"algorithm": "quest"}, **images, **drafts("eagle3"))
    check_parts(message, "--speculative-config method", "'eagle3'", "ngram with images", "Add --language-model-only")


@pytest.mark.parametrize("load_format", OTHER_LOADERS)
def test_refuses_loaders_that_build_the_model_by_themselves(load_format: str) -> None:
    message = refusal(GIB, load_config__load_format=load_format)
    check_parts(message, "--load-format", f"'{load_format}'", "none of", "Remove it")


@pytest.mark.parametrize(
    ("algorithm", "option", "value", "most"),
    [("oracle", "top_k", 4097, 4096), ("quest", "device_buffer_size", 16 * (2**19 - 63), 16 * (2**19 - 64))],
)
def test_refuses_sizes_beyond_the_kernels(algorithm: str, option: str, value: int, most: int) -> None:
    message = dense_refusal({"algorithm": algorithm, option: value}, device_config__device_type="cuda")
    check_parts(message, option, str(value), f"at most {most} on cuda", "Lower it")


@pytest.mark.parametrize(("algorithm", "most"), [("quest", 7), ("oracle", 3)])
def test_refuses_drafts_whose_units_are_too_many_for_the_kernels(algorithm: str, most: int) -> None:
    extra, device = {"algorithm": algorithm, "top_k": 2048}, {"device_config__device_type": "cuda"}
    assert HiSparseConfig.from_vllm_config(dense_engine(extra, **device, **drafts(num_speculative_tokens=most))).top_k
    message = dense_refusal(extra, **device, **drafts(num_speculative_tokens=most + 1))
    option = "--speculative-config num_speculative_tokens"
    check_parts(message, option, str(most + 1), f"at most {most} on cuda", "Lower it")


def test_refuses_subspaces_that_do_not_divide_a_key() -> None:
    extra = {"algorithm": "pq_cache", "algorithm_options": {"num_subspaces": 3}}
    config = HiSparseConfig.from_vllm_config(dense_engine(extra))
    with pytest.raises(HiSparseConfigError) as refused:
        config.make_algorithm(AttentionShape(4, 2, 16, torch.float32), 1000)
    check_parts(str(refused.value), "algorithm_options", "{'num_subspaces': 3}", "divides the head size 16", "Correct")


BLOCKS = {
    "sparse_block_size": 128,
    "sparse_topk_blocks": 16,
    "sparse_local_block": 1,
    "sparse_num_index_heads": 4,
    "sparse_attention_freq": [0, 0, 0, 1],
}


def minimax(options: dict[str, Any] | None = None, indexer: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A `VllmConfig` of MiniMax-M3, under a name that is not refused."""
    text_config = SimpleNamespace(
        num_hidden_layers=4, num_key_value_heads=4, sparse_attention_config=BLOCKS | (indexer or {})
    )
    model = {"model_config__use_mla": False, "model_config__hf_text_config": text_config}
    changes = {"device_config__device_type": "cuda", **model, "model_config__architecture": "Blocks", **changes}
    return engine({**GIB, "algorithm": "msa", **(options or {})}, **changes)


def minimax_refusal(*args: Any, **changes: Any) -> str:
    with pytest.raises(HiSparseConfigError) as refused:
        HiSparseConfig.from_vllm_config(minimax(*args, **changes))
    return str(refused.value)


def test_minimax_m3_selects_what_its_configuration_says() -> None:
    config = HiSparseConfig.from_vllm_config(minimax())
    assert (config.top_k, config.rows, config.tokens_per_unit, config.dense_unit) == (2048, 4096, 16, 16)
    assert config.full_kv_layers == [] and not config.controls_admission(1)
    assert config.kv_cache_dtypes("cuda") == ("auto", "bfloat16")
    for dtype in ("auto", "bf16", "fp8"):
        HiSparseConfig.from_vllm_config(minimax(attention_config__indexer_kv_dtype=dtype))
    drafts = SimpleNamespace(
        method="ngram",
        num_speculative_tokens=2,
        num_speculative_tokens_per_batch_size=None,
        parallel_drafting=False,
        use_multi_module_mtp=lambda: False,
    )
    assert HiSparseConfig.from_vllm_config(minimax(speculative_config=drafts)).rows == 3 * 2048


def test_what_hot_buffers_of_minimax_m3_cannot_do_is_refused() -> None:
    message = minimax_refusal(cache_config__cache_dtype="fp8")
    check_parts(
        message, "--kv-cache-dtype", "'fp8'", "one of auto, bfloat16 with algorithm 'msa'", "Set it to bfloat16"
    )
    message = minimax_refusal(attention_config__indexer_kv_dtype="mxfp4")
    check_parts(message, "--attention-config indexer_kv_dtype", "'mxfp4'", "auto or bf16 or fp8", "Remove it.")
    for method in ("mtp", "eagle3"):
        drafts = SimpleNamespace(method=method, num_speculative_tokens=1)
        message = minimax_refusal(speculative_config=drafts)
        expected = "ngram or ngram_gpu with MiniMax-M3 on cuda"
        check_parts(message, "--speculative-config method", repr(method), expected, "Remove --speculative-config.")
    message = minimax_refusal({"top_k": 1024})
    check_parts(message, "top_k", "1024", "2048, the model's sparse_topk_blocks x 128", "Remove top_k")
    message = minimax_refusal({"full_kv_layers": [0]})
    check_parts(message, "full_kv_layers", "[0]", "none: the layers of a model with an indexer", "Remove it.")
    message = minimax_refusal(device_config__device_type="cpu")
    check_parts(message, "algorithm", "'msa'", "a GPU: vLLM has no code for this model on the CPU", "with a GPU")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sparse_block_size", 64, "128, the page of vLLM's kernels"),
        ("sparse_local_block", 0, "at least 1: the newest block must be selected"),
        ("sparse_local_block", None, "at least 1: the newest block must be selected"),
        ("sparse_num_index_heads", 1, "4, the KV heads"),
    ],
)
def test_an_indexer_of_another_kind_is_refused(name: str, value: int | None, expected: str) -> None:
    message = minimax_refusal(indexer={name: value})
    check_parts(message, f"sparse_attention_config.{name}", repr(value), expected, "Serve another model")


def test_algorithms_that_do_not_fit_the_model_are_refused() -> None:
    fix = "set algorithm to msa for this model"
    check_parts(minimax_refusal({"algorithm": "dsa"}), "algorithm", "'dsa'", "a model with a DSA indexer", fix)
    message = minimax_refusal({"algorithm": "quest"})
    check_parts(message, "algorithm", "'quest'", "selects blocks itself, for which algorithm is msa", "Serve another")
    message = refusal({**GIB, "algorithm": "msa"}, device_config__device_type="cuda")
    check_parts(message, "algorithm", "'msa'", "sparse_attention_config in its config.json", "remove algorithm")


@pytest.mark.parametrize(("active", "expected"), [(None, 8), (3, 3)])
def test_requests_that_may_run_at_once(active: int | None, expected: int) -> None:
    limits = SimpleNamespace(max_num_seqs=8, max_num_active_seqs=active)
    assert max_num_running(SimpleNamespace(scheduler_config=limits)) == expected
