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
  resources: [checkpointstores, checkpointgrants]
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

{{/*
Rules of an admission policy that keep the volumes and containers in variables.volumes and variables.containers
out of the Secrets and claims of sidecars. The operator has the same rules (model/isolation.py).
Argument: the path of the pod's spec, for the messages.
*/}}
{{- define "holdfast.volumeRules" -}}
{{- $certificates := "orValue('').matches('(-certs-[0-9]+-r[0-9]+|-holdfast-certs-[0-9]+)$')" }}
{{- $claim := "orValue('').matches('-holdfast-node$')" }}
- expression: >-
    variables.volumes.all(v,
    !v.?secret.?secretName.{{ $certificates }}
    && !v.?azureFile.?secretName.{{ $certificates }}
    && !v.?csi.?nodePublishSecretRef.?name.{{ $certificates }}
    {{- range list "cephfs" "cinder" "flexVolume" "iscsi" "rbd" "scaleIO" "storageos" }}
    && !v.?{{ . }}.?secretRef.?name.{{ $certificates }}
    {{- end }}
    && v.?projected.?sources.orValue([]).all(s, !s.?secret.?name.{{ $certificates }}))
    && variables.containers.all(c,
    c.?env.orValue([]).all(e, !e.?valueFrom.?secretKeyRef.?name.{{ $certificates }})
    && c.?envFrom.orValue([]).all(e, !e.?secretRef.?name.{{ $certificates }}))
  message: >-
    {{ . }}: Secrets whose names end in -certs-N-rN or -holdfast-certs-N hold certificates of a
    gang, which only sidecars may read: use a Secret of another name
- expression: >-
    variables.volumes.all(v,
    !v.?persistentVolumeClaim.?claimName.{{ $claim }}
    && !v.?ephemeral.?volumeClaimTemplate.?spec.?dataSource.?name.{{ $claim }}
    && !v.?ephemeral.?volumeClaimTemplate.?spec.?dataSourceRef.?name.{{ $claim }})
  message: >-
    {{ . }}.volumes: claims whose names end in -holdfast-node hold the checkpoints and the private
    key of a sidecar, which only that sidecar may read: use another claim
{{- end }}
