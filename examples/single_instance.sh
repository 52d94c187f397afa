#!/usr/bin/env bash
# One instance that prefills and decodes.
#   examples/single_instance.sh deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --kv-cache-dtype fp8
#   ALGORITHM=quest examples/single_instance.sh Qwen/Qwen3-8B
#   DEVICE=cpu examples/single_instance.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"

exec "${serve[@]}" "$@" --port "$PORT" --kv-transfer-config \
  '{"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {'"$options"'}}'
