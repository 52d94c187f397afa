{{- define "hisparse.name" -}}
{{ default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Selector labels; call with (list $ "decode"). */}}
{{- define "hisparse.selector" -}}
app.kubernetes.io/name: vllm-hisparse
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "hisparse.labels" -}}
{{ include "hisparse.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "hisparse.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (eq .Values.device "cpu" | ternary "-cpu" "")) -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end }}

{{- define "hisparse.model" -}}
{{ empty .Values.model.tiny | ternary .Values.model.id "/models/tiny" }}
{{- end }}

{{- define "hisparse.servedName" -}}
{{ .Values.model.servedName | default .Values.model.id | default .Values.model.tiny }}
{{- end }}

{{- define "hisparse.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAsUser }}
  runAsGroup: {{ .Values.runAsUser }}
  fsGroup: {{ .Values.runAsUser }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hisparse.cacheClaim" -}}
{{- with .Values.model.cache -}}
{{ .existingClaim | default (ternary (printf "%s-models" (include "hisparse.name" $)) "" (gt (int .sizeGiB) 0)) }}
{{- end -}}
{{- end }}

{{/* Queue depth of a role, as PromQL; call with (list $ "decode"). */}}
{{- define "hisparse.queueDepth" -}}
sum(vllm:num_requests_waiting{namespace="{{ (index . 0).Release.Namespace }}",pod=~"{{ include "hisparse.name" (index . 0) }}-{{ index . 1 }}-.*"})
{{- end }}

{{/* --kv-transfer-config of the prefill fleet. */}}
{{- define "hisparse.prefillConnector" -}}
{{- $extra := dict "kv_lease_duration" (int .Values.nixl.leaseSeconds) -}}
{{- dict "kv_connector" "NixlConnector" "kv_role" "kv_producer" "kv_connector_extra_config" $extra | toJson -}}
{{- end }}

{{/* --kv-transfer-config of the decode fleet. */}}
{{- define "hisparse.decodeConnector" -}}
{{- $options := .Values.decode.hisparse -}}
{{- $extra := deepCopy $options.extraConfig -}}
{{- $_ := set $extra "kv_lease_duration" (int .Values.nixl.leaseSeconds) -}}
{{- if $options.hostToDeviceRatio }}{{ $_ := set $extra "host_to_device_ratio" $options.hostToDeviceRatio }}{{ end -}}
{{- if $options.hostPoolGiB }}{{ $_ := set $extra "host_pool_gib" $options.hostPoolGiB }}{{ end -}}
{{- if $options.deviceBufferSize }}{{ $_ := set $extra "device_buffer_size" (int $options.deviceBufferSize) }}{{ end -}}
{{- if .Values.decode.tiers }}{{ $_ := set $extra "tiers" (include "hisparse.tiers" . | fromJsonArray) }}{{ end -}}
{{- if ne (int .Values.prefill.gpus) (int .Values.decode.gpus) }}{{ $_ := set $extra "prefill_tp_size" (max 1 (int .Values.prefill.gpus)) }}{{ end -}}
{{- dict "kv_connector" "HiSparseHostConnector" "kv_role" "kv_consumer" "kv_load_failure_policy" $options.kvLoadFailurePolicy "kv_connector_extra_config" $extra | toJson -}}
{{- end }}

{{/* `tiers` of the connector, as JSON. */}}
{{- define "hisparse.tiers" -}}
{{- $names := dict "quotaGiB" "quota_gib" "numThreads" "num_threads" "bucket" "bucket" "endpoint" "endpoint" "scheme" "scheme" "region" "region" "prefix" "prefix" -}}
{{- $tiers := list -}}
{{- range $index, $tier := .Values.decode.tiers -}}
{{- $options := dict "type" $tier.type -}}
{{- range $key, $name := $names -}}
{{- if hasKey $tier $key }}{{ $_ := set $options $name (index $tier $key) }}{{ end -}}
{{- end -}}
{{- if eq $tier.type "fs" }}{{ $_ := set $options "path" (printf "/tiers/%d/%s" $index ($tier.directory | default (printf "%s-%s" $.Release.Namespace (include "hisparse.name" $)))) }}{{ end -}}
{{- if eq $tier.type "p2p" }}{{ $_ := set $options "peers" (list (printf "%s-decode:%d" (include "hisparse.name" $) (int $.Values.decode.p2pPort))) }}{{ end -}}
{{- $tiers = append $tiers $options -}}
{{- end -}}
{{- toJson $tiers -}}
{{- end }}

{{/* Not empty if a role has a tier of this type; call with (list $role "p2p"). */}}
{{- define "hisparse.hasTier" -}}
{{- $type := index . 1 -}}
{{- range (index . 0).tiers }}{{ if eq .type $type }}true{{ end }}{{ end -}}
{{- end }}

{{/* Environment of a role's tiers. */}}
{{- define "hisparse.tierEnv" -}}
{{- if include "hisparse.hasTier" (list . "p2p") }}
- name: VLLM_P2P_SIDE_CHANNEL_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: VLLM_P2P_SIDE_CHANNEL_PORT, value: {{ .p2pPort | quote }}}
{{- end }}
{{- range compact (list (include "hisparse.tierSecret" .)) }}
- name: AWS_ACCESS_KEY_ID
  valueFrom: {secretKeyRef: {name: {{ . }}, key: AWS_ACCESS_KEY_ID}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: AWS_SECRET_ACCESS_KEY}}
- name: AWS_SESSION_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: AWS_SESSION_TOKEN, optional: true}}
{{- end }}
{{- end }}

{{/* The secret of a role's object stores: all tiers have the same. */}}
{{- define "hisparse.tierSecret" -}}
{{- $secrets := list -}}
{{- range .tiers }}{{ $secrets = append $secrets .credentialsSecret }}{{ end -}}
{{- compact $secrets | first | default "" -}}
{{- end }}

{{- define "hisparse.tierVolumes" -}}
{{- range $index, $tier := .tiers }}
{{- if eq $tier.type "fs" }}
{{- /* Several engines that share a directory may exceed the quota for a while. */}}
{{- $size := printf "%dGi" (addf (mulf $tier.quotaGiB 1.05) 1 | ceil | int64) }}
- name: tier-{{ $index }}
  {{- if $tier.volume.hostPath }}
  hostPath: {path: {{ $tier.volume.hostPath | quote }}, type: Directory}
  {{- else if $tier.volume.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $tier.volume.existingClaim }}}
  {{- else if $tier.volume.storageClassName }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ $tier.volume.storageClassName }}
        resources: {requests: {storage: {{ $size }}}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $size }}}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
