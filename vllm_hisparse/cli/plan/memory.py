"""Memory for KV, and the number of requests at once, of full KV, vLLM's own HiSparse and the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from vllm_hisparse.cli.plan.models import ModelShape, narrow_key_bytes
from vllm_hisparse.kv_manager.blocks.lending import divide
from vllm_hisparse.layout import MSA_BLOCK_SIZE, MSA_UNIT, KVLayout, dense_block_size

QUEST_PAGE = 16  # tokens of a page, as in `algorithms/quest.py`


class System(StrEnum):
    """A way to keep KV, whose decoding is predicted."""

    full = "full KV"
    native = "native HiSparse"
    plugin = "vllm_hisparse"


@dataclass(frozen=True)
class Seats:
    """Memory of the requests of one engine rank.

    Attributes:
        device_bytes: least bytes of a mean request's KV on each GPU.
        host_bytes: bytes of a mean request's KV in host memory.
        running: number of requests that device and host memory allow at once.
        bound: limit of this number: `device memory`, `host memory` or `--max-num-seqs`.
    """

    device_bytes: int
    host_bytes: int
    running: int
    bound: str


@dataclass(frozen=True)
class KVMemory:
    """KV memory of one engine rank.

    Attributes:
        model: sizes of the model.
        device_bytes: bytes of device memory for KV on each GPU.
        host_bytes: bytes of host memory for KV of the rank.
        tensor_parallel: GPUs of the rank.
        device_buffer_size: hot rows of a long request.
        top_k: positions selected per query token.
        drafts: drafts of a step.
        max_num_seqs: value of `--max-num-seqs`.
        full_kv_layers: layers of a dense model that keep full KV on the device.
        has_narrow_keys: True if the plugin keeps the indexer keys of a DSA model in 4 bits on the device.
        import_buffer_bytes: bytes of `device_bytes` that the plugin uses for its import buffer.
    """

    model: ModelShape
    device_bytes: int
    host_bytes: int
    tensor_parallel: int
    device_buffer_size: int
    top_k: int
    drafts: int = 0
    max_num_seqs: int = 1 << 30
    full_kv_layers: int = 0
    has_narrow_keys: bool = False
    import_buffer_bytes: int = 0

    @property
    def layout(self) -> KVLayout:
        """Layout of the KV of one GPU. All ranks of a DSA model hold the same rows; a rank of a model with KV heads
        holds a share.
        """
        model = self.model
        heads = max(1, model.num_kv_heads // self.tensor_parallel)
        if model.selects_blocks:
            row_bytes = model.row_bytes * heads // model.num_kv_heads
            return KVLayout(
                row_bytes=row_bytes,
                resident_row_bytes=model.key_bytes,
                num_layers=model.num_layers - model.num_full_kv_layers,
                num_resident_layers=model.num_indexers,
                block_size=MSA_BLOCK_SIZE,
                tokens_per_unit=MSA_UNIT,
                num_kv_heads=heads,
                full_kv_row_bytes=model.num_full_kv_layers * row_bytes,
            )
        if model.is_dsa:
            return KVLayout(
                row_bytes=model.row_bytes,
                resident_row_bytes=model.key_bytes,
                num_layers=model.num_layers - model.num_full_kv_layers,
                num_resident_layers=model.num_indexers,
                max_query_len=1 + self.drafts,
                draft_row_bytes=model.row_bytes + model.key_bytes if self.drafts else 0,
                full_kv_row_bytes=model.num_full_kv_layers * model.row_bytes,
                narrow_key_bytes=narrow_key_bytes(model.index_head_dim) if self.has_narrow_keys else None,
            )
        row_bytes = model.row_bytes * heads // model.num_kv_heads
        bounds = ((QUEST_PAGE, model.bounds_bytes * heads // model.num_kv_heads),)
        num_full = self.full_kv_layers
        return KVLayout(
            row_bytes=row_bytes,
            resident_row_bytes=row_bytes,
            num_layers=model.num_layers - num_full,
            num_resident_layers=num_full,
            block_size=dense_block_size(model.num_layers - num_full, num_full, QUEST_PAGE),
            tokens_per_unit=QUEST_PAGE,
            num_kv_heads=heads,
            max_query_len=1 + self.drafts,
            state_entries=bounds,
        )

    def seats(self, system: System, lengths: Sequence[int]) -> Seats:
        """Count the requests that run at once.

        Args:
            system: way to keep KV.
            lengths: lengths in tokens of equally frequent requests.
        """
        device, host = zip(*(self.request_bytes(system, num_tokens) for num_tokens in lengths), strict=True)
        limits = {"device memory": _fitting(self.kv_bytes(system), device), "--max-num-seqs": self.max_num_seqs}
        if any(host):
            limits["host memory"] = _fitting(self.host_bytes, host)
        bound = min(limits, key=limits.__getitem__)
        return Seats(round(fmean(device)), round(fmean(host)), limits[bound], bound)

    def request_bytes(self, system: System, num_tokens: int) -> tuple[int, int]:
        """Return the least device bytes on each GPU and the host bytes of a request of `num_tokens`."""
        layout = self.layout
        if system == System.full:
            return layout.full_request_bytes(num_tokens), 0
        host = layout.host_request_bytes(num_tokens)
        host *= self.tensor_parallel if self.model.has_kv_heads else 1
        if system == System.native:
            # vLLM's hot buffer has room for `device_buffer_size` rows and one more selection; it never grows.
            rows = self._native_rows(num_tokens)
            resident = (
                layout.num_blocks(num_tokens) * layout.block_size * self.model.num_indexers * self.model.key_bytes
            )
            return resident + rows * layout.num_layers * layout.row_bytes, host
        blocks = layout.num_hot_blocks(self.device_buffer_size, num_tokens) + layout.num_other_blocks(num_tokens)
        return blocks * layout.device_block_bytes, host

    def kv_bytes(self, system: System) -> int:
        """Return the bytes for KV on each GPU."""
        return self.device_bytes - (self.import_buffer_bytes if system == System.plugin else 0)

    def _native_rows(self, num_tokens: int) -> int:
        return min(num_tokens, self.top_k + max(self.device_buffer_size, self.top_k * (1 + self.drafts)))

    def hot_rows(self, system: System, lengths: Sequence[int], running: int) -> list[int]:
        """Return the hot rows per layer of each of the requests that share the device memory.

        The plugin lends free blocks in equal shares; a request that wants less leaves the rest of its share to the
        others.

        Args:
            system: way to keep KV.
            lengths: lengths in tokens of equally frequent requests.
            running: number of requests at once.
        """
        if system == System.full:
            return list(lengths)
        if system == System.native:
            return [self._native_rows(num_tokens) for num_tokens in lengths]
        layout = self.layout
        own = [layout.num_hot_blocks(self.device_buffer_size, num_tokens) for num_tokens in lengths]
        wanted = [
            max(0, -(-num_tokens // layout.rows_per_hot_block) - blocks)
            for num_tokens, blocks in zip(lengths, own, strict=True)
        ]
        needed = fmean(self.request_bytes(System.plugin, num_tokens)[0] for num_tokens in lengths)
        free = max(0.0, self.kv_bytes(system) / max(running, 1) - needed) // layout.device_block_bytes * len(lengths)
        lent = divide(dict(enumerate(wanted)), int(free))
        return [
            min(num_tokens, (blocks + lent[index]) * layout.rows_per_hot_block)
            for index, (num_tokens, blocks) in enumerate(zip(lengths, own, strict=True))
        ]


def _fitting(capacity: int, sizes: Sequence[int]) -> int:
    """Return the number of requests that fit if they start in the order of their arrival.

    The first request that waits leaves memory unused. If all sizes are equal, this is the remainder; otherwise it is on
    average half of the waiting request's size. Large requests wait longer, so sizes are weighted by themselves.
    """
    mean = fmean(sizes)
    if min(sizes) == max(sizes):
        return capacity // sizes[0]
    unused = fmean(size * size for size in sizes) / (2 * mean)
    return max(0, round((capacity - unused) / mean))


def independent_hit_rate(overlap: float, top_k: int, hot_rows: int, num_tokens: int) -> float:
    """Return the share of selected rows that are hot, if a share `overlap` of a selection is selected again next.

    The other positions are independent of earlier selections. Hot rows beyond one selection are therefore hit with a
    probability equal to their share of the sequence.
    """
    if hot_rows >= num_tokens or top_k >= num_tokens:
        return 1.0
    kept = max(0, hot_rows - top_k) / (num_tokens - top_k)
    return overlap + (1 - overlap) * kept
