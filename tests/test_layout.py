import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_hisparse.layout import (
    FP8_DS_MLA_ROW_BYTES,
    MAX_ROW_CLASSES,
    KVLayout,
    StateLayout,
    divide_rows,
    indexer_row_bytes,
    mla_row_bytes,
)
from vllm_hisparse.ops.limits import MAX_HOT_ROWS

LAYOUTS = st.builds(
    KVLayout,
    row_bytes=st.integers(1, 2000),
    resident_row_bytes=st.integers(1, 300),
    num_layers=st.integers(1, 70),
    num_resident_layers=st.integers(1, 70),
    block_size=st.sampled_from([1, 3, 64]),
    draft_row_bytes=st.sampled_from([0, 788]),
)


def test_rows_of_the_real_models() -> None:
    """DeepSeek-V3.2 and GLM-5: 512 latent and 64 rotary elements, indexer keys of 128 fp8 and a scale."""
    assert mla_row_bytes(512, 64, 2) == 1152
    assert indexer_row_bytes(128) == 132
    assert indexer_row_bytes(256) == 264
    assert FP8_DS_MLA_ROW_BYTES == 512 + 4 * 4 + 64 * 2


def test_sizes_of_deepseek_v32() -> None:
    layout = KVLayout(1152, 132, num_layers=61, num_resident_layers=61)
    assert layout.block_size == 64
    assert layout.rows_per_hot_block == 7  # 7 * 1152 = 8064 of 64 * 132 = 8448 bytes
    assert layout.device_block_bytes == 448 * 1152  # 61 * 8448 bytes in whole rows
    assert layout.main_block_bytes == 61 * 64 * 1152
    assert layout.resident_block_bytes == 61 * 64 * 132
    assert layout.host_block_bytes == 61 * 64 * 1284
    assert layout.num_hot_blocks(4096) == 586  # 4097 rows of 7
    assert layout.num_blocks(16384) == 256
    assert layout.hot_request_bytes(16384, 4096) == (586 + 256) * 448 * 1152
    assert layout.full_request_bytes(16384) == layout.host_request_bytes(16384) == 16384 * 61 * 1284


def test_a_sequence_that_is_hot_as_a_whole_takes_as_much_as_full_kv() -> None:
    """12.9 rows of 656 bytes are as wide as a block of keys: with 12 of them it would take 6% more."""
    layout = KVLayout(656, 132, num_layers=61, num_resident_layers=61)
    assert layout.rows_per_hot_block == 13
    num_blocks = layout.num_hot_blocks(32768, 32768) + layout.num_blocks(32768)
    assert 1 < num_blocks * layout.device_block_bytes / layout.full_request_bytes(32768) < 1.005


@pytest.mark.parametrize(("row_bytes", "rows"), [(1152, 2), (656, 3)])
def test_layers_that_share_indexers_have_narrower_blocks(row_bytes: int, rows: int) -> None:
    """20 indexers of 78 layers: 1.9 rows of all layers in bf16, where one would waste half a block; 3.3 in fp8."""
    layout = KVLayout(row_bytes, 132, num_layers=78, num_resident_layers=20)
    assert layout.rows_per_hot_block == rows
    widest = max(78 * rows * row_bytes, 20 * 64 * 132)
    assert widest <= layout.device_block_bytes < widest + row_bytes
    assert layout.hot_request_bytes(131072, 4096) < KVLayout(row_bytes, 132, 78, 78).hot_request_bytes(131072, 4096) / 2


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_blocks_are_rounded_up(num_tokens: int, num_blocks: int) -> None:
    assert KVLayout(1152, 132, 1, 1).num_blocks(num_tokens) == num_blocks


@pytest.mark.parametrize(("rows", "num_blocks"), [(6, 1), (7, 2), (13, 2), (14, 3)])
def test_hot_blocks_hold_the_newest_row_too(rows: int, num_blocks: int) -> None:
    assert KVLayout(1152, 132, 1, 1).num_hot_blocks(rows) == num_blocks


@given(layout=LAYOUTS, rows=st.integers(1, 5000))
def test_hot_blocks_waste_less_than_a_block(layout: KVLayout, rows: int) -> None:
    held = layout.num_hot_blocks(rows) * layout.rows_per_hot_block
    assert rows + 1 <= held < rows + 1 + layout.rows_per_hot_block


