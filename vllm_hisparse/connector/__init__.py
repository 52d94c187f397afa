"""The KV connector: scheduler half, worker half, transport and metrics."""
