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

{{/* (list root image) */}}
{{- define "turnlog.image" -}}
{{- $root := index . 0 -}}
image: {{ printf "%s/%s:%s" $root.Values.image.repository (index . 1) (default $root.Chart.AppVersion $root.Values.image.tag) | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end }}

{{/* What every process of ours is told: (list root) */}}
{{- define "turnlog.env" -}}
- {name: TURNLOG_INSTANCE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: TURNLOG_HEALTH_HOST, value: "0.0.0.0"}
- {name: TURNLOG_LOG_FORMAT, value: {{ .Values.logs.format | quote }}}
- {name: TURNLOG_LOG_LEVEL, value: {{ .Values.logs.level | quote }}}
{{- if .Values.secrets.name }}
{{- range .Values.secrets.keys }}
- {name: TURNLOG_{{ upper . }}_FILE, value: /etc/turnlog/secrets/{{ . }}}
{{- end }}
{{- end }}
{{- if .Values.certificates.configMap }}
- {name: SSL_CERT_FILE, value: /etc/turnlog/certificates/{{ .Values.certificates.key }}}
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
{{- if .Values.model.claim }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{/* `work` is the role's own: scratch, or a claim of its StatefulSet. */}}
{{- define "turnlog.volumes" -}}
- {name: settings, configMap: {name: {{ include "turnlog.name" . }}}}
- {name: tmp, emptyDir: {}}
{{- if .Values.secrets.name }}
- {name: secrets, secret: {secretName: {{ .Values.secrets.name }}, defaultMode: 0440}}
{{- end }}
{{- if .Values.certificates.configMap }}
- {name: certificates, configMap: {name: {{ .Values.certificates.configMap }}}}
{{- end }}
{{- if .Values.model.claim }}
- {name: model, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}}
{{- end }}
{{- end }}

{{/* A pod that Pod Security `restricted` admits, without service links: a Service named like us would set our settings. */}}
{{- define "turnlog.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
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

{{- define "turnlog.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "turnlog.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A silent process is restarted, one that waits for a server is not. */}}
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

{{/* Of a container that makes sandboxes, by profile. */}}
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
