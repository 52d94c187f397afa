#!/usr/bin/env bash
# One instance that prefills and decodes. Arguments: the model, then any options of vLLM.
#   examples/single_instance.sh deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --kv-cache-dtype fp8
#   HOST_POOL_GIB=0.5 examples/single_instance.sh build/models/dsv32 --dtype float32 --enforce-eager \
#     --kv-cache-memory-bytes 268435456                                      # a tiny model, without a GPU
set -euo pipefail
: "${HOST_POOL_GIB:=64}" "${PORT:=8000}" "${PYTHON:=python}"

# `python -m` instead of `vllm serve`, which the CPU build of vLLM does not have.
exec "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$@" --port "$PORT" --kv-transfer-config \
  '{"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_pool_gib": '"$HOST_POOL_GIB"'}}'
