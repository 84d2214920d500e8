"""Questions to the API server and to sidecars that no event answers.

`TemplateChecks` asks whether the API server accepts the pods of a job, before the first round and after
edits. `SilenceChecks` looks between passes for nodes that have become silent. `Owners` reads the controller
that creates an adopted gang's pods. Job, JobSet and TrainJob create pods through Jobs of batch/v1. The
operator reads such a Job once, because its restart policy is immutable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from itertools import count

from holdfast_core.api import CheckpointAdoption, Gang, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.facts.queue import wanted_group
from holdfast_operator.decide.facts.spec import template_problem
from holdfast_operator.decide.report.adoption import NO_OWNER, other_owner, owner_of_job
from holdfast_operator.kube.cluster import JOB, Cluster
from holdfast_operator.loop.observe import Observer
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import Owner, OwnerView, PodView
from holdfast_operator.model.ownership import Key, gang_key
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.pod import render_pod
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.watch.cache import LEASES_PATH, NODES_PATH, ClusterCache
from holdfast_operator.watch.nodes import NodeLeases

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


TICK_SECONDS = 1.0
JOBS_PER_TICK = 200
"""Undisturbed jobs that are checked in a tick, so that thousands of jobs do not take all of the time. For
such a job a check only reads an old inventory again."""


class SilenceChecks:
    """Checks of jobs, every TICK_SECONDS. Undisturbed jobs take turns if there are more than JOBS_PER_TICK.

    Args:
        enqueue: Requests a pass over a job.
    """

    def __init__(
        self,
        cache: ClusterCache,
        observer: Observer,
        sidecars: Sidecars,
        cluster: Cluster,
        clock: Clock,
        metrics: Metrics,
        enqueue: Callable[[Key], None],
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._sidecars = sidecars
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._enqueue = enqueue
        self._silent: frozenset[str] = frozenset()
        self._log_changes = logs.Changed()

    async def run(self) -> None:
        """Check jobs every TICK_SECONDS until cancelled."""
        for tick in count():
            await self._clock.sleep(TICK_SECONDS)
            silent: set[str] = set()
            unproven: set[str] = set()
            jobs = self._cache.jobs.all()
            turns = -(-len(jobs) // JOBS_PER_TICK)
            self._cache.leases.compare(
                self._clock.monotonic(), self._cache.lease_watch.contact_since
            )
            disturbed = self._observer.disturbed_nodes(jobs)
            for number, job in enumerate(jobs):
                if number % turns != tick % turns and not self._is_disturbed(job, disturbed):
                    continue
                try:
                    self._check(job, silent, unproven)
                except Exception as error:  # noqa: BLE001 - an error of one job must not stop the checks
                    self._metrics.unexpected("tick")
                    if self._log_changes.is_new(f"tick {job.uid}", repr(error)):
                        logs.failure(
                            "checking the job between passes failed", error, **logs.job_fields(job)
                        )
            self._silent = frozenset(silent)
            for node in sorted(unproven):
                await self._confirm(node)

    def _is_disturbed(self, job: Gang, nodes: Set[str]) -> bool:
        return not self._sidecars.all_answer(job.uid) or any(
            p.node in nodes for p in self._cache.pods.workers(job.namespace, job.uid)
        )

    def _check(self, job: Gang, silent: set[str], unproven: set[str]) -> None:
        """Start the sidecar calls that no decision requests, and collect the job's late nodes.

        Requests a pass where a node has become silent since the last tick.

        Args:
            silent: Receives the job's nodes that are proven to be silent.
            unproven: Receives the nodes whose leases are stale but must be confirmed by a direct read.
        """
        pods = self._observer.pods(job)
        if not pods:
            return
        self._observer.follow_sidecars(job, pods)
        quiet = self._observer.silent_nodes(job, pods)
        if quiet - self._silent:
            self._enqueue(gang_key(job))
        silent |= quiet
        unproven |= self._observer.unproven_nodes(job, pods)

    async def _confirm(self, node: str) -> None:
        try:
            await confirm(node, self._cache.leases, self._cluster, self._clock)
        except HoldfastError as error:
            self._log_changes.warning(
                f"lease {node}", f"reading node {node} or its lease failed: {error}"
            )


async def confirm(node: str, leases: NodeLeases, cluster: Cluster, clock: Clock) -> None:
    """Read a node that seems to be gone, or a stale lease, because the watch is silent as well."""
    asked_at = clock.monotonic()
    if leases.is_missing(node):
        if not await cluster.node_exists(NODES_PATH, node):
            leases.confirm_missing(node, asked_at)
        return
    renewed = await cluster.lease_renewed(LEASES_PATH, node)
    if renewed is not None:
        leases.observe(node, renewed, clock.monotonic())


class Owners:
    """The controllers of adopted pods that this process has looked up."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[JobUid, tuple[str, OwnerView]] = {}
        """uid of the controller and what is known of it, by uid of the adoption."""

    async def of(self, job: Gang, pods: tuple[PodView, ...]) -> OwnerView | None:
        """Return the controller of the gang's pods, or None if there is no pod yet. Raises ApiError."""
        if not isinstance(job, CheckpointAdoption) or not pods:
            return None
        newest = max(pods, key=lambda p: (p.created, p.name))
        controller = newest.controller
        uid = "" if controller is None else controller.uid
        known = self._known.get(job.uid)
        if known is not None and known[0] == uid:
            return known[1]
        found = NO_OWNER if controller is None else await self._read(job.namespace, controller)
        self._known[job.uid] = (uid, found)
        return found

    async def _read(self, namespace: str, controller: Owner) -> OwnerView:
        if (controller.group, controller.kind) != ("batch", "Job"):
            return other_owner(controller.kind, controller.name)
        raw = await self._cluster.get(JOB, namespace, controller.name)
        return NO_OWNER if raw is None else owner_of_job(raw)

    def forget(self, uid: JobUid) -> None:
        self._known.pop(uid, None)
