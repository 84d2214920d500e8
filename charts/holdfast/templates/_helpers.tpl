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

{{/* What the operator needs for the NetworkPolicy of a gang, as JSON; empty: it creates none. The
namespace of the operator is known to it. */}}
{{- define "holdfast.workerNetworkPolicy" -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.workers -}}
{{- dict "operator" (include "holdfast.selector" . | fromYaml) "metricsFrom" .Values.networkPolicy.metricsFrom | toJson -}}
{{- end -}}
{{- end -}}

{{/* Rights in each namespace with jobs: of a ClusterRole, or of a Role for each of watchNamespaces. */}}
{{- define "holdfast.jobRules" }}
# delete: a job with ttlSecondsAfterFinished ends by the operator's hand.
- apiGroups: [holdfast.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [holdfast.dev]
  resources: [checkpoints]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [holdfast.dev]
  resources: [checkpointstores]
  verbs: [list, watch]
- apiGroups: [holdfast.dev]
  resources: [trainingjobs/status, checkpointadoptions/status, checkpoints/status, checkpointstores/status]
  verbs: [patch]
# blockOwnerDeletion in owner references needs it where that is enforced (OpenShift).
- apiGroups: [holdfast.dev]
  resources: [trainingjobs/finalizers, checkpointadoptions/finalizers, checkpointstores/finalizers]
  verbs: [update]
# patch: Kueue's finalizer is removed from pods that are deleted, or that have ended with their job.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, patch]
# What the restart policy of an adopted gang's controller costs.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get]
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs]
  verbs: [get]
- apiGroups: [holdfast.dev]
  resources: [checkpointadoptions]
  verbs: [get, list, watch]
# Certificates of worker pods: written and removed, never read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
