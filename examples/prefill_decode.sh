#!/usr/bin/env bash
# A prefill instance, a decode instance and a router on one machine. Ctrl-C ends all three.
#   PREFILL_GPUS=0 DECODE_GPUS=1 examples/prefill_decode.sh $MODEL
#   ALGORITHM=quest examples/prefill_decode.sh $DENSE_MODEL --block-size 256
#   DEVICE=cpu examples/prefill_decode.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
: "${PREFILL_PORT:=8100}" "${DECODE_PORT:=8200}" "${PREFILL_SIDE_CHANNEL:=5600}"
: "${PREFILL_GPUS:=0}" "${DECODE_GPUS:=1}" "${PROMETHEUS_PORT:=29000}"
trap 'kill $(jobs -p); wait' EXIT

export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$PREFILL_SIDE_CHANNEL
CUDA_VISIBLE_DEVICES=$PREFILL_GPUS \
  "${serve[@]}" "$@" --host 127.0.0.1 --port "$PREFILL_PORT" --kv-transfer-config \
  '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' &
CUDA_VISIBLE_DEVICES=$DECODE_GPUS \
  "${serve[@]}" "$@" --host 127.0.0.1 --port "$DECODE_PORT" --kv-transfer-config \
  '{"kv_connector": "HiSparseHostConnector", "kv_role": "kv_consumer",
    "kv_connector_extra_config": {'"$options"'}}' &
vllm-router --port "$PORT" --prometheus-port "$PROMETHEUS_PORT" --vllm-pd-disaggregation --kv-connector nixl \
  --prefill "http://127.0.0.1:$PREFILL_PORT" --decode "http://127.0.0.1:$DECODE_PORT" &
wait -n
