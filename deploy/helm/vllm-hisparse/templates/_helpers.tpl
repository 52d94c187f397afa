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

{{/* --kv-transfer-config of the decode fleet. */}}
{{- define "hisparse.decodeConnector" -}}
{{- $options := .Values.decode.hisparse -}}
{{- $extra := deepCopy $options.extraConfig -}}
{{- if $options.hostToDeviceRatio }}{{ $_ := set $extra "host_to_device_ratio" $options.hostToDeviceRatio }}{{ end -}}
{{- if $options.hostPoolGiB }}{{ $_ := set $extra "host_pool_gib" $options.hostPoolGiB }}{{ end -}}
{{- if $options.deviceBufferSize }}{{ $_ := set $extra "device_buffer_size" (int $options.deviceBufferSize) }}{{ end -}}
{{- if ne (int .Values.prefill.gpus) (int .Values.decode.gpus) }}{{ $_ := set $extra "prefill_tp_size" (max 1 (int .Values.prefill.gpus)) }}{{ end -}}
{{- dict "kv_connector" "HiSparseHostConnector" "kv_role" "kv_consumer" "kv_load_failure_policy" $options.kvLoadFailurePolicy "kv_connector_extra_config" $extra | toJson -}}
{{- end }}
