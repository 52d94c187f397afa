#!/usr/bin/env bash
# Eight GPUs: every data parallel rank has its own requests, hot buffers and host pool; experts are spread over all ranks.
#   examples/expert_parallel.sh deepseek-ai/DeepSeek-V3.2 --kv-cache-dtype fp8
# The host needs eight times HOST_POOL_GIB.
set -euo pipefail
source "$(dirname "$0")/common.sh"

exec "${serve[@]}" "$@" --port "$PORT" --data-parallel-size 8 --enable-expert-parallel --kv-transfer-config \
  '{"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {'"$options"'}}'
