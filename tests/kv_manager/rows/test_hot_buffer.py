import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.layout import RowPlace
from vllm_hisparse.ops.base import HotRows, Resolved

NUM_REQUESTS, MAX_BATCH, NUM_SLOTS, NUM_LAYERS, MAX_BLOCKS = 4, 5, 6, 2, 9
BLOCK_SIZE, NUM_DEVICE_BLOCKS, TOP_K = 4, 60, 4
ROWS_PER_BLOCK = NUM_SLOTS + 1  # so that a request has one hot block
SIZES = NUM_REQUESTS, MAX_BATCH, NUM_LAYERS, TOP_K, MAX_BLOCKS, BLOCK_SIZE, NUM_DEVICE_BLOCKS
SHAPE = HotBufferShape(*SIZES, max_hot_blocks=3, rows_per_hot_block=ROWS_PER_BLOCK)
HOT = HotRows(torch.zeros(NUM_DEVICE_BLOCKS * ROWS_PER_BLOCK, 1), ROWS_PER_BLOCK, ROWS_PER_BLOCK)
HOST_ROWS = torch.zeros(NUM_DEVICE_BLOCKS * BLOCK_SIZE, 1)


def make_buffer(query_len: int = 1) -> MLAHotBuffer:
    buffer = MLAHotBuffer(replace(SHAPE, max_query_len=query_len), torch.device("cpu"))
    for _ in range(NUM_LAYERS):
        buffer.add_layer(HOT, HOST_ROWS)
    return buffer


def tensor(*first_hot_block_ids: int) -> torch.Tensor:
    return torch.tensor(first_hot_block_ids, dtype=torch.int32)


def start(buffer: MLAHotBuffer, first_hot_block_id: int, host_ids: list[int]) -> None:
    """A request with one hot block."""
    buffer.extend_host_block_tables({first_hot_block_id: (0, host_ids)})
    buffer.change_hot_block_tables({first_hot_block_id: (0, [first_hot_block_id])})


def index_of(buffer: MLAHotBuffer, first_hot_block_id: int) -> int:
    return int(buffer.requests.find(tensor(first_hot_block_id)))


def hot(buffer: MLAHotBuffer, layer: int, *blocks: int) -> list[int]:
    """Position in every slot of a request with these hot blocks."""
    return buffer.residency[layer].positions.view(-1, ROWS_PER_BLOCK)[list(blocks)].flatten().tolist()


def decode(buffer: MLAHotBuffer, layer: int, *requests: tuple[int, int, list[int]]) -> Resolved:
    """One layer of one step: (first_hot_block_id, newest position, selection) of each request."""
    first_hot_block_ids, newest, selections = zip(*requests, strict=True)
    buffer.step.plan(tensor(*first_hot_block_ids), torch.tensor(newest, dtype=torch.int32) + 1)
    padded = [selection + [-1] * (TOP_K - len(selection)) for selection in selections]
    return buffer.swap_in_of(layer)(torch.tensor(padded, dtype=torch.int32))


def released(buffer: MLAHotBuffer, first_hot_block_id: int) -> tuple[int, int]:
    buffer.release(first_hot_block_id)
    [(name, hits, misses)] = buffer.counts.take_released()
    assert name == first_hot_block_id
    return hits, misses


def test_what_a_request_had_hot_is_forgotten() -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3])
    index = index_of(buffer, 40)
    for layer in range(NUM_LAYERS):
        decode(buffer, layer, (40, 10, [2, 5]))
    assert released(buffer, 40) == (0, 4)
    assert index_of(buffer, 40) == NUM_REQUESTS
    buffer.check_integrity()
    start(buffer, 41, [4])
    assert index_of(buffer, 41) == index
    start(buffer, 50, [5])
    buffer.change_hot_block_tables({50: (1, [40])})  # a block of the request that ended
    for layer in range(NUM_LAYERS):
        assert hot(buffer, layer, 50, 40) == [-1] * (2 * ROWS_PER_BLOCK)
    assert released(buffer, 41) == (0, 0)


