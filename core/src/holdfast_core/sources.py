"""Which checkpoint spec.restoreFrom stands for. Pure.

A source is looked for until the first round of a job has chosen it. From then on the lineage has its
manifest, and a gang that starts over gets the same checkpoint, whatever its job has saved since. Retention
asks the same function, so that the checkpoint which a job would choose now is not pruned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    Gang,
    LineageEntry,
    on_lineage,
)
from holdfast_core.api.training_job import RestoreFromSpec
from holdfast_core.ids import JobUid, age_of
from holdfast_core.retention import BestMode

_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class NoSource:
    """Why spec.restoreFrom stands for no checkpoint now."""

    is_known: bool
    """Whether what it names exists."""
    message: str
    name: str | None = None
    """The Checkpoint that it stands for, if that cannot be restored. Its data stays while it is there."""


def find_source(
    gang: Gang, checkpoints: Iterable[Checkpoint], source: Gang | None
) -> Checkpoint | NoSource:
    """Return the committed Checkpoint from which a job starts. Its status has a manifest and a job.

    Args:
        gang: The job, which has spec.restoreFrom.
        checkpoints: The Checkpoints that may be it, all of the namespace that spec.restoreFrom names.
        source: The present gang of the name in spec.restoreFrom.jobRef, or None.
    """
    spec = gang.spec.restore_from
    assert spec is not None
    if spec.checkpoint_ref is not None:
        name = spec.checkpoint_ref.name
        found = next((c for c in checkpoints if c.name == name), None)
        if found is None:
            text = f"spec.restoreFrom names Checkpoint {name}, which is not in namespace"
            return NoSource(False, f"{text} {gang.spec.source_namespace(gang.namespace)}")
        problem = _problem(found)
        return found if problem is None else _unfit(found, problem)
    name = spec.job or ""
    foreign = [
        c
        for c in checkpoints
        if c.job == name and c.status.job_uid != gang.uid and c.id is not None
    ]
    began = began_from(gang)
    if began is not None:
        again = next((c for c in foreign if c.status.manifest == began.base_manifest), None)
        if again is None:
            text = (
                "the checkpoint from which the job began (status.lineage) has no Checkpoint object"
            )
            return NoSource(False, f"{text} in namespace {gang.namespace} any more")
        problem = _problem(again)
        return again if problem is None else _unfit(again, problem)
    return _by_rule(spec, _of_one_job(foreign, source), source)


def _by_rule(
    spec: RestoreFromSpec, checkpoints: list[Checkpoint], source: Gang | None
) -> Checkpoint | NoSource:
    """Return the Checkpoint of the job that the rule of jobRef selects."""
    name, asked = spec.job, describe(spec)
    if not checkpoints:
        there = (
            "has no Checkpoint" if source is not None else "is not there and has left no Checkpoint"
        )
        text = f"spec.restoreFrom asks for {asked}: job {name} {there}"
        return NoSource(False, f"{text}. `kubectl holdfast list {name}` lists them")
    lineage = () if source is None else source.status.lineage
    present = [c for c in checkpoints if (id_ := c.id) is not None and on_lineage(id_, lineage)]
    if spec.step is not None:
        of_step = [c for c in checkpoints if c.spec.step == spec.step]
        present = [c for c in of_step if c in present] or of_step
    fit = [c for c in present if _problem(c, source) is None]
    if spec.before is not None:
        before = spec.before
        fit = [c for c in fit if c.status.committed_at and c.status.committed_at < before]
    if spec.best is not None and fit:
        metric, sign = spec.best.metric, 1.0 if spec.best.mode is BestMode.MIN else -1.0
        values = [(c, c.status.metrics.get(metric, math.nan)) for c in fit]
        ranked = [(sign * value, _age(c), c) for c, value in values if math.isfinite(value)]
        # Of two equal values the older one, as retention.keepBest does.
        fit = [min(ranked, key=lambda entry: entry[:2])[2]] if ranked else []
    if fit:
        return max(fit, key=_age)
    problems = [
        f"step {c.spec.step}: {problem}"
        for c in sorted(present, key=_age, reverse=True)
        if (problem := _problem(c, source)) is not None
    ]
    text = f"spec.restoreFrom asks for {asked}, and no checkpoint of job {name} is that"
    if problems:
        text += f" ({'; '.join(problems[:3])})"
    return NoSource(bool(present), f"{text}. `kubectl holdfast list {name}` lists them")


def describe(spec: RestoreFromSpec) -> str:
    """Return what restoreFrom asks for, for messages."""
    if spec.checkpoint_ref is not None:
        return f"Checkpoint {spec.checkpoint_ref.name}"
    if spec.step is not None:
        what = f"step {spec.step}"
    elif spec.before is not None:
        what = f"the newest step before {spec.before:%Y-%m-%dT%H:%M:%SZ}"
    elif spec.best is not None:
        what = f"the step with the best {spec.best.metric} ({spec.best.mode})"
    else:
        what = "the newest step"
    return f"{what} of job {spec.job}"


def _unfit(checkpoint: Checkpoint, problem: str) -> NoSource:
    text = f"Checkpoint {checkpoint.name} of spec.restoreFrom cannot be restored: {problem}"
    return NoSource(True, text, checkpoint.name)


def _problem(checkpoint: Checkpoint, source: Gang | None = None) -> str | None:
    """Return why a Checkpoint cannot be restored by another job, or None.

    A person may name a quarantined one, as the way to try it again. A rule does not select it.
    """
    status = checkpoint.status
    if checkpoint.deleting or status.phase is CheckpointPhase.DELETING:
        return "it is being deleted"
    if status.phase is not CheckpointPhase.COMMITTED or not (status.manifest and status.job_uid):
        return f"its phase is {status.phase or 'unknown'}, expected Committed"
    if not checkpoint.persisted:
        return "it is not in an object store"
    if source is not None and status.is_true(CheckpointCondition.QUARANTINED):
        return "it is quarantined: failurePolicy.releasedSteps of its job releases it"
    return None


def _of_one_job(checkpoints: list[Checkpoint], source: Gang | None) -> list[Checkpoint]:
    """Return the Checkpoints of the present job of the name, or of the one that committed the newest."""
    uids = {c.status.job_uid for c in checkpoints}
    uid: JobUid | None
    if source is not None and source.uid in uids:
        uid = source.uid
    else:
        dated = [(c.status.committed_at or _LONG_AGO, c.status.job_uid) for c in checkpoints]
        uid = max(dated, key=lambda entry: entry[0])[1] if dated else None
    return [c for c in checkpoints if c.status.job_uid == uid]


def _age(checkpoint: Checkpoint) -> tuple[int, int]:
    id_ = checkpoint.id
    assert id_ is not None
    return age_of(id_)


def began_from(gang: Gang) -> LineageEntry | None:
    """Return the entry of another job's checkpoint from which this one has begun, or None.

    It is the first of the lineage. Where the gang has started over, an empty entry of its round precedes it.
    """
    lineage = gang.status.lineage
    begun = max((e.round for e in lineage if e.base is None), default=None)
    of_round = [e for e in lineage if e.round == begun] if begun is not None else list(lineage[:1])
    return next((e for e in of_round if e.base is not None), None)
