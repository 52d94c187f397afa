#!/usr/bin/env bash
# A prefill instance, a decode instance and a router on one machine. Arguments: the model, then any options of vLLM.
#   PREFILL_GPUS=0 DECODE_GPUS=1 examples/prefill_decode.sh $MODEL
#   HOST_POOL_GIB=0.5 examples/prefill_decode.sh build/models/dsv32 --dtype float32 --enforce-eager \
#     --kv-cache-memory-bytes 268435456                                      # a tiny model, without a GPU
# Clients talk to the router on port 8000. Ctrl-C ends all three.
set -euo pipefail
: "${HOST_POOL_GIB:=64}" "${PORT:=8000}" "${PREFILL_PORT:=8100}" "${DECODE_PORT:=8200}" "${PYTHON:=python}"
: "${PREFILL_GPUS:=0}" "${DECODE_GPUS:=1}" "${SIDE_CHANNEL_PORT:=5600}"
trap 'trap - EXIT INT TERM; kill 0' EXIT INT TERM

serve() { # role's port, side channel's port, GPUs, --kv-transfer-config, arguments of the script
  local port=$1 side_channel=$2 gpus=$3 connector=$4
  shift 4
  CUDA_VISIBLE_DEVICES=$gpus VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$side_channel \
    "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$@" --host 127.0.0.1 --port "$port" \
    --kv-transfer-config "$connector" &
}

serve "$PREFILL_PORT" "$SIDE_CHANNEL_PORT" "$PREFILL_GPUS" \
  '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' "$@"
serve "$DECODE_PORT" "$((SIDE_CHANNEL_PORT + 100))" "$DECODE_GPUS" \
  '{"kv_connector": "HiSparseHostConnector", "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"host_pool_gib": '"$HOST_POOL_GIB"'}}' "$@"
"$PYTHON" -m vllm_router.launch_router --port "$PORT" --vllm-pd-disaggregation --kv-connector nixl \
  --prefill "http://127.0.0.1:$PREFILL_PORT" --decode "http://127.0.0.1:$DECODE_PORT" &
wait -n
