"""KV cache spec of a hot buffer: how many device blocks a request has."""

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
    """Device blocks of one layer's hot buffer, and those of an algorithm's state with them.

    NOTE: not a `FullAttentionSpec`, or vLLM would merge the group with that of device-resident KV. `block_size` stays
    in tokens and equal to that group's, so that block hashes keep one granularity; `tokens_per_state` makes a block
    hold fewer rows.
    """

    device_buffer_size: int  # tokens
    elastic: bool  # whether it grows with the sequence
    layout: KVLayout  # of the whole model, for the connector

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

        NOTE: a block of state may read as NaN when it becomes one of full-KV layers, and their kernels multiply what is
        beyond the newest token with 0. vLLM zeroes new blocks of such layers where groups differ in precision.
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
    def row_bytes(self) -> int:
        """One token's main KV."""
        return self.num_heads * self.state_content_size_bytes

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def num_blocks(self, num_tokens: int) -> int:
        """Hot blocks that a request of `num_tokens` has at least."""
        return self.layout.num_hot_blocks(self.device_buffer_size, num_tokens if self.elastic else None)

    def num_whole_blocks(self, num_tokens: int) -> int:
        """Blocks that hold a sequence of `num_tokens`, as far as the kernels can use them."""
        num_rows = min(num_tokens, MAX_HOT_ROWS - self.layout.block_size)
        return self.layout.num_hot_blocks(num_rows, num_rows)

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Hot blocks that a request can have."""
        num_blocks = self.layout.num_hot_blocks(self.device_buffer_size)
        return max(num_blocks, self.num_whole_blocks(max_model_len)) if self.elastic else num_blocks

    def num_request_blocks(self, num_tokens: int, is_whole: bool = False) -> int:
        """Device blocks of a request of `num_tokens`, those of state and of device-resident KV included.

        Args:
            num_tokens: of the request.
            is_whole: whether all its rows are hot, or as many as it has at least.
        """
        num_blocks = max(self.num_blocks(num_tokens), self.num_whole_blocks(num_tokens) if is_whole else 0)
        num_blocks += self.layout.state.num_blocks(num_tokens)
        return num_blocks + (self.layout.num_blocks(num_tokens) if self.layout.has_resident_kv else 0)

    def request_bytes(self, num_tokens: int, is_whole: bool = False) -> int:
        """Device bytes of a request in all layers, as `num_request_blocks`."""
        return self.num_request_blocks(num_tokens, is_whole) * self.layout.device_block_bytes

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_model_len = vllm_config.model_config.max_model_len
        num_blocks = self.num_blocks(max_model_len) + self.layout.state.num_blocks(max_model_len)
        return num_blocks * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        # NOTE: Model Runner V1 ignores uses_slot_mapping and indexes block_table[position // block_size].
        num_blocks = self.layout.num_hot_blocks(self.device_buffer_size)
        return max(num_blocks, cdiv(max_len, self.block_size))
