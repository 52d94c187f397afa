"""KV that a prefill instance has let go of: its blocks hold other prompts' KV by the time it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import MODELS, make_prompt
from forks import forked
from servers import DO_PREFILL, wait_for, wait_started
from test_pd import MODEL, OPTIONS, DecodeServer, assert_same

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LEASE_S = 6
NUM_PREFILL_BLOCKS = 40  # two prompts


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DecodeServer]]:
    """A prefill server with a small cache, and a decode server that fails what could not be loaded."""
    options = {"kv_lease_duration": LEASE_S}
    connectors = {
        "prefill": {**PREFILL_CONNECTOR, "kv_connector_extra_config": options},
        "decode": {**hisparse_connector(**OPTIONS, **options), "kv_load_failure_policy": "fail"},
    }
    arguments = {
        "prefill": ["--no-enable-prefix-caching", "--num-gpu-blocks-override", str(NUM_PREFILL_BLOCKS)],
        "decode": [],
    }
    log_dir, servers = tmp_path_factory.mktemp("logs"), {}
    with ProcessGroup() as group:
        for core, (name, connector) in enumerate(connectors.items()):
            port, side_port = free_ports(2)
            args = ["--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--max-model-len", "2048"]
            args += arguments[name]
            process = vllm_engine(name, MODELS / MODEL, log_dir, port, connector, side_port, [core], args)
            servers[name] = DecodeServer(group.start(forked(process)), f"http://{LOOPBACK}:{port}")
        wait_started(group)
        yield servers


def test_lease_had_ended_when_the_parameters_were_presented(servers: dict[str, DecodeServer]) -> None:
    """The prompt is computed, and the next one like it finds its own KV in the prefix cache."""
    prefill, decode, prompt = servers["prefill"], servers["decode"], make_prompt(1000, seed=21)
    expected, warm = prefill.complete(prompt, 12), make_prompt(70, seed=22)
    in_time = prefill.complete(warm, 1, dict(DO_PREFILL))["kv_transfer_params"]
    assert_same(decode.complete(warm, 8, in_time), prefill.complete(warm, 8))
    assert decode.metric("hisparse_transfers") == 1 and decode.metric("hisparse_transfers_expired") == 0
    late = prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
    assert late["kv_lease_duration"] == LEASE_S and late["remote_blocks_expiry_time"] > 0

    def has_let_go() -> bool:
        prefill.complete(make_prompt(1400, seed=23), 1)  # also writes other KV into the blocks
        return prefill.metric("nixl_num_kv_expired_reqs") > 0

    wait_for(has_let_go)
    prefill.complete(make_prompt(2000, seed=24), 1)
    assert_same(decode.complete(prompt, 12, late), expected)
    decode.wait_empty()
    assert decode.metric("hisparse_transfers_expired") == decode.metric("hisparse_transfers") == 1
    found = decode.metric("prefix_cache_hits")
    assert_same(decode.complete(prompt, 12), expected)
    decode.wait_empty()
    assert decode.metric("prefix_cache_hits") > found
