"""The API `holdfast.dev/v1alpha1` as pydantic models: the one source of CRDs, chart and reference.

May import ids, errors, clock and pydantic only; knows neither tiers nor Kubernetes clients.
"""

from __future__ import annotations

from holdfast_core.api.base import (
    API_VERSION,
    CATEGORY,
    GROUP,
    VERSION,
    ApiModel,
    changed,
    merge_patch,
)
from holdfast_core.api.checkpoint import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointSpec,
    CheckpointStatus,
    DeletionPolicy,
    ShardCounts,
)
from holdfast_core.api.checkpoint_policy import (
    CheckpointPolicySpec,
    Compression,
    PeerEncryption,
    WhenDeleted,
)
from holdfast_core.api.checkpoint_store import (
    CheckpointStore,
    CheckpointStoreSpec,
    CheckpointStoreStatus,
    S3Spec,
    StoreCondition,
    StoreFeatures,
)
from holdfast_core.api.meta import (
    Condition,
    ConditionStatus,
    NameRef,
    ObjectMeta,
)
from holdfast_core.api.quantities import parse_duration, parse_quantity_bytes
from holdfast_core.api.strict import strict
from holdfast_core.api.training_job import (
    FailureAction,
    FailureRule,
    TrainingJob,
    TrainingJobSpec,
)
from holdfast_core.api.training_job_status import (
    MAX_LINEAGE,
    MAX_RECENT_RESTARTS,
    GoodputStatus,
    JobCondition,
    JobPhase,
    LineageEntry,
    PersistedStep,
    RecoveryStatus,
    RestartRecord,
    RestorePointStatus,
    TierCounts,
    TrainingJobStatus,
    WorkersStatus,
)

__all__ = [
    "API_VERSION",
    "CATEGORY",
    "GROUP",
    "MAX_LINEAGE",
    "MAX_RECENT_RESTARTS",
    "VERSION",
    "ApiModel",
    "Checkpoint",
    "CheckpointCondition",
    "CheckpointPhase",
    "CheckpointPolicySpec",
    "CheckpointSpec",
    "CheckpointStatus",
    "CheckpointStore",
    "CheckpointStoreSpec",
    "CheckpointStoreStatus",
    "Compression",
    "Condition",
    "ConditionStatus",
    "DeletionPolicy",
    "FailureAction",
    "FailureRule",
    "GoodputStatus",
    "JobCondition",
    "JobPhase",
    "LineageEntry",
    "NameRef",
    "ObjectMeta",
    "PeerEncryption",
    "PersistedStep",
    "RecoveryStatus",
    "RestartRecord",
    "RestorePointStatus",
    "S3Spec",
    "ShardCounts",
    "StoreCondition",
    "StoreFeatures",
    "TierCounts",
    "TrainingJob",
    "TrainingJobSpec",
    "TrainingJobStatus",
    "WhenDeleted",
    "WorkersStatus",
    "changed",
    "merge_patch",
    "parse_duration",
    "parse_quantity_bytes",
    "strict",
]
