"""Attention backends: full-KV reference and hot buffer."""
