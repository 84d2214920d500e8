"""Facts about a gang whose number of workers changes (ADR 0011). Pure.

The present number is that of status.members. The wanted one is spec.workers, or the smaller number for which
an elastic gang has nodes (ADR 0011). A number with which the ranks failed before their first step is refused:
the gang goes back to the number before, and the refused one is tried again once spec.workers has changed.
An elastic gang then tries lower numbers only, so that it never alternates between two numbers.
"""

from __future__ import annotations

from holdfast_core.api import (
    ElasticSpec,
    ElasticStatus,
    Gang,
    ResizeStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.scheduling import waits_for_nodes
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now, Seen, queue_of


def elastic_of(job: Gang) -> ElasticSpec | None:
    """Return spec.elastic, or None without it and for a job in a queue of Kueue.

    Kueue admits all pods of a group or none of them, and placeholders would take nodes without its consent.
    """
    return job.spec.elastic if queue_of(job) is None else None


def wanted_workers(job: Gang, status: TrainingJobStatus) -> int:
    """Return the number of workers that the gang is to have: spec.workers, or fewer if nodes are missing."""
    spec, elastic, found = job.spec, elastic_of(job), status.elastic
    if elastic is None or found is None or found.of_workers != spec.workers:
        return spec.workers
    return min(spec.workers, max(found.workers, elastic.min))


def elastic_record(job: Gang, workers: int) -> ElasticStatus | None:
    """Return status.elastic of a gang with this number of workers, or None if it has all of spec.workers."""
    spec, elastic = job.spec, elastic_of(job)
    if elastic is None or not elastic.min <= workers < spec.workers:
        return None
    return ElasticStatus(workers=workers, of_workers=spec.workers)


def is_growing(job: Gang, status: TrainingJobStatus) -> bool:
    """Return whether nodes were found for more workers than an elastic gang has."""
    found, wanted = status.elastic, wanted_workers(job, status)
    recorded = (
        found is not None and found.workers == wanted and found.of_workers == job.spec.workers
    )
    return recorded and len(status.members) < wanted


def refused_workers(job: Gang, status: TrainingJobStatus) -> int | None:
    """Return the number with which the gang failed before its first step, if spec.workers is the same."""
    record = status.resize
    if record is None or record.refused_of_workers != job.spec.workers:
        return None
    return record.refused_workers


def describe_refused(refused: int, present: int) -> str:
    """Say which number of workers is refused, and with which number the gang continues."""
    return (
        f"the gang failed with {refused} workers before its first step, and continues with {present}. It "
        "tries the other number again after spec.workers has changed"
    )


def is_refused(world: World) -> bool:
    """Return whether the gang has failed with the number of workers that it is to have."""
    job, status = world.observed.job, world.status
    return refused_workers(job, status) == wanted_workers(job, status)


def is_asked_for(world: World) -> bool:
    """Return whether the gang is to have another number of workers than it has, and it is not refused."""
    wanted = wanted_workers(world.observed.job, world.status)
    return bool(world.members) and wanted != len(world.members) and not is_refused(world)


def next_workers(world: World) -> int:
    """Return the number of workers of a gang that starts again with new pods."""
    wanted = wanted_workers(world.observed.job, world.status)
    return len(world.members) if is_refused(world) else wanted


def resized(world: World, workers: int, round_: RestartRound) -> ResizeStatus | None:
    """Return status.resize of a round that begins with this number of workers.

    There is a way back to the number of workers that last trained, if they have committed a step.
    """
    old = world.status.resize
    if workers == len(world.members):
        return old
    before = len(world.members)
    if old is not None and old.from_workers is not None:
        before = old.from_workers
    untried = workers != before and readable.recorded_commit(world) is not None
    from_workers = before if untried else None
    if old is not None and refused_workers(world.observed.job, world.status) is not None:
        return changed(old, round=round_, from_workers=from_workers)
    return ResizeStatus(round=round_, from_workers=from_workers)


def is_untried(status: TrainingJobStatus) -> bool:
    """Return whether no round has trained with the present number of workers since it changed."""
    return status.resize is not None and status.resize.from_workers is not None


# --------------------------------------------------------------------------- missing nodes


def lacks_nodes(world: World, memory: JobMemory, now: Now) -> bool:
    """Return whether pods of an elastic gang have been without nodes for elastic.shrinkAfterSeconds.

    The time begins when the pods of earlier rounds have ended, because the gang waits for their nodes.
    """
    elastic = elastic_of(world.observed.job)
    since = memory.seen_at(Seen.LACKING)
    if elastic is None or since is None or not waits_for_nodes(world):
        return False
    return seconds_since(since, now) >= elastic.shrink_after_seconds


def workers_with_nodes(world: World) -> int:
    """Return the number of members whose pods have nodes that are not lost."""
    return sum(1 for m in world.members if m.alive and m.pod is not None and m.pod.node is not None)


def fewer_workers(world: World) -> int:
    """Return the number of workers with which the gang could continue. It may be below elastic.min."""
    found = workers_with_nodes(world)
    refused = refused_workers(world.observed.job, world.status)
    return found if refused is None else min(found, refused - 1)


def too_few(world: World) -> str | None:
    """Return why the gang cannot continue with `fewer_workers`, or None if it can."""
    elastic, workers = elastic_of(world.observed.job), fewer_workers(world)
    if elastic is None or workers >= elastic.min:
        return None
    found = workers_with_nodes(world)
    if found < elastic.min:
        return f"there are nodes for {found} workers, and elastic.min is {elastic.min}"
    return f"it failed with {workers + 1} workers before its first step, and elastic.min is {elastic.min}"
