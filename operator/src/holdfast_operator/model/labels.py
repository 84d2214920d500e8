"""Every label, annotation and field manager that the operator writes."""

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

MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label that selects, with MANAGED_BY_VALUE, all pods that the operator watches."""

MANAGED_BY_VALUE = "holdfast"

COMPONENT = "app.kubernetes.io/component"
COMPONENT_WORKER = "worker"
"""Value of COMPONENT on worker pods. Store probes have COMPONENT_STORE_PROBE."""

FIELD_MANAGER = "holdfast-operator"

COMPONENT_STORE_PROBE = "store-probe"

STORE_NAME = f"{GROUP}/store"
"""Label of a probe pod with the name of its CheckpointStore."""
