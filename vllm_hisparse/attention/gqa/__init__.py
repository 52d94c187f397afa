"""Grouped-query attention (dense models) over hot buffers."""
