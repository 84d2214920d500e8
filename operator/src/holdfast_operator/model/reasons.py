"""Reasons that the operator writes into conditions, recoveries and Events, and texts of their messages. Pure.

A condition about a tier may also carry a reason that a sidecar reported. The types of conditions and the
phases are in core.api (JobCondition, CheckpointCondition, JobPhase).
"""

from __future__ import annotations

import re
import signal
from enum import StrEnum

from holdfast_core.api import DAMAGED as _DAMAGED
from holdfast_core.messages.schema import CHECKPOINT_MISSING as _MISSING
from holdfast_core.messages.schema import DeadRank


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
    """spec.restoreFrom or spec.rollback asks for a checkpoint that does not exist."""
    GRANT_MISSING = "GrantMissing"
    """The Checkpoint of spec.restoreFrom is in another namespace, and no CheckpointGrant there lets the job
    start from it, or no longer."""
    CHECKPOINT_NOT_RESTORABLE = "CheckpointNotRestorable"
    """The checkpoint of spec.restoreFrom or spec.rollback exists but cannot be restored: it is not committed
    in a store, is quarantined, being deleted, off the lineage or cannot be parsed, or this job has no store
    to read it from."""

    # --- Adopted
    PODS_ADOPTED = "PodsAdopted"
    """The pods of another controller are workers of the gang. The message says what its restart policy
    costs."""
    LOCAL_COPIES_WOULD_BE_LOST = "LocalCopiesWouldBeLost"
    """The controller deletes all pods when one fails, and there is no object store: the gang is not
    started."""

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
    """The lease of a node has stopped, or Kubernetes or a node-problem detector regards the node as lost or
    failing, and the sidecar on it does not answer."""
    RANK_FAILED = "RankFailed"
    """A rank process ended with an error, or with the restart of its container."""
    OOM_KILLED = "OOMKilled"
    """The trainer container ran out of memory."""
    TRAINER_RESTARTING = "TrainerRestarting"
    """The trainer container restarted too often in its pod, so the pod is replaced."""
    HUNG = "Hung"
    """The gang finished no step for failurePolicy.hangs. Also the reason of HangsRepeat."""
    RESTORE_FAILED = "RestoreFailed"
    """A worker could not fetch its shards of the restore point."""
    CHECKPOINT_MISSING = _MISSING
    """No place has a good copy of a checkpoint that the status names. Also the reason of the condition
    CheckpointMissing, of Running=False while the gang waits for this checkpoint, and of PodsKept while a
    failed job waits for it."""
    CHECKPOINTS_FOUND = "CheckpointsFound"
    """The checkpoints that the status names are where they should be."""
    SIDECAR_UNREACHABLE = "SidecarUnreachable"
    """The sidecar of a member does not answer, so the round cannot start and the pod is replaced."""
    POD_SUCCEEDED_EARLY = "PodSucceededEarly"
    """The pod of a member succeeded before the restore point of its round was chosen."""
    STATUS_BEHIND = "StatusBehind"
    """A sidecar or a pod has a higher round than the status, for example because etcd was restored."""
    RESUMED = "Resumed"
    """spec.suspend is false again, or the gang stopped for a resize that is no longer wanted."""
    ROLLED_BACK = "RolledBack"
    """A person has rolled the job back: the round starts from the step of spec.rollback. Also the reason of
    condition RolledBack=True."""
    RESIZED = "Resized"
    """spec.workers has changed. Also the reason of Resizing=False once the gang has trained with it."""
    RESIZE_FAILED = "ResizeFailed"
    """The gang failed with a new number of workers before its first step, and goes back to the number
    before. Also the reason of Resizing=False until spec.workers changes."""

    # --- Running, Restarting
    TRAINING = "Training"
    """Every rank has finished a step of this round."""
    RECOVERED = "Recovered"
    """The restart is over: every rank has finished a step of the new round."""
    RECOVERY_INTERRUPTED = "RecoveryInterrupted"
    """The restart ended before every rank had finished a step: another round began, or the job was suspended
    or failed."""
    STARTING = "Starting"
    """The round starts: pods are created, survivors are sealed, or ranks restore and rendezvous."""
    WAITING_FOR_PODS = "WaitingForPods"
    """A pod is not scheduled or has not started. The message contains the scheduler's message."""
    POD_NOT_STARTED = "PodNotStarted"
    """A pod has a node and has not started on it for 30 s, for example because a volume cannot be mounted.
    After startTimeoutSeconds it is created again on another node."""
    NODE_NAME_UNUSABLE = "NodeNameUnusable"
    """The template sets spec.nodeName, and a pod has not started there, because the node does not exist, is
    lost or fails. The message names the node. Write a nodeSelector instead."""
    CREATE_REFUSED = "CreateRefused"
    """A pod, Secret, Service or Checkpoint of the job could not be created (quota, admission, LimitRange).
    The message contains the error. The operator retries the create."""
    CONTAINER_CANNOT_START = "ContainerCannotStart"
    """The kubelet cannot pull an image or create a container. The job waits without a restart."""
    WAITING_FOR_HOLDERS = "WaitingForHolders"
    """A sidecar that may hold the newest step has not answered yet."""
    WAITING_FOR_STORE = "WaitingForStore"
    """No known checkpoint can be read, and the object store has not answered yet whether it has another."""
    RESTORE_POINT_UNAVAILABLE = "RestorePointUnavailable"
    """No checkpoint is what spec.restoreFrom asks for, or it cannot be restored. The job waits for one."""
    CHECKPOINTS_LOST = "CheckpointsLost"
    """Every copy of the committed steps is lost, and the gang waits for a person before it starts over. Also
    the reason of condition CheckpointsLost."""
    STARTED_OVER = "StartedOver"
    """Every copy of the committed steps is lost, and the gang starts from restoreFrom or from step 0."""
    ROLLING_BACK = "RollingBack"
    """RolledBack is False: the next round starts from the step of spec.rollback."""
    ROLLBACK_OUTDATED = "RollbackOutdated"
    """RolledBack is False: the restore point of another round was chosen after the order was given, so the
    order has no effect."""
    ROLLBACK_WITHDRAWN = "RollbackWithdrawn"
    """RolledBack is False: spec.rollback was removed before a round carried it out."""
    HOLDER_UNREACHABLE = "HolderUnreachable"
    """A lower step was chosen because a possible holder of the newest did not answer in time."""
    SHARDS_LOST = "ShardsLost"
    """A lower step, or none, was chosen because all copies of a shard of the newest step are gone."""
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
    """A suspension would lose every checkpoint: the job has no store, so its pods hold all copies. A resize
    needs the store as well."""
    NOT_PERSISTED = "NotPersisted"
    """A suspension, a resize or the end of a failed job would lose a step that is not in the store, or the
    newest upload is not recorded yet."""
    LAST_STEP_PERSISTED = "LastStepPersisted"
    """The newest committed step of a job that has failed is in the object store, so its pods are deleted."""
    CANNOT_PERSIST = "CannotPersist"
    """The newest committed step of a job that has failed can no longer be uploaded, for example because a pod
    with its shards is gone. The message says what a person can do."""
    PODS_GONE = "PodsGone"
    """All pods of a failed job are gone before its newest committed step was in the object store."""
    NOT_SUSPENDED = "NotSuspended"
    COMPLETED = "Completed"
    """Every rank returned 0, and every commit in the store is recorded."""
    BACKING_OFF = "BackingOff"
    """The next round is delayed: the gang failed repeatedly from the same step, or a sidecar has not answered
    since ranks failed."""
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    """The job needs more restarts within failurePolicy.window than failurePolicy.maxRestarts allows."""
    FAILURE_RULE = "FailureRule"
    """A rule of failurePolicy.rules with action FailJob matches a failure."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """activeDeadlineSeconds has passed."""

    NO_PROGRESS = "NoProgress"
    """Ranks failed repeatedly before they had finished a step, and no checkpoint is left to restore."""

    # --- Quarantined
    QUARANTINED = "Quarantined"
    """Ranks that restored a checkpoint failed repeatedly before they had finished a step. It is kept, and the
    gang restores an older one."""
    RELEASED = "Released"
    """No checkpoint is quarantined any more: a user has released it, a later drill found it intact, or the
    job has ended."""

    # --- Verified (of a Checkpoint)
    INTACT = "Intact"
    """A drill has read every byte in the object store, and all digests match."""
    DAMAGED = _DAMAGED
    """A drill has found a part in the object store that is missing, cut, swapped or wrong. The message names
    it. The checkpoint is quarantined. Also the reason of its condition Quarantined."""
    NOT_RESTORABLE = "NotRestorable"
    """No byte is damaged, but the state cannot be assembled for the number of ranks that the drill asked
    for."""
    NOT_READ = "NotRead"
    """The drill has not read the checkpoint to its end, so nothing is known. StoreUnavailable stands for a
    store that did not answer or refused the keys."""

    # --- Listed, QuotaPressure (of a CheckpointStore), UploadsHeld
    LISTED = "Listed"
    """The store was listed."""
    LIST_FAILED = "ListFailed"
    """The store could not be listed. What status.usage says is older."""
    QUOTA_REACHED = "QuotaReached"
    """The store, a namespace or a job holds as many bytes as a limit of the quota allows, or more. The next
    upload waits."""
    NEAR_QUOTA = "NearQuota"
    """At least 80 % of a limit of the quota are used."""
    PINS_EXCEED_QUOTA = "PinsExceedQuota"
    """A limit of the quota is below what pinned checkpoints hold. Nothing is deleted because of that."""
    WITHIN_QUOTA = "WithinQuota"
    """Less than 80 % of each limit are used. Of a job: no limit is reached that its uploads wait for."""
    NO_QUOTA = "NoQuota"
    """The store has no quota any more."""
    NOT_LISTED = "NotListed"
    """The store was not listed yet, so nothing is known of its quota. Uploads go on."""

    # --- NodesAvoided
    NODES_FAILED = "NodesFailed"
    """Workers failed on nodes as often as failurePolicy.avoidNodes allows, or a rule with action AvoidNode
    matched a failure there. New pods are created on other nodes."""
    NO_NODE_LEFT = "NoNodeLeft"
    """No node took a pod that avoids these nodes, so they are used again."""
    NODES_USED = "NodesUsed"
    """No node is avoided any more, because the failures are older than failurePolicy.avoidNodes.window."""

    # --- NodesLeaving
    NODE_LEAVING = "NodeLeaving"
    """A taint says that the node of a worker will be taken away soon. The worker's pod is deleted while the
    gang trains, so that the gang saves and the worker moves. Also the reason of the Event of this delete."""
    NODE_LEAVING_POD_STAYS = "NodeLeavingPodStays"
    """The same, but the pods on such nodes stay. The message says why."""
    NODES_STAY = "NodesStay"
    """No worker runs on such a node any more."""

    # --- Events about stragglers
    STRAGGLER = "Straggler"
    """A rank takes longer than the others for the same work, by failurePolicy.stragglers. The Event names its
    node. Nothing restarts because of it."""
    STRAGGLER_RECOVERED = "StragglerRecovered"
    """The rank is as fast as the others again."""
    # --- SparesReady
    SPARES_READY = "SparesReady"
    """As many spare pods as spec.spares says can take the place of lost workers."""
    SPARES_WAIT = "SparesWait"
    """Fewer spare pods are ready. The message says what the first of the others waits for."""

    # --- Events about spares
    SPARE_PROMOTED = "SparePromoted"
    """A spare pod has taken the place of a lost worker."""

    # --- Unschedulable
    NOT_SCHEDULED = "NotScheduled"
    """The pods of the gang could not all be scheduled within scheduleTimeoutSeconds, so all of them were
    deleted. A new round creates them again after a back-off."""
    NODES_KEPT = "NodesKept"
    """The same, but the pods stay on their nodes: a committed step would be lost with them."""
    SCHEDULED = "Scheduled"
    """All pods of the gang have nodes."""

    # --- Queued, Running
    WAITING_FOR_QUEUE = "WaitingForQueue"
    """Pods of the gang wait until Kueue admits them to their queue. The message names the queue."""
    ADMITTED_BY_QUEUE = "AdmittedByQueue"
    """Kueue has admitted all pods of the gang."""
    QUEUE_CHANGES_LATER = "QueueChangesLater"
    """The labels of the job name another queue or priority than its pods have. Pods cannot change it: the
    labels take effect when the gang has no pods that have started, for example after a suspension."""
    NOT_QUEUED = "NotQueued"
    """The pods of the gang are in no queue."""
    # --- WorkersMissing
    SHRUNK = "Shrunk"
    """There were no nodes for some workers of an elastic gang, so it continues without them. Also why a round
    begins."""
    CANNOT_SHRINK = "CannotShrink"
    """There are no nodes for some workers of an elastic gang, and it cannot continue without them. The
    message says why."""
    GROWING = "Growing"
    """Nodes were found for missing workers. The gang saves, stops and continues with them."""
    GROWN = "Grown"
    """Why a round begins: nodes were found for missing workers."""
    ALL_WORKERS = "AllWorkers"
    """The gang has as many workers as spec.workers."""

    # --- SpecApplied
    SPEC_APPLIED = "SpecApplied"
    APPLIES_LATER = "AppliesLater"
    """The pods were created from an earlier value of a field."""
    PODS_DIFFER = "PodsDiffer"
    """Some pods have the present template, and others an earlier one."""
    TEMPLATE_CHANGED = "TemplateChanged"
    """Pods in which no rank ever ran are created again from the present template."""

    # --- Reconciled
    PASS_FAILED = "PassFailed"
    """A pass of the operator over the job ended with an exception, or one of its actions failed."""
    PASS_SUCCEEDED = "PassSucceeded"

    # --- FailureRulesApply
    RULE_NEVER_MATCHES = "RuleNeverMatches"
    """The rules before a rule of failurePolicy.rules match all of its values, so that it has no effect."""
    RULES_APPLY = "RulesApply"

    # --- LastCheckpointSucceeded, RemoteTierHealthy, Checkpoint conditions and Events
    COMMITTED = "Committed"
    PERSISTED = "Persisted"
    IMPORTED = "Imported"
    """spec.stored says that an object store has it: this cluster did not save it, or had lost its record."""
    SAVE_REQUESTED = "SaveRequested"
    TOO_MANY_REQUESTS = "TooManyRequests"
    """The job has as many open requests to save as it may have."""
    JOB_ENDED = "JobEnded"
    """The job ended before a request to save was fulfilled."""
    JOB_NOT_FOUND = "JobNotFound"
    """A request to save names a job that does not exist."""
    STEP_NOT_COMMITTED = "StepNotCommitted"
    """A person has created a Checkpoint of a step. Only the operator records commits."""
    PINNED = "Pinned"
    NOT_PINNED = "NotPinned"
    PRUNING = "Pruning"
    DATA_KEPT = "DataKept"
    """A Checkpoint with deletionPolicy DeleteData was deleted, but its data could not be deleted."""
    DATA_DELETED = "DataDeleted"
    """Event of a CheckpointStore: a pod has deleted checkpoints of a job that is over, suspended or gone."""
    DELETE_FAILED = "DeleteFailed"
    """Event of a CheckpointStore: such a pod failed. It is tried again."""
    STORE_HEALTHY = "StoreHealthy"


# --------------------------------------------------------------------------- texts of messages


def first_cause(text: str) -> str:
    """Return the first of the errors that a sidecar lists, in one line, and the number of the others.

    The errors are separated by line breaks, or by a semicolon and a space. The logs of the sidecars have all.
    """
    errors = [part for line in text.splitlines() for part in line.split("; ") if part]
    if len(errors) < 2:
        return text
    return f"{errors[0]} (and {len(errors) - 1} more errors, which the logs of the sidecars have)"


# --------------------------------------------------------------------------- how a rank ended


LAST_OUTPUT_CHARACTERS = 700
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
"""Prefix that torch's excepthook writes before each line of a traceback."""
_FRAME = re.compile(r'^  File ".*", line \d+')


