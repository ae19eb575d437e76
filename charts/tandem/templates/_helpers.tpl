{{/* Adds to the values what an earlier chart's lack: `helm upgrade --reuse-values` brings those alone. Every template begins
with it. Of what users name the entries of themselves (labels, limits, selectors) nothing is added. */}}
{{- define "tandem.complete" -}}
{{- include "tandem.fill" (dict "values" .Values "defaults" (fromYaml (.Files.Get "defaults.yaml"))) -}}
{{- end }}

{{- define "tandem.fill" -}}
{{- range $key, $default := .defaults -}}
{{- if not (hasKey $.values $key) -}}{{- $_ := set $.values $key $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (index $.values $key)) (not (has $key (list "resources" "labels"))) -}}
{{- include "tandem.fill" (dict "values" (index $.values $key) "defaults" $default) -}}
{{- end -}}
{{- end -}}
{{- end }}

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

{{/* Full image reference of a part: (dict "root" $ "part" "worker"). A released chart has its own images as annotations. */}}
{{- define "tandem.image" -}}
{{- $published := printf "ghcr.io/tandem-dev/tandem-%s:%s" .part .root.Chart.AppVersion -}}
{{- $image := index (.root.Chart.Annotations | default dict) (printf "tandem.dev/%s-image" .part) | default $published -}}
{{- with (.root.Values.global | default dict).imageRegistry -}}
{{- $image = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^[^/]*[.:][^/]*/|^localhost/" $image "") -}}
{{- end -}}
{{- index .root.Values.images .part | default $image -}}
{{- end }}

{{/* Which network policies models get, as the operator is told. */}}
{{- define "tandem.networkPolicies" -}}
{{- if not .Values.networkPolicies.enabled }}none{{ else if .Values.networkPolicies.egress }}all{{ else }}ingress{{ end -}}
{{- end }}

{{/* The ClusterRole that gateways are bound to. */}}
{{- define "tandem.gatewayRole" -}}
{{ include "tandem.name" . }}-{{ .Release.Namespace }}-gateway
{{- end }}

{{/* Ports at which the hub is reached, as JSON: 443 and that of hub.endpoint. */}}
{{- define "tandem.hubPorts" -}}
{{- $url := urlParse (.Values.hub.endpoint | default "https://hub") -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "http" | ternary "80" "443") -}}
{{- list 443 (int $port) | uniq | toJson -}}
{{- end }}

{{/* The namespace of the hub where hub.endpoint is a Service, as NAME or NAME.NAMESPACE.svc…; else nothing. */}}
{{- define "tandem.hubNamespace" -}}
{{- with .Values.hub.endpoint -}}
{{- $parts := regexReplaceAll ":[0-9]+$" (urlParse .).host "" | splitList "." -}}
{{- if and (ge (len $parts) 3) (eq (index $parts 2) "svc") -}}{{ index $parts 1 }}{{- end -}}
{{- if eq (len $parts) 1 -}}{{ $.Release.Namespace }}{{- end -}}
{{- end -}}
{{- end }}

{{/* Sysctls that are those of the pod alone, as a CEL list. */}}
{{- define "tandem.safeSysctls" -}}
['kernel.shm_rmid_forced', 'net.ipv4.ip_local_port_range', 'net.ipv4.ip_local_reserved_ports',
        'net.ipv4.ip_unprivileged_port_start', 'net.ipv4.ping_group_range', 'net.ipv4.tcp_fin_timeout',
        'net.ipv4.tcp_keepalive_intvl', 'net.ipv4.tcp_keepalive_probes', 'net.ipv4.tcp_keepalive_time',
        'net.ipv4.tcp_rmem', 'net.ipv4.tcp_syncookies', 'net.ipv4.tcp_wmem']
{{- end }}

{{/* What the operator may do where it serves models. It binds gateways to one ClusterRole, and writes no Roles. */}}
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
- apiGroups: [batch]
  resources: [jobs] # that fill caches: they are made once and never changed
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets] # the keys of the models' pods, by their names: it cannot list, watch or delete Secrets
  verbs: [get, create, update]
- apiGroups: [""]
  resources: [resourcequotas] # how many GPUs a namespace has for its models
  verbs: [list]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  resourceNames: [{{ include "tandem.gatewayRole" . }}]
  verbs: [bind]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles] # those that earlier releases made, to delete them
  verbs: [get, list, watch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [pods/status] # the readiness gate of workers, once a gateway has admitted them
  verbs: [patch]
- apiGroups: [coordination.k8s.io]
  resources: [leases] # of another operator that has claimed a model: whether that one is there
  verbs: [get]
- apiGroups: [""]
  resources: [events] # its own, and those that say why a StatefulSet cannot create pods
  verbs: [get, list, watch, create, update]
{{- end }}
