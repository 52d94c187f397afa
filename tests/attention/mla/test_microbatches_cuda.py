"""How a layer runs in microbatches: what each sees, and on which stream. vLLM's indexer and attention are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mla.indexer import DeepSeekV32IndexerDecodeMetadata, DeepseekV32IndexerMetadata

from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape

KEYS = ["0.indexer", "1.indexer"]


@pytest.fixture
def microbatches(cuda_modules: dict[str, ModuleType]) -> ModuleType:
    return cuda_modules["microbatches"]


@dataclass(frozen=True)
class Context:
    attn_metadata: dict[str, Any]
    no_compile_layers: dict[str, Any]


class Metadata(SimpleNamespace):
    """Metadata of attention layers."""


class Layer:
    def __init__(self, impl: Any):
        self.impl, self.topk_indices_buffer, self.name = impl, torch.arange(100), "layer"


def indexer_metadata(num_requests: int, num_tokens: int, seq_lens: torch.Tensor) -> DeepseekV32IndexerMetadata:
    """Metadata of a step in which every request decodes."""
    rows = len(seq_lens)
    decode = DeepSeekV32IndexerDecodeMetadata(
        block_table=torch.arange(rows * 2).view(rows, 2),
        seq_lens=seq_lens,
        decode_lens=torch.arange(rows),
        requires_padding=False,
        schedule_metadata=torch.empty(0),
    )
    slots = torch.arange(num_tokens)
    return DeepseekV32IndexerMetadata(seq_lens, 100, slots, num_requests, num_tokens, 0, 0, decode)


def run(
    microbatches: ModuleType, monkeypatch: pytest.MonkeyPatch, indexer: DeepseekV32IndexerMetadata, query_len: int
) -> list[str]:
    """Run a layer of four requests in three microbatches; what happened, in order."""
    events: list[str] = []
    current = ["main"]

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: events.append(f"{name} waits for {event.name}"),
            wait_stream=lambda other: events.append(f"{name} waits for {other.name}"),
        )

    @contextmanager
    def on(used: SimpleNamespace) -> Iterator[None]:
        before, current[0] = current[0], used.name
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream(current[0]))
    monkeypatch.setattr(torch.cuda, "stream", on)
    names = (f"selection {number}" for number in count())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(name=next(names)))
    monkeypatch.setattr(microbatches, "num_compute_units", lambda _: 7)
    monkeypatch.setattr(
        microbatches,
        "get_paged_mqa_logits_metadata",
        lambda lens, page_size, sms, indices: (lens.tolist(), page_size, sms, *current),
    )
    layers = dict.fromkeys(KEYS, SimpleNamespace(kv_cache=torch.zeros(9, 64, 132)))
    draft, whole = SimpleNamespace(), Metadata(microbatches="all")
    context = [Context({"0": whole, "1": whole, "draft": draft} | dict.fromkeys(KEYS, indexer), layers)]

    @contextmanager
    def override(other: Context) -> Iterator[None]:
        before, context[0] = context[0], other
        yield
        context[0] = before

    monkeypatch.setattr(microbatches, "get_forward_context", lambda: context[0])
    monkeypatch.setattr(microbatches, "override_forward_context", override)
    buffer = SimpleNamespace(streams=[stream("second"), stream("third"), stream("unused")])
    impl = SimpleNamespace(hot_buffer=buffer, of_microbatch=lambda microbatch: f"impl of {microbatch.requests.start}")
    num_tokens = 4 * query_len
    layer = Layer(impl)
    made = [
        microbatches.DecodeMicrobatch(slice(first, last), query_len, lambda part: Metadata(first=part.start))
        for first, last in ((0, 1), (1, 3), (3, 4))
    ]

    def select_and_attend(part: Any, tokens: torch.Tensor, nothing: None) -> None:
        found = context[0].attn_metadata
        assert nothing is None and part.name == "layer" and part.topk_indices_buffer[0] == tokens[0]
        assert found["0"] is found["1"] and found["draft"] is draft and found[KEYS[0]] is found[KEYS[1]]
        decode = found[KEYS[0]].decode
        sizes = found[KEYS[0]].num_decodes, found[KEYS[0]].num_decode_tokens
        assert len(decode.seq_lens) == len(decode.block_table) == len(decode.decode_lens)
        assert decode.schedule_metadata == (decode.seq_lens.tolist(), 64, 7, "main"), "made before microbatches begin"
        events.append(f"{current[0]}: {part.impl}, tokens {tokens.tolist()}, {found['0'].first}, {sizes}")
        events.append(f"lengths {decode.seq_lens.tolist()}, tables {decode.block_table[:, 0].tolist()}")

    microbatches.run_in_microbatches(layer, select_and_attend, (torch.arange(num_tokens), None), made)
    assert context[0].attn_metadata["0"] is whole and layer.impl is impl
    return events


def test_a_microbatch_begins_when_the_one_before_has_selected(
    microbatches: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer = indexer_metadata(4, 4, torch.tensor([[5], [6], [7], [8]]))
    assert run(microbatches, monkeypatch, indexer, 1) == [
        "main: impl of 0, tokens [0], 0, (1, 1)",
        "lengths [[5]], tables [0]",
        "second waits for selection 0",
        "second: impl of 1, tokens [1, 2], 1, (2, 2)",
        "lengths [[6], [7]], tables [2, 4]",
        "third waits for selection 1",
        "third: impl of 3, tokens [3], 3, (1, 1)",
        "lengths [[8]], tables [6]",
        "main waits for second",
        "main waits for third",
    ]


@pytest.mark.parametrize("by_token", [False, True])
def test_drafts(microbatches: ModuleType, monkeypatch: pytest.MonkeyPatch, by_token: bool) -> None:
    """vLLM's indexer has a row for each request, or one for each token."""
    lengths = [[4, 5], [5, 6], [6, 7], [7, 8]]
    seq_lens = torch.tensor(lengths).view(8, 1) if by_token else torch.tensor(lengths)
    events = run(microbatches, monkeypatch, indexer_metadata(4, 8, seq_lens), 2)
    assert [event for event in events if "tokens" in event] == [
        "main: impl of 0, tokens [0, 1], 0, (1, 2)",
        "second: impl of 1, tokens [2, 3, 4, 5], 1, (2, 4)",
        "third: impl of 3, tokens [6, 7], 3, (1, 2)",
    ]
    assert [event for event in events if "lengths" in event] == (
        [
            "lengths [[4], [5]], tables [0, 2]",
            "lengths [[5], [6], [6], [7]], tables [4, 6, 8, 10]",
            "lengths [[7], [8]], tables [12, 14]",
        ]
        if by_token
        else [
            "lengths [[4, 5]], tables [0]",
            "lengths [[5, 6], [6, 7]], tables [2, 4]",
            "lengths [[7, 8]], tables [6]",
        ]
    )