@given(layout=LAYOUTS)
def test_a_device_block_fits_either_group(layout: KVLayout) -> None:
    hot_bytes = layout.num_layers * layout.rows_per_hot_block * layout.row_bytes
    assert layout.rows_per_hot_block >= 1
    assert layout.device_block_bytes >= max(hot_bytes, layout.resident_block_bytes)
    assert layout.device_block_bytes - max(hot_bytes, layout.resident_block_bytes) < layout.block_alignment_bytes
    assert layout.device_block_bytes % layout.block_alignment_bytes == 0
    row_bytes = layout.num_layers * layout.row_bytes
    assert hot_bytes <= max(row_bytes, layout.resident_block_bytes + row_bytes / 2)
    if row_bytes <= layout.resident_block_bytes and hot_bytes < layout.resident_block_bytes - 2 * row_bytes:
        pytest.fail("another row would fit")


@given(layout=LAYOUTS, num_tokens=st.integers(0, 10000))
def test_host_bytes_cover_every_token(layout: KVLayout, num_tokens: int) -> None:
    per_token = layout.num_layers * layout.row_bytes + layout.resident_token_bytes
    assert layout.host_block_bytes == layout.block_size * per_token
    excess = layout.host_request_bytes(num_tokens) - num_tokens * per_token
    assert 0 <= excess < layout.host_block_bytes


@given(
    num_kv_heads=st.integers(1, 8),
    head_bytes=st.sampled_from([64, 512]),
    num_layers=st.integers(1, 40),
    num_full_kv=st.integers(0, 10),
    unit=st.sampled_from([1, 16, 32]),
)
@example(num_kv_heads=2, head_bytes=64, num_layers=8, num_full_kv=9, unit=32)
def test_hot_blocks_of_dense_models(num_kv_heads: int, head_bytes: int, num_layers: int, num_full_kv: int, unit: int):
    """Whole units, in the bytes that the full-KV layers need anyway; as many rows as tokens without such layers."""
    row_bytes = num_kv_heads * head_bytes
    layout = KVLayout(row_bytes, row_bytes, num_layers, num_full_kv, 128, unit, num_kv_heads)
    rows = layout.rows_per_hot_block
    assert rows % unit == 0 and layout.unit_bytes == unit * head_bytes
    assert layout.device_block_bytes % (rows * head_bytes) == 0, "a KV head's rows of a block have a number"
    if not num_full_kv:
        assert rows == 128
    elif num_layers != num_full_kv:
        assert rows != 128, "pages of one size make vLLM cut the groups"
        excess = rows * num_layers - 128 * num_full_kv
        assert rows == unit or excess < unit * num_layers / 2, "every block would be wider"
    held = layout.num_hot_blocks(4 * unit) * rows
    assert 5 * unit <= held < 5 * unit + rows, "the newest unit has a slot of its own"


def test_without_full_kv_layers_a_request_takes_its_hot_blocks_alone():
    layout = KVLayout(512, 512, 4, 0, 128, 16, 2)
    assert layout.hot_request_bytes(100_000, 512) == layout.num_hot_blocks(512) * layout.device_block_bytes


def test_a_draft_models_kv_is_device_resident():
    """Draft KV has device blocks with and without full-KV layers, and hot blocks have rows of the same width."""
    plain = KVLayout(512, 512, 4, 0, 128, 16, 2)
    layout = replace(plain, draft_row_bytes=2048)
    assert (plain.has_resident_kv, layout.has_resident_kv) == (False, True)
    assert layout.resident_block_bytes == 128 * 2048 and layout.host_block_bytes == 128 * (4 * 512 + 2048)
    assert layout.rows_per_hot_block == 8 * 16 - 16, "pages of one size make vLLM cut the groups"
    num_blocks = layout.num_hot_blocks(512) + layout.num_blocks(100_000)
    assert layout.hot_request_bytes(100_000, 512) == num_blocks * layout.device_block_bytes
    assert replace(plain, num_resident_layers=2, draft_row_bytes=2048).rows_per_hot_block == 12 * 16


