"""Prefill and decode apart with a draft model (EAGLE): NIXL brings its KV of the prompt with that of full-KV layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import MODELS, assert_same_but_rounding
from draft_models import make_draft_model
from forks import forked
from servers import DO_PREFILL, completion, wait_started
from test_dense_drafts import repeating
from test_pd import DecodeServer

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

OPTIONS = {"algorithm": "quest", "host_pool_gib": 0.25, "top_k": 2048, "device_buffer_size": 8192}
ARGS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--max-model-len", "2048"]


def start(
    group: ProcessGroup, directory: Path, name: str, connector: dict, core: int, drafts: dict, *args: str
) -> DecodeServer:
    port, side_port = free_ports(2)
    options = [*ARGS, *args, "--speculative-config", json.dumps(drafts)]
    process = vllm_engine(name, MODELS / "llama", directory, port, connector, side_port, [core], options)
    return DecodeServer(group.start(forked(process)), f"http://{LOOPBACK}:{port}")


def counts(server: DecodeServer) -> list[float]:
    return [server.metric(f"spec_decode_num_{kind}_tokens") for kind in ("accepted", "draft")]


@pytest.mark.slow
def test_drafts_are_as_good_as_on_the_prefill_side(tmp_path: Path) -> None:
    model = make_draft_model("eagle", MODELS / "llama", tmp_path / "draft")
    drafts = {"method": "eagle", "model": str(model), "num_speculative_tokens": 3}
    with ProcessGroup() as group:
        prefill = start(group, tmp_path, "prefill", PREFILL_CONNECTOR, 0, drafts, "--no-enable-prefix-caching")
        decode = start(group, tmp_path, "decode", hisparse_connector(**OPTIONS), 1, drafts)
        wait_started(group)
        for length in (5, 300, 1100):
            prompt = repeating(length)
            transfer = prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
            reply, expected = decode.complete(prompt, 40, transfer), prefill.complete(prompt, 40)
            assert_same_but_rounding([completion(reply)], [completion(expected)])
            decode.wait_empty()
        assert decode.metric("hisparse_transfers_refused") == 0
        computed, received = (accepted / drafted for accepted, drafted in map(counts, (prefill, decode)))
    assert received == pytest.approx(computed, abs=0.1) and 0.2 < computed < 1
