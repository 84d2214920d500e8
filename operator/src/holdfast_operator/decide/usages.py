"""Keep usage, orphans and quota of each CheckpointStore up to date by listings. Pure.

A short-lived pod lists the store and deletes old orphans (model/command_pods.py). These are its rules: when a
listing is due, its command, the meaning of its report, and which limits of the quota are reached. Jobs read
the reached limits in the status of the store; their coordinators then request no further upload.

Between two listings the numbers stay as they are. A quota whose store was not listed yet holds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from holdfast_core.api import (
    Checkpoint,
    CheckpointStore,
    CheckpointStoreStatus,
    JobUsageStatus,
    NamespaceUsageStatus,
    OrphanStatus,
    ReachedQuota,
    StoreCondition,
    UsageStatus,
    changed,
    parse_duration,
    parse_quantity_bytes,
    size_text,
)
from holdfast_core.clock import stamp
from holdfast_core.contract import (
    MAX_LISTED_JOBS,
    MAX_LISTED_NAMESPACES,
    StoreVerb,
    UsageContract,
)
from holdfast_core.ids import JobUid
from holdfast_core.names import first_of
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandReport,
    StoreCommand,
)
from holdfast_operator.model.job import is_within, place_of, store_config
from holdfast_operator.model.reasons import Reason

AT_A_LIMIT = timedelta(minutes=1)
"""Longest time between two listings while a quota is reached: uploads wait for what the next one shows."""
PRESSURE = 0.8
LIMIT_SECONDS = 900
"""Longest time of a listing: about 10 million objects at 100 pages of 1,000 a second, and a sweep."""
MAX_NAMED_JOBS = 2000
"""Most jobs whose uids are in one variable of the pod. One that is missing there counts as unknown to this
cluster: what its newest round has uploaded stays."""


# --------------------------------------------------------------------------- when


def location(store: CheckpointStore) -> str:
    """Return the place that a listing describes, as a URL."""
    config = store_config(store)
    return f"{'https' if config.secure else 'http'}://{place_of(config)}"


def seconds_to_listing(store: CheckpointStore, now: datetime) -> float:
    """Return the time until the store must be listed, 0 if it is due now."""
    status, last = store.status, store.status.last_listing
    moved = status.usage is not None and status.usage.location != location(store)
    every = parse_duration(store.spec.usage.every)
    if status.reached_quotas or moved:
        every = min(every, AT_A_LIMIT)
    if last is None or not is_within(every, last, now):
        return 0.0
    return (last + every - now).total_seconds()


def request_of(
    store: CheckpointStore, running: Collection[JobUid], ended: Collection[JobUid]
) -> UsageContract:
    """Return what the listing may delete.

    Args:
        running: The jobs of this cluster that use this location, by whatever CheckpointStore, and that may
            upload or do so again.
        ended: Those that upload nothing more. As many of them are named as there is room for.
    """
    if len(running) > MAX_NAMED_JOBS:
        return UsageContract()
    after = parse_duration(store.spec.usage.sweep_orphans_after)
    named = tuple(sorted(ended))[: MAX_NAMED_JOBS - len(running)]
    return UsageContract(int(after.total_seconds()), tuple(sorted(running)), named)


def listing_command(store: CheckpointStore, request: UsageContract) -> StoreCommand:
    """Return the command of the next listing, or of the one that is under way."""
    return StoreCommand(
        verb=StoreVerb.USAGE,
        seed=f"{store.generation} {store.status.last_listing}",
        request=request.to_json(),
        limit_seconds=LIMIT_SECONDS,
    )


# --------------------------------------------------------------------------- what a listing says


def with_listing(
    store: CheckpointStore,
    result: CommandReport | CommandFailed,
    names: Mapping[JobUid, str],
    now: datetime,
) -> CheckpointStoreStatus:
    """Return the status after a listing has ended. After a failed one, the numbers stay as they are.

    Args:
        names: Names of this cluster's jobs.
    """
    status = changed(store.status, last_listing=now)
    usage, problem = None, ""
    if isinstance(result, CommandFailed):
        problem = result.message
    elif result.problem is not None:
        problem = result.problem
    else:
        try:
            usage = _usage(result.data, location(store), names, now)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"the report of the listing is not valid: {error}"
    if usage is not None:
        status = changed(status, usage=usage)
    text = problem[:2000]
    if usage is not None:
        text = f"{usage.objects} objects, {size_text(usage.bytes)}"
    reason = Reason.LIST_FAILED if usage is None else Reason.LISTED
    return status.with_condition(
        StoreCondition.LISTED, usage is not None, reason, text, now, store.generation
    )


def _usage(
    data: Mapping[str, Any], where: str, names: Mapping[JobUid, str], now: datetime
) -> UsageStatus:
    """Return what a report says. Raises ValueError, TypeError, KeyError or AttributeError."""
    jobs = tuple(
        JobUsageStatus(
            namespace=namespace, uid=uid, name=names.get(uid), bytes=size, objects=objects
        )
        for namespace, uid, size, objects in data["jobs"][:MAX_LISTED_JOBS]
    )
    return UsageStatus(
        listed_at=now,
        location=where[:1024],
        bytes=data["bytes"],
        objects=data["objects"],
        checkpoints=data["checkpoints"],
        namespaces=tuple(
            NamespaceUsageStatus(namespace=name, bytes=size, objects=objects)
            for name, size, objects in data["namespaces"][:MAX_LISTED_NAMESPACES]
        ),
        jobs=jobs,
        other_bytes=max(0, data["bytes"] - sum(job.bytes for job in jobs)),
        orphans=tuple(
            OrphanStatus(
                kind=kind[:32],
                bytes=found["bytes"],
                objects=found["objects"],
                oldest_seconds=found["oldestSeconds"],
            )
            for kind, found in list(data["orphans"].items())[:8]
            if found["objects"]
        ),
        swept_bytes=data["swept"]["bytes"],
    )


# --------------------------------------------------------------------------- quota


@dataclass(frozen=True, slots=True)
class Held:
    """What somebody holds in the store."""

    what: str
    """For people: the store, a namespace or a job."""
    bytes: int
    namespace: str | None = None
    job_uid: JobUid | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """How much of one limit is used."""

    held: Held
    limit_name: str
    limit_bytes: int

    @property
    def ratio(self) -> float:
        return self.held.bytes / max(1, self.limit_bytes)

    def __str__(self) -> str:
        return (
            f"{self.held.what}: {size_text(self.held.bytes)} of {size_text(self.limit_bytes)} "
            f"({self.limit_name}, {self.ratio:.0%})"
        )


def _uses(
    store: CheckpointStore, whole: Held, namespaces: Iterable[Held], jobs: Iterable[Held]
) -> list[Use]:
    """Return how much of each limit of the quota is used. It is empty without a quota."""
    quota = store.spec.quota
    if quota is None:
        return []
    limits = (
        ("quota.bytes", quota.bytes, (whole,)),
        ("quota.perNamespace", quota.per_namespace, namespaces),
        ("quota.perJob", quota.per_job, jobs),
    )
    return [
        Use(held, name, parse_quantity_bytes(limit))
        for name, limit, found in limits
        if limit is not None
        for held in found
    ]


def uses(store: CheckpointStore) -> list[Use]:
    """Return how much of each limit is used, by the listing. It is empty without quota or listing."""
    usage = store.status.usage
    if usage is None or usage.location != location(store):
        return []
    namespaces = (Held(f"namespace {n.namespace}", n.bytes, n.namespace) for n in usage.namespaces)
    jobs = (Held(f"job {j.name or j.uid}", j.bytes, j.namespace, j.uid) for j in usage.jobs)
    return _uses(store, Held("the store", usage.bytes), namespaces, jobs)


def pinned_uses(store: CheckpointStore, pinned: Iterable[Checkpoint]) -> list[Use]:
    """Return the limits that are below what pins hold, by the sizes of the Checkpoints.

    Chunks that checkpoints share are counted for each, so the pins may hold less.
    """
    of_job, total = Counter[tuple[str, JobUid]](), 0
    for checkpoint in pinned:
        size, uid = checkpoint.status.bytes or 0, checkpoint.status.job_uid
        total += size
        if uid is not None:
            of_job[checkpoint.job, uid] += size
    namespace = Held(f"pins of namespace {store.namespace}", total)
    jobs = (Held(f"pins of job {job}", size) for (job, _), size in sorted(of_job.items()))
    found = _uses(store, Held("pins", total), (namespace,), jobs)
    return [use for use in found if use.held.bytes > use.limit_bytes]


def quota_is_new(store: CheckpointStore) -> bool:
    """Return whether the status does not say yet what the present quota means.

    Otherwise it changes with the next listing only.
    """
    known = store.status.condition(StoreCondition.QUOTA_PRESSURE)
    if known is None:
        return store.spec.quota is not None
    return known.observed_generation != store.generation


def with_quota(
    store: CheckpointStore, pinned: Iterable[Checkpoint], now: datetime
) -> CheckpointStoreStatus:
    """Return the status with the reached limits of the quota, and with condition QuotaPressure.

    A store that never had a quota does not get the condition.
    """
    kind, status = StoreCondition.QUOTA_PRESSURE, store.status
    if store.spec.quota is None:
        status = changed(status, reached_quotas=())
        if status.condition(kind) is None:
            return status
        text = "spec.quota is not set"
        return status.with_condition(kind, False, Reason.NO_QUOTA, text, now, store.generation)
    found = sorted(uses(store), key=lambda use: -use.ratio)
    reached = [use for use in found if use.held.bytes >= use.limit_bytes]
    status = changed(
        status,
        reached_quotas=tuple(
            ReachedQuota(
                namespace=use.held.namespace,
                job_uid=use.held.job_uid,
                bytes=use.held.bytes,
                limit_bytes=use.limit_bytes,
            )
            for use in reached
        ),
    )
    value, reason, text = _pressure(store, status, found, pinned_uses(store, pinned))
    return status.with_condition(kind, value, reason, text, now, store.generation)


def _pressure(
    store: CheckpointStore,
    status: CheckpointStoreStatus,
    found: list[Use],
    above: list[Use],
) -> tuple[bool | None, Reason, str]:
    """Return value, reason and message of condition QuotaPressure."""
    usage = status.usage
    listed = "" if usage is None else f", listed at {stamp(usage.listed_at)}"
    high = [str(use) for use in found if use.ratio >= PRESSURE]
    waits = (
        "The next upload of the jobs concerned waits, and goes on by itself when there is room. "
        f"{ROOM}"
    )
    if above:
        text = (
            f"the quota is below what pins hold: {first_of([str(use) for use in above])}. Nothing pinned is "
            f"deleted. Remove pins (spec.pin of the Checkpoints), or raise spec.quota. {waits}"
        )
        return True, Reason.PINS_EXCEED_QUOTA, text
    if status.reached_quotas:
        return True, Reason.QUOTA_REACHED, f"{first_of(high)}{listed}. {waits}"
    if high:
        text = f"{first_of(high)}{listed}. At 100 % the next upload waits. {ROOM}"
        return True, Reason.NEAR_QUOTA, text
    if usage is None or usage.location != location(store):
        return None, Reason.NOT_LISTED, "the store was not listed yet; uploads go on until then"
    text = f"{found[0]}{listed}" if found else f"no limit is in use{listed}"
    return False, Reason.WITHIN_QUOTA, text


ROOM = (
    "To make room: kubectl holdfast prune JOB, delete Checkpoints with deletionPolicy DeleteData, or raise "
    "spec.quota of the CheckpointStore"
)


def quota_ratio(store: CheckpointStore) -> float | None:
    """Return the highest share of a limit that is used. None: there is no quota, or nothing is known."""
    return max((use.ratio for use in uses(store)), default=None)
