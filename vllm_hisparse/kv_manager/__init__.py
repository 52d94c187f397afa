"""KV manager: allocators on the scheduler's side, storage on the worker's side."""
