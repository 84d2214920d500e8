{{- define "holdfast.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "holdfast.serviceAccount" -}}
{{- default (include "holdfast.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* What never changes in the life of a release: selectors are made of it. */}}
{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/part-of: holdfast
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* repository:tag of (dict "image" ... "root" $) */}}
{{- define "holdfast.image" -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}

{{/* The pods of all jobs, as the operator labels them. */}}
{{- define "holdfast.workers" -}}
app.kubernetes.io/managed-by: holdfast
{{- end -}}
