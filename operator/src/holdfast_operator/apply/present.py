"""Objects of jobs that no watch shows: which of them this process has put or found, and when.

Their puts are repeated from time to time, in case one was deleted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from holdfast_core.api import Gang, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.ids import JobUid
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import DesiredObject
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.render.standing import standing_objects

SURE_SECONDS = {
    kinds.NETWORK_POLICY: 600.0,
    kinds.SERVICE: 600.0,
    kinds.DISRUPTION_BUDGET: 600.0,
    kinds.SECRET: 60.0,
}
"""Kinds of objects that are not watched, and the time after which the put of one is repeated. The pods that
wait to start would wait forever for a Secret that was deleted."""


class Present:
    """Records of the objects that are not watched, by job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[JobUid, dict[tuple[str, str], tuple[Mapping[str, Any], float]]] = {}
        """Body and time of the last put, by kind and name."""
        self._taken: dict[JobUid, set[str]] = {}

    def is_fresh(self, job: Gang, wanted: DesiredObject) -> bool:
        """Return whether the object was put as it should be within SURE_SECONDS."""
        body, at = self._known.get(job.uid, {}).get((wanted.kind, wanted.name), (None, 0.0))
        limit = SURE_SECONDS.get(wanted.kind, 0.0)
        return body == wanted.body and self._clock.monotonic() - at < limit

    def is_known(self, job: Gang, wanted: DesiredObject) -> bool:
        return (wanted.kind, wanted.name) in self._known.get(job.uid, {})

    def put(self, job: Gang, wanted: DesiredObject) -> None:
        """Record that the object is as it should be."""
        if wanted.kind in SURE_SECONDS:
            self._record(job, wanted.body, self._clock.monotonic())

    def failed(self, job: Gang, wanted: DesiredObject) -> None:
        """Take an object for present if it was before, because looking for it failed."""
        body, _ = self._known.get(job.uid, {}).get((wanted.kind, wanted.name), (None, 0.0))
        if wanted.kind != kinds.SECRET and body == wanted.body:
            self._record(job, wanted.body, self._found_earlier(job))

    def assume(self, job: Gang, sidecar: SidecarSettings) -> None:
        """Take the objects of a gang that trains for present, unless this process has put any.

        An earlier process has created them. A new one looks for them later: the calls for a thousand jobs
        would delay the first passes by half a minute.
        """
        if job.uid in self._known or not job.status.is_true(JobCondition.RUNNING):
            return
        for body in standing_objects(job, len(job.status.members), sidecar):
            self._record(job, body, self._found_earlier(job))

    def _record(self, job: Gang, body: Mapping[str, Any], at: float) -> None:
        key = (str(body["kind"]), str(body["metadata"]["name"]))
        self._known.setdefault(job.uid, {})[key] = (body, at)

    def _found_earlier(self, job: Gang) -> float:
        """Return when an object counts as found that is taken for present, because looking for it failed.

        It is a time within the last ten minutes that differs between jobs. When the API server is back after
        ten minutes, the operator would otherwise look for the objects of all jobs at the same moment, before
        it sees which pods were lost meanwhile.
        """
        part = zlib.crc32(job.uid.encode()) / 2**32
        return self._clock.monotonic() - part * SURE_SECONDS[kinds.SERVICE]

    def secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the certificate Secrets of the job that this process created or found."""
        return frozenset(name for kind, name in self._known.get(uid, {}) if kind == kinds.SECRET)

    def taken_secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the names for Secrets of the job that this process found in use for something else."""
        return frozenset(self._taken.get(uid, ()))

    def take_name(self, job: Gang, secret: str) -> None:
        """Record that an object that is not the job's has the name for a Secret."""
        self._taken.setdefault(job.uid, set()).add(secret)

    def deleted(self, job: Gang, kind: str, name: str) -> None:
        self._known.get(job.uid, {}).pop((kind, name), None)

    def forget(self, uid: JobUid) -> None:
        """Drop the records of a job that is gone."""
        self._known.pop(uid, None)
        self._taken.pop(uid, None)
