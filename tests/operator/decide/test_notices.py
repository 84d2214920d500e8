"""Events that follow from conditions."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import START, condition, job, now, pod, status

from holdfast_core.api import JobCondition, RestorePointStatus, TrainingJobStatus
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.report.status import notices
from holdfast_operator.model.actions import EmitEvent, EventKind, WriteStatus
from holdfast_operator.model.job import Observed
from holdfast_operator.model.reasons import Reason

REMOTE, SAVED = JobCondition.REMOTE_TIER_HEALTHY, JobCondition.LAST_CHECKPOINT_SUCCEEDED
RUNNING = JobCondition.RUNNING


def status_with(kind: JobCondition, value: bool | None, reason: str) -> TrainingJobStatus:
    if value is None:
        return TrainingJobStatus()
    return TrainingJobStatus(conditions=(condition(kind, value, reason, "the message", START),))


@pytest.mark.parametrize(
    ("kind", "before", "after", "event"),
    [
        (REMOTE, (None, ""), (False, "AccessDenied"), EventKind.WARNING),
        (REMOTE, (True, "StoreHealthy"), (False, "AccessDenied"), EventKind.WARNING),
        (REMOTE, (False, "Unavailable"), (False, "AccessDenied"), EventKind.WARNING),
        (REMOTE, (False, "AccessDenied"), (False, "AccessDenied"), None),
        (REMOTE, (False, "AccessDenied"), (True, "StoreHealthy"), EventKind.NORMAL),
        (REMOTE, (None, ""), (True, "StoreHealthy"), None),
        (REMOTE, (True, "StoreHealthy"), (True, "StoreHealthy"), None),
        (SAVED, (True, "Committed"), (False, "NodeVolumeFull"), EventKind.WARNING),
        (SAVED, (False, "NodeVolumeFull"), (True, "Committed"), EventKind.NORMAL),
        (RUNNING, (False, "Starting"), (False, "ContainerCannotStart"), EventKind.WARNING),
        (RUNNING, (False, "ContainerCannotStart"), (False, "ContainerCannotStart"), None),
        (RUNNING, (True, "Training"), (False, "Starting"), None),
    ],
)
def test_a_changed_condition_sends_its_event(
    kind: JobCondition,
    before: tuple[bool | None, str],
    after: tuple[bool | None, str],
    event: EventKind | None,
) -> None:
    found = notices(status_with(kind, *before), status_with(kind, *after))
    expected = [] if event is None else [EmitEvent(event, after[1], "the message")]
    assert found == expected


def test_image_that_cannot_be_pulled_is_an_event_once() -> None:
    stuck = pod(0, waiting_reason="ErrImagePull", waiting_message="no such image")
    observed = Observed(
        job=job(workers=1, status=status(members=(0,), restore_point=RestorePointStatus())),
        pods=(stuck,),
    )
    decision = decide(observed, now())
    (event,) = [a for a in decision.actions if isinstance(a, EmitEvent)]
    assert event.reason == Reason.CONTAINER_CANNOT_START
    assert "no such image" in event.message
    (write,) = [a for a in decision.actions if isinstance(a, WriteStatus)]
    again = Observed(job=job(workers=1, status=write.status), pods=(stuck,))
    assert not [a for a in decide(again, now(1)).actions if isinstance(a, EmitEvent)]
