#!/usr/bin/env bash
# A dense model with the algorithm of mean_page.py.
#   examples/own_algorithm.sh Qwen/Qwen3-8B
#   DEVICE=cpu examples/own_algorithm.sh
set -euo pipefail
TINY_MODEL=qwen3 ALGORITHM=mean_page.MeanPage
[ "${DEVICE:-}" != cpu ] || : "${TOP_K:=256}"
source "$(dirname "$0")/common.sh"

# The algorithm's name is the dotted path of its class, so its folder must be on PYTHONPATH.
PYTHONPATH=$examples${PYTHONPATH:+:$PYTHONPATH} exec "${serve[@]}" "$@" --port "$PORT" --kv-transfer-config \
  '{"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {'"$options"'}}'
