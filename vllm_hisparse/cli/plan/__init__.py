"""`vllm-hisparse plan`: predicts memory, speed and start commands of a deployment from a model's config.json."""
