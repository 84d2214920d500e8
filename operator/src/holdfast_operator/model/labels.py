"""Every label, annotation, field manager and kind of object that the operator writes."""

from __future__ import annotations

from holdfast_core.api import GROUP
from holdfast_core.names import JOB_UID_LABEL

JOB_NAME = f"{GROUP}/job"
"""Label with the name of the TrainingJob, for users' selectors, or of the CheckpointAdoption."""

JOB_NAMESPACE = f"{GROUP}/job-namespace"
"""Label with the namespace of the TrainingJob, on objects in another namespace."""

JOB_UID = JOB_UID_LABEL

WORKER = f"{GROUP}/worker"
"""Label with the index of the pod's worker in the gang."""

BIRTH_ROUND = f"{GROUP}/birth-round"
"""Label with the restart round in which the pod was created. It does not change in later rounds."""

ADOPT = f"{GROUP}/adopt"
"""Label with the name of the CheckpointAdoption of a pod that another controller creates. Users set it. An
empty value stands for the name of the pod's JobSet."""

AVOIDED_NODES = f"{GROUP}/avoided-nodes"
"""Annotation of a pod with the names, separated by commas, of the nodes that its node affinity excludes
because they were lost, and not tainted yet, when it was created. The affinity of a pod cannot be changed, so
a pod that no node has taken is created again when it need not exclude one of these nodes any longer."""

FAILED_NODES = f"{GROUP}/failed-nodes"
"""Annotation of a pod with the names, separated by commas, of the nodes that its node affinity excludes
because workers of the job failed there."""

RENDERED_FROM = f"{GROUP}/rendered-from"
"""Annotation of a pod with a digest of each part of the spec from which it was created."""

QUEUE_NAME = "kueue.x-k8s.io/queue-name"
"""Label with the name of a LocalQueue of Kueue. Users set it on a TrainingJob, and the operator on its pods.
The names that follow are Kueue's as well: pkg/controller/jobs/pod/constants and pkg/controller/constants of
kubernetes-sigs/kueue."""

QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
"""Label with the name of a WorkloadPriorityClass, on a TrainingJob and on its pods."""

POD_GROUP = "kueue.x-k8s.io/pod-group-name"
"""Label with the name of the pod group that Kueue admits as a whole. Kueue's Workload has the same name."""

POD_GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
"""Annotation with the number of pods of the group."""

ROLE_HASH = "kueue.x-k8s.io/role-hash"
"""Annotation that replaces Kueue's hash of the pod's shape. Pods of a role that the group had not at its
beginning are never admitted, and the shape contains the affinity, by which new pods avoid nodes."""

ROLE_WORKER = "worker"
"""Value of ROLE_HASH on all worker pods. Kueue uses it as the name of the pod set in its Workload."""

RETRIABLE_IN_GROUP = "kueue.x-k8s.io/retriable-in-group"
"""Annotation by which Kueue regards a group as finished, and frees its quota, once no pod of it runs. The
operator sets it to "false" on the ended pods of a job that is over. No pod replaces them."""

KUEUE_FINALIZER = "kueue.x-k8s.io/managed"
"""Finalizer that Kueue's webhook adds to each pod with QUEUE_NAME."""

KUEUE_GATE_PREFIX = "kueue.x-k8s.io/"
"""Beginning of the names of the scheduling gates that Kueue adds to a pod and removes when it admits it:
`admission`, and `topology` with topology-aware scheduling."""

MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label that selects, with MANAGED_BY_VALUE, all pods that the operator watches."""

MANAGED_BY_VALUE = "holdfast"

COMPONENT = "app.kubernetes.io/component"

COMPONENT_WORKER = "worker"
"""Value of COMPONENT on worker pods. Pods that run a command for a store have `store-` and the verb."""

COMPONENT_PLACEHOLDER = "placeholder"
"""Value of COMPONENT on pods that look for nodes for missing workers of an elastic gang."""

FIELD_MANAGER = "holdfast-operator"

STORE_NAME = f"{GROUP}/store"
"""Label of a pod that runs a command for a store, with the name of the CheckpointStore."""

POD = "Pod"

SERVICE = "Service"

SECRET = "Secret"

NETWORK_POLICY = "NetworkPolicy"

DISRUPTION_BUDGET = "PodDisruptionBudget"
