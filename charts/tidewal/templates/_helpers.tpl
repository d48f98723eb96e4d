{{- define "tidewal.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tidewal.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tidewal.labels" -}}
{{ include "tidewal.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tidewal.tables" -}}
{{ .Values.tables.existingClaim | default (printf "%s-tables" (include "tidewal.fullname" .)) }}
{{- end }}

{{- /* A cluster needs each role: without one, what that role does waits for ever. */ -}}
{{- define "tidewal.check" -}}
{{- $offered := list }}
{{- range $group := .Values.groups }}{{ if and $group (gt (int $group.replicas) 0) }}{{ $offered = concat $offered $group.roles }}{{ end }}{{ end }}
{{- range $role := list "mixcoord" "streamingnode" "proxy" "datanode" "querynode" }}
{{- if not (has $role $offered) }}{{ fail (printf "no group offers the role %s" $role) }}{{ end }}
{{- end }}
{{- if .Values.direct.enabled }}
{{- if not (or .Values.direct.tlsSecret .Values.direct.plaintext) }}{{ fail "direct.enabled needs direct.tlsSecret, or direct.plaintext in a network of your own" }}{{ end }}
{{- if not (or .Values.settingsSecret (hasKey (.Values.settings | default dict) "TIDEWAL__CLUSTER__SECRET")) }}{{ fail "direct.enabled needs TIDEWAL__CLUSTER__SECRET, in settingsSecret or settings" }}{{ end }}
{{- end }}
{{- end }}
