"""Requests of tests to a running OpenAI server of vLLM."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests

from tools.harness.deployment import MODEL_NAME
from tools.harness.processes import EngineProcess, ProcessGroup

REQUEST_TIMEOUT_S = 180
START_TIMEOUT_S = 500  # engines load side by side, from a cold disk
SETTLE_TIMEOUT_S = 60
DO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def wait_for(condition: Callable[[], object], timeout_s: float = SETTLE_TIMEOUT_S) -> None:
    """Wait until something holds; `timeout_s` only ends a test that fails."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


def wait_started(group: ProcessGroup) -> None:
    """Wait until every server answers, then make NIXL's polling threads leave the cores to those that compute."""
    group.wait_healthy(START_TIMEOUT_S)
    for process in group.processes:
        process.calm_polling_threads()


@dataclass
class Server:
    """One engine and its base URL."""

    process: EngineProcess
    url: str
    stream_timeout_s = REQUEST_TIMEOUT_S  # no field

    def complete(self, prompt: list[int], max_tokens: int = 8, transfer: dict | None = None, **extra: Any) -> dict:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            **({"kv_transfer_params": transfer} if transfer else {}),
            **extra,
        }
        return requests.post(f"{self.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S).json()

    def stream(
        self, prompt: list[int], max_tokens: int, on_token: Callable[[], Any] = lambda: None
    ) -> tuple[list[int], str]:
        """Token ids of a streamed completion, and the error that ended it ("" for none)."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        tokens: list[int] = []
        try:
            with requests.post(
                f"{self.url}/v1/completions", json=body, stream=True, timeout=self.stream_timeout_s
            ) as reply:
                for line in reply.iter_lines():
                    data = line.decode().removeprefix("data: ")
                    if data == "[DONE]":
                        return tokens, ""
                    event = json.loads(data) if data else {"choices": []}
                    if "error" in event:
                        return tokens, str(event["error"])
                    on_token()
                    tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
        except requests.RequestException as error:
            return tokens, str(error)
        return tokens, "the stream ended without [DONE]"

    def has_counted(self, name: str, before: float) -> bool:
        """True if a counter has grown since."""
        return self.metric(name) > before

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        samples = re.findall(rf"^vllm:{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"{name} is not exported"
        return sum(map(float, samples))


def is_error(reply: dict) -> bool:
    """True if the client was told: an error instead of a completion, never a short one."""
    return "choices" not in reply or reply["choices"][0]["finish_reason"] == "error"


def tokens_of(reply: dict) -> tuple[list[int], list[float]]:
    choice = reply["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def completion(reply: dict) -> dict:
    """A reply in the form of the offline engines' completions."""
    tokens, logprobs = tokens_of(reply)
    best = [sorted(step.values(), reverse=True) for step in reply["choices"][0]["logprobs"]["top_logprobs"]]
    return {"tokens": tokens, "logprobs": logprobs, "margins": [first - second for first, second, *_ in best]}
