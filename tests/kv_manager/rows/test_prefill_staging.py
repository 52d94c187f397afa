"""Staged prefills: where a step's tokens go, and requests longer than the staging memory, which vLLM warms up with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.prefill_staging import PrefillGroup, PrefillStaging
from vllm_hisparse.ops.base import HotRows

BLOCK_SIZE, MAX_BLOCKS, NUM_SLOTS, WIDTH = 4, 5, 6, 2
NUM_ROWS = MAX_BLOCKS * BLOCK_SIZE
FIRST_HOT_BLOCK_ID = 3


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def make_buffer(host_rows: torch.Tensor) -> MLAHotBuffer:
    shape = HotBufferShape(2, 2, 1, 4, MAX_BLOCKS, BLOCK_SIZE, 8, 1, NUM_SLOTS + 1)
    buffer = MLAHotBuffer(shape, torch.device("cpu"))
    buffer.add_layer(HotRows(torch.zeros(8 * (NUM_SLOTS + 1), WIDTH), NUM_SLOTS + 1, NUM_SLOTS + 1), host_rows)
    return buffer


def make_groups(buffer: MLAHotBuffer, *requests: tuple[int, int, int]) -> tuple[PrefillStaging, list[PrefillGroup]]:
    """Groups of a step with one (hot block, tokens before, tokens of the step) per request."""
    staging = PrefillStaging(buffer)
    first_hot_block_ids, before, num_tokens = (
        torch.tensor(column, dtype=torch.int32) for column in zip(*requests, strict=True)
    )
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), num_tokens.cumsum(0).int()))
    seq_lens = before + num_tokens
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(requests),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(num_tokens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=first_hot_block_ids[:, None],
        slot_mapping=torch.full((int(starts[-1]),), -1),
    )
    return staging, staging.groups(common, 0, lambda part: part)


def test_requests_that_fit_together_share_a_group() -> None:
    _, groups = make_groups(make_buffer(torch.zeros(64, WIDTH)), (1, 0, 7), (2, 3, 2), (3, 10, 10), (4, 0, 2))
    assert [[(r.first, r.last, r.first_block) for r in group.requests] for group in groups] == [
        [(0, 7, 0), (3, 5, 2)],
        [(10, 20, 0)],
        [(0, 2, 0)],
    ]
    assert [group.tokens for group in groups] == [slice(0, 9), slice(9, 19), slice(19, 21)]
    assert groups[0].slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 11, 12]
    assert groups[0].metadata.block_table_tensor.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_tokens", [NUM_ROWS, NUM_ROWS + 1, NUM_ROWS + 3 * BLOCK_SIZE])
def test_a_request_longer_than_the_staging_memory_stays_in_it(num_tokens: int) -> None:
    """One slot per token and one block per block of tokens, none outside; nothing reaches the host."""
    host_rows = torch.zeros(64, WIDTH)
    buffer = make_buffer(host_rows)
    staging, [group] = make_groups(buffer, (FIRST_HOT_BLOCK_ID, 0, num_tokens))
    assert group.slots.tolist() == [min(token, NUM_ROWS - 1) for token in range(num_tokens)]
    table = group.metadata.block_table_tensor[0].tolist()
    assert table == [min(block, MAX_BLOCKS - 1) for block in range(-(-num_tokens // BLOCK_SIZE))]
    staging.cache.fill_(-1)
    staging.plan(group)
    staging.load(group, host_rows)
    staging.store(group, 0, host_rows)
    assert not host_rows.any()
    assert (buffer.residency[0].positions == -1).all()


def test_staging_memory_for_short_requests_has_the_rows_that_a_kernel_reads_of_any_cache() -> None:
    staging = PrefillStaging(make_buffer(torch.zeros(64, WIDTH)))
    assert staging.cache.shape == (MAX_BLOCKS, BLOCK_SIZE, WIDTH)
    assert staging.cache.untyped_storage().nbytes() >= 256 * WIDTH * staging.cache.element_size()


def test_the_history_of_a_chunk_is_counted() -> None:
    host_rows = torch.arange(64.0 * WIDTH).view(64, WIDTH)
    buffer = make_buffer(host_rows)
    staging, groups = make_groups(buffer, (1, 3, 4), (FIRST_HOT_BLOCK_ID, 5, 2))
    for first_hot_block_id in (1, FIRST_HOT_BLOCK_ID):
        buffer.extend_host_block_tables({first_hot_block_id: (0, [2 * first_hot_block_id, 2 * first_hot_block_id + 1])})
        buffer.change_hot_block_tables({first_hot_block_id: (0, [first_hot_block_id])})
    for group in groups:
        staging.plan(group)
        staging.load(group, host_rows)
    assert torch.equal(staging.rows[:3], host_rows[8:11])
    assert buffer.take_staged_bytes() == (3 + 5) * WIDTH * 4
    assert buffer.take_staged_bytes() == 0


class Assignments(TorchDispatchMode):
    """Notes the shape of what is assigned to elements that a tensor chooses.

    On CUDA, torch keeps an assigned number on the host, copies it to the device, and waits for everything before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put" in str(func):
            self.shapes.append(args[2].shape)
        return func(*args, **(kwargs or {}))


def test_a_chunk_never_waits_for_the_device() -> None:
    host_rows = torch.randn(64, WIDTH)
    buffer = make_buffer(host_rows)
    buffer.extend_host_block_tables({FIRST_HOT_BLOCK_ID: (0, list(range(MAX_BLOCKS)))})
    buffer.change_hot_block_tables({FIRST_HOT_BLOCK_ID: (0, [FIRST_HOT_BLOCK_ID])})
    staging, [group] = make_groups(buffer, (FIRST_HOT_BLOCK_ID, 4, 9))
    with Assignments() as assignments:
        buffer.residency[0].positions[torch.tensor([0])] = -1
        assert assignments.shapes == [()]  # what must not happen below
        staging.plan(group)
        staging.load(group, host_rows)
        staging.store(group, 0, host_rows)
    assert assignments.shapes.count(()) == 1
    assert sorted(buffer.residency[0].positions.tolist())[-NUM_SLOTS:] == list(range(7, 13))
