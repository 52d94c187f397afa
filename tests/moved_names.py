"""Names of vLLM that only tests use, and that have moved between the releases we serve."""

try:
    from vllm.v1.core.kv_cache_planning import is_kv_cache_spec_uniform
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform

__all__ = ["is_kv_cache_spec_uniform"]
