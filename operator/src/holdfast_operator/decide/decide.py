"""Decide what one pass does about one job. Pure: no clock, no I/O, no randomness.

The rules apply in this order, and the first that fits decides the pass:
 1. The job is being deleted.
 2. A pod of the job cannot be parsed: the pass only reports it.
 3. The job is over.
 4. The job is suspended and stays so or resumes, or it can be suspended immediately.
 5. The job has no round yet: acceptance and the first round (CAS 1).
 6. activeDeadlineSeconds has passed: the job fails.
 7. Failures: a new round (CAS 1), a wait, or the end of the job (failures.py).
 8. Completion, or suspension after the gang has saved and stopped.
 9. spec.workers has changed, and no committed step would be lost with the pods: a new round (CAS 1).
10. An elastic gang is resized when there are nodes for missing workers, and begins a round (CAS 1) without
    the workers for which there are none.
11. The pods cannot all be scheduled in time: a new round (CAS 1) creates them again after a back-off.
12. Pods have not started on their nodes in time: the nodes are avoided, and the pods created again.
13. Adopted pods that have started are recorded in the status.
14. The round has no restore point: choose it (CAS 2), or seal survivors and create pods until it can be.
15. Seals, pods, ROUND, Checkpoint objects, and one status write if it is due.
Each pass but those of rule 2 and those that begin a round also deletes placeholders that are not needed.
Pods that are being deleted lose Kueue's finalizer, whichever rule decides (queue.py).
A pass that begins a round or chooses its restore point only emits Events besides. No pass writes the status
more than once.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition
from holdfast_operator.decide import ends, failures, lifecycle, new_rounds, rounds
from holdfast_operator.decide.facts import queue, sizes
from holdfast_operator.decide.facts.world import World, advance, is_over, see_failure
from holdfast_operator.decide.report.conditions import unreadable_pass
from holdfast_operator.decide.report.notices import with_notices
from holdfast_operator.decide.writes import fail_job, written
from holdfast_operator.model.actions import (
    BeginRound,
    ChooseRestorePoint,
    Decision,
    Delete,
    ReleasePod,
    normal,
)
from holdfast_operator.model.job import Now, Observed
from holdfast_operator.model.reasons import Reason

__all__ = ["decide"]
_WITHOUT_FAILURES = (
    new_rounds.resize_gang,
    new_rounds.grow_gang,
    new_rounds.shrink_gang,
    new_rounds.schedule,
    new_rounds.replace_late_pods,
    rounds.record_births,
)
"""The rules 9 to 13. Each returns None if it does not apply."""


def decide(observed: Observed, now: Now) -> Decision:
    """Return the actions of one pass over one job, and the memory for the next pass."""
    world = World(observed, now)
    advance(world)
    decision, source = _decide(world), world.source
    deletes = decision.deletes
    if not isinstance(decision.status, BeginRound | ChooseRestorePoint):
        deletes = (*deletes, *_in_each_pass(world))
    decision = replace(
        decision,
        memory=world.memory,
        objects=tuple(o for o in decision.objects if source.may_put(o.kind)),
        deletes=tuple(d for d in deletes if source.may_delete(d.kind)),
    )
    return with_notices(decision, world)


def _in_each_pass(world: World) -> list[Delete | ReleasePod]:
    """Return what is done to pods whichever rule decides, except in a pass that begins a round."""
    observed = world.observed
    deletes: list[Delete | ReleasePod] = []
    deletes.extend(queue.due(world))
    if observed.placeholders and not observed.unreadable:
        deletes.extend(sizes.unneeded_placeholders(world))
    return deletes


def _decide(world: World) -> Decision:
    job = world.job
    if job.deleting:
        freed = ends.release_all(world, "the job is being deleted")
        return Decision.of(freed, None, "the job is being deleted")
    readable = unreadable_pass(world)
    if readable is not None:
        return readable
    if is_over(job.status):
        return rounds.over(world)
    if job.status.is_true(JobCondition.SUSPENDED) or (
        job.spec.suspend and lifecycle.may_suspend_now(world)
    ):
        return rounds.suspended(world)
    if job.status.restart_round is None:
        return new_rounds.first_round(world)
    deadline = lifecycle.deadline_passed(world)
    if deadline is not None:
        return fail_job(world, deadline)
    found = failures.find(world)
    see_failure(world, bool(found))
    if found:
        return failures.plan(world, found)
    done = lifecycle.completed(world)
    if done is not None and (not job.spec.suspend or job.spec.store is None):
        event = normal(Reason.COMPLETED, "every rank returned 0")
        return written(world, done, [event], "complete")
    if job.spec.suspend and job.spec.store is not None and lifecycle.stopped_and_saved(world):
        status = lifecycle.suspended(world)
        return written(world, status, [], "the gang has stopped and saved: the job is suspended")
    for rule in _WITHOUT_FAILURES:
        decision = rule(world)
        if decision is not None:
            return decision
    if job.status.restore_point is None:
        return rounds.choose(world)
    return rounds.run(world)
