"""Failures, the restarts that they lead to, and what restarts are evidence of. Pure.

decide/failures.py finds the failures and applies the rules. Disruptions never count towards
failurePolicy.maxRestarts and never wait.

Failures that count against the checkpoint that the round restored:
1. A restart counts against the checkpoint that its round had restored if ranks failed by themselves before
   one had finished a step. It counts for as long as the job restores or quarantines this checkpoint, also
   outside of failurePolicy.window.
2. After failurePolicy.quarantineAfter of them, CAS 1 of the next round quarantines the checkpoint, if an
   older one can be restored instead. Otherwise the gang tries again until its budget is spent.
3. If the older one fails as often, the cause is not the checkpoint: a data set or a licence server may be
   away. CAS 1 of the next round releases what was quarantined for it, and the newest is restored again.
   Nothing is quarantined until the gang has trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from holdfast_core.api import (
    MAX_RECENT_RESTARTS,
    FailureAction,
    JobCondition,
    RestartRecord,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import CheckpointId, Worker
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.world import World, back_to
from holdfast_operator.model.reasons import Reason

ALL_LOST_SECONDS = 300.0
"""Wait before several lost nodes count as failed while no sidecar of the job answers. A control plane that is
cut off from the nodes is more likely than the loss of all of them. Kubernetes waits as long before it
evicts pods."""
CANNOT_START = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "StartError",
    }
)
"""The kubelet's reasons for containers that can start once a user corrects the image or the pod."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of one worker, or of the gang (worker None)."""

    reason: Reason
    message: str
    worker: Worker | None = None
    disruption: bool = False
    exit_code: int | None = None
    replace_pod: bool = False
    confirm_gone: str | None = None
    """Name of a pod whose absence is the only evidence of this failure."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the failures of a pass lead to."""

    failures: tuple[Failure, ...]
    """All failures, causes before consequences, with the pods that a rule replaces."""
    action: FailureAction = FailureAction.RESTART_GANG
    matched: Failure | None = None
    """The first failure that a rule of failurePolicy matches. None: no rule matches."""
    avoided: frozenset[Worker] = frozenset()
    """Workers whose nodes the rule avoids."""
    note: str = ""
    """Which rule applies, for conditions and Events. "" without a rule."""
    ignored: bool = False
    """Whether the restart does not count towards failurePolicy.maxRestarts."""
    failed_from: CheckpointId | None = None
    """The restore point, if ranks failed by themselves before one had finished a step from it."""
    blamed: Mapping[Worker, Failure] = field(default_factory=dict)
    """Workers on whose nodes the failures count."""

    @property
    def disruption(self) -> bool:
        """Return whether any of the failures is a disruption.

        One disruption explains the other failures: ranks die when one of their peers disappears.
        """
        return any(f.disruption for f in self.failures)

    @property
    def text(self) -> str:
        """Return the message of the first failure, and the rule that applies."""
        message = self.failures[0].message
        return f"{message}; {self.note}" if self.note else message

    @property
    def confirm_gone(self) -> tuple[str, ...]:
        return tuple(f.confirm_gone for f in self.failures if f.confirm_gone is not None)


# --------------------------------------------------------------------------- restarts


FREE_RESTARTS = 2
"""Restarts from the same step that begin without a delay."""
MAX_DELAY_SECONDS = 60.0
FIRST_START_SECONDS = 15.0
MAX_START_SECONDS = 600.0
"""Shortest and longest back-off, before it is shortened at random, of a gang that ends before its first
step."""


def kept_restarts(world: World) -> tuple[RestartRecord, ...]:
    """Return the restarts of the window, those that count, and those that are evidence about checkpoints.

    The last ones failed from the present restore point or from a quarantined checkpoint. A script that takes
    half an hour until it fails would otherwise never fail often enough from one checkpoint.
    """
    point = world.status.restore_point
    bases = set(world.status.quarantined)
    if point is not None and point.id is not None:
        bases.add(point.id)
    window = world.spec.failure_policy.window_length
    saved_in = _round_of_newest_commit(world)
    return tuple(
        r
        for r in world.status.recent_restarts
        if world.now.is_within(window, r.at)
        or (r.round > saved_in and not r.ignored)
        or r.failed_from in bases
    )


def counted(records: Iterable[RestartRecord], world: World) -> tuple[RestartRecord, ...]:
    """Return the restarts that count towards failurePolicy.maxRestarts.

    They are those within failurePolicy.window, and all since the newest committed step was saved. With the
    window alone, a gang that fails slowly, or waits long before each restart, would restart for ever.
    """
    window = world.spec.failure_policy.window_length
    saved_in = _round_of_newest_commit(world)
    return tuple(
        r
        for r in records
        if not r.ignored and (r.round > saved_in or world.now.is_within(window, r.at))
    )


def _round_of_newest_commit(world: World) -> int:
    """Return the round that saved the newest committed step, as far as the operator knows, or -1.

    A round that has no restore point yet follows the last round that had one.
    """
    status = world.status
    committed, point = status.last_committed_step, status.restore_point
    if committed is None or (point is None and not status.lineage):
        return -1  # a restore point of another job counts the rounds of that job
    if point is not None:
        present, base = world.round, point.id
    else:
        present, base = status.lineage[-1].round, status.lineage[-1].base
    return present if base is None or committed > base.step else base.round


