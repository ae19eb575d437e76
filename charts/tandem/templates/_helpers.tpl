{{- define "tandem.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "tandem.name" .) -}}
{{- end }}

{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: tandem-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: tandem
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Full image reference of a part: (dict "root" $ "part" "worker") */}}
{{- define "tandem.image" -}}
{{- index .root.Values.images .part | default (printf "ghcr.io/tandem-dev/tandem-%s:%s" .part .root.Chart.AppVersion) -}}
{{- end }}

{{/* Which network policies models get, as the operator is told. */}}
{{- define "tandem.networkPolicies" -}}
{{- if not .Values.networkPolicies.enabled }}none{{ else if .Values.networkPolicies.egress }}all{{ else }}ingress{{ end -}}
{{- end }}

{{/* What the operator may do where it serves models. It creates Roles that let gateways see pods, so it must itself be
     allowed to see pods: Kubernetes lets nobody grant what he does not have. */}}
{{- define "tandem.rules" -}}
- apiGroups: [tandem.dev]
  resources: [inferencemodels]
  verbs: [get, list, watch]
- apiGroups: [tandem.dev]
  resources: [inferencemodels/status]
  verbs: [patch]
- apiGroups: [tandem.dev]
  resources: [inferencemodels/finalizers] # to set blockOwnerDeletion on children
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [controllerrevisions] # the revisions of models: they are made once and never changed
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets] # the keys of the models' pods, by their names: it cannot list, watch or delete Secrets
  verbs: [get, create, update]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings, roles]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events] # its own, and those that say why a StatefulSet cannot create pods
  verbs: [get, list, watch, create, update]
{{- end }}
