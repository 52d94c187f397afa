"""Hierarchical sparse attention for vLLM: full KV cache in host memory, a small hot buffer on the device."""

__version__ = "0.1.0"
