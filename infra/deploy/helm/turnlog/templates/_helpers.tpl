{{- define "turnlog.name" -}}
{{- if contains "turnlog" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-turnlog" .Release.Name }}{{ end -}}
{{- end }}

{{- define "turnlog.labels" -}}
app.kubernetes.io/name: turnlog
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* (list root role) */}}
{{- define "turnlog.selector" -}}
app.kubernetes.io/name: turnlog
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* (list root role): the namespace of its objects */}}
{{- define "turnlog.namespace" -}}
{{- $root := index . 0 -}}
{{- ternary (default $root.Release.Namespace $root.Values.sandbox.namespace) $root.Release.Namespace (eq (index . 1) "sandbox") }}
{{- end }}

{{/* (list root image) */}}
{{- define "turnlog.image" -}}
{{- $root := index . 0 -}}
image: {{ printf "%s/%s:%s" $root.Values.image.repository (index . 1) (default $root.Chart.AppVersion $root.Values.image.tag) | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end }}

{{/* Environment of every turnlog process, except for keys of secrets. */}}
{{- define "turnlog.told" -}}
- {name: TURNLOG_INSTANCE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: TURNLOG_HEALTH_HOST, value: "::"}
- {name: TURNLOG_LOG_FORMAT, value: {{ .Values.logs.format | quote }}}
- {name: TURNLOG_LOG_LEVEL, value: {{ .Values.logs.level | quote }}}
{{- if .Values.certificates.configMap }}
- {name: SSL_CERT_FILE, value: /etc/turnlog/certificates/{{ .Values.certificates.key }}}
{{- end }}
{{- end }}

