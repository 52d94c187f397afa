"""KV cache spec of a hot buffer; it says how many device blocks a request has."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVQuantMode, MLAAttentionSpec

from vllm_hisparse.layout import KVLayout
from vllm_hisparse.ops.limits import MAX_HOT_ROWS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class HotBufferSpec(AttentionSpec):
    """Device blocks of one layer's hot buffer, and of an algorithm's state.

    NOTE: this is no `FullAttentionSpec`, because vLLM would merge the group with that of device-resident KV.
    `block_size` is in tokens and equal to that group's, so that block hashes keep one granularity; `tokens_per_state`
    lets a block hold fewer rows.
    """

    device_buffer_size: int  # hot rows of a layer, in tokens
    elastic: bool  # True if the hot buffer grows with the sequence
    layout: KVLayout  # sizes of the whole model, for the connector

    @classmethod
    def from_mla_spec(
        cls, spec: MLAAttentionSpec, layout: KVLayout, device_buffer_size: int, elastic: bool
    ) -> HotBufferSpec:
        """Replace a sparse layer's full-KV spec."""
        return cls(
            block_size=spec.block_size,
            num_kv_heads=1,
            head_size=spec.head_size,
            head_size_v=0,
            dtype=spec.dtype,
            kv_quant_mode=spec.kv_quant_mode,
            state_content_bytes=spec.state_content_bytes,
            tokens_per_state=Fraction(spec.block_size, layout.rows_per_hot_block),
            dcp_sharded=False,
            block_stride_alignment=layout.block_alignment_bytes,
            device_buffer_size=device_buffer_size,
            elastic=elastic,
            layout=layout,
        )

    @classmethod
    def from_full_spec(
        cls, spec: FullAttentionSpec, layout: KVLayout, device_buffer_size: int, elastic: bool
    ) -> HotBufferSpec:
        """Replace the full-KV spec of a dense model's sparse layer.

        NOTE: with an algorithm's state, `kv_quant_mode` is a quantized one, because vLLM zeroes new blocks of full-KV
        layers if groups differ in precision. Zeroing is needed: a block that held state may contain NaN, and the
        kernels of full-KV layers multiply the entries beyond the newest token by 0.
        """
        return cls(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD if layout.state_entries else spec.kv_quant_mode,
            tokens_per_state=Fraction(spec.block_size, layout.rows_per_hot_block),
            dcp_sharded=False,
            block_stride_alignment=layout.block_alignment_bytes,
            device_buffer_size=device_buffer_size,
            elastic=elastic,
            layout=layout,
        )

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def num_blocks(self, num_tokens: int) -> int:
        """Smallest number of hot blocks of a request of `num_tokens`, without lent blocks."""
        return self.layout.num_hot_blocks(self.device_buffer_size, num_tokens if self.elastic else None)

    def num_whole_blocks(self, num_tokens: int) -> int:
        """Hot blocks that hold a sequence of `num_tokens` as a whole, at most as many as the kernels can use."""
        num_rows = min(num_tokens, MAX_HOT_ROWS - self.layout.block_size)
        return self.layout.num_whole_blocks(num_rows)

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Largest number of hot blocks that a request can have."""
        num_blocks = self.layout.num_hot_blocks(self.device_buffer_size)
        return max(num_blocks, self.num_whole_blocks(max_model_len)) if self.elastic else num_blocks

    def num_request_blocks(self, num_tokens: int, is_whole: bool = False) -> int:
        """Device blocks of a request, with the blocks of an algorithm's state and of device-resident KV.

        Args:
            num_tokens: tokens of the request.
            is_whole: True: the request is hot as a whole. False: it has its own hot blocks only.
        """
        num_blocks = max(self.num_blocks(num_tokens), self.num_whole_blocks(num_tokens) if is_whole else 0)
        return num_blocks + self.layout.num_other_blocks(num_tokens)

    def request_bytes(self, num_tokens: int, is_whole: bool = False) -> int:
        """Device bytes of the blocks that `num_request_blocks` counts, in all layers."""
        return self.num_request_blocks(num_tokens, is_whole) * self.layout.device_block_bytes

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_model_len = vllm_config.model_config.max_model_len
        num_blocks = self.num_blocks(max_model_len) + self.layout.state.num_blocks(max_model_len)
        return num_blocks * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        # NOTE: Model Runner V1 ignores `uses_slot_mapping` and indexes block_table[position // block_size].
        num_blocks = self.layout.num_hot_blocks(self.device_buffer_size)
        return max(num_blocks, cdiv(max_len, self.block_size))
