"""A streaming client of vLLM's completions API that keeps token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp


class CompletionError(RuntimeError):
    """A request failed; the message says what the server answered."""


@dataclass
class Completion:
    """The answer to one prompt."""

    response_id: str = ""  # prefix of vLLM's internal request id
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # between the logprobs of the two best tokens
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None: the server does not say
    first_token_s: float = 0.0  # seconds from sending to the first token
    total_s: float = 0.0  # seconds from sending to the end

    def add_chunk(self, chunk: dict[str, Any]) -> int:
        """Append a chunk of the stream; returns its number of tokens."""
        self.response_id = self.response_id or chunk["id"]
        num_before = len(self.token_ids)
        if details := (chunk.get("usage") or {}).get("prompt_tokens_details"):
            self.num_cached_tokens = details["cached_tokens"]
        for choice in chunk["choices"]:
            self.token_ids += choice["token_ids"]
            logprobs = choice.get("logprobs") or {}
            self.logprobs += logprobs.get("token_logprobs", [])
            self.margins += [_margin(best.values()) for best in logprobs.get("top_logprobs", [])]
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"]
        return len(self.token_ids) - num_before


class OpenAIClient:
    """Greedy completions of token-id prompts; an async context manager.

    Args:
        model: the served model's name.
        timeout_s: seconds for one request, from sending to its end.
        num_logprobs: number of best tokens whose logprobs come with each token.
    """

    def __init__(self, model: str, *, timeout_s: float = 300.0, num_logprobs: int = 2):
        self._model, self._num_logprobs = model, num_logprobs
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s), connector=aiohttp.TCPConnector(limit=0)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def complete(
        self,
        base_url: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Completion:
        """Generate exactly max_tokens tokens.

        Args:
            on_tokens: called with the number of tokens of each chunk.

        Raises:
            CompletionError: the server refused the request, broke off, or sent a different number of tokens.
        """
        completion = Completion()
        started = time.monotonic()
        try:
            async with self._session.post(
                f"{base_url}/v1/completions", json=self._body(prompt_ids, max_tokens)
            ) as reply:
                if reply.status != 200:
                    raise CompletionError(f"{base_url} answered {reply.status}: {(await reply.text())[:2000]}")
                async for line in reply.content:
                    num_tokens = _add_event(completion, line)
                    if num_tokens and not completion.first_token_s:
                        completion.first_token_s = time.monotonic() - started
                    if num_tokens and on_tokens is not None:
                        on_tokens(num_tokens)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CompletionError(f"{base_url} broke off: {type(error).__name__} {error}") from error
        completion.total_s = time.monotonic() - started
        if len(completion.token_ids) != max_tokens:
            raise CompletionError(f"{base_url} sent {len(completion.token_ids)} of {max_tokens} tokens")
        return completion

    async def metrics(self, base_url: str) -> dict[str, float]:
        """Prometheus samples by name, summed over their labels."""
        from prometheus_client.parser import text_string_to_metric_families

        async with self._session.get(f"{base_url}/metrics") as reply:
            text = await reply.text()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def _body(self, prompt_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": self._num_logprobs or None,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # two tokens may have the same text
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _margin(logprobs: Iterable[float]) -> float:
    first, second, *_ = sorted(logprobs, reverse=True)
    return first - second


def _add_event(completion: Completion, line: bytes) -> int:
    """Append one line of the event stream; returns its number of tokens."""
    data = line.decode().removeprefix("data:").strip()
    if not data or data == "[DONE]":
        return 0
    event = json.loads(data)
    if "error" in event:
        raise CompletionError(f"stream ended with an error: {event['error']}")
    return completion.add_chunk(event)