{{- define "turnlog.env" -}}
{{- include "turnlog.told" . }}
{{- if .Values.secrets.name }}
{{- range .Values.secrets.keys }}
- {name: TURNLOG_{{ upper . }}_FILE, value: /etc/turnlog/secrets/{{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{/* (list root role): keys of the Secret for sandbox and egress, as JSON. Pods that run agents' code get no gateway
signing key, and the egress proxy gets only its own keys. */}}
{{- define "turnlog.keys" -}}
{{- $keys := list }}
{{- range (index . 0).Values.secrets.keys }}
{{- if ternary (hasPrefix "egress_" .) (not (hasPrefix "gateway_" .)) (eq (index $ 1) "egress") }}{{ $keys = append $keys . }}{{ end }}
{{- end }}
{{- toJson $keys }}
{{- end }}

{{- define "turnlog.fewEnv" -}}
{{- include "turnlog.told" (index . 0) }}
{{- if (index . 0).Values.secrets.name }}
{{- range fromJsonArray (include "turnlog.keys" .) }}
- {name: TURNLOG_{{ upper . }}_FILE, value: /etc/turnlog/secrets/{{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether the egress proxy is created, and its address for workers. */}}
{{- define "turnlog.egress" -}}
{{- if and .Values.roles.egress.enabled .Values.roles.sandbox.enabled (dig "egress" "allow" list .Values.settings) }}
{{- printf "%s://%s-egress.%s:%v" (ternary "https" "http" (ne "" (dig "egress" "certificate_file" "" .Values.settings))) (include "turnlog.name" .) .Release.Namespace .Values.roles.egress.port }}
{{- end }}
{{- end }}

{{/* (list root role): its identity in the cluster and in Kafka */}}
{{- define "turnlog.serviceAccount" -}}
{{- with dig (index . 1) "serviceAccountName" (index . 0).Values.serviceAccountName (index . 0).Values.principals.roles }}
serviceAccountName: {{ . }}
{{- end }}
{{- end }}

{{- define "turnlog.principalEnv" -}}
{{- if dig (index . 1) "secret" "" (index . 0).Values.principals.roles }}
{{- range (index . 0).Values.principals.keys }}
- {name: TURNLOG_{{ upper . }}_FILE, value: /etc/turnlog/principal/{{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "turnlog.principalMount" -}}
{{- if dig (index . 1) "secret" "" (index . 0).Values.principals.roles }}
- {name: principal, mountPath: /etc/turnlog/principal, readOnly: true}
{{- end }}
{{- end }}

{{- define "turnlog.principalVolume" -}}
{{- with dig (index . 1) "secret" "" (index . 0).Values.principals.roles }}
- {name: principal, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "turnlog.mounts" -}}
- {name: settings, mountPath: /etc/turnlog/settings.toml, subPath: settings.toml, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: work, mountPath: /turnlog}
{{- if .Values.secrets.name }}
- {name: secrets, mountPath: /etc/turnlog/secrets, readOnly: true}
{{- end }}
{{- if .Values.certificates.configMap }}
- {name: certificates, mountPath: /etc/turnlog/certificates, readOnly: true}
{{- end }}
{{- end }}

{{/* For containers that read the policy's folder. */}}
{{- define "turnlog.modelMount" -}}
{{- if .Values.model.claim }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{- define "turnlog.modelVolume" -}}
{{- if .Values.model.claim }}
- {name: model, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}}
{{- end }}
{{- end }}

{{/* `work` belongs to the role: scratch space, or a claim of its StatefulSet. */}}
{{- define "turnlog.volumes" -}}
{{- if .Values.secrets.name }}
- {name: secrets, secret: {secretName: {{ .Values.secrets.name }}, defaultMode: 0440}}
{{- end }}
{{- include "turnlog.openVolumes" . }}
{{- end }}

{{- define "turnlog.fewVolumes" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.secrets.name }}
- name: secrets
  secret:
    secretName: {{ $root.Values.secrets.name }}
    defaultMode: 0440
    items:
      {{- range fromJsonArray (include "turnlog.keys" .) }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- include "turnlog.openVolumes" $root }}
{{- end }}

{{- define "turnlog.openVolumes" }}
- {name: settings, configMap: {name: {{ include "turnlog.name" . }}}}
- {name: tmp, emptyDir: {}}
{{- if .Values.certificates.configMap }}
- {name: certificates, configMap: {name: {{ .Values.certificates.configMap }}}}
{{- end }}
{{- end }}

{{/* A pod that Pod Security `restricted` admits. No service links: a Service named turnlog would set TURNLOG_*. */}}
{{- define "turnlog.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* values.schema.json refuses an id of 0; the cluster assigns an id that is null. */}}
{{- define "turnlog.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  {{- with .Values.podSecurity.runAsUser }}
  runAsUser: {{ int64 . }}
  {{- end }}
  {{- with .Values.podSecurity.runAsGroup }}
  runAsGroup: {{ int64 . }}
  {{- end }}
  {{- include "turnlog.fsGroup" . | nindent 2 }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "turnlog.fsGroup" -}}
{{- with .Values.podSecurity.fsGroup }}fsGroup: {{ int64 . }}{{ end }}
{{- end }}

{{- define "turnlog.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A hung process is restarted; one that waits for a server is not. */}}
{{- define "turnlog.probes" -}}
startupProbe: {httpGet: {path: /healthz, port: health}, periodSeconds: 2, failureThreshold: 60}
livenessProbe: {httpGet: {path: /healthz, port: health}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
readinessProbe: {httpGet: {path: /readyz, port: health}, periodSeconds: 5, timeoutSeconds: 3}
{{- end }}

{{/* (list root role): the labels, annotations and metadata of its pods */}}
{{- define "turnlog.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "turnlog.selector" . | nindent 2 }}
  {{- with $root.Values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations:
  checksum/settings: {{ toJson $root.Values.settings | sha256sum }}
  {{- with $root.Values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* Security context of a container that creates sandboxes, by profile. */}}
{{- define "turnlog.sandboxSecurity" -}}
securityContext:
  {{- if eq . "privileged" }}
  privileged: true
  runAsUser: 0
  {{- else }}
  runAsUser: 0
  procMount: Unmasked
  capabilities: {drop: [ALL], add: [SETUID, SETGID, CHOWN, KILL, DAC_OVERRIDE, FOWNER, SYS_ADMIN]}
  {{- end }}
{{- end }}
