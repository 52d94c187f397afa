"""Tensor operations on hot buffers, host pools and indexer caches."""
