"""Engines whose graphs differ do not share an entry of vLLM's cache of compiled models."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig

from vllm_hisparse.compat.compiled_models import separate_compiled_models
from vllm_hisparse.plugin import register

HOT = "HiSparseHostConnector"


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def engine_hash(connector: str, **options: Any) -> str:
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=options)
    return VllmConfig(kv_transfer_config=transfer).compute_hash()


def test_a_prefill_instance_has_another_entry() -> None:
    """A prefill instance writes KV with vLLM's own operation, which the graph of layers with hot buffers lacks."""
    assert engine_hash("NixlConnector") != engine_hash(HOT)


def test_options_that_change_the_graph_change_the_entry() -> None:
    hashes = [
        engine_hash(HOT),
        engine_hash(HOT, indexer_key_dtype="fp4"),
        engine_hash(HOT, algorithm="quest"),
        engine_hash(HOT, algorithm="quest", full_kv_layers=[]),
        engine_hash(HOT, algorithm="quest", full_kv_layers=[0]),
    ]
    assert len(set(hashes)) == len(hashes)


def test_options_that_change_the_memory_beside_the_kv_cache_change_the_entry() -> None:
    """With VLLM_ENABLE_STARTUP_PLAN, vLLM takes the size of the KV cache from an engine with the same hash."""
    hashes = [engine_hash(HOT), engine_hash(HOT, import_buffer_gib=1.0), engine_hash(HOT, rows_by_layer=[1.0, 2.0])]
    assert len(set(hashes)) == len(hashes)


def test_sizes_of_host_memory_do_not_change_the_entry() -> None:
    assert engine_hash(HOT, host_pool_gib=1.0) == engine_hash(HOT, host_pool_gib=2.0)


def test_other_connectors_keep_vllms_hash() -> None:
    plain = KVTransferConfig.compute_hash.__wrapped__
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert transfer.compute_hash() == plain(transfer)


def test_a_second_call_changes_nothing() -> None:
    wrapped = KVTransferConfig.compute_hash
    separate_compiled_models("Other", ())
    assert KVTransferConfig.compute_hash is wrapped
