"""Sparse attention algorithms, one in each file: its state, and its way to select."""