def with_restart(
    records: tuple[RestartRecord, ...], new: RestartRecord
) -> tuple[RestartRecord, ...]:
    """Return the records and one more, MAX_RECENT_RESTARTS at most.

    The oldest ignored restarts are dropped first. So no restart that counts is dropped: there are at most
    maxRestarts of them, which is lower than MAX_RECENT_RESTARTS.
    """
    found = [*records, new]
    while len(found) > MAX_RECENT_RESTARTS:
        found.pop(next((i for i, r in enumerate(found) if r.ignored), 0))
    return tuple(found)


def budget_spent(world: World) -> bool:
    """Return whether one more restart that counts would exceed failurePolicy.maxRestarts."""
    restarts = len(counted(world.status.recent_restarts, world))
    return restarts >= world.spec.failure_policy.max_restarts


def delay_seconds(world: World) -> float:
    """Return the back-off before the next round, in seconds since the failure was first seen.

    It is 0 if a step was committed since the restore point. Without the back-off, a gang
    that fails repeatedly from the same step would spend its restart budget within seconds, before a user can
    look at it. The wait is between a half and the whole of 1, 2, 4 and so on seconds (ADR 0010). A gang that
    ends before its first step mostly lacks something outside of it, which takes minutes to come back. Its
    wait begins with FIRST_START_SECONDS, so that the default budget lasts for a quarter of an hour at least.
    """
    saved_in = _round_of_newest_commit(world)
    futile = sum(1 for r in kept_restarts(world) if r.round > saved_in)
    if futile < FREE_RESTARTS:
        return 0.0
    doubled = 2.0 ** min(futile - FREE_RESTARTS, 10)
    whole = min(doubled, MAX_DELAY_SECONDS)
    if not trained_since_restored(world):
        whole = min(FIRST_START_SECONDS * doubled, MAX_START_SECONDS)
    return whole * (1 + share_of(world)) / 2


def share_of(world: World) -> float:
    """Return a number in [0, 1) that is the same in every pass over this round of this job.

    Jobs that fail together, for example because their store does not answer, get different numbers, so they
    do not restart together. A random number would change with each pass and each restart of the operator.
    """
    seed = f"{world.job.uid}/{world.round}".encode()
    return int.from_bytes(blake3(seed).digest(length=4), "big") / 2**32


# --------------------------------------------------------------------------- evidence against checkpoints


def failed_from(world: World) -> CheckpointId | None:
    """Return the restore point if ranks that fail now may fail because of it, else None.

    They do not if one of them has finished a step.
    """
    point = world.status.restore_point
    if point is None or point.step is None or point.round is None or point.job_uid is not None:
        return None
    resize = world.status.resize
    if resize is not None and resize.from_workers is not None:
        return None  # the ranks may be unable to reshard it (sizes.py)
    return None if trained_since_restored(world) else CheckpointId(point.step, point.round)


def with_evidence(
    status: TrainingJobStatus, world: World, records: tuple[RestartRecord, ...]
) -> TrainingJobStatus:
    """Return the status in which the restore point is quarantined, or the checkpoints above it are released.

    Args:
        status: The status of the next round.
        records: The restarts, with the one that begins this round.
    """
    point = world.status.restore_point
    id_ = None if point is None else point.id
    if id_ is None or point is None or records[-1].failed_from != id_:
        return status
    counts = _counts(world, records)
    if _is_elsewhere(world, counts):
        return _released(status, counts)
    if not is_due(world, records[:-1], id_):
        return status
    return changed(status, quarantined=(*status.quarantined, id_))


def is_due(world: World, earlier: tuple[RestartRecord, ...], failed_from: CheckpointId) -> bool:
    """Return whether one more failure than the `earlier` ones quarantines this checkpoint."""
    policy = world.spec.failure_policy
    counts = _counts(world, earlier)
    counts[failed_from] += 1
    if counts[failed_from] < policy.quarantine_after or _is_elsewhere(world, counts):
        return False
    if failed_from.step in policy.released_steps or failed_from in world.status.quarantined:
        return False
    return readable.has_older(world, failed_from)


def _counts(world: World, records: Iterable[RestartRecord]) -> Counter[CheckpointId]:
    """Count the failures from each checkpoint since the restore point was saved."""
    point = world.status.restore_point
    saved = -1 if point is None or point.round is None else point.round
    found = (r.failed_from for r in records if r.round > saved)
    return Counter(id_ for id_ in found if id_ is not None)


def _is_elsewhere(world: World, counts: Counter[CheckpointId]) -> bool:
    """Return whether gangs failed so often from several checkpoints that none of them is the cause."""
    after = world.spec.failure_policy.quarantine_after
    return sum(n >= after for n in counts.values()) > 1


def _released(status: TrainingJobStatus, counts: Counter[CheckpointId]) -> TrainingJobStatus:
    """Return the status in which the newest of these checkpoints can be restored again.

    No rank has trained since they were quarantined.
    """
    newest = max(id_.step for id_ in counts)
    kept = tuple(q for q in status.quarantined if q not in counts)
    if kept == status.quarantined:
        return status
    return changed(
        status,
        quarantined=kept,
        lineage=back_to(newest, status.lineage),
        last_committed_step=newest,
    )


def trained_since_restored(world: World) -> bool:
    """Return whether a rank may have finished a step of this round, or none has been started."""
    point, state = world.status.restore_point, world.coordinator
    if point is None or state is None or world.status.is_true(JobCondition.RUNNING):
        return True
    return state.progress is not None and state.progress.last > (point.step or 0)
