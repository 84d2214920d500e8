"""The operator's Prometheus metrics, and its two ports without TLS. No decision depends on them.

The ports serve /metrics for Prometheus, and /healthz and /readyz for the kubelet. Every pod of the cluster
may be able to reach them, so the number of connections is limited: a new connection at the limit closes the
oldest one. No connection uses a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from holdfast_core import logs
from holdfast_core.api import (
    Gang,
    JobCondition,
    RecoveryStatus,
    TrainingJobStatus,
    UsageStatus,
)
from holdfast_core.clock import Clock
from holdfast_core.contract import DrillExit
from holdfast_core.net import Port
from holdfast_operator.model.reasons import Reason

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 12, 20, 30, 60, 120, 300, 600)
_JOB = ("namespace", "job")
_STORE = ("namespace", "store")


def _is_started_over(status: TrainingJobStatus) -> bool:
    """Return whether the newest choice of a restore point has started the gang over."""
    running = status.condition(JobCondition.RUNNING)
    return running is not None and running.reason == Reason.STARTED_OVER


class Metrics:
    """All metrics of one operator process, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._rounds = counter(
            "holdfast_restart_rounds",
            "Restart rounds that were begun, by the reason that began them.",
            ("reason",),
        )
        self._recovery = histogram(
            "holdfast_recovery_seconds",
            "Seconds that each phase of a recovery took; phase total is their sum.",
            ("phase",),
            buckets=_SECONDS,
        )
        self._lost_steps = counter(
            "holdfast_lost_steps",
            "Steps that were trained before a failure and have to be trained again.",
            _JOB,
        )
        self._quarantined = counter(
            "holdfast_checkpoints_quarantined",
            "Checkpoints that were quarantined, because ranks that restored them failed repeatedly.",
            _JOB,
        )
        self._pruned = counter(
            "holdfast_checkpoints_pruned",
            "Checkpoints that were deleted from the object store, by the retention or by a person.",
            _JOB,
        )
        self._drills = counter(
            "holdfast_drills",
            "Drills of checkpoints in an object store that have ended, by result: intact, damaged, "
            "not_restorable, not_read.",
            (*_STORE, "result"),
        )
        self._drill_bytes = counter(
            "holdfast_drill_read_bytes",
            "Payload bytes that drills have read and compared.",
            _STORE,
        )
        self._drill_seconds = counter(
            "holdfast_drill_read_seconds",
            "Seconds in which drills have read them.",
            _STORE,
        )
        self._timeouts = counter(
            "holdfast_schedule_timeouts",
            "Times that the pods of a gang could not all be scheduled in time and were deleted.",
            _JOB,
        )
        self._goodput = gauge(
            "holdfast_goodput_ratio",
            "Share of a job's time that was spent on training that no failure undid. A job that is over has "
            "no series: its status keeps the share.",
            _JOB,
        )
        self._silent = gauge(
            "holdfast_job_sidecars_unreachable",
            "1 while condition SidecarsUnreachable of the job is true, else 0.",
            _JOB,
        )
        self._missing = gauge(
            "holdfast_job_checkpoint_missing",
            "1 while condition CheckpointMissing of the job is true, else 0. A job that never missed a "
            "checkpoint has no series.",
            _JOB,
        )
        self._lost = gauge(
            "holdfast_job_checkpoints_lost",
            "1 while condition CheckpointsLost of the job is true, else 0. A job that never waited for a "
            "person to start it over has no series.",
            _JOB,
        )
        self._start_overs = counter(
            "holdfast_job_start_overs",
            "Times that the job started over because every copy of its checkpoints was lost.",
            _JOB,
        )
        self._queued = gauge(
            "holdfast_job_queued",
            "1 while condition Queued of the job is true, else 0. A job that was in no queue has no series.",
            _JOB,
        )
        self._held = gauge(
            "holdfast_job_uploads_held",
            "1 while condition UploadsHeld of the job is true, else 0. A job that never waited for a quota "
            "has no series.",
            _JOB,
        )
        self._conditions = {
            JobCondition.SIDECARS_UNREACHABLE: self._silent,
            JobCondition.CHECKPOINT_MISSING: self._missing,
            JobCondition.CHECKPOINTS_LOST: self._lost,
            JobCondition.QUEUED: self._queued,
            JobCondition.UPLOADS_HELD: self._held,
        }
        self._store_bytes = gauge(
            "holdfast_store_bytes",
            "Bytes of all objects below the prefix of a CheckpointStore, at the newest listing.",
            _STORE,
        )
        self._store_objects = gauge(
            "holdfast_store_objects",
            "Number of all objects below the prefix of a CheckpointStore, at the newest listing.",
            _STORE,
        )
        self._store_quota = gauge(
            "holdfast_store_quota_ratio",
            "Highest share of a limit of the store's quota that is used. At 1 uploads wait. A store "
            "without a quota has no series.",
            _STORE,
        )
        self._store_namespaces = gauge(
            "holdfast_store_namespace_bytes",
            "Bytes of the jobs of one namespace in a CheckpointStore. Only the largest namespaces have one.",
            (*_STORE, "job_namespace"),
        )
        self._store_jobs = gauge(
            "holdfast_store_job_bytes",
            "Bytes of one job in a CheckpointStore; job is its uid if this cluster does not have it. "
            "Only the largest jobs have one.",
            (*_STORE, "job_namespace", "job"),
        )
        self._store_orphans = gauge(
            "holdfast_store_orphan_bytes",
            "Bytes of objects in a CheckpointStore that no checkpoint needs, by kind.",
            (*_STORE, "kind"),
        )
        self._spares = gauge(
            "holdfast_job_spares_ready",
            "Spare pods of the job that can take the place of a lost worker now.",
            _JOB,
        )
        self._promotions = counter(
            "holdfast_job_spares_promoted",
            "Spare pods that have taken the place of lost workers of the job.",
            _JOB,
        )
        self.pass_seconds = histogram(
            "holdfast_reconcile_seconds",
            "Seconds of one pass over one object.",
            ("kind",),
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
        )
        self.failed_passes = counter(
            "holdfast_reconcile_errors",
            "Passes that ended with an error. The operator repeats them.",
            ("kind",),
        )
        self._unexpected = counter(
            "holdfast_unexpected_errors",
            (
                "Errors that the operator does not expect. The affected part continues, and the log "
                "has the traceback."
            ),
            ("part",),
        )
        self.dropped_connections = counter(
            "holdfast_connections_dropped",
            (
                "Connections to a port of the operator that were closed early: too many connections "
                "were open, or the connection could not be accepted."
            ),
            ("port", "reason"),
        )
        self.queue_depth = gauge(
            "holdfast_queue_depth",
            "Keys in the work queue that wait for a worker.",
        )
        self.leads = gauge(
            "holdfast_operator_leads",
            "1 while this operator process holds the lease and works on jobs, 0 while it is a standby.",
        )
        self.watch_age_seconds = gauge(
            "holdfast_watch_age_seconds",
            "Seconds since the watch last delivered an event.",
            ("watch",),
        )

        self.foreign_pods = gauge(
            "holdfast_foreign_pods",
            (
                "Pods with Holdfast's label that no TrainingJob or CheckpointStore controls. The "
                "operator ignores them."
            ),
        )
        self.leases_in_doubt = gauge(
            "holdfast_leases_in_doubt",
            (
                "Late node leases while most are late at the same time. They show no lost node then: "
                "the API server or the operator is slow."
            ),
        )
        self._unreadable = gauge(
            "holdfast_unreadable_objects",
            (
                "Objects with a value that this version cannot read. The operator does not change "
                "them."
            ),
            ("kind",),
        )
        self._unreadable_kinds: set[str] = set()
        self._store_series: dict[tuple[tuple[str, str], Gauge], set[tuple[str, ...]]] = {}
        """Labels of the series of each store."""

    def unexpected(self, part: str) -> None:
        self._unexpected.labels(part).inc()

    def status_written(self, job: Gang, new: TrainingJobStatus) -> None:
        """Count what is new in a status that was written: a round, phases of a recovery, lost steps.

        Args:
            job: The job with the status before the write.
            new: The status that was written.
        """
        old = job.status
        recovery = new.last_recovery
        if new.restart_round is not None and new.restart_round != old.restart_round:
            named = recovery is not None and recovery.round == new.restart_round
            reason = recovery.reason if named and recovery is not None else Reason.FIRST_ROUND
            tries = new.scheduling
            if tries is not None and tries.retry_at is not None and not named:
                reason = Reason.NOT_SCHEDULED
                self._timeouts.labels(job.namespace, job.name).inc()
            self._rounds.labels(reason).inc()
        for record in new.recoveries:
            self._count_recovery(job, record)
        if new.completion_time is not None:
            with suppress(KeyError):
                self._goodput.remove(job.namespace, job.name)
        elif new.goodput is not None:
            self._goodput.labels(job.namespace, job.name).set(new.goodput.ratio)

        quarantined = len(set(new.quarantined) - set(old.quarantined))
        if quarantined:
            self._quarantined.labels(job.namespace, job.name).inc(quarantined)
        if new.spares is not None or old.spares is not None:
            ready = 0 if new.spares is None else new.spares.ready
            self._spares.labels(job.namespace, job.name).set(ready)
        promoted = len(new.promoted_since(old))
        if promoted:
            self._promotions.labels(job.namespace, job.name).inc(promoted)

        if _is_started_over(new) and not _is_started_over(old):
            self._start_overs.labels(job.namespace, job.name).inc()

        for kind, gauge in self._conditions.items():
            known = new.condition(kind)
            if known is not None or kind is JobCondition.SIDECARS_UNREACHABLE:
                gauge.labels(job.namespace, job.name).set(new.is_true(kind))

    def unreadable(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of objects that cannot be parsed, by kind. Kinds not in `counts` become 0."""
        for kind in self._unreadable_kinds | set(counts):
            self._unreadable.labels(kind).set(counts.get(kind, 0))
        self._unreadable_kinds |= set(counts)

    def store_listed(
        self, namespace: str, store: str, usage: UsageStatus | None, quota_ratio: float | None
    ) -> None:
        """Set the series of a store to what its newest listing says. Series of what is gone are removed."""
        own = (namespace, store)
        values: dict[Gauge, dict[tuple[str, ...], float]] = {
            self._store_bytes: {} if usage is None else {own: usage.bytes},
            self._store_objects: {} if usage is None else {own: usage.objects},
            self._store_quota: {} if quota_ratio is None else {own: quota_ratio},
            self._store_namespaces: {},
            self._store_jobs: {},
            self._store_orphans: {},
        }
        if usage is not None:
            for one in usage.namespaces:
                values[self._store_namespaces][*own, one.namespace] = one.bytes
            for job in usage.jobs:
                values[self._store_jobs][*own, job.namespace, job.name or job.uid] = job.bytes
            for kind in usage.orphans:
                values[self._store_orphans][*own, kind.kind] = kind.bytes
        for metric, rows in values.items():
            known = self._store_series.setdefault((own, metric), set())
            for labels in known - rows.keys():
                metric.remove(*labels)
            for labels, value in rows.items():
                metric.labels(*labels).set(value)
            self._store_series[own, metric] = set(rows)

    def pruned(self, job: Gang) -> None:
        """Count a checkpoint that was deleted from the object store."""
        self._pruned.labels(job.namespace, job.name).inc()

    def drilled(
        self, namespace: str, store: str, result: DrillExit, read_bytes: int, seconds: float
    ) -> None:
        """Count a drill that has ended."""
        self._drills.labels(namespace, store, result.name.lower()).inc()
        self._drill_bytes.labels(namespace, store).inc(read_bytes)
        self._drill_seconds.labels(namespace, store).inc(seconds)

    def forget_store(self, namespace: str, store: str) -> None:
        """Remove the series of a store that is gone."""
        self.store_listed(namespace, store, None, None)
        for result in DrillExit:
            with suppress(KeyError):
                self._drills.remove(namespace, store, result.name.lower())
        for metric in (self._drill_bytes, self._drill_seconds):
            with suppress(KeyError):
                metric.remove(namespace, store)

    def forget(self, namespace: str, job: str) -> None:
        """Remove the series of a job that is gone."""
        for metric in (
            self._goodput,
            self._lost_steps,
            self._quarantined,
            self._pruned,
            *self._conditions.values(),
            self._timeouts,
            self._spares,
            self._promotions,
            self._start_overs,
        ):
            with suppress(KeyError):
                metric.remove(namespace, job)

    def _count_recovery(self, job: Gang, new: RecoveryStatus) -> None:
        same = (r for r in job.status.recoveries if r.round == new.round)
        old = next(same, RecoveryStatus(round=new.round, reason=new.reason))
        known = old.phases()
        for phase, seconds in new.phases().items():
            if phase not in known:
                self._recovery.labels(phase).observe(seconds)
        if old.total_seconds is None and new.total_seconds is not None:
            self._recovery.labels("total").observe(new.total_seconds)
        if old.lost_steps is None and new.lost_steps:
            self._lost_steps.labels(job.namespace, job.name).inc(new.lost_steps)


# --------------------------------------------------------------------------- the ports


SILENT_WATCH_SECONDS = 180.0
"""Silence of one watch after which /readyz fails. The API server sends each watch a bookmark about once
a minute, so a longer silence means that the operator does not see changes in the cluster."""
_IDLE_SECONDS = 5.0
_RENDERED_SECONDS = 0.2
"""Seconds for which one rendering of /metrics is reused. The rate of requests is not limited."""


class PlainPorts:
    """The two listening ports. `metrics_port` and `health_port` are valid between start and close."""

    def __init__(
        self,
        metrics: Metrics,
        watch_age_seconds: Callable[[], float | None],
        stalled_watches: Callable[[], Sequence[str]],
        clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._watch_age_seconds = watch_age_seconds
        self._stalled_watches = stalled_watches
        self._clock = clock
        self._log_changes = logs.Changed()
        self._rendered: tuple[float, bytes] | None = None
        self._ports = {
            name: Port(
                context=None,
                idle_seconds=_IDLE_SECONDS,
                closed=partial(self._closed, name),
            )
            for name in ("metrics", "health")
        }
        self.metrics_port = 0
        self.health_port = 0

    def _closed(self, port: str, reason: str, message: str) -> None:
        self._metrics.dropped_connections.labels(port, reason).inc()
        self._log_changes.warning_once(reason, message, port=port)

    async def start(self, host: str, metrics_port: int, health_port: int) -> None:
        """Listen on both ports; port 0 lets the system choose. Raises OSError if a port is in use."""
        metrics = web.Application(client_max_size=1024)
        metrics.router.add_get("/metrics", self._serve_metrics)
        health = web.Application(client_max_size=1024)
        health.router.add_get("/healthz", self._alive)
        health.router.add_get("/readyz", self._ready)
        self.metrics_port = await self._ports["metrics"].start(metrics, host, metrics_port)
        self.health_port = await self._ports["health"].start(health, host, health_port)

    def connections(self, port: str) -> int:
        """Return the number of open connections of the port `metrics` or `health`."""
        return self._ports[port].connections

    async def close(self) -> None:
        for port in self._ports.values():
            await port.close()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        now = self._clock.monotonic()
        if self._rendered is None or now >= self._rendered[0] + _RENDERED_SECONDS:
            self._rendered = now, generate_latest(self._metrics.registry)
        return web.Response(
            body=self._rendered[1],
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _ready(self, request: web.Request) -> web.Response:
        """Answer 503 while a watch is not in sync or has been silent for too long. A standby is ready, too.

        /healthz answers 200 all the same: the operator continues with the copies it has, and the kubelet
        must not restart it because an API server is silent.
        """
        age = self._watch_age_seconds()
        if age is None:
            return web.Response(status=503, text="the watches are not in sync yet\n")
        if age > SILENT_WATCH_SECONDS:
            return web.Response(status=503, text=f"a watch has been silent for {age:.0f} s\n")
        return web.Response(text=f"the newest event of a watch is {age:.0f} s old\n")

    async def _alive(self, request: web.Request) -> web.Response:
        """Answer 503 if a watch's loop stands still. Any answer shows that the event loop runs."""
        stalled = self._stalled_watches()
        if stalled:
            return web.Response(
                status=503, text=f"these watches neither receive nor fail: {', '.join(stalled)}\n"
            )
        return web.Response(text="ok\n")
