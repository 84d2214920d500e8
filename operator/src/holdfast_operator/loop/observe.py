"""Gather the facts that a decision about one job is based on, also those that no event brings.

`Observer` reads the reflectors' copies and caches only and writes nothing, so a pass waits for no
request before it has decided. `Observer.follow_sidecars` may start background calls to sidecars.

`TemplateChecks` asks whether the API server accepts the pods of a job, before the first round and after
edits. `SilenceChecks` looks between passes for nodes that have become silent. `Owners` reads the controller
that creates an adopted gang's pods. Job, JobSet and TrainJob create pods through Jobs of batch/v1. The
operator reads such a Job once, because its restart policy is immutable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from itertools import count

from holdfast_core import logs
from holdfast_core.api import Checkpoint, CheckpointAdoption, CheckpointStore, Gang, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import FIRST_SPARE, JobUid, RestartRound, Worker
from holdfast_core.names import job_prefix
from holdfast_core.store_retention import needs_source
from holdfast_operator.apply.apply import Present
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.facts.scheduling import wanted_group
from holdfast_operator.decide.facts.spec import (
    NO_OWNER,
    other_owner,
    owner_of_job,
    template_problem,
)
from holdfast_operator.kube.cluster import JOB, Cluster
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import (
    ForeignSource,
    JobMemory,
    NodeView,
    Observed,
    Owner,
    OwnerView,
    PodView,
    StoreView,
    Unreadable,
    place_of,
    store_config,
    store_view,
)
from holdfast_operator.model.ownership import Key, gang_key, log_fields, pod_source
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import render_pod
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.state import routine_seconds
from holdfast_operator.watch.cache import LEASES_PATH, NODES_PATH, ClusterCache
from holdfast_operator.watch.nodes import NodeLeases

SUSPECT_SHARE = 0.6
"""Share of nodeLoss.suspectAfterSeconds after which the sidecars of a node with a late lease are called
directly. The two failed calls that a decision requires are then complete when the lease has been stale
for the whole time."""

NO_LEASE = "does not renew its lease"


class Observer:
    """Source of the facts about one job, read from the caches."""

    def __init__(
        self,
        cache: ClusterCache,
        sidecars: Sidecars,
        present: Present,
        sidecar: SidecarSettings,
        clock: Clock,
        failing_conditions: frozenset[tuple[str, str]] = frozenset(),
        leaving_taints: frozenset[str] = frozenset(),
    ) -> None:
        self._cache = cache
        self._sidecars = sidecars
        self._present = present
        self._sidecar = sidecar
        self._clock = clock
        self._failing_conditions = failing_conditions
        self._leaving_taints = leaving_taints

    def pods(self, job: Gang) -> tuple[PodView, ...]:
        """Return the pods of the gang, each with its birth round."""
        found = self._cache.pods.workers(job.namespace, job.uid)
        return pod_source(job).members(found, self.silent_nodes(job, found))

    def observe(
        self,
        job: Gang,
        memory: JobMemory,
        template_refusal: str | None = None,
        owner: OwnerView | None = None,
    ) -> Observed:
        pods, placeholders = self.pods(job), self._cache.pods.placeholders(job.namespace, job.uid)
        self.follow_sidecars(job, pods)
        self._present.assume(job, self._sidecar)
        return Observed(
            job=job,
            pods=pods,
            placeholders=placeholders,
            sidecars=self._sidecars.views(job.uid),
            nodes=self._nodes(job, (*pods, *placeholders)),
            lost_nodes=self._lost_nodes(job, pods),
            coordinator=self._sidecars.coordinator_state(job.uid),
            checkpoints=self._checkpoints(job),
            foreign=self._foreign(job),
            cloned=self._cache.cloned(job.namespace, job.name, job.uid),
            source=self._cache.source_job(job),
            store=self._store(job),
            sidecar=self._sidecar,
            secrets=self._present.secrets(job.uid),
            taken_secrets=self._present.taken_secrets(job.uid),
            memory=memory,
            routine_seconds=routine_seconds(len(self._cache.jobs)),
            unreadable=self._unreadable(job),
            template_refusal=template_refusal,
            owner=owner,
            same_name=self._cache.jobs.same_name(job),
        )

    def follow_sidecars(self, job: Gang, pods: tuple[PodView, ...]) -> None:
        """Pass the job's current pods and coordinator to `Sidecars`, which may start calls to them.

        The controller's tick calls this between passes as well.
        """
        status = job.status
        coordinator: Worker | None = None
        if status.restore_point is not None:
            coordinator = status.coordinator
        trains = status.is_true(JobCondition.RUNNING)
        members = tuple(p for p in pods if _is_member(job, p))
        named = {p.uid for p in members if p.worker == coordinator}
        others = tuple(p for p in pods if p.worker != coordinator or p.uid in named)
        self._sidecars.follow(
            gang_key(job),
            job.uid,
            status.restart_round,
            others,
            coordinator,
            self.suspects(job, pods),
            ranks=_present_workers(job) * job.spec.procs_per_worker,
            gang=frozenset(p.uid for p in members) if trains else frozenset(),
        )

    def suspects(self, job: Gang, pods: tuple[PodView, ...]) -> frozenset[str]:
        """Return the nodes of the job's pods that have late leases or no Node object, or that fail.

        Where ranks of the current round are dead and no pod is missing, return all nodes: a node may be lost
        before its lease is late. A lost pod explains its dead peers. The round that replaces it seals the
        other sidecars, so each of their inventories would be read twice.
        """
        now = self._clock.monotonic()
        self._note_missing_nodes(pods, now)
        state = self._sidecars.coordinator_state(job.uid)
        dead = state is not None and state.dead and state.round == job.status.restart_round
        if dead and not _lacks_pods(job, pods):
            return frozenset(p.node for p in pods if p.node is not None)
        limit = job.spec.node_loss.suspect_after_seconds * SUSPECT_SHARE
        watch = self._cache.lease_watch
        contact, since = watch.last_contact, watch.contact_since
        found = set()
        for pod in pods:
            if pod.node is None:
                continue
            stale = self._cache.leases.stale_seconds(pod.node, now, contact, since)
            if (stale is not None and stale >= limit) or self._problem(pod.node):
                found.add(pod.node)
        return frozenset(found)

    def disturbed_nodes(self, jobs: Iterable[Gang]) -> set[str]:
        """Return the nodes that one of these jobs may have to suspect (`suspects`)."""
        thresholds = (j.spec.node_loss.suspect_after_seconds for j in jobs)
        limit = min(thresholds, default=0.0) * SUSPECT_SHARE
        watch = self._cache.lease_watch
        contact, since = watch.last_contact, watch.contact_since
        late = self._cache.leases.late(limit, self._clock.monotonic(), contact, since)
        return late.union(n for n in self._cache.nodes.names() if self._problem(n))

    def _problem(self, name: str) -> str:
        """Return by what Kubernetes or a node-problem detector shows that a node is lost or fails, or ""."""
        node = self._cache.nodes.get(name)
        if node is None:
            return ""
        if node.taints:
            return f"has the taint {min(t.key for t in node.taints)}"
        failing = sorted(node.conditions & self._failing_conditions)
        return "has the condition {}={}".format(*failing[0]) if failing else ""

    def _note_missing_nodes(self, pods: tuple[PodView, ...], now: float) -> None:
        for node in {p.node for p in pods if p.node is not None}:
            if self._cache.nodes.is_there(node):
                self._cache.leases.found(node)
            else:
                self._cache.leases.miss(node, now)

    def _contact(self, node: str) -> float | None:
        """Return when the watch that would show a change of this node last delivered anything."""
        missing = self._cache.leases.is_missing(node)
        return (self._cache.node_watch if missing else self._cache.lease_watch).last_contact

    def silent_nodes(self, job: Gang, pods: tuple[PodView, ...]) -> frozenset[str]:
        """Return the nodes of the job's pods that are proven to be silent for suspect_after."""
        return self._nodes_where(self._cache.leases.is_silent, job, pods)

    def unproven_nodes(self, job: Gang, pods: tuple[PodView, ...]) -> frozenset[str]:
        """Return the nodes whose leases are stale but where the watch of leases may be late itself."""
        return self._nodes_where(self._cache.leases.needs_confirmation, job, pods)

    def _nodes_where(
        self,
        holds: Callable[[str, float, float, float | None], bool],
        job: Gang,
        pods: tuple[PodView, ...],
    ) -> frozenset[str]:
        now, threshold = self._clock.monotonic(), job.spec.node_loss.suspect_after_seconds
        nodes = {p.node for p in pods if p.node is not None}
        return frozenset(n for n in nodes if holds(n, threshold, now, self._contact(n)))

    def _nodes(self, job: Gang, pods: tuple[PodView, ...]) -> dict[str, NodeView]:
        silent = self.silent_nodes(job, pods)
        nodes: dict[str, NodeView] = {}
        for name in {p.node for p in pods if p.node is not None}:
            node = self._cache.nodes.get(name)
            if node is None and name in silent:
                nodes[name] = NodeView(name, lost_because="no longer exists", is_silent=True)
            if node is not None:
                renewed_at = self._cache.leases.changed_at(name)
                why = NO_LEASE if name in silent else self._problem(name)
                nodes[name] = replace(
                    node,
                    leaving_taints=frozenset(
                        t for t in node.other_taints if t.key in self._leaving_taints
                    ),
                    lost_because=why,
                    is_silent=name in silent,
                    renewed_at=renewed_at,
                )
        return nodes

    def _lost_nodes(self, job: Gang, pods: tuple[PodView, ...]) -> tuple[NodeView, ...]:
        """Return the lost and failing nodes of the whole cluster, the newest loss first.

        The nodes of the job's own pods are not enough: the pod that ran on a lost node may be deleted by
        now. Lost nodes that an earlier operator process recorded are in the annotations of the job's
        pods. They count until this process has seen the node's lease change.
        """
        started = {(p.worker, p.birth_round) for p in pods if p.started}
        spares = () if job.status.spares is None else job.status.spares.births
        if started.issuperset([*enumerate(job.status.members), *enumerate(spares, FIRST_SPARE)]):
            return ()  # every pod has started, so the search of all leases is saved
        cache, threshold = self._cache, job.spec.node_loss.suspect_after_seconds
        lost = cache.leases.silent(
            threshold, self._clock.monotonic(), cache.lease_watch.last_contact
        )
        avoided = {n for p in pods for n in p.avoided_nodes if cache.leases.is_undated(n)}
        failing = cache.nodes.with_conditions(self._failing_conditions)
        nodes = [
            replace(
                cache.nodes.get(name) or NodeView(name),
                lost_because=self._problem(name) or NO_LEASE,
                renewed_at=cache.leases.changed_at(name),
            )
            for name in sorted(lost | avoided | failing)
            if cache.nodes.is_there(name)
        ]
        return tuple(sorted(nodes, key=lambda n: n.renewed_at or 0.0, reverse=True))

    def _foreign(self, job: Gang) -> ForeignSource | None:
        namespace, name = job.spec.source_namespace(job.namespace), job.spec.source_checkpoint
        if name is None or namespace == job.namespace:
            return None
        if not self._cache.is_granted(job, namespace):
            return ForeignSource(namespace, granted=False)
        found = self._cache.checkpoints.get(namespace, name)
        stores = self._cache.stores.of(namespace)
        if found is not None:
            stores = tuple(s for s in stores if found.status.store in (None, s.name))
        places = tuple(place_of(store_config(s)) for s in stores)
        return ForeignSource(namespace, granted=True, checkpoint=found, places=places)

    def _checkpoints(self, job: Gang) -> tuple[Checkpoint, ...]:
        own = self._cache.checkpoints.of(job.namespace, job.name)
        source, of_job = job.spec.source_checkpoint, job.spec.source_job
        if of_job not in (None, job.name) and needs_source(job):
            return (*own, *self._cache.checkpoints.of(job.namespace, of_job))
        if job.spec.source_namespace(job.namespace) != job.namespace:
            return own
        if source is None or any(c.name == source for c in own):
            return own
        found = self._cache.checkpoints.get(job.namespace, source)
        return own if found is None else (*own, found)

    def _unreadable(self, job: Gang) -> tuple[Unreadable, ...]:
        """Return the objects that exist, concern this job and cannot be parsed."""
        found = list(self._cache.pods.unreadable(job.namespace, job.uid))
        prefix = job_prefix(job.name, job.uid)
        found.extend(self._cache.unreadable.members(Checkpoint.KIND, job.namespace, prefix))
        source = job.spec.source_checkpoint
        foreign = job.spec.source_namespace(job.namespace) != job.namespace
        if source is not None and not foreign and not source.startswith(f"{prefix}-"):
            hidden = self._cache.unreadable.get(Checkpoint.KIND, job.namespace, source)
            found.extend(() if hidden is None else (hidden,))
        if job.spec.store is not None:
            kind = CheckpointStore.KIND
            store = self._cache.unreadable.get(kind, job.namespace, job.spec.store)
            found.extend(() if store is None else (store,))
        return tuple(found)

    def _store(self, job: Gang) -> StoreView | None:
        if job.spec.store is None:
            return None
        store = self._cache.stores.get(job.namespace, job.spec.store)
        return None if store is None or store.deleting else store_view(store)


def _is_member(job: Gang, pod: PodView) -> bool:
    members = job.status.members
    return pod.worker < len(members) and members[pod.worker] == pod.birth_round


def _lacks_pods(job: Gang, pods: tuple[PodView, ...]) -> bool:
    """Return whether the pod of a member is gone or is being deleted, which a new round does not wait for."""
    present = [p for p in pods if _is_member(job, p) and not p.terminating]
    return len(present) < len(job.status.members)


def _present_workers(job: Gang) -> int:
    """Return the number of workers of the present gang.

    It differs from spec.workers after a user has changed it, until the gang has stopped. Before the first
    round they are equal.
    """
    return len(job.status.members) or job.spec.workers


# --------------------------------------------------------------------------- questions to the API server


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
                            "checking the job between passes failed", error, **log_fields(job)
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
