"""Hot buffers of a dense model whose hot blocks come and go: what is selected is there, whatever a slot held before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.algorithms.base import AttentionShape
from vllm_hisparse.algorithms.streaming_llm import StreamingLLM, StreamingLLMOptions
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.ops.base import HotRows

NUM_HEADS, HEAD_SIZE, PER_UNIT, NUM_SELECTED = 2, 2, 4, 2
BLOCK_SIZE, NUM_HOST_BLOCKS, NUM_DEVICE_BLOCKS = 8, 16, 60
MAX_TOKENS = BLOCK_SIZE * (NUM_HOST_BLOCKS - 1)
UNITS_PER_BLOCK = BLOCK_SIZE // PER_UNIT
FIRST_HOT_BLOCK_ID = 7


class Life:
    """One request that decodes with hot blocks of any number, and the tokens that it should have.

    Args:
        source: of every choice.
        query_len: new tokens of a step at most.
        num_tokens: of its prompt, which is on the host alone.
    """

    def __init__(self, source: random.Random, query_len: int, num_tokens: int):
        self.source, self.query_len = source, query_len
        options, heads = StreamingLLMOptions(page_size=PER_UNIT), AttentionShape(4, NUM_HEADS, HEAD_SIZE, torch.float32)
        algorithm = StreamingLLM(options, heads, NUM_SELECTED * PER_UNIT, MAX_TOKENS, query_len)
        self.num_slots = NUM_SELECTED * query_len * PER_UNIT
        shape = HotBufferShape(
            num_requests=2,
            max_batch=2,
            num_layers=1,
            top_k=NUM_SELECTED * PER_UNIT,
            max_blocks=NUM_HOST_BLOCKS,
            block_size=BLOCK_SIZE,
            num_device_blocks=NUM_DEVICE_BLOCKS,
            max_hot_blocks=NUM_DEVICE_BLOCKS,
            rows_per_hot_block=BLOCK_SIZE,
            max_query_len=query_len,
        )
        self.buffer = GQAHotBuffer(algorithm, shape, NUM_HEADS, torch.zeros(NUM_DEVICE_BLOCKS, 0, dtype=torch.uint8))
        width = PER_UNIT * 2 * HEAD_SIZE
        self.hot = HotRows(
            torch.full((NUM_DEVICE_BLOCKS * NUM_HEADS * UNITS_PER_BLOCK, width), -1.0), UNITS_PER_BLOCK, UNITS_PER_BLOCK
        )
        self.host = torch.full((NUM_HOST_BLOCKS * NUM_HEADS * UNITS_PER_BLOCK, width), -2.0)
        self.buffer.add_layer(self.hot, self.host)
        self.host_ids = list(range(1, NUM_HOST_BLOCKS))
        source.shuffle(self.host_ids)
        self.tokens = torch.rand(num_tokens, NUM_HEADS, 2 * HEAD_SIZE)  # of each position that is known
        for position, token in enumerate(self.tokens):
            self.home(position)[:] = token
        self.free = [block for block in range(1, NUM_DEVICE_BLOCKS) if block != FIRST_HOT_BLOCK_ID]
        self.blocks = [FIRST_HOT_BLOCK_ID]
        while len(self.blocks) < self.min_blocks:
            self.blocks.append(self.take())
        self.buffer.extend_host_block_tables({FIRST_HOT_BLOCK_ID: (0, self.host_ids)})
        self.buffer.change_hot_block_tables({FIRST_HOT_BLOCK_ID: (0, list(self.blocks))})

    @property
    def min_blocks(self) -> int:
        """Table of a request with the least blocks that it may have."""
        return -(-(self.num_slots + self.query_len * PER_UNIT) // BLOCK_SIZE)

    def take(self) -> int:
        return self.free.pop(self.source.randrange(len(self.free)))

    def home(self, position: int) -> torch.Tensor:
        """A token's place on the host: [num_heads, 2 * head_size]."""
        units = self.host.view(NUM_HOST_BLOCKS, NUM_HEADS, UNITS_PER_BLOCK, PER_UNIT, -1)
        block, offset = self.host_ids[position // BLOCK_SIZE], position % BLOCK_SIZE
        return units[block, :, offset // PER_UNIT, offset % PER_UNIT]

    def move(self) -> None:
        """Get blocks, or lose some of those beyond the smallest number."""
        num_lent = len(self.blocks) - self.min_blocks
        if num_lent and self.source.random() < 0.5:
            first, last = self.min_blocks, self.source.randint(self.min_blocks + 1, len(self.blocks))
            self.free += self.blocks[first:last]
            del self.blocks[first:last]
        else:
            first = len(self.blocks)
            self.blocks += [self.take() for _ in range(self.source.randint(1, 20)) if len(self.free) > 4]
        self.buffer.change_hot_block_tables({FIRST_HOT_BLOCK_ID: (first, self.blocks[first:])})

    def step(self) -> None:
        """Decode, and compare what the selections found; some of the new tokens may be rejected."""
        buffer, num_known = self.buffer, len(self.tokens)
        num_new = self.source.randint(1, self.query_len)
        new = torch.rand(self.query_len, NUM_HEADS, 2 * HEAD_SIZE)
        seq_len, query_lens = torch.tensor([num_known + num_new]).int(), torch.tensor([num_new]).int()
        buffer.step.plan(torch.tensor([FIRST_HOT_BLOCK_ID]).int(), seq_len, query_lens)
        buffer.step.begin(0)
        key, value = new.split(HEAD_SIZE, -1)
        buffer.step.write_tokens(0, key.contiguous(), value.contiguous())
        units = [self.select(num_known + i + 1 if i < num_new else 0) for i in range(self.query_len)]
        resolved = buffer.swap_in_of(0)(torch.cat(units, 1))
        expected = torch.cat((self.tokens, new[:num_new]))
        rows = self.hot.rows.view(-1, PER_UNIT, 2 * HEAD_SIZE)
        for head, (selected, row_ids) in enumerate(zip(torch.cat(units, 1), resolved.hot_row_ids, strict=False)):
            for unit, row_id in zip(selected[selected >= 0].tolist(), row_ids[selected >= 0].tolist(), strict=True):
                wanted = expected[unit * PER_UNIT : (unit + 1) * PER_UNIT, head]
                assert torch.equal(rows[row_id][: len(wanted)], wanted), f"unit {unit} of {len(expected)} tokens"
        buffer.step.finish(0)
        self.tokens = expected[: num_known + self.source.randint(1, num_new)]

    def select(self, num_tokens: int) -> torch.Tensor:
        """Any units of each head and the newest, [num_heads, num_selected] int32; without tokens, none."""
        newest, selected = (num_tokens - 1) // PER_UNIT, torch.full((NUM_HEADS, NUM_SELECTED), -1, dtype=torch.int32)
        for head in selected if num_tokens else ():
            units = [*self.source.sample(range(newest), min(NUM_SELECTED - 1, newest)), newest]
            head[: len(units)] = torch.tensor(units)
        return selected


@pytest.mark.long
@pytest.mark.parametrize("query_len", [1, 3])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_selected_units_are_whole_when_blocks_come_and_go(query_len: int, seed: int) -> None:
    torch.manual_seed(seed % 1000)
    source = random.Random(seed)
    life = Life(source, query_len, source.randint(1, 50))
    while len(life.tokens) + query_len < MAX_TOKENS - 50:
        if source.random() < 0.6:
            life.move()
        life.step()
        life.buffer.check_integrity()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda units: units.long(), f"torch.int64 [1, {NUM_HEADS}, {NUM_SELECTED}]"),
        (lambda units: units[..., 1:], f"torch.int32 [1, {NUM_HEADS}, {NUM_SELECTED - 1}]"),
        (lambda units: units[:, :1], f"torch.int32 [1, 1, {NUM_SELECTED}]"),
        (lambda units: units.repeat(2, 1, 1), f"torch.int32 [2, {NUM_HEADS}, {NUM_SELECTED}]"),
        (lambda units: units >= 0, f"torch.bool [1, {NUM_HEADS}, {NUM_SELECTED}]"),
        (lambda units: units.tolist(), "list"),
        (lambda units: None, "NoneType"),
    ],
)
def test_an_algorithm_that_returns_no_selection_is_refused(change: Any, got: str) -> None:
    life = Life(random.Random(0), 1, 20)
    life.buffer.step.plan(torch.tensor([FIRST_HOT_BLOCK_ID]).int(), torch.tensor([21]).int(), torch.tensor([1]).int())
    algorithm = life.buffer.algorithm
    key, query = torch.rand(1, NUM_HEADS, HEAD_SIZE), torch.rand(1, 4, HEAD_SIZE)
    assert life.buffer.select(0, key, query).shape == (NUM_HEADS, NUM_SELECTED)
    select = algorithm.retrieve_topk
    algorithm.retrieve_topk = lambda *args: change(select(*args))
    expected = f"torch.int32 [1, {NUM_HEADS}, {NUM_SELECTED}] (batch, KV heads, num_selected)"
    message = (
        f"retrieve_topk of StreamingLLM returned {got}, expected {expected}. Return what self.select(...) returns."
    )
    with pytest.raises(ValueError) as error:
        life.buffer.select(0, key, query)
    assert str(error.value) == message
