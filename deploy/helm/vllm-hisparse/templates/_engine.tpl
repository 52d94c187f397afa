{{/* Deployment of a fleet; call with (list $ "decode" connector). */}}
{{- define "hisparse.engine" -}}
{{- $ := index . 0 -}}
{{- $name := index . 1 -}}
{{- $connector := index . 2 -}}
{{- $role := index $.Values $name -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "hisparse.name" $ }}-{{ $name }}
  labels: {{ include "hisparse.labels" (list $ $name) | nindent 4 }}
spec:
  {{- if eq $role.autoscaling.kind "none" }}
  replicas: {{ $role.replicas }}
  {{- end }}
  progressDeadlineSeconds: {{ add $.Values.model.startupTimeoutSeconds 600 }}
  selector:
    matchLabels: {{ include "hisparse.selector" (list $ $name) | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
  template:
    metadata:
      labels: {{ include "hisparse.labels" (list $ $name) | nindent 8 }}
      {{- with $.Values.podAnnotations }}
      annotations: {{ toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "hisparse.name" $ }}-engine
      {{- include "hisparse.podSecurity" $ | nindent 6 }}
      terminationGracePeriodSeconds: {{ add $.Values.drainSeconds $.Values.longestRequestSeconds 60 }}
      {{- if $.Values.model.tiny }}
      initContainers:
        - name: make-model
          image: {{ include "hisparse.image" $ }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          command: [vllm-hisparse, make-model, {{ $.Values.model.tiny }}, --out, /models/tiny]
          env: {{ include "hisparse.engineEnv" (list $ $name) | nindent 12 }}
          resources: {{ include "hisparse.engineResources" (list $ $role) | nindent 12 }}
          securityContext: {{ include "hisparse.containerSecurity" $ | nindent 12 }}
          volumeMounts: {{ include "hisparse.engineMounts" $role | nindent 12 }}
      {{- end }}
      containers:
        - name: vllm
          image: {{ include "hisparse.image" $ }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          command: [python, -m, vllm.entrypoints.openai.api_server]
          args: {{ include "hisparse.engineArgs" (list $ $role $connector) | nindent 12 }}
          env: {{ include "hisparse.engineEnv" (list $ $name) | nindent 12 }}
          ports:
            - {name: http, containerPort: {{ $.Values.enginePort }}}
            {{- if eq $name "prefill" }}
            - {name: nixl, containerPort: {{ $.Values.nixl.sideChannelPort }}}
            {{- end }}
            {{- if include "hisparse.hasTier" (list $role "p2p") }}
            - {name: p2p, containerPort: {{ $role.p2pPort }}}
            {{- end }}
          resources: {{ include "hisparse.engineResources" (list $ $role) | nindent 12 }}
          securityContext: {{ include "hisparse.containerSecurity" $ | nindent 12 }}
          # /health answers once the model is loaded and warmed up.
          startupProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 10
            failureThreshold: {{ max 1 (div $.Values.model.startupTimeoutSeconds 10) }}
          readinessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
          livenessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 15
            timeoutSeconds: 10
            failureThreshold: 4
          # Out of the services first; then SIGTERM, on which vLLM finishes the running requests.
          lifecycle:
            preStop:
              exec: {command: [sleep, {{ $.Values.drainSeconds | quote }}]}
          volumeMounts: {{ include "hisparse.engineMounts" $role | nindent 12 }}
      volumes:
        - name: models
          {{- if include "hisparse.cacheClaim" $ }}
          persistentVolumeClaim: {claimName: {{ include "hisparse.cacheClaim" $ }}}
          {{- else }}
          emptyDir: {}
          {{- end }}
        - {name: cache, emptyDir: {}}
        - {name: tmp, emptyDir: {}}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $role.shmGiB }}Gi}
        {{- if gt (int (dig "hugepages" "gib" 0 $role)) 0 }}
        - name: hugepages
          emptyDir: {medium: HugePages-{{ $role.hugepages.size }}}
        {{- end }}
        {{- with include "hisparse.tierVolumes" $role | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
      {{- with index $role $key }}
      {{ $key }}: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
{{- end }}

{{- define "hisparse.engineArgs" -}}
{{- $ := index . 0 -}}
{{- $role := index . 1 -}}
{{- $engine := $.Values.engine -}}
- --model={{ include "hisparse.model" $ }}
- --served-model-name={{ include "hisparse.servedName" $ }}
- --host=0.0.0.0
- --port={{ $.Values.enginePort }}
- --dtype={{ $engine.dtype }}
- --kv-cache-dtype={{ $engine.kvCacheDtype }}
- --max-model-len={{ int $engine.maxModelLen }}
{{- with int $engine.blockSize }}
- --block-size={{ . }}
{{- end }}
{{- with $engine.attentionBackend }}
- --attention-backend={{ . }}
{{- end }}
- --tensor-parallel-size={{ max 1 (int $role.gpus) }}
- --shutdown-timeout={{ $.Values.longestRequestSeconds }}
- --disable-uvicorn-access-log
{{- if has "cache_aware" (list $.Values.router.policy.prefill $.Values.router.policy.decode) }}
- --enable-scale-out
{{- end }}
- {{ printf "--kv-transfer-config=%s" (index . 2) | quote }}
{{- with (dig "hisparse" "deviceKvGiB" 0 $role) }}
- --kv-cache-memory-bytes={{ mulf . 1073741824 | int64 }}
{{- end }}
{{- range concat $engine.extraArgs $role.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "hisparse.engineEnv" -}}
{{- $ := index . 0 -}}
{{- $name := index . 1 -}}
{{- $role := index $.Values $name -}}
{{- $ports := $.Values.nixl.dataPorts -}}
- {name: UCX_TCP_PORT_RANGE, value: "{{ $ports.first }}-{{ $ports.last }}"}
- {name: UCX_TCP_CM_PORT_RANGE, value: "{{ $ports.first }}-{{ $ports.last }}"}
{{- if eq $name "prefill" }}
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ $.Values.nixl.sideChannelPort | quote }}}
{{- end }}
{{- with $.Values.nixl.ucxTls }}
- {name: UCX_TLS, value: {{ . | quote }}}
{{- end }}
{{- with $.Values.nixl.ucxNetDevices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
- {name: HOME, value: /cache}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: VLLM_CACHE_ROOT, value: /cache/vllm}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: HF_HOME, value: /models/huggingface}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- if $.Values.model.tiny }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with $.Values.model.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.model.tokenSecret.key }}}}
{{- end }}
{{- include "hisparse.tierEnv" $role }}
{{- range $key, $value := merge (dict) $role.env $.Values.engine.env $.Values.nixl.env }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "hisparse.engineResources" -}}
{{- $ := index . 0 -}}
{{- $role := index . 1 -}}
{{- $hugepages := dig "hugepages" (dict "gib" 0) $role -}}
{{- range list "requests" "limits" }}
{{ . }}:
  cpu: {{ $role.cpus | quote }}
  memory: {{ printf "%dMi" (mulf $role.memoryGiB 1024 | int64) }}
  {{- if int $role.gpus }}
  nvidia.com/gpu: {{ $role.gpus }}
  {{- end }}
  {{- if gt (int $hugepages.gib) 0 }}
  hugepages-{{ $hugepages.size }}: {{ $hugepages.gib }}Gi
  {{- end }}
  {{- if $.Values.nixl.rdma.resource }}
  {{ $.Values.nixl.rdma.resource }}: {{ $.Values.nixl.rdma.count }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "hisparse.engineMounts" -}}
- {name: models, mountPath: /models}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if gt (int (dig "hugepages" "gib" 0 .)) 0 }}
- {name: hugepages, mountPath: /hugepages}
{{- end }}
{{- range $index, $tier := .tiers }}
{{- if eq $tier.type "fs" }}
- {name: tier-{{ $index }}, mountPath: /tiers/{{ $index }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "hisparse.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
