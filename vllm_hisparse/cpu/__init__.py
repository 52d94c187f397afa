"""Parts that only the CPU platform needs: attention, indexer, rejection sampler."""
