"""What a decision does, read from its whole objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast_core.api import CheckpointStatus, TrainingJobStatus
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    Decision,
    DesiredObject,
    described,
)
from holdfast_operator.model.job import PodView
from holdfast_operator.model.ownership import worker_identity
from holdfast_operator.watch.records import pod_view


def of_kind(actions: Iterable[Action], *kinds: type | str) -> list[Any]:
    """Return the actions of these types, and those that do this: "create Pod"."""
    types = tuple(k for k in kinds if isinstance(k, type))
    texts = tuple(k for k in kinds if isinstance(k, str))
    return [a for a in actions if isinstance(a, types) or does(a, *texts)]


def does(action: Action, *texts: str) -> bool:
    """Return whether the description of the action begins with the words of one of these: "create Pod"."""
    return f"{described(action)} ".startswith(tuple(f"{text} " for text in texts))


def begun(decision: Decision) -> BeginRound:
    """Return the beginning of a round, which the decision must contain."""
    [found] = of_kind(decision.actions, BeginRound)
    assert isinstance(found, BeginRound)
    return found


def counting(status: TrainingJobStatus) -> int:
    """Return the number of recorded restarts that count towards maxRestarts."""
    return sum(not r.ignored for r in status.recent_restarts)


def created_pods(actions: Iterable[Action]) -> list[PodView]:
    """Return the pods that are created, as a watch would show them."""
    found = []
    for action in actions:
        if isinstance(action, DesiredObject) and action.kind == "Pod":
            stamps = {"uid": "new", "creationTimestamp": "2026-01-01T00:00:00Z"}
            metadata = {**action.body["metadata"], **stamps}
            raw = {**action.body, "metadata": metadata}
            identity = worker_identity(raw)
            assert identity is not None, f"{action.name} is no pod of a worker"
            found.append(pod_view(raw, identity))
    return found


def step_of(wanted: DesiredObject) -> int | None:
    """Return spec.step that a write of a Checkpoint sets, or None."""
    found: int | None = (wanted.body.get("spec") or {}).get("step")
    return found


def status_of(wanted: DesiredObject) -> CheckpointStatus:
    """Return the status that a write of a Checkpoint sets."""
    given = {k: v for k, v in wanted.body["status"].items() if v is not None}
    return CheckpointStatus.from_dict(given)