def test_layers_are_independent() -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3])
    decode(buffer, 0, (40, 10, [2, 5]))
    assert decode(buffer, 1, (40, 10, [2, 4])).num_misses[0] == 2
    assert decode(buffer, 0, (40, 11, [2, 5])).num_misses[0] == 0


def test_counts_hits_and_misses_by_request_and_in_all() -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3])
    start(buffer, 50, [4, 5, 6])
    decode(buffer, 0, (40, 10, [2, 5, 10]), (50, 8, [1, 2, 3]))
    assert buffer.counts.take() == (0, 5)
    decode(buffer, 0, (50, 9, [1, 2, 7]))
    assert buffer.counts.take() == (2, 1)
    assert buffer.counts.take() == (0, 0)
    buffer.release(50)
    buffer.release(40)
    assert buffer.counts.take_released() == [(50, 2, 4), (40, 0, 2)]
    assert buffer.counts.take_released() == []


@pytest.mark.parametrize("num_tokens", [0, 3, 6, 8, 35])
def test_prefill_seeds_the_latest_positions_that_fit(num_tokens: int) -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2])
    seeds = buffer.seeds(tensor(40), num_tokens)
    buffer.seed(1, seeds)
    expected, positions = [-1] * ROWS_PER_BLOCK, range(max(num_tokens - NUM_SLOTS, 0), num_tokens)
    for position in positions:
        expected[position % NUM_SLOTS] = position
    assert hot(buffer, 1, 40) == expected
    assert seeds.hot_row_ids.tolist() == [[40 * ROWS_PER_BLOCK + position % NUM_SLOTS for position in positions]]
    assert (buffer.residency[0].positions == -1).all()
    buffer.check_integrity()


def test_a_later_chunk_takes_the_slots_of_an_earlier_one() -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3])
    for num_tokens in (5, 9):
        buffer.seed(0, buffer.seeds(tensor(40), num_tokens))
    assert hot(buffer, 0, 40) == [6, 7, 8, 3, 4, 5, -1]
    assert decode(buffer, 0, (40, 10, [3, 8, 2])).num_misses[0] == 1
    assert hot(buffer, 0, 40) == [6, 7, 8, 3, 2, 5, -1]


@pytest.mark.parametrize("num_tokens", [7, 12, 13])
def test_a_prompt_that_fits_into_its_blocks_has_every_row_in_its_own_slot(num_tokens: int) -> None:
    """Every row is in its own slot, also if the request has more blocks than it is guaranteed."""
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3, 4])
    buffer.change_hot_block_tables({40: (1, [50])})
    buffer.seed(0, buffer.seeds(tensor(40), num_tokens))
    assert hot(buffer, 0, 40, 50) == [slot if slot < num_tokens else -1 for slot in range(2 * ROWS_PER_BLOCK)]
    assert decode(buffer, 0, (40, num_tokens, [num_tokens - 1, 0])).num_misses[0] == 0


def test_a_prompt_that_does_not_fit_fills_what_it_has_been_lent() -> None:
    """Beside a request with more blocks and one with fewer, whose rows stay what they are."""
    buffer = make_buffer()
    for first_hot_block_id in (40, 45, 55):
        start(buffer, first_hot_block_id, [1, 2, 3, 4, 5])
    buffer.change_hot_block_tables({40: (1, [50]), 55: (1, [56, 57])})
    for position in range(3):
        decode(buffer, 0, (45, position, []), (55, position, []))
    before = hot(buffer, 0, 45, 55, 56, 57)
    for num_tokens in (9, 17):
        buffer.seed(0, buffer.seeds(tensor(40), num_tokens))
    num_slots = 2 * ROWS_PER_BLOCK - 1
    expected = [-1] * (2 * ROWS_PER_BLOCK)
    for position in range(17 - num_slots, 17):
        expected[position % num_slots] = position
    assert hot(buffer, 0, 40, 50) == expected
    assert hot(buffer, 0, 45, 55, 56, 57) == before
    assert hot(buffer, 0, 0) == [-1] * ROWS_PER_BLOCK
    assert decode(buffer, 0, (40, 17, [4, 16, 3])).num_misses[0] == 1


