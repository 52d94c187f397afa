# The other scripts read this file. It sets `serve`, a command that a model and its options follow, and `options`, JSON of
# the connector's options.
#   DEVICE=cpu: a tiny model, which is made if it is not there, on the CPU platform.
#   ALGORITHM=quest: a dense model needs an algorithm.
#   TOP_K=1024: tokens that a query of a dense model attends to.
examples=$(dirname "${BASH_SOURCE[0]}")
: "${PORT:=8000}"
if [ "${DEVICE:=cuda}" = cpu ]; then
  : "${HOST_POOL_GIB:=0.25}"
  # The CPU build of vLLM has no command `vllm`.
  serve=(python -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager --max-model-len 4096
    --max-num-seqs 16 --max-num-batched-tokens 512 --kv-cache-memory-bytes 268435456 --model)
  export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 UCX_TLS=tcp,shm,self VLLM_CPU_OMP_THREADS_BIND=nobind
  if [ $# = 0 ]; then
    set -- "$examples/../build/models/${TINY_MODEL:=dsv32}"
    [ -e "$1" ] || vllm-hisparse make-model "$TINY_MODEL" --out "$1"
  fi
else
  : "${HOST_POOL_GIB:=64}"
  serve=(vllm serve)
  [ $# != 0 ] || { echo "usage: $0 MODEL [OPTION OF VLLM]..., or DEVICE=cpu $0" >&2; exit 2; }
fi
options='"host_pool_gib": '$HOST_POOL_GIB${ALGORITHM:+', "algorithm": "'$ALGORITHM'"'}${TOP_K:+', "top_k": '$TOP_K}