@pytest.mark.parametrize(("num_full_kv", "draft_bytes", "rows"), [(0, 512, 32), (3, 512, 112), (2, 2 * 512, 112)])
def test_hot_pages_are_not_as_large_as_those_of_a_draft_layer(num_full_kv: int, draft_bytes: int, rows: int):
    """Nor as those of full-KV layers, as many as these and the hot layers may be."""
    assert KVLayout(512, 512, 4, num_full_kv, 128, 16, 2, draft_row_bytes=draft_bytes).rows_per_hot_block == rows


@given(unit=st.sampled_from([1, 4, 16, 64]), drafts=st.integers(0, 3), num_tokens=st.integers(1, 2000), size=st.data())
def test_a_sequence_that_grows_has_a_slot_for_every_unit_of_its_next_step(
    unit: int, drafts: int, num_tokens: int, size: st.DataObject
):
    """Unless it is longer than the buffer: then it has the buffer and a slot for each new unit, in any case."""
    layout = KVLayout(512, 512, 4, 0, 128, unit, 2, 1 + drafts)
    device_buffer_size = size.draw(st.integers(1, 2000 // unit)) * unit
    num_units = layout.num_hot_blocks(device_buffer_size, num_tokens) * layout.rows_per_hot_block // unit
    first_new = (num_tokens - 1) // unit
    assert num_units >= min(first_new, device_buffer_size // unit) + 1 + drafts


STATE_LAYOUTS = st.builds(
    StateLayout,
    entries=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 500)), max_size=4).map(tuple),
    num_layers=st.integers(1, 40),
    block_bytes=st.integers(40 * 500, 10**6),
)


