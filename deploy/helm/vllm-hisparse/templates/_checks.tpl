{{/* What the schema cannot say: relations between values. Every message names option, value, what works, what to do. */}}
{{- define "hisparse.refuse" -}}
{{- fail (printf "\n\n%s: got %v, expected %s. %s\n" .option .got .expected .fix) -}}
{{- end }}

{{- define "hisparse.checks" -}}
{{- include "hisparse.checkModel" . -}}
{{- include "hisparse.checkArgs" . -}}
{{- include "hisparse.checkEnv" . -}}
{{- include "hisparse.checkMemory" . -}}
{{- include "hisparse.checkTiers" . -}}
{{- include "hisparse.checkPorts" . -}}
{{- include "hisparse.checkScaling" . -}}
{{- include "hisparse.checkScrapers" . -}}
{{- end }}

{{- define "hisparse.checkModel" -}}
{{- if eq (empty .Values.model.id) (empty .Values.model.tiny) -}}
{{- include "hisparse.refuse" (dict "option" "model.id / model.tiny" "got" (printf "%q and %q" .Values.model.id .Values.model.tiny) "expected" "exactly one of the two" "fix" "Set model.id to the model to serve, or clear it for a tiny model.") -}}
{{- end -}}
{{- $algorithm := .Values.decode.hisparse.extraConfig.algorithm | default "dsa" -}}
{{- $dtypes := dict "cpu" (list "auto" "bfloat16" "float16") "cuda" (list "auto" "bfloat16") -}}
{{- $known := index $dtypes .Values.device -}}
{{- if eq "cuda" .Values.device -}}
{{- $known = concat $known (ternary (list "fp8" "fp8_ds_mla") (list "fp8" "fp8_e4m3") (eq "dsa" $algorithm)) -}}
{{- end -}}
{{- if not (has .Values.engine.kvCacheDtype $known) -}}
{{- include "hisparse.refuse" (dict "option" "engine.kvCacheDtype" "got" .Values.engine.kvCacheDtype "expected" (printf "one of %s with algorithm %s and device: %s" ($known | join ", ") $algorithm .Values.device) "fix" "Set auto to keep the KV in the model's dtype.") -}}
{{- end -}}
{{- if and (ne "dsa" $algorithm) (ne (int .Values.prefill.gpus) (int .Values.decode.gpus)) -}}
{{- include "hisparse.refuse" (dict "option" "prefill.gpus" "got" .Values.prefill.gpus "expected" (printf "%v, as in decode: both roles split the KV heads of a dense model over their GPUs" .Values.decode.gpus) "fix" "Set both to the same number.") -}}
{{- end -}}
{{- range $name := list "prefill" "decode" -}}
{{- $gpus := int (index $.Values $name).gpus -}}
{{- if and (eq $.Values.device "cpu") $gpus -}}
{{- include "hisparse.refuse" (dict "option" (printf "%s.gpus" $name) "got" $gpus "expected" "0 with device: cpu" "fix" "Set it to 0, or device to cuda.") -}}
{{- end -}}
{{- if and (eq $.Values.device "cuda") (not $gpus) -}}
{{- include "hisparse.refuse" (dict "option" (printf "%s.gpus" $name) "got" $gpus "expected" "at least 1 with device: cuda" "fix" "Raise it, or set device to cpu.") -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
The options of a list that an argument spells for vLLM, or nothing; call with (list $argument $options). vLLM takes
underscores for dashes, a unique beginning for the option, a dot for a key of its JSON value, and -qfp8 for -q fp8.
*/}}
{{- define "hisparse.spells" -}}
{{- $name := regexReplaceAll "[=.+].*" (toString (index . 0)) "" | replace "_" "-" -}}
{{- range $option := index . 1 -}}
{{- $begins := and (hasPrefix "--" $name) (gt (len $name) 2) (hasPrefix $name $option) -}}
{{- if or $begins (eq $name $option) (and (eq $option "-q") (hasPrefix "-q" $name)) }}{{ $option }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Options that the chart sets are refused among the free arguments, those that both roles must share in a role's. */}}
{{- define "hisparse.checkArgs" -}}
{{- $fixed := list "--model" "--served-model-name" "--dtype" "--kv-cache-dtype" "--block-size" "--max-model-len" "--kv-transfer-config" "--tensor-parallel-size" "-tp" "--port" "--host" "--shutdown-timeout" "--kv-cache-memory-bytes" -}}
{{- $shared := list "--quantization" "-q" "--revision" "--hf-overrides" "--config" -}}
{{- $args := dict "engine.extraArgs" .Values.engine.extraArgs "prefill.extraArgs" .Values.prefill.extraArgs "decode.extraArgs" .Values.decode.extraArgs -}}
{{- range $option, $list := $args -}}
{{- range $argument := $list -}}
{{- if include "hisparse.spells" (list $argument $fixed) -}}
{{- include "hisparse.refuse" (dict "option" $option "got" $argument "expected" "no option that the chart sets" "fix" "Use model, engine, enginePort, gpus or decode.hisparse: both roles get the same value where KV must match.") -}}
{{- end -}}
{{- if and (ne $option "engine.extraArgs") (include "hisparse.spells" (list $argument $shared)) -}}
{{- include "hisparse.refuse" (dict "option" $option "got" $argument "expected" "no option that prefill and decode must share" "fix" "Move it to engine.extraArgs, which both roles get.") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A name that stands twice in a container's environment breaks later upgrades. */}}
{{- define "hisparse.checkEnv" -}}
{{- $fixed := list "VLLM_NIXL_SIDE_CHANNEL_HOST" "VLLM_NIXL_SIDE_CHANNEL_PORT" "UCX_TCP_PORT_RANGE" "UCX_TCP_CM_PORT_RANGE" "UCX_TLS" "UCX_NET_DEVICES" "HOME" "XDG_CACHE_HOME" "VLLM_CACHE_ROOT" "TRITON_CACHE_DIR" "HF_HOME" "HF_HUB_OFFLINE" "HF_TOKEN" "VLLM_NO_USAGE_STATS" "VLLM_P2P_SIDE_CHANNEL_HOST" "VLLM_P2P_SIDE_CHANNEL_PORT" "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN" -}}
{{- $env := dict "engine.env" .Values.engine.env "prefill.env" .Values.prefill.env "decode.env" .Values.decode.env "nixl.env" .Values.nixl.env -}}
{{- range $option, $variables := $env -}}
{{- range $name, $_ := $variables -}}
{{- if has $name $fixed -}}
{{- include "hisparse.refuse" (dict "option" $option "got" $name "expected" "no variable that the chart sets" "fix" "Use nixl.sideChannelPort, dataPorts, ucxTls or ucxNetDevices, model.cache or model.tokenSecret, decode.p2pPort or credentialsSecret of a tier.") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "hisparse.checkMemory" -}}
{{- $options := .Values.decode.hisparse -}}
{{- if eq (empty $options.hostPoolGiB) (empty $options.hostToDeviceRatio) -}}
{{- include "hisparse.refuse" (dict "option" "decode.hisparse.hostPoolGiB / hostToDeviceRatio" "got" (printf "%v and %v" $options.hostPoolGiB $options.hostToDeviceRatio) "expected" "exactly one of the two above 0" "fix" "Set the other one to 0.") -}}
{{- end -}}
{{- if and $options.hostToDeviceRatio (not $options.deviceKvGiB) -}}
{{- include "hisparse.refuse" (dict "option" "decode.hisparse.hostToDeviceRatio" "got" $options.hostToDeviceRatio "expected" "deviceKvGiB, to compute the host memory to request" "fix" "Set decode.hisparse.deviceKvGiB, or hostPoolGiB instead of the ratio.") -}}
{{- end -}}
{{- /* Every GPU of a dense model has a pool of its own. */ -}}
{{- $pools := ternary 1 (max 1 (int .Values.decode.gpus)) (eq "dsa" ($options.extraConfig.algorithm | default "dsa")) -}}
{{- $pool := $options.hostPoolGiB | default (mulf $options.hostToDeviceRatio $options.deviceKvGiB $pools) -}}
{{- /* As `HiSparseConfig.tier_buffer_bytes`. */ -}}
{{- $buffer := ternary ($options.extraConfig.tier_buffer_gib | default (minf 4 (maxf 0.5 (divf $pool 32)))) 0 (not (empty .Values.decode.tiers)) -}}
{{- $needed := addf $pool .Values.decode.overheadGiB $buffer -}}
{{- if lt (float64 .Values.decode.memoryGiB) (float64 $needed) -}}
{{- include "hisparse.refuse" (dict "option" "decode.memoryGiB" "got" .Values.decode.memoryGiB "expected" (printf "at least %v: a host pool of %v GiB and decode.overheadGiB %v%s" $needed $pool .Values.decode.overheadGiB (ternary (printf ", and %v for the buffer of decode.tiers" $buffer) "" (gt (float64 $buffer) 0.0))) "fix" "Raise decode.memoryGiB or shrink the host pool.") -}}
{{- end -}}
{{- range $name := list "prefill" "decode" -}}
{{- $role := index $.Values $name -}}
{{- if gt (float64 $role.shmGiB) (divf $role.memoryGiB 2) -}}
{{- include "hisparse.refuse" (dict "option" (printf "%s.shmGiB" $name) "got" $role.shmGiB "expected" (printf "at most half of %s.memoryGiB (%v), which it counts against" $name $role.memoryGiB) "fix" "Lower it or raise the memory.") -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := $options.extraConfig -}}
{{- if has $key (list "host_pool_gib" "host_to_device_ratio" "device_buffer_size" "tiers" "kv_lease_duration") -}}
{{- include "hisparse.refuse" (dict "option" "decode.hisparse.extraConfig" "got" $key "expected" "no key that the chart has a value for" "fix" "Use hostPoolGiB, hostToDeviceRatio, deviceBufferSize, decode.tiers or nixl.leaseSeconds.") -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "hisparse.checkTiers" -}}
{{- $p2p := include "hisparse.hasTier" (list .Values.decode "p2p") -}}
{{- if gt (len $p2p) 4 -}}
{{- include "hisparse.refuse" (dict "option" "decode.tiers" "got" "several of type p2p" "expected" "at most one: it asks all decode pods" "fix" "Remove the others.") -}}
{{- end -}}
{{- $secrets := list -}}
{{- range .Values.decode.tiers }}{{ $secrets = append $secrets .credentialsSecret }}{{ end -}}
{{- if gt (len (compact $secrets | uniq)) 1 -}}
{{- include "hisparse.refuse" (dict "option" "decode.tiers" "got" (printf "credentialsSecret %s" (compact $secrets | uniq | join ", ")) "expected" "one secret for all tiers: an engine has one set of AWS_* variables" "fix" "Give the same secret rights to all buckets.") -}}
{{- end -}}
{{- $refused := dict -}}
{{- if .Values.decode.tiers }}{{ range list "--no-enable-prefix-caching" "--disable-prefix-caching" }}{{ $_ := set $refused . "the prefix cache, whose blocks decode.tiers hold" }}{{ end }}{{ end -}}
{{- if $p2p }}{{ range list "--data-parallel-size" "-dp" }}{{ $_ := set $refused . "one engine per pod with a tier of type p2p: each has a port of its own" }}{{ end }}{{ end -}}
{{- range $option, $list := dict "engine.extraArgs" .Values.engine.extraArgs "decode.extraArgs" .Values.decode.extraArgs -}}
{{- range $argument := $list -}}
{{- range $name, $expected := $refused -}}
{{- if include "hisparse.spells" (list $argument (list $name)) -}}
{{- include "hisparse.refuse" (dict "option" $option "got" $argument "expected" $expected "fix" "Remove it, or the tier.") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "hisparse.checkPorts" -}}
{{- $data := .Values.nixl.dataPorts -}}
{{- if gt (int $data.first) (int $data.last) -}}
{{- include "hisparse.refuse" (dict "option" "nixl.dataPorts" "got" (printf "%v-%v" $data.first $data.last) "expected" "first at most last" "fix" "Swap them.") -}}
{{- end -}}
{{- $ports := dict "enginePort" (int .Values.enginePort) "nixl.sideChannelPort" (int .Values.nixl.sideChannelPort) "decode.p2pPort" (int .Values.decode.p2pPort) -}}
{{- if eq $ports.enginePort (index $ports "nixl.sideChannelPort") -}}
{{- include "hisparse.refuse" (dict "option" "nixl.sideChannelPort" "got" .Values.nixl.sideChannelPort "expected" "another port than enginePort" "fix" "Change one of them.") -}}
{{- end -}}
{{- if eq $ports.enginePort (index $ports "decode.p2pPort") -}}
{{- include "hisparse.refuse" (dict "option" "decode.p2pPort" "got" .Values.decode.p2pPort "expected" "another port than enginePort" "fix" "Change one of them.") -}}
{{- end -}}
{{- range $option, $port := $ports -}}
{{- if and (ge $port (int $data.first)) (le $port (int $data.last)) -}}
{{- include "hisparse.refuse" (dict "option" $option "got" $port "expected" (printf "a port outside nixl.dataPorts (%v-%v)" $data.first $data.last) "fix" "Change one of them.") -}}
{{- end -}}
{{- end -}}
{{- if eq (int .Values.router.port) (int .Values.router.metricsPort) -}}
{{- include "hisparse.refuse" (dict "option" "router.metricsPort" "got" .Values.router.metricsPort "expected" "another port than router.port" "fix" "Change one of them.") -}}
{{- end -}}
{{- if eq (int .Values.service.port) (int .Values.router.metricsPort) -}}
{{- include "hisparse.refuse" (dict "option" "service.port" "got" .Values.service.port "expected" "another port than router.metricsPort, which the service has too" "fix" "Change one of them.") -}}
{{- end -}}
{{- end }}

{{- define "hisparse.checkScaling" -}}
{{- range $name := list "prefill" "decode" -}}
{{- $scaling := (index $.Values $name).autoscaling -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- include "hisparse.refuse" (dict "option" (printf "%s.autoscaling.maxReplicas" $name) "got" $scaling.maxReplicas "expected" (printf "at least minReplicas (%v)" $scaling.minReplicas) "fix" "Raise it or lower minReplicas.") -}}
{{- end -}}
{{- if and (eq $scaling.kind "keda") (empty $.Values.prometheusAddress) -}}
{{- include "hisparse.refuse" (dict "option" "prometheusAddress" "got" "\"\"" "expected" (printf "the URL of Prometheus: %s.autoscaling.kind is keda" $name) "fix" "Set it, or kind to hpa or none.") -}}
{{- end -}}
{{- end -}}
{{- $health := .Values.router.health -}}
{{- if lt (int .Values.drainSeconds) (int $health.intervalSeconds) -}}
{{- include "hisparse.refuse" (dict "option" "drainSeconds" "got" .Values.drainSeconds "expected" (printf "at least router.health.intervalSeconds (%v)" $health.intervalSeconds) "fix" "Raise it: otherwise routers send requests to a pod that is shut down.") -}}
{{- end -}}
{{- if and .Values.nixl.rdma.resource (not (int .Values.nixl.rdma.count)) -}}
{{- include "hisparse.refuse" (dict "option" "nixl.rdma.count" "got" .Values.nixl.rdma.count "expected" "at least 1 with nixl.rdma.resource" "fix" "Raise it or clear the resource.") -}}
{{- end -}}
{{- end }}

{{- define "hisparse.checkScrapers" -}}
{{- $readers := list -}}
{{- if .Values.serviceMonitor.enabled }}{{ $readers = append $readers "serviceMonitor.enabled" }}{{ end -}}
{{- range $name := list "prefill" "decode" -}}
{{- if ne (index $.Values $name).autoscaling.kind "none" }}{{ $readers = append $readers (printf "%s.autoscaling" $name) }}{{ end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled $readers (empty .Values.networkPolicy.scrapers) -}}
{{- include "hisparse.refuse" (dict "option" "networkPolicy.scrapers" "got" "[]" "expected" (printf "Prometheus' pods or namespace: %s reads the engines' metrics" (join ", " $readers)) "fix" "Set it, for example to [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}].") -}}
{{- end -}}
{{- end }}