def test_a_turn_that_computes_positions_again_leaves_none_of_their_rows_of_before() -> None:
    """A streaming session: its first turn went further than what it keeps."""
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3, 4])
    buffer.change_hot_block_tables({40: (1, [50])})
    for position in range(5):
        decode(buffer, 0, (40, position, []))
    seeds = buffer.seeds(tensor(40), 12)
    buffer.seed(0, seeds)
    assert hot(buffer, 0, 40, 50) == [*range(12), -1, -1]
    assert (seeds.first, seeds.last) == (0, 12), "rows of before are written again"
    assert decode(buffer, 0, (40, 12, [2, 3, 4])).num_misses[0] == 0


def test_rows_of_the_last_step_are_empty_when_the_first_block_goes() -> None:
    buffer = make_buffer(query_len=3)
    buffer.extend_host_block_tables({40: (0, [1, 2, 3])})
    buffer.change_hot_block_tables({40: (0, [40, 50, 55])})
    query_lens = torch.tensor([3], dtype=torch.int32)
    buffer.step.plan(tensor(40), query_lens + 8, query_lens)
    buffer.swap_in_of(0)(torch.full((1, 3 * TOP_K), -1, dtype=torch.int32))
    assert hot(buffer, 0, 50)[:4] == [-1, 8, 9, 10]
    buffer.change_hot_block_tables({40: (0, [50, 55])})
    assert hot(buffer, 0, 50)[:4] == [-1] * 4, "a position may be computed again, and not in this row"


def test_a_turn_finds_no_row_of_the_token_that_it_drops_when_blocks_go() -> None:
    """A session's next turn begins at the last token of a step in flight, after which blocks were taken back."""
    buffer = make_buffer()
    buffer.extend_host_block_tables({40: (0, [1, 2, 3, 4, 5])})
    buffer.change_hot_block_tables({40: (0, [40, 50, 55])})
    decode(buffer, 0, (40, 15, [3]))
    assert hot(buffer, 0, 55)[1] == 15
    buffer.change_hot_block_tables({40: (1, [55])})
    decode(buffer, 0, (40, 15, [3]))
    assert decode(buffer, 0, (40, 16, [15])).num_misses[0] == 1


def test_rows_stay_hot_when_blocks_come_and_go() -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3, 4, 5, 6, 7])
    buffer.change_hot_block_tables({40: (1, [50, 51])})
    decode(buffer, 0, (40, 20, [3, 9, 15]))
    assert hot(buffer, 0, 40, 50, 51) == [-1] * 3 + [3] + [-1] * 5 + [9] + [-1] * 5 + [15] + [-1] * 4 + [20]
    buffer.change_hot_block_tables({40: (1, [51])})
    assert decode(buffer, 0, (40, 21, [3, 9, 15])).num_misses[0] == 1
    buffer.change_hot_block_tables({40: (2, [50])})
    assert decode(buffer, 0, (40, 22, [3, 9, 15])).num_misses[0] == 0
    buffer.check_integrity()


def test_newest_rows_move_to_the_reserved_slot_when_the_buffer_is_full() -> None:
    buffer = make_buffer()
    start(buffer, 3, [1])
    for newest, slot in [(0, 0), (5, 5), (6, 6), (7, 6), (20, 6)]:
        buffer.step.plan(tensor(3), torch.tensor([newest + 1], dtype=torch.int32))
        buffer.step.begin(0)
        assert buffer.step.newest_row_ids[0, 0] == 3 * ROWS_PER_BLOCK + slot


def test_the_least_recently_used_rows_make_room() -> None:
    buffer = make_buffer()
    start(buffer, 40, [1, 2, 3, 4, 5, 6, 7])
    for newest, selection in enumerate([[0, 1], [2, 3], [4, 5], [0, 1], [6, 7]], start=20):
        decode(buffer, 0, (40, newest, selection))
    assert sorted(hot(buffer, 0, 40)) == [-1, 0, 1, 4, 5, 6, 7]


