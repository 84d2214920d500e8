"""Count restarts of a gang that hangs at one step, and say how to announce a pause (ADR 0014). Pure.

An honest pause that the script does not announce ends as a hang at the same step in each round. So each such
restart doubles the limits, until the pause fits in or a user has announced it. It does not double the limit
of a gang whose ranks all wait for others: that is a deadlock, and it spends the budget of restarts.
"""

from __future__ import annotations

from holdfast_core.api import HangsStatus, JobCondition, TrainingJobStatus, changed
from holdfast_core.ids import Step
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason

MAX_DOUBLINGS = 6
"""Number of doublings of the limits, at most: half an hour becomes 32 hours."""
_MAX_CAUSE_CHARACTERS = 600


def factor(status: TrainingJobStatus) -> float:
    """Return by what the limits of ranks that may be at work are multiplied in this round."""
    return 1.0 if status.hangs is None else 2.0 ** min(status.hangs.restarts, MAX_DOUBLINGS)


def with_hang(status: TrainingJobStatus, world: World, cause: str, now: Now) -> TrainingJobStatus:
    """Return the status of a round that begins because the gang hangs.

    The condition is true from the second hang at the same step on.

    Args:
        cause: Message of the hang.
    """
    progress = None if world.coordinator is None else world.coordinator.progress
    if progress is None:
        return status
    step, known = progress.last, status.hangs
    again = known is not None and step <= known.step
    hangs = (
        changed(known, restarts=known.restarts + 1)
        if known is not None and again
        else HangsStatus(step=step, restarts=1)
    )
    if known is not None and not again:
        status = _passed(status, known.step, world, now)
    status = changed(status, hangs=hangs)
    if not again:
        return status
    text = (
        f"no step followed step {hangs.step} in {hangs.restarts} rounds in a row: "
        f"{cause[:_MAX_CAUSE_CHARACTERS]}. Until a step follows, the limits of ranks that do not wait for "
        f"others are {factor(status):.0f} times as long. If the ranks were at work, announce it around that "
        'code: `with checkpointer.paused("an evaluation"):`. Or set failurePolicy.hangs.seconds to more than '
        "it takes"
    )
    generation = world.observed.job.generation
    return status.with_condition(
        JobCondition.HANGS_REPEAT, True, Reason.HUNG, text, now.utc, generation
    )


def with_passed_hangs(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status without hangs at a step that all ranks have passed."""
    hangs = status.hangs
    if hangs is None or status.step is None or status.step <= hangs.step:
        return status
    return _passed(changed(status, hangs=None), hangs.step, world, now)


def _passed(status: TrainingJobStatus, step: Step, world: World, now: Now) -> TrainingJobStatus:
    kind, generation = JobCondition.HANGS_REPEAT, world.observed.job.generation
    if not status.is_true(kind):
        return status
    text = f"a step followed step {step}"
    return status.with_condition(kind, False, Reason.RECOVERED, text, now.utc, generation)
