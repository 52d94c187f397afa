"""Tiers below the host pool. Prefixes that the pool has no room for go there, and come back from there.

vLLM's own tiering (`vllm.v1.kv_offload.tiering`) moves the blocks and knows where they are. Its primary tier is a small
transfer buffer here, which blocks pass through on their way between the host pool and the tiers. All of this runs in
the scheduler's process.
"""
