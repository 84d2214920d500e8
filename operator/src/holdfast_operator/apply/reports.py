"""Reports on gangs about which there is no decision: the object cannot be parsed, or the pass over it failed.

Decisions write a status as a whole. Here one condition (Readable, Reconciled) is written, and the rest of the
status stays as it is. An Event says the same. A condition is the only write to an object that cannot be
parsed. It replaces one entry of the list of conditions, and writes all other entries back as they were read,
with the resourceVersion of that read.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from holdfast_core import logs
from holdfast_core.api import GANGS, ConditionStatus, Gang, JobCondition
from holdfast_core.clock import Clock, stamp
from holdfast_core.errors import HoldfastError
from holdfast_operator.apply.apply import ActionsFailed
from holdfast_operator.kube.api import ApiError, ConflictError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.reasons import Reason

_GANG_KINDS = frozenset(kind.KIND for kind in GANGS)
_MAX_REMEMBERED = 10_000
REMEDY = (
    "Holdfast does not delete, write or start anything of it until it can be read. Correct the "
    "field, or run an operator of the release that wrote it"
)
FAULTS_IN_A_ROW = 3
"""Passes in a row that end with the same HoldfastError before it is reported. Most are over by the next pass,
such as a time-out of the API server. Any other exception is reported at once."""
_MAX_CHARACTERS = 1024
_NUMBERS = re.compile(r"\d+")
"""Two texts of one error may differ in numbers, such as the port of a connection or a resourceVersion."""
_NO_REFUSALS = (401, 408, 409, 429)
"""Status codes between 400 and 499 that say nothing about the contents of a request."""


class Reports:
    """Reporter of objects that cannot be parsed, and of failed passes. It reports each text once."""

    def __init__(self, cluster: Cluster, events: Events, clock: Clock) -> None:
        self._cluster = cluster
        self._events = events
        self._clock = clock
        self._unreadable: dict[str, str] = {}
        """The reported problem, by uid of the object."""
        self._failed: dict[str, tuple[str, int]] = {}
        """Cause of the newest failure and the number of passes in a row that ended with it, by uid."""

    def forget(self, uid: str) -> None:
        self._unreadable.pop(uid, None)
        self._failed.pop(uid, None)

    def is_read(self, uid: str) -> None:
        """Record that the object can be parsed, so that the next time that it cannot is reported again."""
        self._unreadable.pop(uid, None)

    async def report(self, found: Unreadable) -> None:
        """Report a TrainingJob, CheckpointAdoption or CheckpointStore that cannot be parsed.

        Other HoldfastErrors are logged and not raised.

        Raises:
            ConflictError: The object changed since it was read, so the caller must read it again.
        """
        if self._unreadable.get(found.uid) == found.problem:
            return
        text = f"{found.problem}; {REMEDY}"
        await self._events.emit(found, "Warning", Reason.CANNOT_READ, text)
        if found.kind in _GANG_KINDS:
            kind = JobCondition.READABLE
            try:
                await self._write(found, kind, ConditionStatus.FALSE, Reason.CANNOT_READ, text)
            except ConflictError:
                raise
            except HoldfastError as error:
                logs.warning(f"{found}: condition {kind} not written: {error}")
        if len(self._unreadable) >= _MAX_REMEMBERED:
            self._unreadable.clear()
        self._unreadable[found.uid] = found.problem

    async def ended(self, job: Gang, error: ActionsFailed | None) -> None:
        """Report the end of a pass: the error of failed actions, or a success after a failure."""
        if error is not None:
            await self.failed(job, error)
            return
        self._failed.pop(job.uid, None)
        known = job.status.condition(JobCondition.RECONCILED)
        if known is not None and known.is_false:
            text = "the last pass over this job succeeded"
            await self._reconciled(job, ConditionStatus.TRUE, Reason.PASS_SUCCEEDED, text)

    @asynccontextmanager
    async def of_pass(self, job: Gang) -> AsyncIterator[None]:
        """Report an exception that ends the pass in this context. The queue gets it and repeats the pass."""
        try:
            yield
        except Exception as error:
            await self.failed(job, error)
            raise

    async def failed(self, job: Gang, error: Exception) -> None:
        """Report what a pass has raised, once for each text and job."""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error}{notes}"[:_MAX_CHARACTERS]
        cause = text
        if isinstance(error, ActionsFailed):  # the number of failed actions may differ in each pass
            text, cause, error = str(error)[:_MAX_CHARACTERS], str(error.first), error.first.error
        cause = _NUMBERS.sub("0", cause)
        known, count = self._failed.get(job.uid, ("", 0))
        count = count + 1 if known == cause else 1
        self._failed[job.uid] = (cause, count)
        if count != (FAULTS_IN_A_ROW if isinstance(error, HoldfastError) else 1):
            return
        message = (
            f"{text}. The pass is repeated. Until it succeeds, the operator may do only a part of its work "
            f"for this job, or nothing. {_remedy(error)}"
        )
        await self._reconciled(job, ConditionStatus.FALSE, Reason.PASS_FAILED, message)
        await self._events.emit(job, "Warning", Reason.PASS_FAILED, message)

    async def _reconciled(
        self, job: Gang, value: ConditionStatus, reason: Reason, message: str
    ) -> None:
        kind = JobCondition.RECONCILED
        try:
            await self._write(job, kind, value, reason, message)
        except HoldfastError as error:
            self._failed.pop(job.uid, None)  # the next pass tries again
            logs.warning(f"condition {kind} of {job.name} not written: {error}")

    async def _write(
        self,
        job: Gang | Unreadable,
        kind: JobCondition,
        value: ConditionStatus,
        reason: Reason,
        message: str,
    ) -> None:
        """Write the condition with the resourceVersion of a direct read.

        Nothing is written if the object is gone or the name has another uid now, or if status.conditions is
        not a list of conditions. Raises ConflictError and ApiError.
        """
        raw = await self._cluster.get(job.kind, job.namespace, job.name)
        if raw is None or raw["metadata"]["uid"] != job.uid:
            return
        conditions = (raw.get("status") or {}).get("conditions") or []
        if not isinstance(conditions, list) or not all(isinstance(c, Mapping) for c in conditions):
            return
        old: Mapping[str, Any] = next((c for c in conditions if c.get("type") == kind), {})
        if (old.get("status"), old.get("message")) == (value, message):
            return
        same, now = old.get("status") == value, stamp(self._clock.utc_now())
        new = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": old["lastTransitionTime"] if same else now,
            "observedGeneration": raw["metadata"].get("generation") or 0,
        }
        others = [c for c in conditions if c.get("type") != kind]
        version = str(raw["metadata"]["resourceVersion"])
        await self._cluster.patch_status(
            job.kind, job.namespace, job.name, version, {"conditions": [*others, new]}
        )


def _remedy(error: Exception) -> str:
    """Return what a person can do. Only a refusal by the API server is reason to correct the job."""
    if not isinstance(error, HoldfastError):
        return "It is probably a defect of the operator: report it with the operator's log"
    status = error.status if isinstance(error, ApiError) else None
    if status is None or not 400 <= status < 500 or status in _NO_REFUSALS:
        return "If it lasts, find out why the named call fails: the job itself need not be changed"
    return "The API server refuses this request: correct what its answer names"
