"""Tiers below the host pool: where prefixes go that it no longer has room for, and where they come back from.

vLLM's own tiering (`vllm.v1.kv_offload.tiering`) moves the data and knows where it is; everything here runs in the
scheduler's process. Its primary tier is a small transfer buffer: blocks pass through it on their way between the host
pool and the tiers.
"""
