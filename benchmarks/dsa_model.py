"""A small DeepSeek-V3.2 in torch, for training: multi-head latent attention, the DSA indexer, one MTP layer.

Parameter names are those of Hugging Face's checkpoints (`DeepseekV32ForCausalLM`), so that vLLM serves what training
writes. A row of the KV cache is as wide as the real model's (512 latent elements and 64 rotary ones), an indexer key
has its 128 elements. Sources: DeepSeek-V3.2 technical report, sections 2 and 3; vLLM's `deepseek_v2.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NORM_EPS = 1e-6
QUERY_CHUNK = 1024  # queries whose scores are held at once
NEVER = float("-inf")

AttentionMode = StrEnum("AttentionMode", ["DENSE", "DISTILL", "SPARSE"])
IndexerState = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, head weights


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; names as in the checkpoint's config.json.

    Attributes:
        index_topk_freq: one in so many layers has an indexer, from the second on; the others use its selection.
    """

    vocab_size: int = 2048
    num_hidden_layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 448
    num_attention_heads: int = 4
    q_lora_rank: int = 192
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 256
    index_topk_freq: int = 1
    rope_theta: float = 100_000.0

    def has_indexer(self, layer: int) -> bool:
        """True if a layer selects for itself; an MTP layer always does (vLLM's deepseek_v2.py)."""
        return layer >= self.num_hidden_layers or max(layer - 1, 0) % self.index_topk_freq == 0

    def hf_config(self, max_position_embeddings: int) -> dict[str, Any]:
        sizes = {name: value for name, value in asdict(self).items() if name not in ("rope_theta", "index_topk_freq")}
        is_shared = self.index_topk_freq > 1
        return {
            "architectures": ["GlmMoeDsaForCausalLM" if is_shared else "DeepseekV32ForCausalLM"],
            "model_type": "glm_moe_dsa" if is_shared else "deepseek_v32",
            **sizes,
            **({"index_topk_freq": self.index_topk_freq} if is_shared else {}),
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            # Every layer has a dense MLP; vLLM wants a number of experts all the same.
            "first_k_dense_replace": self.num_hidden_layers + 1,
            "moe_intermediate_size": self.intermediate_size,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": max_position_embeddings,
            "rms_norm_eps": NORM_EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


def rotation(num_tokens: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding: [num_tokens, qk_rope_head_dim / 2] float32 each."""
    size = shape.qk_rope_head_dim
    frequencies = shape.rope_theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(num_tokens, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """Turn pairs of elements by their position.

    Args:
        x: [batch, tokens, heads, qk_rope_head_dim].
        turn: from `rotation`.
        interleaved: pairs are neighbours (main attention); otherwise element i and i + size / 2 (indexer).
    """
    cos, sin = (part[:, None] for part in turn)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    first, second = first.float(), second.float()
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return turned.to(x.dtype)


class Indexer(nn.Module):
    """Scores every earlier position for every query: I[t, s] = sum over heads of w[t, h] * relu(q[t, h] . k[s])."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.wq_b = nn.Linear(shape.q_lora_rank, shape.index_n_heads * shape.index_head_dim, bias=False)
        self.wk = nn.Linear(shape.hidden_size, shape.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(shape.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(shape.hidden_size, shape.index_n_heads, bias=False)

    def forward(self, x: torch.Tensor, latent: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> IndexerState:
        """Queries [batch, tokens, heads, dim], keys [batch, tokens, dim] and head weights [batch, tokens, heads].

        Args:
            x: [batch, tokens, hidden_size], the layer's normed input.
            latent: [batch, tokens, q_lora_rank], the query latent.
        """
        rope = self.shape.qk_rope_head_dim
        query = self.wq_b(latent).unflatten(-1, (self.shape.index_n_heads, -1))
        key = self.k_norm(self.wk(x))[:, :, None]
        query, key = (torch.cat((rotate(part[..., :rope], turn, False), part[..., rope:]), -1) for part in (query, key))
        scale = (self.shape.index_n_heads * self.shape.index_head_dim) ** -0.5
        return query, key[:, :, 0], self.weights_proj(x).float() * scale


def index_scores(state: IndexerState, queries: slice) -> torch.Tensor:
    """Scores of a slice of the queries over all positions, later ones -inf: [batch, queries, tokens] float32."""
    query, key, weights = state
    logits = torch.einsum("bqhd,bkd->bqhk", query[:, queries], key).relu()
    scores = torch.einsum("bqhk,bqh->bqk", logits.float(), weights[:, queries])
    return scores.masked_fill(_later(queries, key.shape[1], key.device), NEVER)


def _later(queries: slice, num_tokens: int, device: torch.device) -> torch.Tensor:
    """True for positions after the query: [queries, num_tokens] bool."""
    positions = torch.arange(num_tokens, device=device)
    return positions > positions[queries][:, None]


class Attention(nn.Module):
    """Multi-head latent attention, dense or over the indexer's selection."""

    def __init__(self, shape: Shape, has_indexer: bool):
        super().__init__()
        self.shape = shape
        heads, key_dim = shape.num_attention_heads, shape.qk_nope_head_dim + shape.qk_rope_head_dim
        self.q_a_proj = nn.Linear(shape.hidden_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(shape.q_lora_rank, NORM_EPS)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, heads * key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(shape.kv_lora_rank, NORM_EPS)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, shape.hidden_size, bias=False)
        self.indexer = Indexer(shape) if has_indexer else None

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        mode: AttentionMode,
        shared: IndexerState | None,
    ) -> tuple[torch.Tensor, torch.Tensor, IndexerState | None]:
        """Attend.

        Args:
            x: [batch, tokens, hidden_size].
            turn: from `rotation`.
            mode: DENSE: causal; DISTILL: causal, and the indexer learns from it; SPARSE: over the selection.
            shared: indexer state of the layer whose selection this one uses, if it has no indexer.

        Returns:
            [batch, tokens, hidden_size]; the indexer's loss; the indexer state for layers that share it.
        """
        latent = self.q_a_layernorm(self.q_a_proj(x))
        query, key, value = self._heads(x, latent, turn)
        if mode == AttentionMode.DENSE:
            wide = F.pad(value, (0, query.shape[-1] - value.shape[-1]))  # FlashAttention wants one size for all three
            out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, wide)), is_causal=True)
            out = out.transpose(1, 2)[..., : value.shape[-1]]
            return self.o_proj(out.flatten(2)), x.new_zeros(()), shared
        # The indexer learns from the attention alone, not from the language model's loss (report, section 2.1).
        state = shared if self.indexer is None else self.indexer(x.detach(), latent.detach(), turn)
        assert state is not None, "the first layer has no indexer"
        outs, loss = [], x.new_zeros((), dtype=torch.float32)
        for start in range(0, x.shape[1], QUERY_CHUNK):
            chunk = slice(start, min(start + QUERY_CHUNK, x.shape[1]))
            out, chunk_loss = checkpoint(
                self._attend_chunk, query, key, value, state, chunk, mode == AttentionMode.SPARSE, use_reentrant=False
            )
            outs.append(out)
            loss = loss + chunk_loss
        return self.o_proj(torch.cat(outs, 1).flatten(2)), loss / x.shape[1], state

    def _heads(
        self, x: torch.Tensor, latent: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [batch, tokens, heads, nope + rope], values [batch, tokens, heads, v_head_dim]."""
        shape, nope = self.shape, self.shape.qk_nope_head_dim
        query = self.q_b_proj(latent).unflatten(-1, (shape.num_attention_heads, -1))
        compressed, key_pe = self.kv_a_proj_with_mqa(x).split([shape.kv_lora_rank, shape.qk_rope_head_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (shape.num_attention_heads, -1))
        key_nope, value = expanded.split([nope, shape.v_head_dim], -1)
        key_pe = rotate(key_pe[:, :, None], turn, True).expand(-1, -1, shape.num_attention_heads, -1)
        query = torch.cat((query[..., :nope], rotate(query[..., nope:], turn, True)), -1)
        return query, torch.cat((key_nope, key_pe.to(key_nope.dtype)), -1), value

    def _attend_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        state: IndexerState,
        chunk: slice,
        is_sparse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [batch, queries, heads, v_head_dim] and indexer loss, summed over the queries, of a slice of them.

        The loss is the cross entropy of the indexer's softmax against the attention's mean over heads, over the
        positions attended to (report, equations 3 and 4).
        """
        scores = index_scores(state, chunk)
        excluded = _later(chunk, key.shape[1], key.device)
        if is_sparse and key.shape[1] > self.shape.index_topk:
            selected = scores.detach().topk(self.shape.index_topk, -1).indices
            excluded = excluded | torch.ones_like(scores, dtype=torch.bool).scatter_(-1, selected, False)
        logits = torch.einsum("bqhd,bkhd->bhqk", query[:, chunk], key) * query.shape[-1] ** -0.5
        excluded = excluded.expand(scores.shape)
        probs = logits.float().masked_fill(excluded[:, None], NEVER).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", probs.to(value.dtype), value)
        log_index = scores.masked_fill(excluded, NEVER).log_softmax(-1).masked_fill(excluded, 0.0)
        return out, -(probs.detach().mean(1) * log_index).sum() / len(scores)


class Layer(nn.Module):
    """A decoder layer: attention and a dense SwiGLU MLP."""

    def __init__(self, shape: Shape, index: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, NORM_EPS)
        self.self_attn = Attention(shape, shape.has_indexer(index))
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, NORM_EPS)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.mlp.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.mlp.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        mode: AttentionMode,
        shared: IndexerState | None,
    ) -> tuple[torch.Tensor, torch.Tensor, IndexerState | None]:
        out, index_loss, state = self.self_attn(self.input_layernorm(x), turn, mode, shared)
        x = x + out
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y)), index_loss, state


