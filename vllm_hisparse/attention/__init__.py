"""Attention layers over hot buffers on CUDA: `mla/` for DSA models, `gqa/` for dense models."""
