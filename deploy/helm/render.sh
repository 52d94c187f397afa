#!/usr/bin/env bash
# Renders the chart with `helm template` into deploy/helm/rendered: default, CPU and production values, and tiers.
set -euo pipefail
cd "$(dirname "$0")"
for values in default cpu production tiers; do
  options=()
  [ "$values" = default ] || options=(--values "vllm-hisparse/values-$values.yaml")
  helm template hisparse vllm-hisparse --namespace serving --kube-version 1.31.0 "${options[@]}" >"${1:-rendered}/$values.yaml"
done
