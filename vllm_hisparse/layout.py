"""Sizes and byte layouts of KV: the only definition for host pool, kernels, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil
from operator import mul
from typing import NamedTuple

from vllm_hisparse.ops.limits import MAX_COLUMNS, MAX_HOT_ROWS, MAX_QUERY_LEN

INDEXER_SCALE_BYTES = 4  # one fp32 scale per 128 quantised key elements
INDEXER_QUANT_GROUP = 128
FP8_DS_MLA_ROW_BYTES = 656  # 512 fp8 + 4 fp32 scales + 64 bf16 (vllm/v1/attention/backends/mla/flashmla_sparse.py)
BLOCK_SIZE = 64  # tokens per host block and per device block of indexer keys
MSA_BLOCK_SIZE = 128  # the same for MiniMax-M3, whose indexer selects such blocks
# Tokens of MiniMax-M3's units: device blocks hold whole units, and units of 128 tokens would waste most of a block
MSA_UNIT = 16
# Tokens of a dense model's block: FlashAttention's minimum, and a maximum, because larger blocks waste memory
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 256
RESIDENCY_ENTRY_BYTES = 8  # position and expiry
MAX_UNUSED_SHARE = 0.25  # hot rows may leave this share of a device block unused, or half a unit if that is more
MAX_UNUSED_UNITS = 0.75  # but they may never leave more than these units unused
# A request gets equal rows when they have slots for the first share of its tokens, and keeps them while they have slots
# for the second one. NOTE: a change of the division empties all of its hot rows.
EQUAL_ROWS_SHARE, LEAST_EQUAL_ROWS_SHARE = 15 / 16, 7 / 8
MIN_IMPORT_PARTS = 2  # least parts of an import buffer: one is read while another one is copied
IMPORT_ALIGNMENT_BYTES = 256  # alignment of these parts, so that pages are copied in words
MAX_ROW_CLASSES = 8  # different numbers of rows that layers may have in a block; each costs small launches in a step


def most_buffer_rows(unit: int) -> int:
    """Return the largest `device_buffer_size` that the kernels take; the rest of their limit is for reserved slots.

    Args:
        unit: tokens that are selected together.
    """
    return (MAX_HOT_ROWS - BLOCK_SIZE) * unit


def most_drafts(top_k: int, unit: int) -> int:
    """Return the largest number of drafts whose selections the kernels take.

    Args:
        top_k: positions of a selection.
        unit: tokens that are selected together.
    """
    return max(min(MAX_QUERY_LEN, MAX_COLUMNS * unit // top_k) - 1, 0)


def least_import_buffer_bytes(block_bytes: int) -> int:
    """Return the bytes of the smallest import buffer, each of whose parts holds a block.

    Args:
        block_bytes: bytes of a block that come through the buffer, in all layers.
    """
    return MIN_IMPORT_PARTS * -(-block_bytes // IMPORT_ALIGNMENT_BYTES) * IMPORT_ALIGNMENT_BYTES


def mla_row_bytes(kv_lora_rank: int, qk_rope_head_dim: int, element_bytes: int) -> int:
    """Bytes of one unquantised MLA row: the compressed latent followed by the rotary key."""
    return (kv_lora_rank + qk_rope_head_dim) * element_bytes


def indexer_row_bytes(index_head_dim: int) -> int:
    """Bytes of one indexer key: fp8 elements plus their fp32 scales (vLLM's `indexer_k_quant_and_cache`).

    A block stores all elements first, `[block_size, index_head_dim]` fp8, then all scales, `[block_size]` fp32.
    """
    return index_head_dim + index_head_dim // INDEXER_QUANT_GROUP * INDEXER_SCALE_BYTES


def dense_block_size(num_hot: int, num_resident: int | Fraction, unit: int) -> int:
    """Choose the tokens per block of a dense model, a power of two.

    Layers with device-resident KV share vLLM's blocks with hot pages. The smallest size is chosen at which the KV of
    these layers takes at least as many bytes of a block as one page of all hot layers.

    Args:
        num_hot: layers with hot rows.
        num_resident: layers with device-resident KV; a draft layer with rows of another width counts by its bytes.
        unit: tokens that are selected together.
    """
    size = MIN_BLOCK_SIZE
    while size < MAX_BLOCK_SIZE and size * num_resident < unit * num_hot:
        size *= 2
    # NOTE: at this size, hot pages would be as large as pages of the other layers, which vLLM would take for one group.
    if size == unit and num_hot < num_resident < 2 * num_hot:
        size *= 2
    return size if num_resident else MIN_BLOCK_SIZE


def divide_rows(shares: Sequence[tuple[float, int]], num_rows: int) -> tuple[int, ...]:
    """Divide the hot rows of a device block among layers.

    Groups of layers with the same share get the same number of rows, and at most `MAX_ROW_CLASSES` numbers occur: the
    nearest shares become their mean. Numbers are rounded down. While enough rows are left, the group with the smallest
    part of its share then gets one more row for each of its layers.

    Args:
        shares: for each group, the share of one of its layers relative to other layers, and the number of its layers.
        num_rows: rows of all layers together; at least one for each layer.

    Returns:
        Rows of a layer of each group, at least 1. All together, they are at most `num_rows`.
    """
    classes = [([share], num_layers * share, num_layers) for share, num_layers in _sum_by_share(shares)]
    while len(classes) > MAX_ROW_CLASSES:
        means = [total / num_layers for _, total, num_layers in classes]
        nearest = min(range(len(classes) - 1), key=lambda index: means[index + 1] - means[index])
        one, other = classes[nearest : nearest + 2]
        classes[nearest : nearest + 2] = [(one[0] + other[0], one[1] + other[1], one[2] + other[2])]
    sizes, whole = [num_layers for _, _, num_layers in classes], sum(total for _, total, _ in classes)
    wanted = [total / num_layers / whole * num_rows for _, total, num_layers in classes]
    rows = [max(int(each), 1) for each in wanted]
    while (num_left := num_rows - sum(map(mul, rows, sizes))) < 0:
        rows[max((i for i in range(len(rows)) if rows[i] > 1), key=lambda index: rows[index] / wanted[index])] -= 1
    while fitting := [i for i, size in enumerate(sizes) if size <= num_left and rows[i] < wanted[i]]:
        index = min(fitting, key=lambda index: rows[index] / wanted[index])
        rows[index], num_left = rows[index] + 1, num_left - sizes[index]
    by_share = {share: each for (members, _, _), each in zip(classes, rows, strict=True) for share in members}
    return tuple(by_share[share] for share, _ in shares)


def _sum_by_share(shares: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return each share, in ascending order, and the number of its layers."""
    distinct = sorted({share for share, _ in shares})
    return [(each, sum(num for share, num in shares if share == each)) for each in distinct]


@dataclass(frozen=True)
class StateLayout:
    """Layout of the growing fields of an algorithm's state in device blocks.

    A block has as many entries of one field as fit: those of the first layer, then those of the next layer. A request
    gets blocks of all fields when its tokens need them, in an order that is the same for every request.

    Args:
        entries: for each field, tokens of an entry, and bytes of an entry in one layer.
        num_layers: layers with state.
        block_bytes: bytes of a device block.
    """

    entries: tuple[tuple[int, int], ...]
    num_layers: int
    block_bytes: int

    @cached_property
    def entries_per_block(self) -> tuple[int, ...]:
        """Entries of each field in a block; 0 if a block is too small."""
        return tuple(self.block_bytes // (num_bytes * self.num_layers) for _, num_bytes in self.entries)

    @cached_property
    def tokens_per_block(self) -> tuple[int, ...]:
        """Tokens whose entries fit into a block, for each field."""
        return tuple(num * tokens for num, (tokens, _) in zip(self.entries_per_block, self.entries, strict=True))

    def field_blocks(self, num_tokens: int) -> list[int]:
        """Blocks of each field for a request of `num_tokens`."""
        return [-(-num_tokens // tokens) for tokens in self.tokens_per_block]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of all fields for a request of `num_tokens`."""
        return sum(self.field_blocks(num_tokens))

    def columns(self, num_tokens: int) -> list[int]:
        """Column in the request's table of each block, in the order in which a request of `num_tokens` gets its blocks.

        The table has the blocks of the first field, then those of the next field.
        """
        first_tokens = [
            (index * tokens, field)
            for field, (tokens, num) in enumerate(
                zip(self.tokens_per_block, self.field_blocks(num_tokens), strict=True)
            )
            for index in range(num)
        ]
        return sorted(range(len(first_tokens)), key=first_tokens.__getitem__)


class RowPlace(NamedTuple):
    """Place of a layer's hot rows in a device block.

    Attributes:
        first: first row.
        pitch: rows from one of the layer's rows to the next.
        equal_offset: rows from `first` to the layer's first row in a block that is divided equally.
    """

    first: int
    pitch: int = 1
    equal_offset: int = 0


@dataclass(frozen=True)
class KVLayout:
    """Sizes of a model's KV on host and device.

    Device-resident KV is KV that the device keeps for every token, besides hot rows: the indexer keys of a DSA model
    and the KV of its layers that do not select, the KV of a dense model's `full_kv_layers`, the KV of draft layers.

    Args:
        row_bytes: bytes of one token's main KV in one layer.
        resident_row_bytes: bytes of one token's device-resident KV in one layer: of its indexer key in a DSA model, of
            its KV in a dense model.
        num_layers: layers with main KV.
        num_resident_layers: layers with such device-resident KV, without draft layers; may be 0.
        block_size: tokens per host block and per device block of device-resident KV.
        tokens_per_unit: consecutive rows that are selected, copied and evicted together; divides `block_size`.
        num_kv_heads: KV heads, each with a selection of its own. None: one selection for whole rows (DSA models).
        max_query_len: tokens that a decoding request computes in a step: one and its drafts.
        draft_row_bytes: bytes of one token's KV in all draft layers.
        state_entries: growing fields of an algorithm's state, as in `StateLayout`.
        full_kv_row_bytes: bytes of one token's KV in all layers of a DSA model that do not select.
        narrow_key_bytes: bytes of one token's indexer key in one layer on the device, without draft layers, if the
            device keeps it in fewer bits than the host, which keeps `resident_row_bytes`. None: both keep the same.
        row_shares: for each layer of a DSA model that selects, in order, its share of the hot rows of a block relative
            to other layers', and the number of layers that share its selection, itself included. (): all layers have
            the same number of rows.
    """

    row_bytes: int
    resident_row_bytes: int
    num_layers: int
    num_resident_layers: int
    block_size: int = BLOCK_SIZE
    tokens_per_unit: int = 1
    num_kv_heads: int | None = None
    max_query_len: int = 1
    draft_row_bytes: int = 0
    state_entries: tuple[tuple[int, int], ...] = ()
    full_kv_row_bytes: int = 0
    narrow_key_bytes: int | None = None
    row_shares: tuple[tuple[float, int], ...] = ()

    @cached_property
    def rows_per_hot_block(self) -> int:
        """Hot rows of a layer in one device block, if all layers have as many (else `layer_rows`).

        A block has as many whole units as fit into the bytes of a block of device-resident KV, and one more if the
        block becomes only a little larger with it. Both groups share vLLM's block pool, whose blocks have the size of
        the larger group. A sequence that is hot as a whole has several times as many hot blocks as blocks of
        device-resident KV.
        """
        if not self.has_resident_kv:
            return self.block_size
        block_bytes = self.resident_block_bytes
        unit_bytes = self.row_bytes * self.num_layers * self.tokens_per_unit
        num_units, unused_bytes = divmod(block_bytes, unit_bytes)
        if unused_bytes > min(max(MAX_UNUSED_SHARE * block_bytes, unit_bytes / 2), MAX_UNUSED_UNITS * unit_bytes):
            num_units += 1
        num_units = max(1, num_units)
        # NOTE: vLLM splits groups with equal page sizes into equal numbers of layers, unless some layers have others.
        has_as_many = self.num_layers == self.num_resident_layers and not self.draft_row_bytes
        if not has_as_many and self._is_page_of_both(num_units):
            num_units = max(1, num_units - 1)
        return num_units * self.tokens_per_unit

    @cached_property
    def selecting_rows(self) -> tuple[int, ...]:
        """Hot rows in one device block of each layer that selects, by `row_shares`."""
        if len({share for share, _ in self.row_shares}) <= 1:
            return (self.rows_per_hot_block,) * len(self.row_shares)
        return divide_rows(self.row_shares, self.device_block_bytes // self.row_bytes)

    @cached_property
    def layer_rows(self) -> tuple[int, ...]:
        """Hot rows of each layer in one device block, at `row_places`."""
        if not self.row_shares:
            return (self.rows_per_hot_block,) * self.num_layers
        groups = zip(self.selecting_rows, self.row_shares, strict=True)
        return tuple(rows for rows, (_, num_layers) in groups for _ in range(num_layers))

    @cached_property
    def row_places(self) -> tuple[RowPlace, ...]:
        """Place of each layer's hot rows in a device block.

        NOTE: if blocks are divided in two ways, rows of layers that share a selection take turns, because these layers
        also share row ids, so that all of them must have the same `equal_offset`.
        """
        if not self.equal_rows:
            ends = accumulate(self.layer_rows)
            return tuple(RowPlace(end - num) for num, end in zip(self.layer_rows, ends, strict=True))
        places, first, equal_first = [], 0, 0
        for rows, (_, num_layers) in zip(self.selecting_rows, self.row_shares, strict=True):
            places += [RowPlace(first + index, num_layers, equal_first - first) for index in range(num_layers)]
            first, equal_first = first + rows * num_layers, equal_first + self.equal_rows * num_layers
        return tuple(places)

    @cached_property
    def fewest_rows(self) -> int:
        """Hot rows in one device block of the layer that has the fewest."""
        return min(self.layer_rows)

    @property
    def equal_rows(self) -> int:
        """Hot rows of each layer in one device block of a request with equal rows, which is hot as a whole or nearly
        so. 0: no request has equal rows, because `row_shares` give no layer fewer rows."""
        return self.rows_per_hot_block if self.fewest_rows < self.rows_per_hot_block else 0

    @property
    def whole_rows(self) -> int:
        """Hot rows in one device block of the layer with the fewest, for a request that is hot as a whole."""
        return self.equal_rows or self.fewest_rows

    @cached_property
    def mean_rows(self) -> float:
        """Hot rows of a mean layer in one device block."""
        return sum(self.layer_rows) / self.num_layers

    def _is_page_of_both(self, num_units: int) -> bool:
        page_bytes = num_units * self.tokens_per_unit * self.row_bytes
        return page_bytes in (self.block_size * self.device_key_bytes, self.block_size * self.draft_row_bytes)

    @property
    def has_resident_kv(self) -> bool:
        return self.num_resident_layers > 0 or self.wider_row_bytes > 0

    @property
    def wider_row_bytes(self) -> int:
        """One token's device-resident KV in all layers whose rows are not `resident_row_bytes` wide."""
        return self.full_kv_row_bytes + self.draft_row_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes that a miss copies."""
        return self.tokens_per_unit * self.row_bytes // (self.num_kv_heads or 1)

    @cached_property
    def device_block_bytes(self) -> int:
        """Distance in bytes from one block of vLLM's device pool to the next."""
        hot = self.num_layers * self.rows_per_hot_block * self.row_bytes
        widest = max(hot, self.resident_block_bytes)
        return -(-widest // self.block_alignment_bytes) * self.block_alignment_bytes

    @property
    def residency_block_bytes(self) -> int:
        """Bytes of one device block's residency, outside vLLM's KV cache.

        A DSA model has an entry for each row that a layer which selects may have, a dense model for each unit that
        fits into the block.
        """
        if self.num_kv_heads is None:
            equal = self.num_resident_layers * self.rows_per_hot_block
            by_layer = sum(max(rows, self.equal_rows) for rows in self.selecting_rows)
            return (by_layer or equal) * RESIDENCY_ENTRY_BYTES
        return self.device_block_bytes // self.unit_bytes * RESIDENCY_ENTRY_BYTES

    @cached_property
    def state(self) -> StateLayout:
        """Layout of an algorithm's state in device blocks."""
        return StateLayout(self.state_entries, self.num_layers, self.device_block_bytes)

    @property
    def block_alignment_bytes(self) -> int:
        """Bytes of which the size of a device block is a multiple, because kernels count distances in rows, or in KV
        heads' parts of a block.
        """
        if self.num_kv_heads is None:
            return self.row_bytes
        return self.rows_per_hot_block * self.row_bytes // self.num_kv_heads

    @property
    def main_block_bytes(self) -> int:
        """Bytes of the main KV of one block's tokens, all layers."""
        return self.num_layers * self.block_size * self.row_bytes

    @property
    def device_key_bytes(self) -> int:
        """Bytes of one token's device-resident KV in one layer of the device, without draft layers."""
        return self.resident_row_bytes if self.narrow_key_bytes is None else self.narrow_key_bytes

    @property
    def resident_token_bytes(self) -> int:
        """Bytes of one token's device-resident KV, all layers, on the device."""
        return self.num_resident_layers * self.device_key_bytes + self.wider_row_bytes

    @property
    def resident_block_bytes(self) -> int:
        """Bytes of the device-resident KV of one block's tokens, all layers, on the device."""
        return self.block_size * self.resident_token_bytes

    @property
    def saved_block_bytes(self) -> int:
        """Bytes of the host's copy of the device-resident KV of one block's tokens, all layers."""
        return self.block_size * (self.num_resident_layers * self.resident_row_bytes + self.wider_row_bytes)

    @property
    def receives_on_host(self) -> bool:
        """True if a prefill instance's device-resident KV lands in the host pool, because the device keeps its keys in
        fewer bits."""
        return self.narrow_key_bytes is not None

    @property
    def received_block_bytes(self) -> int:
        """Bytes of a host block that come from a prefill instance."""
        return self.host_block_bytes if self.receives_on_host else self.main_block_bytes

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one host block: main KV and a copy of device-resident KV of all layers."""
        return self.main_block_bytes + self.saved_block_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Host blocks, or device blocks of device-resident KV, that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def num_hot_blocks(self, device_buffer_size: int, num_tokens: int | None = None) -> int:
        """Device blocks of a request's hot buffer.

        Args:
            device_buffer_size: hot tokens of a long sequence in a mean layer, without those of its newest units.
            num_tokens: tokens of the sequence, if the hot buffer grows with it, `block_size` tokens at a time. None:
                the hot buffer of a long sequence.
        """
        num_rows = device_buffer_size + self.max_query_len * self.tokens_per_unit
        num_blocks = self._blocks_of(num_rows, self.mean_rows)
        if num_tokens is None:
            return num_blocks
        return min(num_blocks, self._blocks_of(self._grown_rows(num_tokens), self.whole_rows))

    def num_whole_blocks(self, num_tokens: int) -> int:
        """Device blocks in which every layer holds a sequence of `num_tokens`, at most as many as the kernels can use.

        NOTE: the layer with the fewest rows decides, because a request is hot as a whole or is not, in all layers.
        """
        num_rows = num_tokens + self.max_query_len * self.tokens_per_unit
        return self._blocks_of(min(num_rows, self._grown_rows(num_tokens)), self.whole_rows)

    def suits_equal_rows(self, num_blocks: int, num_tokens: int, has_equal_rows: bool) -> bool:
        """Return True if every layer has slots for nearly all tokens in hot blocks that are divided equally.

        Args:
            num_blocks: hot blocks of the request.
            num_tokens: tokens after the next step, drafts included.
            has_equal_rows: True if they are divided equally now.
        """
        share = LEAST_EQUAL_ROWS_SHARE if has_equal_rows else EQUAL_ROWS_SHARE
        return share * (num_tokens - 1 + self.max_query_len) <= num_blocks * self.equal_rows

    def _grown_rows(self, num_tokens: int) -> int:
        """Rows of a hot buffer that grows with its sequence, `block_size` tokens at a time."""
        # NOTE: slots for drafts are reserved before their number is known.
        num_whole = ((num_tokens - 1) // self.tokens_per_unit + self.max_query_len) * self.tokens_per_unit
        return self.num_blocks(num_whole) * self.block_size

    def _blocks_of(self, num_rows: int, rows_per_block: float) -> int:
        # NOTE: the kernels take no request with more blocks.
        most_blocks = MAX_HOT_ROWS // (max(self.layer_rows) // self.tokens_per_unit)
        return min(ceil(num_rows / rows_per_block), most_blocks)

    def num_other_blocks(self, num_tokens: int) -> int:
        """Device blocks of a request besides its hot blocks: of an algorithm's state and of device-resident KV."""
        return self.state.num_blocks(num_tokens) + (self.num_blocks(num_tokens) if self.has_resident_kv else 0)

    def hot_request_bytes(self, num_tokens: int, device_buffer_size: int) -> int:
        """Device bytes of one request of `num_tokens` with a full-grown hot buffer."""
        num_blocks = self.num_hot_blocks(device_buffer_size) + self.num_other_blocks(num_tokens)
        return num_blocks * self.device_block_bytes

    def full_request_bytes(self, num_tokens: int) -> int:
        """Device bytes of one request of `num_tokens`, with full KV on the device."""
        return self.num_blocks(num_tokens) * self.host_block_bytes

    def host_request_bytes(self, num_tokens: int) -> int:
        """Host bytes of one request of `num_tokens`."""
        return self.num_blocks(num_tokens) * self.host_block_bytes