@pytest.mark.long
@settings(max_examples=settings().max_examples // 2)  # of many steps each
@given(seed=st.integers(0, 2**32))
def test_random_requests_never_share_or_lose_state(seed: int) -> None:
    source, buffer = random.Random(seed), make_buffer()
    lengths: dict[int, int] = {}
    for _ in range(30):
        if len(lengths) < NUM_REQUESTS and source.random() < 0.3:
            first_hot_block_id = source.choice([h for h in range(20) if h not in lengths])
            start(buffer, first_hot_block_id, [first_hot_block_id] * MAX_BLOCKS)
            lengths[first_hot_block_id] = source.randint(0, 12)
        elif lengths and source.random() < 0.2:
            first_hot_block_id = source.choice(list(lengths))
            buffer.release(first_hot_block_id)
            del lengths[first_hot_block_id]
        elif lengths:
            first_hot_block_ids = source.sample(list(lengths), source.randint(1, len(lengths)))
            requests = []
            for first_hot_block_id in first_hot_block_ids:
                newest = lengths[first_hot_block_id]
                requests.append((first_hot_block_id, newest, source.sample(range(newest + 1), min(newest + 1, TOP_K))))
                lengths[first_hot_block_id] += 1
            for layer in range(NUM_LAYERS):
                decode(buffer, layer, *requests)
        buffer.check_integrity()


def test_a_step_may_be_padded_beyond_the_number_of_requests() -> None:
    buffer = make_buffer()
    for first_hot_block_id in range(NUM_REQUESTS):
        start(buffer, first_hot_block_id, [first_hot_block_id])
    first_hot_block_ids = (*range(NUM_REQUESTS), NUM_DEVICE_BLOCKS - 1)  # the last is padding
    resolved = decode(buffer, 0, *((first_hot_block_id, 3, [0, 2]) for first_hot_block_id in first_hot_block_ids))
    assert resolved.num_misses.tolist() == [2] * NUM_REQUESTS + [0]


def test_a_request_that_is_hot_as_a_whole_divides_its_blocks_equally() -> None:
    """Requests 40 and 45 have two blocks each, with 10 and 4 rows of the layers, or 7 of each."""
    layer_rows, equal_rows, stride = (10, 4), 7, 14
    places = RowPlace(0), RowPlace(10, equal_offset=-3)
    shape = replace(SHAPE, layer_rows=layer_rows, places=places, equal_rows=equal_rows)
    buffer, host = MLAHotBuffer(shape, torch.device("cpu")), torch.arange(72.0)[:, None]
    caches = torch.full((NUM_DEVICE_BLOCKS * stride, 1), float("nan")).view(-1, stride, 1)
    for place, rows in zip(places, layer_rows, strict=True):
        cache = caches[:, place.first : place.first + rows]
        buffer.add_layer(HotRows.from_cache(cache, equal_rows, place.equal_offset), host.clone())
    start(buffer, 40, list(range(9)))
    start(buffer, 45, list(range(9, 18)))
    buffer.change_hot_block_tables({40: (0, [40, 50])}, {40: True})
    buffer.change_hot_block_tables({45: (1, [51])})
    num_rows = buffer.requests.num_hot_rows
    assert [num_rows[:, index_of(buffer, each)].tolist() for each in (40, 45)] == [[14, 14], [20, 8]]
    for layer in range(NUM_LAYERS):
        for first_hot_block_id in (40, 45):
            seeds = buffer.seeds(tensor(first_hot_block_id), 12, layer)
            buffer.seed(layer, seeds)
            row_ids = buffer.seeded_rows(layer, seeds)[0]
            buffer.layers[layer].hot.rows[row_ids] = seeds.units[:, None] + 0.5 * (first_hot_block_id == 45)
        width = buffer.classes.entries_per_block[layer]
        held = buffer.residency[layer].positions.view(-1, width)[[40, 50], :equal_rows].flatten().tolist()
        assert held == [*range(12), -1, -1]
        found = decode(buffer, layer, (40, 12, [12, 2, 11, 6]), (45, 12, [12, 2, 11, 6]))
        assert found.num_misses.tolist()[:2] == [0, int(layer == 1)]
        rows = buffer.layers[layer].hot.rows[found.hot_row_ids[:2].long()][..., 0]
        assert rows[0, 1:].tolist() == [2, 11, 6] and rows[1, 2:].tolist() == [11.5, 6.5]
    in_blocks = caches[[40, 50]].view(2, 2, equal_rows)
    for layer in range(NUM_LAYERS):
        assert in_blocks[:, layer].flatten()[:12].tolist() == list(range(12)), "7 rows of each layer, side by side"
    buffer.step.begin(0)
    newest = [buffer.step.newest_rows_of(layer)[:2].tolist() for layer in range(NUM_LAYERS)]
    assert newest == [[50 * stride + 5, 51 * stride + 2], [50 * stride + 5 - 3, 51 * stride + 3]]
    for layer, rows in enumerate(newest):
        buffer.layers[layer].hot.rows[rows] = torch.tensor([[100.0 + layer], [200.0 + layer]])
        buffer.step.finish(layer)
    assert [layer.host[[12, 9 * 4 + 12]].flatten().tolist() for layer in buffer.layers] == [[100, 200], [101, 201]]
    buffer.change_hot_block_tables({40: (0, [40, 50])}, {40: False})
    assert num_rows[:, index_of(buffer, 40)].tolist() == [20, 8]
    for layer in range(NUM_LAYERS):
        held = buffer.residency[layer].positions.view(-1, buffer.classes.entries_per_block[layer])[[40, 50]]
        assert (held == -1).all(), "rows are left of the other division"
    buffer.check_integrity()
    buffer.release(40)
    start(buffer, 40, list(range(9)))
    assert num_rows[:, index_of(buffer, 40)].tolist() == [10, 4], "a new request has inherited the division"


def test_layers_with_different_numbers_of_rows_decode_and_seed_by_their_own_numbers() -> None:
    """A request with two blocks is hot as a whole in the layer with 10 rows of each, and evicts in that with 4."""
    layer_rows, stride = (10, 4), 14
    shape = replace(SHAPE, layer_rows=layer_rows)
    buffer, host = MLAHotBuffer(shape, torch.device("cpu")), torch.arange(36.0)[:, None]
    caches = torch.full((NUM_DEVICE_BLOCKS * stride, 1), float("nan"))
    for first, rows in zip((0, 10), layer_rows, strict=True):
        buffer.add_layer(HotRows(caches[first:], rows, stride), host.clone())
    start(buffer, 40, list(range(9)))
    buffer.change_hot_block_tables({40: (1, [50])})
    assert buffer.requests.num_hot_rows[:, index_of(buffer, 40)].tolist() == [20, 8]
    for layer in range(NUM_LAYERS):
        buffer.seed(layer, buffer.seeds(tensor(40), 12, layer))
        rows = layer_rows[layer]
        held = buffer.residency[layer].positions.view(-1, rows)[[40, 50]].flatten().tolist()
        assert held == ([*range(12), *[-1] * 8] if layer == 0 else [7, 8, 9, 10, 11, 5, 6, -1])
        found = decode(buffer, layer, (40, 12, [12, 2, 11, 6]))
        assert found.num_misses[0] == int(layer == 1)
        assert (caches[layer * 10 :][found.hot_row_ids[0, 1].long()] == 2).all() or layer == 0
    buffer.step.begin(0)
    newest = [int(buffer.step.newest_rows_of(layer)[0]) for layer in range(NUM_LAYERS)]
    assert newest == [50 * stride + 2, 50 * stride + 3]
    for layer, row in enumerate(newest):
        buffer.layers[layer].hot.rows[row] = 100 + layer
        buffer.step.finish(layer)
    assert [layer.host[12].item() for layer in buffer.layers] == [100, 101]
    buffer.change_hot_block_tables({40: (1, [55])})
    assert (buffer.residency[0].positions.view(-1, 10)[55] == -1).all()
    assert (buffer.residency[1].positions.view(-1, 4)[55] == -1).all()
    buffer.check_integrity()
