"""A gang of two workers that trains in round 2 and persists its checkpoints."""

from __future__ import annotations

from typing import Any

from tests.support.operator.builders import (
    job,
    manifest_digest,
    pod,
    sidecar,
    status,
    store,
)
from tests.support.operator.progress import progress_of

from holdfast_core.api import Checkpoint, LineageEntry, PersistedStep, RestorePointStatus
from holdfast_core.ids import CheckpointId, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, RestorePoint
from holdfast_operator.model.job import JobMemory, Observed


def persisted(step: int, round_: int = 2) -> PersistedStep:
    return PersistedStep(
        step=Step(step), round=RestartRound(round_), manifest=manifest_digest(step, round_)
    )


def point(step: int, round_: int = 2) -> RestorePoint:
    return RestorePoint(Step(step), RestartRound(round_), manifest_digest(step, round_))


def world(
    *,
    committed: PersistedStep | None = None,
    reported: RestorePoint | None = None,
    checkpoints: tuple[Checkpoint, ...] = (),
    coordinator: dict[str, Any] | None = None,
    memory: JobMemory | None = None,
    cloned: frozenset[str] = frozenset(),
    **spec: Any,
) -> Observed:
    pods = (pod(0), pod(1))
    return Observed(
        job=job(
            2,
            status(
                2,
                (0, 0),
                restore_point=RestorePointStatus(step=Step(30), round=RestartRound(1)),
                coordinator=Worker(0),
                lineage=(
                    LineageEntry(
                        round=RestartRound(2), base=CheckpointId(Step(30), RestartRound(1))
                    ),
                ),
                last_persisted=committed,
            ),
            **{"store": "main", "object_every_steps": 10, **spec},
        ),
        pods=pods,
        sidecars=tuple(sidecar(p, 2, version=1) for p in pods),
        store=store(),
        coordinator=CoordinatorState(
            **{
                "version": 7,
                "round": RestartRound(2),
                "running": True,
                "progress": progress_of(44, 43),
                "last_replicated": point(40),
                "last_persisted": reported,
                "last_persisted_bytes": 1234,
                **(coordinator or {}),
            }
        ),
        checkpoints=checkpoints,
        cloned=cloned,
        memory=memory or JobMemory(round=RestartRound(2), round_seen_at=0.0),
    )
