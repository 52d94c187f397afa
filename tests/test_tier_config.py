from typing import Any

import pytest

from tests.test_config import engine
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.kv_manager.tiers.make_tiers import num_buffer_chunks
from vllm_hisparse.kv_manager.tiers.transfer_buffer import chunk_bytes
from vllm_hisparse.tier_config import FsTier, ObjTier, P2PTier

FS = {"type": "fs", "path": "/var/kv", "quota_gib": 10}
P2P = {"type": "p2p", "peers": ["decode:5710", "10.0.0.1:5711"]}
OBJ = {"type": "obj", "bucket": "kv-blocks", "endpoint": "minio:9000"}


def parse(tiers: Any, **options: Any) -> HiSparseConfig:
    return HiSparseConfig.from_extra_config({"host_pool_gib": 1.0, "tiers": tiers, **options})


def parse_for_engine(
    tiers: Any, enable_prefix_caching: bool = True, prefix_caching_hash_algo: str = "sha256"
) -> HiSparseConfig:
    """Parse as an engine does, which checks its own options, too."""
    config = engine({"host_pool_gib": 1.0, "tiers": tiers})
    config.cache_config.enable_prefix_caching = enable_prefix_caching
    config.cache_config.prefix_caching_hash_algo = prefix_caching_hash_algo
    return HiSparseConfig.parse(config)


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
        ({"type": "fs", "path": "/x"}, ["tiers.0.fs.quota_gib: got ['path', 'type']", "required", "Add it"]),
        ({**FS, "quota_gib": 0}, ["tiers.0.fs.quota_gib", "greater than 0"]),
        ({**FS, "quota_gib": 1e308}, ["tiers.0.fs.quota_gib", "1e+308", "less than or equal to 17179869184"]),
        ({**FS, "quota_gib": "10"}, ["tiers.0.fs.quota_gib", "'10'", "valid number, without quotes"]),
        ({**FS, "root_dir": "/x"}, ["tiers.0.fs.root_dir", "num_threads, path, quota_gib, type"]),
        ({**P2P, "peers": ["decode"]}, ["tiers.0.p2p.peers.0", "'decode', expected HOST:PORT"]),
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
        parse_for_engine([FS], **cache)
    good = {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256_cbor"}
    assert parse_for_engine([FS], **good).tiers


def test_size_of_the_transfer_buffer() -> None:
    block_bytes = 10**6
    chunk = chunk_bytes(block_bytes)
    assert num_buffer_chunks(parse([FS]), block_bytes, 100) == 2**29 // chunk
    assert num_buffer_chunks(parse([FS]), block_bytes, 20_000) == int(20_000 * block_bytes / 32) // chunk
    assert num_buffer_chunks(parse([FS]), block_bytes, 10**7) == 4 * 2**30 // chunk
    assert num_buffer_chunks(parse([FS], tier_buffer_gib=1.0), block_bytes, 100) == 2**30 // chunk
    with pytest.raises(HiSparseConfigError, match=r"tier_buffer_gib: got 0\.01, expected at least 0\.060, 64 blocks"):
        num_buffer_chunks(parse([FS], tier_buffer_gib=0.01), block_bytes, 100)
    with pytest.raises(HiSparseConfigError, match=r"tier_buffer_gib: got None, expected at least 5\.0"):
        num_buffer_chunks(parse([FS]), 80 * 2**20, 400)
    assert parse([]).tier_buffer_bytes(2**40) == 0


@pytest.mark.parametrize(
    "tiers",
    [
        [{**OBJ, "secretkey": "hush"}],
        [{**OBJ, "secret_key": ["hush"]}],
        [{**OBJ, "scheme": "hush"}],
        [{"type": "obj", "secret_key": "hush"}],
        [{"secret_key": "hush"}],
        [{"type": "s3", "secret_key": "hush"}],
        [{"type": "fs", "secret_key": "hush"}],
        [{**FS, "secret_key": "hush"}],
        {"type": "obj", "secret_key": "hush"},
        ["hush"],
        "hush",
    ],
)
def test_a_refusal_does_not_show_what_may_be_a_secret(tiers: Any) -> None:
    message = refusal(tiers)
    assert message.startswith("tiers") and "hush" not in message


def test_an_unknown_option_is_refused_without_its_value() -> None:
    assert "hush" not in refusal([FS], secret_key="hush")


def test_a_store_that_cannot_be_opened_shows_no_secret() -> None:
    (tier,) = parse([{**OBJ, "secret_key": "hush", "access_key": "AKIA"}]).tiers
    assert tier.without_secrets("no store with AKIA:hush") == "no store with ***:***"


@pytest.mark.parametrize(
    ("host", "peers", "is_refused"),
    [
        (None, ["decode:5710"], True),
        ("localhost", ["10.0.0.1:5710"], True),
        ("127.0.0.1", ["127.0.0.1:5710", "10.0.0.1:5710"], True),
        ("0.0.0.0", ["10.0.0.1:5710"], True),
        ("0.0.0.0", [], True),
        (None, ["localhost:5710", "127.0.0.1:5711"], False),
        (None, [], False),
        ("10.0.0.2", ["decode:5710"], False),
    ],
)
def test_peers_must_be_able_to_call_back(
    host: str | None, peers: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_P2P_SIDE_CHANNEL_HOST", raising=False)
    tiers = [{"type": "p2p", "host": host, "peers": peers}]
    if not is_refused:
        assert parse_for_engine(tiers).tiers
        return
    with pytest.raises(HiSparseConfigError, match=r"tiers\.0\.host: got"):
        parse_for_engine(tiers)


def test_the_environment_names_this_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chart and Ray set it for every replica."""
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "10.0.0.2")
    assert parse_for_engine([P2P]).tiers
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "0.0.0.0")
    with pytest.raises(HiSparseConfigError, match="VLLM_P2P_SIDE_CHANNEL_HOST"):
        parse_for_engine([P2P])
