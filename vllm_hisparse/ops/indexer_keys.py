"""Indexer keys in 4 bits, on any device: quantising, paged logits, conversion from and to the model's 8 bits.

A key has 128 elements in four groups of 32. A group is e2m1 numbers (OCP Microscaling Formats 1.0, section 5.3.3) times
a power of two. A block of a cache holds the elements of all its keys, [block_size, 64] bytes, then a word per key,
[block_size] int32:

* bits 31 to 16: scale of the key, a bfloat16 power of two;
* bits 4g + 3 to 4g, for g from 0 to 3: exponent of group g above `MIN_GROUP_EXPONENT`.

Elements of a group are four 32-bit words of eight elements each: bits 4j + 2 to 4j of a word are the magnitude of
element j, bit 8j + 7 its sign for j below 4, bit 8(j - 4) + 3 its sign for the others. Two byte permutations turn such
a word into fp8 elements. Every number of a group, times its power of two, is exact in fp8 (e4m3): a key in 8 bits is an
exact copy of one in 4 bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from vllm_hisparse.ops.kernels import current_stream, kernels

# NOTE: torch's dispatcher picks the implementation by device, so that callers have one path.

HEAD_DIM = 128  # elements of a key
GROUP = 32  # elements that share a power of two
ELEMENT_BYTES = HEAD_DIM // 2
WORD_BYTES = 4
KEY_BYTES = ELEMENT_BYTES + WORD_BYTES
WIDE_SCALE_BYTES = 4
WIDE_KEY_BYTES = HEAD_DIM + WIDE_SCALE_BYTES  # bytes of a key in 8 bits: fp8 elements and a float32 scale
TILE = 64  # keys of a block

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of e2m1, by their code
LARGEST_EXPONENT = 2  # 6 = 1.5 * 2 ** 2
# Middles between neighbouring magnitudes; True if a number in the middle is rounded up, because the upper code is even
MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
MIN_GROUP_EXPONENT, MAX_GROUP_EXPONENT = (
    -5,
    6,
)  # 0.5 * 2 ** -5 is fp8's least normal number, 6 * 2 ** 6 its largest here
MIN_KEY_EXPONENT, MAX_KEY_EXPONENT = -100, 100  # exponents of a key's largest group; scales stay normal numbers
_SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)
FP8 = torch.float8_e4m3fn


def quantize(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys to 4 bits.

    Args:
        keys: [..., HEAD_DIM] of any float dtype.

    Returns:
        Elements, [..., ELEMENT_BYTES] uint8, and words, [...] int32.
    """
    groups = keys.float().unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(-1))
    # The least e with amax <= 6 * 2 ** e, from amax = mantissa * 2 ** exponent with a mantissa from 0.5 to 1.
    exponent = exponent.where(mantissa.isfinite(), 129) - LARGEST_EXPONENT - 1
    exponent = (exponent + (mantissa.isfinite() & (mantissa > 0.75))).where(mantissa != 0, -(2**20))
    largest = exponent.amax(-1, keepdim=True).clamp(MIN_KEY_EXPONENT, MAX_KEY_EXPONENT)
    above = ((exponent - largest).clamp_max(0) + MAX_GROUP_EXPONENT - MIN_GROUP_EXPONENT).clamp_min(0)
    scale = (above + largest + MIN_GROUP_EXPONENT - MAX_GROUP_EXPONENT)[..., None]
    magnitude = torch.ldexp(groups.double().abs(), -scale)
    code = torch.zeros_like(magnitude, dtype=torch.int64)
    for middle, is_up in MIDDLES:
        code += magnitude >= middle if is_up else magnitude > middle
    negative = torch.signbit(groups).long()
    code, negative = (part.unflatten(-1, (-1, 8)) for part in (code, negative))
    places, sign_places = 4 * torch.arange(8, device=keys.device), torch.tensor(_SIGN_BITS, device=keys.device)
    bits = (code << places).sum(-1) + (negative << sign_places).sum(-1)
    elements = _as_int32(bits).flatten(-2).contiguous().view(torch.uint8)
    shifts = 4 * torch.arange(groups.shape[-2], device=keys.device)
    words = ((largest[..., 0] - MAX_GROUP_EXPONENT + 127).long() << 23) + (above.long() << shifts).sum(-1)
    return elements, _as_int32(words)


