"""Look after each job between its passes: calls to its sidecars, and nodes that have become silent."""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import count

from holdfast_core.api import Gang
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.loop.observe import Observer
from holdfast_operator.model.keys import Key, gang_key
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.watch.cache import LEASES_PATH, NODES_PATH, ClusterCache
from holdfast_operator.watch.node_leases import NodeLeases

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
