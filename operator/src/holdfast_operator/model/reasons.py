"""Reasons that the operator writes into conditions, recoveries and Events, each with its meaning.

A condition about a tier may also carry a reason that a sidecar reported. The types of conditions and the
phases are in core.api (JobCondition, CheckpointCondition, JobPhase).
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    # --- Accepted
    ACCEPTED = "Accepted"
    """The operator can run the spec."""
    STORE_NOT_FOUND = "StoreNotFound"
    """The namespace has no CheckpointStore of the name that the spec gives."""
    STORE_UNAVAILABLE = "StoreUnavailable"
    """The probe of the store failed. The message contains the error."""
    STORE_NOT_PROBED = "StoreNotProbed"
    """The probe of the store's current spec has not ended yet."""
    INVALID_TEMPLATE = "InvalidTemplate"
    """spec.template cannot become a worker pod. It has not exactly one trainer container, does not use the
    launcher, reaches what belongs to the sidecar, or the API server refuses the pod."""
    CHECKPOINT_NOT_FOUND = "CheckpointNotFound"
    """spec.restoreFrom names a Checkpoint that does not exist."""
    CHECKPOINT_NOT_RESTORABLE = "CheckpointNotRestorable"
    """The Checkpoint of spec.restoreFrom exists but cannot be restored: it is not committed in a store, is
    quarantined, is being deleted or cannot be parsed, or this job has no store to read it from."""

    # --- why a round begins (Restarting, recoveries, recentRestarts, Events)
    FIRST_ROUND = "FirstRound"
    """The job begins its first round."""
    POD_LOST = "PodLost"
    """The pod of a member was deleted or is being deleted."""
    POD_EVICTED = "PodEvicted"
    """The pod of a member was evicted or preempted: condition DisruptionTarget is true, or the pod failed
    with a reason such as Evicted."""
    POD_FAILED = "PodFailed"
    """The pod of a member is in phase Failed, and was not disrupted."""
    NODE_LOST = "NodeLost"
    """The lease of a node has stopped, and the sidecar on it does not answer."""
    RANK_FAILED = "RankFailed"
    """A rank process ended with an error, or with the restart of its container."""
    OOM_KILLED = "OOMKilled"
    """The trainer container ran out of memory."""
    TRAINER_RESTARTING = "TrainerRestarting"
    """The trainer container restarted too often in its pod, so the pod is replaced."""
    RESTORE_FAILED = "RestoreFailed"
    """A worker could not fetch its shards of the restore point."""
    SIDECAR_UNREACHABLE = "SidecarUnreachable"
    """The sidecar of a member does not answer, so the round cannot start and the pod is replaced."""
    POD_SUCCEEDED_EARLY = "PodSucceededEarly"
    """The pod of a member succeeded before the restore point of its round was chosen."""
    STATUS_BEHIND = "StatusBehind"
    """A sidecar or a pod has a higher round than the status, for example because etcd was restored."""
    RESUMED = "Resumed"
    """spec.suspend is false again."""

    # --- Running, Restarting
    TRAINING = "Training"
    """Every rank has finished a step of this round."""
    RECOVERED = "Recovered"
    """The restart is over: every rank has finished a step of the new round."""
    STARTING = "Starting"
    """The round starts: pods are created, survivors are sealed, or ranks restore and rendezvous."""
    WAITING_FOR_PODS = "WaitingForPods"
    """A pod is not scheduled or has not started. The message contains the scheduler's message."""
    CREATE_REFUSED = "CreateRefused"
    """A pod, Secret or Service of the job could not be created (quota, admission, LimitRange). The message
    contains the error. The operator retries the create."""
    CONTAINER_CANNOT_START = "ContainerCannotStart"
    """The kubelet cannot pull an image or create a container. The job waits without a restart."""
    WAITING_FOR_HOLDERS = "WaitingForHolders"
    """A sidecar that may hold the newest step has not answered yet."""
    RESTORE_POINT_UNAVAILABLE = "RestorePointUnavailable"
    """A step was committed, but no complete checkpoint can be read. The job waits and never starts over."""
    HOLDER_UNREACHABLE = "HolderUnreachable"
    """A lower step was chosen because a possible holder of the newest did not answer in time."""
    SHARDS_LOST = "ShardsLost"
    """A lower step, or none, was chosen because all copies of a shard of the newest step are gone."""
    RESTORE_POINT_REJECTED = "RestorePointRejected"
    """A lower step was chosen because ranks that restored the newest failed repeatedly."""
    RESTORE_POINT_CHOSEN = "RestorePointChosen"
    ROUND_BEGAN = "RoundBegan"

    NAME_TAKEN = "NameTaken"
    """An object that does not belong to the job has the name that one of the job's objects would get."""
    CANNOT_READ = "CannotRead"
    """The object, or another one that it needs, holds a value that this version cannot parse."""
    READ_AGAIN = "ReadAgain"
    """The job and all of its pods can be parsed again."""

    # --- SidecarsUnreachable
    NO_SIDECAR_ANSWERS = "NoSidecarAnswers"
    """The operator reaches no sidecar of the job. It waits while ranks that train continue."""
    SOME_SIDECARS_SILENT = "SomeSidecarsSilent"
    """Some sidecars do not answer. The message names their pods."""
    SIDECARS_ANSWER = "SidecarsAnswer"

    # --- Suspended, Complete, Failed
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    """The gang was asked to save and stop."""
    NO_OBJECT_TIER = "NoObjectTier"
    """A suspension would lose every checkpoint: the job has no store, so its pods hold all copies."""
    NOT_PERSISTED = "NotPersisted"
    """A suspension would lose a step that is not in the store, or the newest upload is not recorded yet."""
    NOT_SUSPENDED = "NotSuspended"
    COMPLETED = "Completed"
    """Every rank returned 0, and every commit in the store is recorded."""
    BACKING_OFF = "BackingOff"
    """The next round is delayed: the gang failed repeatedly from the same step, or a sidecar has not answered
    since ranks failed."""
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    """The job needs more restarts within failurePolicy.window than failurePolicy.maxRestarts allows."""
    EXIT_CODE_RULE = "ExitCodeRule"
    """A rule of failurePolicy.rules demands FailJob for the exit code of a rank."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """activeDeadlineSeconds has passed."""

    # --- LastCheckpointSucceeded, RemoteTierHealthy, Checkpoint conditions and Events
    COMMITTED = "Committed"
    PERSISTED = "Persisted"
    SAVE_REQUESTED = "SaveRequested"
    PINNED = "Pinned"
    NOT_PINNED = "NotPinned"
    PRUNING = "Pruning"
    DATA_KEPT = "DataKept"
    """A Checkpoint with deletionPolicy DeleteData was deleted, but its data could not be deleted."""
    STORE_HEALTHY = "StoreHealthy"
