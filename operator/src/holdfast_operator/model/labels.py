"""Every label, finalizer and field manager that the operator writes: one place, spelled once."""

from __future__ import annotations

from holdfast_core.api import GROUP

JOB_NAME = f"{GROUP}/job"
"""Name of the TrainingJob; what people select by."""

JOB_NAMESPACE = f"{GROUP}/job-namespace"
"""Its namespace, on objects that lie in another one."""

JOB_UID = f"{GROUP}/job-uid"
"""Its uid: what the Service and the spreading of pods select by. It decides no ownership: anybody
who may create a pod can copy it (ownership.py)."""

WORKER = f"{GROUP}/worker"
"""Index of the pod in the gang."""

BIRTH_ROUND = f"{GROUP}/birth-round"
"""Restart round that the pod was created in; survivors keep it in later rounds."""

AVOIDED_NODES = f"{GROUP}/avoided-nodes"
"""Annotation of a pod: names of the nodes that were lost when it was created, and that its node affinity
excludes, separated by commas. An affinity cannot be changed, so the pod is created again when one of
them is back."""

MANAGED_BY = "app.kubernetes.io/managed-by"
"""Selects, with MANAGED_BY_VALUE, all pods that the operator's reflector watches."""

MANAGED_BY_VALUE = "holdfast"

COMPONENT = "app.kubernetes.io/component"
COMPONENT_WORKER = "worker"
"""Distinguishes workers from store probes."""

DATA_FINALIZER = f"{GROUP}/delete-data"
"""On Checkpoints with deletionPolicy DeleteData only: data first, object after."""

FIELD_MANAGER = "holdfast-operator"

COMPONENT_STORE_PROBE = "store-probe"

STORE_NAME = f"{GROUP}/store"
"""Name of the CheckpointStore that a probe pod reads."""
