"""Two servers of one model: stock vLLM with full KV, which is the reference, and one with hot buffers and a tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import requests
from conftest import MODELS
from forks import forked
from servers import REQUEST_TIMEOUT_S, Server, wait_for, wait_started
from test_pd import DecodeServer

from tools.harness.deployment import hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 4
LIMITS = {"max-model-len": MAX_MODEL_LEN, "max-num-seqs": MAX_NUM_SEQS, "max-num-batched-tokens": 512}
COMMON_ARGS = [text for name, limit in LIMITS.items() for text in (f"--{name}", str(limit))]


class HotServer(DecodeServer):
    """A server with hot buffers and vLLM's development endpoints.

    Args:
        tier_dir: the directory of its fs tier.
    """

    def __init__(self, process: Any, url: str, tier_dir: Path):
        super().__init__(process, url)
        self.tier_dir = tier_dir

    def post(self, path: str, **query: Any) -> dict:
        """Call an endpoint that takes its options from the query."""
        reply = requests.post(f"{self.url}/{path}", params=query, timeout=REQUEST_TIMEOUT_S)
        assert reply.ok, reply.text
        return reply.json()

    def get(self, path: str) -> dict:
        return requests.get(f"{self.url}/{path}", timeout=REQUEST_TIMEOUT_S).json()

    def forget(self) -> None:
        """Empty the prefix caches of device and host. The tier keeps its blocks."""
        self.wait_empty()
        assert self.post("reset_prefix_cache", reset_external=True)["success"]

    @contextmanager
    def stopped(self, call: str, end: str, **query: Any) -> Iterator[None]:
        """Call one endpoint, such as `pause`, and always a second one, such as `resume`, at the end."""
        self.post(call, **query)
        try:
            yield
        finally:
            self.post(end)

    @contextmanager
    def running(self, prompts: Sequence[list[int]], max_tokens: int) -> Iterator[list[Future]]:
        """Streams of these prompts, each of which has delivered a token and none of which has ended.

        Their results are those of `Server.stream`.
        """
        with ThreadPoolExecutor(len(prompts)) as executor:
            events = [Event() for _ in prompts]
            calls = zip(prompts, events, strict=True)
            streams = [executor.submit(self.stream, prompt, max_tokens, event.set) for prompt, event in calls]
            wait_for(lambda: all(event.is_set() for event in events))
            assert not any(stream.done() for stream in streams), "they were to run on"
            yield streams


def num_cached(reply: dict) -> int:
    """Tokens of the prompt that were found in a prefix cache."""
    return (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


class Pair:
    """Both servers.

    Args:
        model: name of a tiny model.
        options: `kv_connector_extra_config` without tiers.
        args: command-line options of both servers.
        hot_args: options of the server with hot buffers alone.
    """

    def __init__(
        self,
        group: ProcessGroup,
        log_dir: Path,
        model: str,
        options: dict[str, Any],
        args: Sequence[str] = (),
        hot_args: Sequence[str] = (),
    ):
        tier_dir = log_dir / "tier"
        tier = {"type": "fs", "path": str(tier_dir), "quota_gib": 1.0, "num_threads": 2}
        connector = {**hisparse_connector(tiers=[tier], **options), "kv_role": "kv_both"}

        def start(name: str, core: int, connector: dict | None, own_args: Sequence[str]) -> tuple[Any, str]:
            port, side_port = free_ports(2)
            command_args = [*COMMON_ARGS, *args, *own_args]
            process = vllm_engine(name, MODELS / model, log_dir, port, connector, side_port, [core], command_args)
            process.env["VLLM_SERVER_DEV_MODE"] = "1"
            return group.start(forked(process)), f"http://{LOOPBACK}:{port}"

        self.full = Server(*start("full", 0, None, ["--no-enable-prefix-caching"]))
        self.hot = HotServer(*start("hot", 1, connector, [*hot_args, "--enable-prompt-tokens-details"]), tier_dir)
        wait_started(group)

    def ask(self, ask: Callable[[Server], Any]) -> tuple[Any, Any]:
        """The reply of the server with hot buffers, and that of full KV."""
        return ask(self.hot), ask(self.full)