def dequantize(elements: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn keys in 4 bits into 8 bits. The result is exact.

    Args:
        elements: [..., ELEMENT_BYTES] uint8.
        words: [...] int32.

    Returns:
        Elements, [..., HEAD_DIM] float8_e4m3fn, and scales, [...] float32.
    """
    bits = elements.contiguous().view(torch.int32).long()[..., None]
    places = torch.arange(0, 32, 4, device=bits.device)
    magnitude = torch.tensor(MAGNITUDES, device=bits.device)[(bits >> places) & 7]
    negative = (bits >> torch.tensor(_SIGN_BITS, device=bits.device)) & 1
    groups = magnitude.copysign(0.5 - negative.float()).unflatten(-2, (-1, GROUP // 8)).flatten(-2)
    shifts = 4 * torch.arange(HEAD_DIM // GROUP, device=words.device)
    exponent = ((words.long()[..., None] >> shifts) & 15) + MIN_GROUP_EXPONENT
    values = torch.ldexp(groups, exponent[..., None]).flatten(-2)
    return values.to(FP8), (words & -(1 << 16)).view(torch.float32)


def key_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and words of a cache, in place.

    Args:
        cache: [num_blocks, block_size, KEY_BYTES] uint8 with contiguous blocks, any block stride.

    Returns:
        [num_blocks, block_size, ELEMENT_BYTES] uint8 and [num_blocks, block_size] int32.
    """
    num_blocks, block_size, row_bytes = cache.shape
    flat = torch.as_strided(cache, (num_blocks, block_size * row_bytes), (cache.stride(0), 1), cache.storage_offset())
    split = block_size * ELEMENT_BYTES
    return flat[:, :split].unflatten(1, (block_size, ELEMENT_BYTES)), flat[:, split:].view(torch.int32)


@torch.library.custom_op("vllm_hisparse::insert_indexer_keys", mutates_args=("cache",))
def insert(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise keys and write them to their slots.

    Args:
        cache: as in `key_views`.
        keys: [tokens, HEAD_DIM]; on CUDA bfloat16, any float dtype elsewhere.
        slots: [tokens] int64 `block * block_size + offset`; -1 is skipped.

    Raises:
        TypeError, ValueError: on CUDA, a tensor is of another dtype, shape or alignment.
    """
    keys, slots = keys[slots >= 0], slots[slots >= 0]
    block_size = cache.shape[1]
    for part, new in zip(key_views(cache), quantize(keys), strict=True):
        part[slots // block_size, slots % block_size] = new


@torch.library.custom_op("vllm_hisparse::gather_indexer_keys", mutates_args=("values", "scales"))
def gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Write the keys of whole requests side by side, in 8 bits.

    Args:
        cache: as in `key_views`.
        block_table: [num_requests, max_blocks] int32.
        cu_seq_lens: [num_requests + 1] int32 place of each request's first key in the output.
        values: [tokens, HEAD_DIM] float8_e4m3fn, written; entries beyond the requests' keys stay unchanged.
        scales: [tokens, WIDE_SCALE_BYTES] uint8 bytes of float32 scales, written in the same way.

    Raises:
        TypeError, ValueError: on CUDA, a tensor is of another dtype, shape or alignment.
    """
    elements, words = key_views(cache)
    starts = cu_seq_lens.tolist()
    for index, (start, end) in enumerate(pairwise(starts)):
        blocks = block_table[index, : -(-(end - start) // cache.shape[1])].long()
        found = dequantize(elements[blocks].flatten(0, 1)[: end - start], words[blocks].flatten()[: end - start])
        values[start:end], scales[start:end] = found[0], found[1][:, None].view(torch.uint8)


@torch.library.custom_op("vllm_hisparse::indexer_logits", mutates_args=())
def paged_logits(
    cache: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    """Return the scores of all keys of each request: sum over heads of weight * relu(query . key).

    Args:
        cache: as in `key_views`; on CUDA with blocks of TILE keys.
        query: [num_requests, queries, heads, HEAD_DIM] float8_e4m3fn; on CUDA with 32 or 64 heads.
        weights: [num_requests * queries, heads] float32, query scales included.
        seq_lens: [num_requests, queries or 1] int32, keys that a query sees; the last one sees most.
        block_table: [num_requests, max_blocks] int32.
        max_seq_len: keys of the longest request.

    Returns:
        [num_requests * queries, max_seq_len] float32; undefined beyond the keys that a query sees.

    Raises:
        TypeError, ValueError: on CUDA, a tensor is of another dtype, shape or alignment.
        RuntimeError: the GPU has no WGMMA instructions (compute capability 9.0).
    """
    elements, words = key_views(cache)
    num_requests, num_queries, _, _ = query.shape
    out = torch.full((num_requests * num_queries, max_seq_len), torch.nan)
    for index in range(num_requests):
        num_keys = int(seq_lens[index, -1])
        blocks = block_table[index, : -(-num_keys // cache.shape[1])].long()
        values, scales = dequantize(elements[blocks].flatten(0, 1)[:num_keys], words[blocks].flatten()[:num_keys])
        products = torch.einsum("qhd,kd->qhk", query[index].float(), values.float()).relu_()
        rows = slice(index * num_queries, (index + 1) * num_queries)
        out[rows, :num_keys] = torch.einsum("qhk,qh->qk", products, weights[rows]) * scales
    return out


@torch.library.custom_op("vllm_hisparse::narrow_indexer_keys", mutates_args=("narrow",))
def narrow_blocks(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Quantise blocks of keys in 8 bits.

    Args:
        wide: [blocks, TILE * WIDE_KEY_BYTES] uint8: fp8 elements of all keys, then their float32 scales.
        narrow: [blocks, TILE * KEY_BYTES] uint8, overwritten.

    Raises:
        ValueError: a tensor is not contiguous, or on CUDA of another dtype or shape.
    """
    _check_contiguous(wide, narrow)
    split = TILE * HEAD_DIM
    values, scales = wide[:, :split].view(FP8).unflatten(1, (TILE, -1)), wide[:, split:].view(torch.float32)
    for part, new in zip(key_views(narrow.unflatten(1, (TILE, -1))), quantize(_scaled(values, scales)), strict=True):
        part.copy_(new)


@torch.library.custom_op("vllm_hisparse::widen_indexer_keys", mutates_args=("wide",))
def widen_blocks(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    """Copy blocks of keys in 4 bits into 8 bits, exactly.

    Args:
        narrow, wide: as in `narrow_blocks`; `wide` is overwritten.

    Raises:
        ValueError: as in `narrow_blocks`.
    """
    _check_contiguous(wide, narrow)
    values, scales = dequantize(*key_views(narrow.unflatten(1, (TILE, -1))))
    wide[:, : TILE * HEAD_DIM] = values.view(torch.uint8).flatten(1)
    wide[:, TILE * HEAD_DIM :] = scales.view(torch.uint8)


def _check_contiguous(*blocks: torch.Tensor) -> None:
    if not all(each.is_contiguous() for each in blocks):
        raise ValueError("blocks of keys are not contiguous")


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Keys in 8 bits as float32; unused ones, which may hold anything, stay numbers."""
    return (values.float() * scales[..., None]).nan_to_num(0.0)


def _as_int32(bits: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 numbers."""
    return (bits - ((bits >> 31) << 32)).to(torch.int32)


@insert.register_kernel("cuda")
def _(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    kernels().insert_indexer_keys(cache, keys, slots, current_stream())


@gather.register_kernel("cuda")
def _(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    kernels().gather_indexer_keys(cache, block_table, cu_seq_lens, values.view(torch.uint8), scales, current_stream())


@paged_logits.register_kernel("cuda")
def _(
    cache: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    width = -(-max_seq_len // TILE) * TILE  # whole blocks are written
    logits = torch.empty(len(weights), width, dtype=torch.float32, device=query.device)
    query = query.view(torch.uint8)
    kernels().indexer_logits(cache, query, weights, seq_lens, block_table, logits, current_stream())
    return logits[:, :max_seq_len]


@narrow_blocks.register_kernel("cuda")
def _(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    kernels().narrow_indexer_keys(wide, narrow, current_stream())


@widen_blocks.register_kernel("cuda")
def _(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    kernels().widen_indexer_keys(narrow, wide, current_stream())
