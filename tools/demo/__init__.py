"""A demonstration: prefill and decode instances behind a router, compared with full KV."""
