"""Byte layouts of one token's KV, defined once for the host pool, the kernels, the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

INDEXER_SCALE_BYTES = 4  # one fp32 scale per 128 quantised key elements
INDEXER_QUANT_GROUP = 128
FP8_DS_MLA_ROW_BYTES = 656  # 512 fp8 + 4 fp32 scales + 64 bf16 (vllm/v1/attention/backends/mla/flashmla_sparse.py)
BLOCK_SIZE = 64  # tokens per host block and per indexer block


def mla_row_bytes(kv_lora_rank: int, qk_rope_head_dim: int, element_bytes: int) -> int:
    """Bytes of one unquantised MLA row: the compressed latent followed by the rotary key."""
    return (kv_lora_rank + qk_rope_head_dim) * element_bytes


def indexer_row_bytes(index_head_dim: int) -> int:
    """Bytes of one indexer key: fp8 elements plus their fp32 scales (vLLM's `indexer_k_quant_and_cache`).

    A block stores all elements first, `[block_size, index_head_dim]` fp8, then all scales, `[block_size]` fp32.
    """
    return index_head_dim + index_head_dim // INDEXER_QUANT_GROUP * INDEXER_SCALE_BYTES


@dataclass(frozen=True)
class KVLayout:
    """Sizes of a DSA model's KV on host and device.

    Args:
        row_bytes: one token's main KV in one layer.
        indexer_row_bytes: one token's indexer key in one layer.
        num_layers: layers with main KV.
        num_indexer_layers: layers with an indexer.
        block_size: tokens per host block and per indexer block.
    """

    row_bytes: int
    indexer_row_bytes: int
    num_layers: int
    num_indexer_layers: int
    block_size: int = BLOCK_SIZE

    @property
    def rows_per_hot_block(self) -> int:
        """Hot rows in one device block: as many as fit in the bytes of an indexer block.

        The two groups share vLLM's block pool, whose blocks are as wide as the widest group.
        """
        return max(1, self.block_size * self.indexer_row_bytes // self.row_bytes)

    @property
    def device_block_bytes(self) -> int:
        """Bytes from one block of vLLM's device pool to the next: whole rows, which kernels address by number."""
        hot = self.num_layers * self.rows_per_hot_block * self.row_bytes
        widest = max(hot, self.num_indexer_layers * self.block_size * self.indexer_row_bytes)
        return -(-widest // self.row_bytes) * self.row_bytes

    @property
    def main_block_bytes(self) -> int:
        """Bytes of the main KV of one block's tokens, all layers."""
        return self.num_layers * self.block_size * self.row_bytes

    @property
    def indexer_block_bytes(self) -> int:
        """Bytes of the indexer keys of one block's tokens, all layers."""
        return self.num_indexer_layers * self.block_size * self.indexer_row_bytes

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one host block: main KV and indexer keys of all layers."""
        return self.main_block_bytes + self.indexer_block_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Host (or indexer) blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def num_hot_blocks(self, device_buffer_size: int) -> int:
        """Device blocks of one request's hot buffer, its newest-row slot included."""
        return -(-(device_buffer_size + 1) // self.rows_per_hot_block)

    def hot_request_bytes(self, num_tokens: int, device_buffer_size: int) -> int:
        """Device bytes of one request of `num_tokens` with a hot buffer."""
        num_blocks = self.num_hot_blocks(device_buffer_size) + self.num_blocks(num_tokens)
        return num_blocks * self.device_block_bytes

    def full_request_bytes(self, num_tokens: int) -> int:
        """Device bytes of one request of `num_tokens` with its full KV on the device."""
        return self.num_blocks(num_tokens) * self.host_block_bytes

    def host_request_bytes(self, num_tokens: int) -> int:
        """Host bytes of one request of `num_tokens`."""
        return self.num_blocks(num_tokens) * self.host_block_bytes
