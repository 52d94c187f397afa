"""The vllm-hisparse command."""
