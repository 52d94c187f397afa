from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError, _check_prefix_cache
from vllm_hisparse.kv_manager.tiers.make_tiers import MIN_CHUNKS, _num_chunks
from vllm_hisparse.kv_manager.tiers.transfer_buffer import chunk_bytes
from vllm_hisparse.tier_config import FsTier, ObjTier, P2PTier

FS = {"type": "fs", "path": "/var/kv", "quota_gib": 10}
P2P = {"type": "p2p", "peers": ["decode:5710", "10.0.0.1:5711"]}
OBJ = {"type": "obj", "bucket": "kv-blocks", "endpoint": "minio:9000"}


def parse(tiers: Any, **options: Any) -> HiSparseConfig:
    return HiSparseConfig.from_extra_config({"host_pool_gib": 1.0, "tiers": tiers, **options})


def refusal(tiers: Any, **options: Any) -> str:
    with pytest.raises(HiSparseConfigError) as error:
        parse(tiers, **options)
    return str(error.value)


def test_tiers_are_parsed_in_order() -> None:
    config = parse([P2P, FS, OBJ])
    assert [type(tier) for tier in config.tiers] == [P2PTier, FsTier, ObjTier]
    assert config.tier_timeout_s == 5.0 and config.tier_buffer_gib is None
    assert [str(tier) for tier in config.tiers] == [
        "p2p, peers decode:5710, 10.0.0.1:5711",
        "fs at /var/kv, 10 GiB",
        "obj in bucket kv-blocks at https://minio:9000",
    ]
    assert parse([]).tiers == HiSparseConfig(host_pool_gib=1.0).tiers == []


def test_they_become_vllms_tiers() -> None:
    p2p, fs, obj = (tier.secondary_tier() for tier in parse([P2P, FS, OBJ]).tiers)
    assert p2p == {"type": "hisparse_p2p", "host": None, "port": None}
    assert (fs["root_dir"], fs["quota_bytes"]) == ("/var/kv", 10 * 2**30)
    assert obj["store_config"]["endpoint_override"] == "minio:9000"
    assert obj["store_config"]["access_key"] == "", "the AWS SDK finds it"


@pytest.mark.parametrize(
    ("tier", "parts"),
    [
        ({"type": "nfs"}, ["tiers.0", "fs", "p2p", "obj"]),
        ({"path": "/x"}, ["tiers.0", "type"]),
        ({"type": "fs", "path": "/x"}, ["tiers.0.fs.quota_gib", "required"]),
        ({**FS, "quota_gib": 0}, ["tiers.0.fs.quota_gib", "greater than 0"]),
        ({**FS, "quota_gib": "10"}, ["tiers.0.fs.quota_gib", "'10'", "valid number"]),
        ({**FS, "root_dir": "/x"}, ["tiers.0.fs.root_dir", "num_threads, path, quota_gib, type"]),
        ({**P2P, "peers": ["decode"]}, ["tiers.0.p2p.peers.0", "'decode'"]),
        ({**P2P, "port": 70000}, ["tiers.0.p2p.port", "less than 65536"]),
        ({**OBJ, "scheme": "ftp"}, ["tiers.0.obj.scheme", "'http' or 'https'"]),
        ({**OBJ, "bucket": ""}, ["tiers.0.obj.bucket"]),
    ],
)
def test_refusals_name_option_and_value(tier: dict, parts: list[str]) -> None:
    message = refusal([tier])
    assert all(part in message for part in parts), message


def test_one_p2p_tier_at_most() -> None:
    assert "at most one of type p2p" in refusal([P2P, FS, P2P])


@pytest.mark.parametrize(("name", "value"), [("tier_buffer_gib", 0), ("tier_timeout_s", -1), ("tier_timeout_s", "5")])
def test_refuses_other_options_out_of_range(name: str, value: Any) -> None:
    assert refusal([FS], **{name: value}).startswith(name)


def test_secrets_are_not_shown() -> None:
    shown = repr(parse([{**OBJ, "access_key": "AKIA", "secret_key": "hush", "session_token": "token"}]))
    assert not any(secret in shown for secret in ("AKIA", "hush", "'token'"))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256"}, "--enable-prefix-caching"),
        ({"enable_prefix_caching": True, "prefix_caching_hash_algo": "xxhash"}, "--prefix-caching-hash-algo"),
    ],
)
def test_the_prefix_cache_must_be_one_that_others_understand(cache: dict, message: str) -> None:
    with pytest.raises(HiSparseConfigError, match=message):
        _check_prefix_cache(SimpleNamespace(cache_config=SimpleNamespace(**cache)))
    good = {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256_cbor"}
    _check_prefix_cache(SimpleNamespace(cache_config=SimpleNamespace(**good)))


def test_size_of_the_transfer_buffer() -> None:
    block_bytes = 10**6
    chunk = chunk_bytes(block_bytes)
    assert _num_chunks(parse([FS]), block_bytes, 100) == MIN_CHUNKS
    assert _num_chunks(parse([FS]), block_bytes, 10_000) == int(10_000 * block_bytes / 32) // chunk
    assert _num_chunks(parse([FS]), block_bytes, 10**7) == 4 * 2**30 // chunk
    assert _num_chunks(parse([FS], tier_buffer_gib=1.0), block_bytes, 100) == 2**30 // chunk
    with pytest.raises(HiSparseConfigError, match=r"tier_buffer_gib: got 0\.01, expected at least 0\.060, 64 blocks"):
        _num_chunks(parse([FS], tier_buffer_gib=0.01), block_bytes, 100)
