"""Look after each job between its passes: calls to its sidecars, and nodes that have become silent."""

from __future__ import annotations

from collections.abc import Callable

from holdfast_core.api import Gang
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.loop.observe import Observer
from holdfast_operator.model.keys import Key, gang_key
from holdfast_operator.watch.cache import LEASES_PATH, ClusterCache

TICK_SECONDS = 1.0


class SilenceChecks:
    """Checks of all jobs, every TICK_SECONDS.

    Args:
        enqueue: Requests a pass over a job.
    """

    def __init__(
        self,
        cache: ClusterCache,
        observer: Observer,
        cluster: Cluster,
        clock: Clock,
        metrics: Metrics,
        enqueue: Callable[[Key], None],
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._enqueue = enqueue
        self._silent: frozenset[str] = frozenset()
        self._log_changes = logs.Changed()

    async def run(self) -> None:
        """Check every job every TICK_SECONDS until cancelled."""
        while True:
            await self._clock.sleep(TICK_SECONDS)
            silent: set[str] = set()
            unproven: set[str] = set()
            for job in self._cache.jobs():
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
        """Read the node's lease from the API server, because the watch of leases is silent as well."""
        try:
            renewed = await self._cluster.lease_renewed(LEASES_PATH, node)
        except HoldfastError as error:
            self._log_changes.warning(
                f"lease {node}", f"reading the lease of node {node} failed: {error}"
            )
            return
        if renewed is not None:
            self._cache.leases.observe(node, renewed, self._clock.monotonic())
