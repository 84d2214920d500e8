"""Report on an object that it cannot be parsed: by an Event, and on a gang by condition Readable.

The condition is the only write to an object that cannot be parsed. It replaces one entry of the list of
conditions, and writes all other entries back as they were read, with the resourceVersion of that read.
"""

from __future__ import annotations

from holdfast_core.api import API_VERSION, GANGS, ConditionStatus, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_operator.apply.raw_conditions import NewCondition, write_condition
from holdfast_operator.base import logs
from holdfast_operator.kube.api import ConflictError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.kube.events import Events, Subject
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.reasons import Reason

_GANG_KINDS = frozenset(kind.KIND for kind in GANGS)
_MAX_REMEMBERED = 10_000
REMEDY = (
    "Holdfast does not delete, write or start anything of it until it can be read. Correct the "
    "field, or run an operator of the release that wrote it"
)


class UnreadableReports:
    """Reporter of objects that cannot be parsed. It reports each problem of each object once."""

    def __init__(self, cluster: Cluster, events: Events, clock: Clock) -> None:
        self._cluster = cluster
        self._events = events
        self._clock = clock
        self._reported: dict[str, str] = {}
        """The reported problem, by uid of the object."""

    def forget(self, uid: str) -> None:
        self._reported.pop(uid, None)

    async def report(self, found: Unreadable) -> None:
        """Report a TrainingJob, CheckpointAdoption or CheckpointStore that cannot be parsed.

        Other HoldfastErrors are logged and not raised.

        Raises:
            ConflictError: The object changed since it was read, so the caller must read it again.
        """
        if self._reported.get(found.uid) == found.problem:
            return
        text = f"{found.problem}; {REMEDY}"
        subject = Subject(API_VERSION, found.kind, found.namespace, found.name, found.uid)
        await self._events.emit(subject, "Warning", Reason.CANNOT_READ, text)
        if found.kind in _GANG_KINDS:
            try:
                await self._write_condition(found, text)
            except ConflictError:
                raise
            except HoldfastError as error:
                logs.warning(f"{found}: condition {JobCondition.READABLE} not written: {error}")
        if len(self._reported) >= _MAX_REMEMBERED:
            self._reported.clear()
        self._reported[found.uid] = found.problem

    async def _write_condition(self, job: Unreadable, text: str) -> None:
        await write_condition(
            self._cluster,
            job.kind,
            job.namespace,
            job.name,
            job.uid,
            NewCondition(JobCondition.READABLE, ConditionStatus.FALSE, Reason.CANNOT_READ, text),
            self._clock.utc_now(),
        )