def how_it_ended(dead: DeadRank) -> str:
    """Describe the end of a rank for conditions and Events: exit code or signal, then its error output.

    The output is left out for SIGKILL and SIGTERM, because it does not explain a kill from outside.
    """
    text = _how(dead.code)
    if dead.out_of_memory:
        text += f", and its container ran out of memory: {dead.out_of_memory}"
    output = "" if _was_killed(dead.code) else _last_output(dead.message)
    return f"{text}: {output}" if output else text


def _was_killed(code: int) -> bool:
    return code in (-signal.SIGKILL, -signal.SIGTERM)


def _how(code: int) -> str:
    if _was_killed(code):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _last_output(output: str) -> str:
    """Return the error that follows the last traceback, or the end of the output if there is none."""
    lines = [_RANK_PREFIX.sub("", line).rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    error = _after_traceback(lines)
    if error:
        return "\n".join(error)[:LAST_OUTPUT_CHARACTERS]
    text = "\n".join(lines)
    if len(text) <= LAST_OUTPUT_CHARACTERS:
        return text
    tail = text[-LAST_OUTPUT_CHARACTERS:]
    return tail[tail.find("\n") + 1 :]


def _after_traceback(lines: list[str]) -> list[str]:
    """Return the lines after the last frame and its source, or nothing if there is no frame.

    Lines that are indented by four spaces or more belong to the source. The text of an error may be indented
    by less.
    """
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return []
    rest = lines[frames[-1] + 1 :]
    source = next((i for i, line in enumerate(rest) if not line.startswith("    ")), len(rest))
    return rest[source:]