@pytest.mark.parametrize("query_len", [1, 2])
def test_the_rows_of_a_microbatch_say_which_of_its_requests_they_are_of(
    microbatches: ModuleType, monkeypatch: pytest.MonkeyPatch, query_len: int
) -> None:
    """vLLM's indexer on Blackwell has a row per token, with the request of each, and its kernel wants as many."""
    num_requests = 6
    num_rows = num_requests * query_len
    whole = indexer_metadata(num_requests, num_rows, torch.arange(num_rows)[:, None])
    whole.decode.indices = torch.arange(num_requests).repeat_interleave(query_len)
    whole.decode.per_req_decode_lens = torch.arange(num_requests)
    scheduled = []
    monkeypatch.setattr(microbatches, "num_compute_units", lambda _: 7)
    monkeypatch.setattr(
        microbatches,
        "get_paged_mqa_logits_metadata",
        lambda lens, _, __, indices: scheduled.append((len(lens), indices)),
    )
    microbatch = microbatches.DecodeMicrobatch(slice(2, 5), query_len, lambda _: None)
    part = microbatch._indexer_metadata(whole, 64).decode
    expected = torch.arange(3).repeat_interleave(query_len)
    assert torch.equal(part.indices, expected) and len(part.seq_lens) == len(part.block_table) == len(expected)
    assert part.per_req_decode_lens.tolist() == [2, 3, 4]
    [(num_lens, indices)] = scheduled
    assert num_lens == len(expected) and torch.equal(indices, expected)


def test_which_steps_have_microbatches(microbatches: ModuleType) -> None:
    """Steps of many requests that may miss rows, where every layer selects."""
    shape = HotBufferShape(99, 99, 2, 8, 10, 64, 500, max_hot_blocks=20, rows_per_hot_block=40)
    buffer = SimpleNamespace(shape=shape, selects=[True, True])

    def requests_of(num_requests: int, **changes: Any) -> list[slice]:
        changed = SimpleNamespace(**{**vars(buffer), **changes})
        return [
            microbatch.requests for microbatch in microbatches.make_microbatches(changed, num_requests, lambda _: None)
        ]

    assert requests_of(35) == [slice(0, 17), slice(17, 35)]
    assert requests_of(36) == [slice(0, 12), slice(12, 24), slice(24, 36)]
    assert requests_of(60) == [slice(0, 15), slice(15, 30), slice(30, 45), slice(45, 60)], (
        "as many as there are streams"
    )
    assert requests_of(microbatches.MAX_REQUESTS) and not requests_of(microbatches.MAX_REQUESTS + 1)
    assert requests_of(31) == [], "as many of the longest sequences fit into 20,000 hot rows"
    few = replace(shape, num_device_blocks=1)
    assert requests_of(24, shape=few) and not requests_of(23, shape=few)
    assert requests_of(33, selects=[True, False]) == []
    assert requests_of(33, shape=replace(shape, num_device_blocks=600)) == []
