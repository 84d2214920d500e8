"""Report errors of passes over a gang, also those of single actions: by condition Reconciled and by an Event.

Without it the error would be in the operator's log only, and the job would stand still without a word.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast_core.api import API_VERSION, ConditionStatus, Gang, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_operator.apply.apply import ActionsFailed
from holdfast_operator.apply.raw_conditions import NewCondition, write_condition
from holdfast_operator.base import logs
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.kube.events import Events, Subject
from holdfast_operator.model.reasons import Reason

FAULTS_IN_A_ROW = 3
"""Passes in a row that end with the same HoldfastError before it is reported. Most are over by the next pass,
such as a time-out of the API server. Any other exception is reported at once."""
_MAX_CHARACTERS = 1024
_NO_REFUSALS = (401, 408, 409, 429)
"""Status codes between 400 and 499 that say nothing about the contents of a request."""


class FailedPasses:
    """Reporter of failed passes. It reports each text of each job once."""

    def __init__(self, cluster: Cluster, events: Events, clock: Clock) -> None:
        self._cluster = cluster
        self._events = events
        self._clock = clock
        self._failed: dict[str, tuple[str, int]] = {}
        """Cause of the newest failure and the number of passes in a row that ended with it, by uid."""

    def forget(self, uid: str) -> None:
        self._failed.pop(uid, None)

    @asynccontextmanager
    async def reported(self, job: Gang) -> AsyncIterator[list[ActionsFailed]]:
        """Report what the body raises, and raise it again. Report a success after a failure.

        Yields:
            A list for the error of failed actions. It is reported in the same way.
        """
        failed: list[ActionsFailed] = []
        try:
            yield failed
        except Exception as error:
            await self._failure(job, error)
            raise
        if failed:
            await self._failure(job, failed[0])
            return
        self._failed.pop(job.uid, None)
        known = job.status.condition(JobCondition.RECONCILED)
        if known is not None and known.is_false:
            text = "the last pass over this job succeeded"
            await self._write(job, ConditionStatus.TRUE, Reason.PASS_SUCCEEDED, text)

    async def _failure(self, job: Gang, error: Exception) -> None:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error}{notes}"[:_MAX_CHARACTERS]
        cause = text
        if isinstance(error, ActionsFailed):  # the number of failed actions may differ in each pass
            text, cause, error = str(error)[:_MAX_CHARACTERS], str(error.first), error.first.error
        known, count = self._failed.get(job.uid, ("", 0))
        count = count + 1 if known == cause else 1
        self._failed[job.uid] = (cause, count)
        if count != (FAULTS_IN_A_ROW if isinstance(error, HoldfastError) else 1):
            return
        message = (
            f"{text}. The pass is repeated. Until it succeeds, the operator may do only a part of its work "
            f"for this job, or nothing. {_remedy(error)}"
        )
        await self._write(job, ConditionStatus.FALSE, Reason.PASS_FAILED, message)
        subject = Subject(API_VERSION, job.KIND, job.namespace, job.name, job.uid)
        await self._events.emit(subject, "Warning", Reason.PASS_FAILED, message)

    async def _write(self, job: Gang, value: ConditionStatus, reason: Reason, message: str) -> None:
        condition = NewCondition(JobCondition.RECONCILED, value, reason, message)
        try:
            await write_condition(
                self._cluster,
                job.KIND,
                job.namespace,
                job.name,
                job.uid,
                condition,
                self._clock.utc_now(),
            )
        except HoldfastError as error:
            self._failed.pop(job.uid, None)  # the next pass tries again
            logs.warning(f"condition {JobCondition.RECONCILED} of {job.name} not written: {error}")


def _remedy(error: Exception) -> str:
    """Return what a person can do. Only a refusal by the API server is reason to correct the job."""
    if not isinstance(error, HoldfastError):
        return "It is probably a defect of the operator: report it with the operator's log"
    status = error.status if isinstance(error, ApiError) else None
    if status is None or not 400 <= status < 500 or status in _NO_REFUSALS:
        return "If it lasts, find out why the named call fails: the job itself need not be changed"
    return "The API server refuses this request: correct what its answer names"
