#!/usr/bin/env bash
# vLLM's load generator against the server or router on PORT. Arguments: options of `vllm bench serve`.
#   examples/benchmark.sh --random-input-len 32000 --random-output-len 512 --num-prompts 64 --max-concurrency 16
#   DEVICE=cpu examples/benchmark.sh
# To see what the plugin changes, run the same against `vllm serve` with the same options and no --kv-transfer-config.
set -euo pipefail
: "${PORT:=8000}"
load=(--dataset-name random --ignore-eos --temperature 0 --base-url "http://127.0.0.1:$PORT")
if [ "${DEVICE:=cuda}" = cpu ]; then # the CPU build of vLLM has no command `vllm`
  exec python -c 'import argparse; from vllm.benchmarks import serve
parser = argparse.ArgumentParser(); serve.add_cli_args(parser); serve.main(parser.parse_args())' \
    "${load[@]}" --random-input-len 600 --random-output-len 16 --num-prompts 8 --max-concurrency 4 "$@"
else
  exec vllm bench serve "${load[@]}" "$@"
fi
