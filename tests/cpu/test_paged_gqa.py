import pytest
import torch
from vllm import _custom_ops as kernels

from vllm_hisparse.cpu.paged_gqa import CpuBlocks, attend

BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 32, 2, 64
KERNELS = [("vec", torch.float32), ("vec", torch.bfloat16), ("vec16", torch.float32)]
if torch.cpu._is_amx_tile_supported():
    KERNELS.append(("amx", torch.bfloat16))


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_reads_what_vllms_kernel_wrote(isa: str, dtype: torch.dtype) -> None:
    cache = torch.full((4, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), float("nan"), dtype=dtype)
    keys, values = torch.randn(2, 50, NUM_HEADS, HEAD_SIZE).to(dtype)
    table = torch.tensor([3, 1])
    slots = table.repeat_interleave(BLOCK_SIZE)[:50] * BLOCK_SIZE + torch.arange(50) % BLOCK_SIZE
    halves = cache.view(4, NUM_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, 2)
    kernels.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)

    blocks = CpuBlocks.view(cache, isa)
    positions = torch.randperm(50)
    for head in range(NUM_HEADS):
        where = table[positions // BLOCK_SIZE], torch.full((50,), head), positions % BLOCK_SIZE
        assert torch.equal(blocks.load_keys(*where), keys[positions, head])
        assert torch.equal(blocks.load_values(*where), values[positions, head])


def test_attends_to_valid_rows_alone() -> None:
    query, rows = torch.randn(3, 2, HEAD_SIZE), torch.randn(3, 7, 2 * HEAD_SIZE)
    valid = torch.rand(3, 7) > 0.5
    valid[:, 2] = True
    rows[~valid] = float("nan")
    out = attend(query, rows, valid, 0.3)
    for i in range(3):
        keys, values = rows[i, valid[i]].chunk(2, -1)
        torch.testing.assert_close(out[i], (query[i] @ keys.T * 0.3).softmax(-1) @ values)
