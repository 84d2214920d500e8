"""Check whether the API server accepts the pods of a job: before the first round, and after edits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.api import Gang, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_operator.decide.acceptance import template_problem
from holdfast_operator.decide.features.queue import wanted_group
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.keys import Key
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.pod import render_pod

REFUSAL_SECONDS = (1.0, 30.0)
"""Shortest and longest wait before a refused template is checked again. Between these limits the wait
equals the time for which the template has been refused so far. The first check comes soon, because a new
namespace may not have its service account yet."""


@dataclass(frozen=True, slots=True)
class _Result:
    generation: int
    text: str | None
    """Why the server refuses the pod. None: it accepts it."""
    since: float
    """Time of the first refusal of this generation."""
    at: float

    @property
    def valid_until(self) -> float:
        """Return the monotonic time of the next check. An accepted template is not checked again."""
        if self.text is None:
            return math.inf
        shortest, longest = REFUSAL_SECONDS
        return self.at + min(max(self.at - self.since, shortest), longest)


class TemplateChecks:
    """Checks of jobs that have not begun their first round, or were edited. The last results are kept.

    Args:
        sidecar: Settings of the sidecar container in the pods that are checked.
        add_after: Queues a job again after this many seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        sidecar: SidecarSettings,
        clock: Clock,
        add_after: Callable[[Key, float], None],
    ) -> None:
        self._cluster = cluster
        self._sidecar = sidecar
        self._clock = clock
        self._add_after = add_after
        self._results: dict[JobUid, _Result] = {}

    async def refusal(self, key: Key, job: Gang) -> str | None:
        """Return why the API server would refuse the job's pod, or None.

        The server is asked once for each generation of the job, and again after a wait (REFUSAL_SECONDS)
        while it refuses. The pods of a job that runs were accepted, so its template is checked only after an
        edit, and a check that fails delays nothing.
        """
        over = job.status.completion_time is not None
        if job.deleting or over or job.spec.template is None:
            self._results.pop(job.uid, None)
            return None
        if job.status.restart_round is None:
            return await self._checked(key, job)
        try:
            return await self._checked(key, job) if self._may_be_refused(job) else None
        except HoldfastError:
            return None

    def _may_be_refused(self, job: Gang) -> bool:
        """Return whether the spec of a running job was edited, or was refused after an edit."""
        known = job.status.condition(JobCondition.SPEC_APPLIED)
        return (
            job.uid in self._results
            or job.generation != job.status.observed_generation
            or (known is not None and known.reason == Reason.INVALID_TEMPLATE)
        )

    async def _checked(self, key: Key, job: Gang) -> str | None:
        """Return the result of the last check, or check now if it is due."""
        now = self._clock.monotonic()
        known = self._results.get(job.uid)
        if known is not None and known.generation != job.generation:
            known = None
        if known is not None and now < known.valid_until:
            if known.text is not None:
                self._add_after(key, known.valid_until - now)
            return known.text
        if job.spec.template is None or template_problem(job.spec.template) is not None:
            return None  # the template cannot be rendered, and `decide` reports that itself
        group = wanted_group(job, job.spec.workers, RestartRound(0))
        body = render_pod(job, Worker(0), RestartRound(0), None, self._sidecar, group=group)
        text = await self._cluster.refusal_of_pod(job.namespace, body)
        result = _Result(job.generation, text, now if known is None else known.since, now)
        self._results[job.uid] = result
        if text is not None:
            self._add_after(key, result.valid_until - now)
        return text

    def forget(self, uid: JobUid) -> None:
        """Drop the result of a job that no longer exists."""
        self._results.pop(uid, None)