@given(layout=STATE_LAYOUTS, num_tokens=st.integers(0, 2000))
def test_state_blocks_hold_every_entry_and_waste_less_than_a_block(layout: StateLayout, num_tokens: int):
    num_blocks = layout.field_blocks(num_tokens)
    assert layout.num_blocks(num_tokens) == sum(num_blocks)
    for (tokens, num_bytes), per_block, num in zip(layout.entries, layout.entries_per_block, num_blocks, strict=True):
        block_bytes = per_block * num_bytes * layout.num_layers
        assert block_bytes <= layout.block_bytes < block_bytes + num_bytes * layout.num_layers
        num_entries = -(-num_tokens // tokens)
        assert num_entries <= num * per_block < num_entries + per_block


@given(layout=STATE_LAYOUTS, lengths=st.lists(st.integers(0, 2000), min_size=2, max_size=2).map(sorted))
def test_state_blocks_keep_their_places_when_a_request_grows(layout: StateLayout, lengths: list[int]):
    """The blocks of fewer tokens are the first of more tokens; they are the first ones of each field."""
    short, long = lengths
    columns, num_blocks = layout.columns(long), layout.field_blocks(long)
    assert sorted(columns) == list(range(sum(num_blocks)))
    starts = [sum(num_blocks[:field]) for field in range(len(num_blocks))]
    expected = [
        start + index for start, num in zip(starts, layout.field_blocks(short), strict=True) for index in range(num)
    ]
    assert sorted(columns[: layout.num_blocks(short)]) == expected


def test_state_of_a_llama_in_device_blocks():
    """Quest over 32 layers of 8 KV heads: a block of 16 tokens' rows holds the bounds of 16 pages."""
    layout = KVLayout(4096, 4096, 32, 0, 16, 16, 8, state_entries=((16, 4096),))
    assert layout.state.tokens_per_block == (256,)
    assert layout.state.num_blocks(131_072) == 512
    plain = replace(layout, state_entries=())
    assert (plain.state.num_blocks(131_072), plain.state.columns(131_072)) == (0, [])
    num_bytes = layout.hot_request_bytes(131_072, 4096) - plain.hot_request_bytes(131_072, 4096)
    assert num_bytes == 131_072 * 32 * 256, "256 bytes per token and layer"


@pytest.mark.parametrize("device_buffer_size", [MAX_HOT_ROWS - 64, MAX_HOT_ROWS - 1])
def test_a_table_of_hot_blocks_is_never_wider_than_the_kernels_allow(device_buffer_size: int) -> None:
    """Though blocks are whole: with more full-KV layers than hot ones, a block has more rows than tokens."""
    layout = KVLayout(4096, 4096, num_layers=2, num_resident_layers=7, block_size=64, num_kv_heads=8)
    assert layout.rows_per_hot_block > layout.block_size and MAX_HOT_ROWS % layout.rows_per_hot_block
    num_blocks = layout.num_hot_blocks(device_buffer_size)
    assert MAX_HOT_ROWS - layout.rows_per_hot_block < num_blocks * layout.rows_per_hot_block <= MAX_HOT_ROWS
    assert layout.num_hot_blocks(device_buffer_size, 1 << 21) == num_blocks


def shares_of(source: random.Random, num_groups: int) -> list[tuple[float, int]]:
    return [(source.uniform(0.2, 5), source.randint(1, 4)) for _ in range(num_groups)]


@pytest.mark.parametrize("seed", range(40))
def test_divided_rows_fill_a_block_by_their_shares(seed: int) -> None:
    source = random.Random(seed)
    shares = shares_of(source, source.randint(1, 61))
    num_layers = sum(num for _, num in shares)
    num_rows = num_layers * source.choice([1, 3, 13, 40])
    rows = divide_rows(shares, num_rows)
    taken = sum(each * num for each, (_, num) in zip(rows, shares, strict=True))
    assert min(rows) >= 1 and taken <= num_rows
    assert len(set(rows)) <= MAX_ROW_CLASSES
    ordered = [found for _, found in sorted(zip(shares, rows, strict=True))]
    assert all(few <= many + 1 for few, many in combinations(ordered, 2)), "a larger share has fewer rows"
    assert num_rows - taken < num_layers, "enough rows are left for one more in every layer"


def test_whole_numbers_of_rows_are_divided_exactly() -> None:
    assert divide_rows([(1, 2), (2, 1), (6, 1)], 40) == (4, 8, 24)
    assert divide_rows([(5, 1), (5, 3)], 52) == (13, 13)
    assert divide_rows([(0.001, 1), (1, 1)], 8) == (1, 7)


def test_divided_rows_use_the_whole_block() -> None:
    equal = KVLayout(656, 132, 61, 61, narrow_key_bytes=68)
    layout = replace(equal, row_shares=((1, 61),))
    assert equal.rows_per_hot_block == 6 and equal.device_block_bytes // 656 == 405 > 61 * 6
    assert replace(equal, row_shares=tuple((1 + layer / 100, 1) for layer in range(61))).mean_rows > 6.5
    assert layout.layer_rows == (6,) * 61, "one share means one number of rows"


def test_requests_that_are_hot_as_a_whole_have_equal_rows() -> None:
    equal = KVLayout(656, 132, 61, 61)
    layout = replace(equal, row_shares=((1, 30), (3, 31)))
    assert layout.rows_per_hot_block == equal.rows_per_hot_block == 13
    assert layout.layer_rows == (6,) * 30 + (19,) * 31 and layout.fewest_rows == 6
    assert layout.num_hot_blocks(4096) == -(-4097 * 61 // (30 * 6 + 31 * 19)), "a mean layer has 4097 rows"
    assert layout.equal_rows == layout.whole_rows == 13, "a block of a request that is hot as a whole"
    assert layout.num_whole_blocks(30_000) == equal.num_whole_blocks(30_000) == -(-30_001 // 13)
    assert layout.num_hot_blocks(4096, 640) == equal.num_hot_blocks(4096, 640) == -(-640 // 13)
    assert layout.mean_rows == (30 * 6 + 31 * 19) / 61
    assert layout.num_whole_blocks(1 << 20) == MAX_HOT_ROWS // 19, "the layer with the most rows decides"
    assert layout.device_block_bytes == equal.device_block_bytes
    assert layout.residency_block_bytes == 8 * (13 + 19), "two layers select"
    assert layout.suits_equal_rows(60, 832, False) and not layout.suits_equal_rows(60, 833, False), "15/16 of 832"
    assert layout.suits_equal_rows(56, 832, True) and not layout.suits_equal_rows(56, 833, True), "7/8 of 832"
    drafting = replace(layout, max_query_len=3)
    assert drafting.suits_equal_rows(60, 830, False) and not drafting.suits_equal_rows(60, 831, False)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.98, 1.02)])
def test_rows_of_layers_that_have_as_many_are_equal_anyway(shares: tuple[float, float]) -> None:
    equal = KVLayout(656, 132, 61, 61)
    layout = replace(equal, row_shares=((shares[0], 30), (shares[1], 31)))
    assert layout.fewest_rows == 13 == layout.whole_rows and layout.equal_rows == 0
