{{/* Fail the installation before anything starts if values contradict each other. */}}
{{- define "turnlog.checked" -}}
{{- $settings := .Values.settings -}}
{{- if not $settings.kafka.bootstrap }}{{ fail "settings.kafka.bootstrap is empty: name your brokers, host:port[,host:port]" }}{{ end -}}
{{- if not $settings.registry.url }}{{ fail "settings.registry.url is empty: name your schema registry" }}{{ end -}}
{{- if not $settings.store.endpoint }}{{ fail "settings.store.endpoint is empty: name your S3 store" }}{{ end -}}
{{- range $name, $role := .Values.roles }}
{{- if and $role.enabled $role.single (gt (int (default 1 $role.replicas)) 1) }}
{{- fail (printf "roles.%s.replicas is %v: two pods would fence each other; set it to 1" $name $role.replicas) }}
{{- end }}
{{- $units := ternary $settings.kafka.groups $settings.kafka.rollouts (has $name (list "assembler" "views")) }}
{{- if and $role.autoscale $role.autoscale.enabled }}
{{- if gt (int $role.autoscale.max) (int $units) }}
{{- fail (printf "roles.%s.autoscale.max is %v, but there are only %v partitions to share (settings.kafka.groups, rollouts)" $name $role.autoscale.max $units) }}
{{- end }}
{{- if eq $.Values.autoscaler.kind "none" }}
{{- fail (printf "roles.%s.autoscale is enabled, but autoscaler.kind is none: set it to keda or hpa" $name) }}
{{- end }}
{{- if not $.Values.roles.lag.enabled }}
{{- fail (printf "roles.%s.autoscale is enabled, but roles.lag is not: nothing would export its lag" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := dict }}
{{- range $name, $of := .Values.principals.roles }}{{ if $of.secret }}{{ $_ := set $own $name $of.secret }}{{ end }}{{ end }}
{{- if $own }}
{{- $runs := dict "configure" .Values.configure.enabled "loader" .Values.engine.enabled "trainer" .Values.trainer.enabled "dashboard" .Values.dashboard.enabled }}
{{- range $name, $role := .Values.roles }}{{ $_ := set $runs $name (and $role.enabled (ne $name "egress")) }}{{ end }}
{{- range $name, $enabled := $runs }}
{{- if and $enabled (not (hasKey $own $name)) }}
{{- fail (printf "principals.roles.%s.secret is missing: either every role that runs has its own principal, or none has" $name) }}
{{- end }}
{{- end }}
{{- range .Values.principals.keys }}
{{- if has . $.Values.secrets.keys }}{{ fail (printf "principals.keys and secrets.keys both name %s: a role would have two values" .) }}{{ end }}
{{- end }}
{{- end }}
{{- if and .Values.roles.gateway.enabled (gt (int .Values.roles.gateway.replicas) 1) (not .Values.secrets.name) }}
{{- fail "roles.gateway.replicas is above 1, but secrets.name is empty: gateways must share a signing key" }}
{{- end }}
{{- if include "turnlog.egress" . }}
{{- if not (and .Values.secrets.name (has "egress_signing_key" .Values.secrets.keys)) }}
{{- fail "settings.egress.allow gives sandboxes network access, but secrets.keys has no egress_signing_key: add it to both Secrets, or set roles.egress.enabled to false to let each worker connect by itself" }}
{{- end }}
{{- if eq "tunnel" (dig "egress" "tls" "" $settings) }}
{{- fail "settings.egress.tls is tunnel, which hides requests from roles.egress: set it to intercept or refuse, or set roles.egress.enabled to false" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.servers) }}
{{- fail "networkPolicy.servers is empty: sandbox workers could reach any address without roles.egress; list the peers of Kafka, registry and store" }}
{{- end }}
{{- end }}
{{- if and .Values.trainer.enabled (eq "external" (dig "trainer" "kind" "" $settings)) }}
{{- fail "settings.trainer.kind is external, but trainer.enabled is true: the Megatron trainer would fence yours; set it to false" }}
{{- end }}
{{- if and (eq .Values.sandbox.profile "runtime") (not .Values.sandbox.runtimeClassName) }}
{{- fail "sandbox.profile is runtime, but sandbox.runtimeClassName is empty: set it to the RuntimeClass that isolates" }}
{{- end }}
{{- end }}