class DraftLayer(Layer):
    """The MTP layer: predicts the token after next from a hidden state and the next token (vLLM's deepseek_mtp.py)."""

    def __init__(self, shape: Shape):
        super().__init__(shape, shape.num_hidden_layers)
        self.enorm = nn.RMSNorm(shape.hidden_size, NORM_EPS)
        self.hnorm = nn.RMSNorm(shape.hidden_size, NORM_EPS)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = nn.RMSNorm(shape.hidden_size, NORM_EPS)


class Model(nn.Module):
    """The language model.

    Args:
        shape: sizes.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        layers = [Layer(shape, index) for index in range(shape.num_hidden_layers)]
        self.model.layers = nn.ModuleList([*layers, DraftLayer(shape)])
        self.model.norm = nn.RMSNorm(shape.hidden_size, NORM_EPS)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        depth = (2 * shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 if "embed" in name else scale * parameter.shape[1] ** -0.5)

    def forward(self, tokens: torch.Tensor, mode: AttentionMode) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states after the final norm, and the indexers' loss.

        Args:
            tokens: [batch, tokens] int64.
            mode: kind of attention of all layers.

        Returns:
            [batch, tokens, hidden_size]; sum over layers of the mean over tokens.
        """
        turn = rotation(tokens.shape[1], self.shape, tokens.device)
        x, total, shared = self.model.embed_tokens(tokens), 0.0, None
        for layer in self.model.layers[:-1]:
            x, index_loss, shared = layer(x, turn, mode, shared)
            total = total + index_loss
        return self.model.norm(x), total

    def draft(
        self, hidden: torch.Tensor, tokens: torch.Tensor, mode: AttentionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft layer's hidden states, from which `lm_head` predicts the token after next, and its indexer's loss.

        Args:
            hidden: [batch, tokens, hidden_size] from `forward`.
            tokens: [batch, tokens] int64, the next token of each position.
            mode: kind of attention of the layer.
        """
        layer = self.model.layers[-1]
        embedded = self.model.embed_tokens(tokens)
        embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), 1)  # as vLLM does at position 0
        x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), -1))
        x, index_loss, _ = layer(x, rotation(tokens.shape[1], self.shape, tokens.device), mode, None)
        return layer.shared_head.norm(x), index_loss

    def indexer_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if ".indexer." in name]

    def trunk_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if ".indexer." not in name]
