"""Keep each CheckpointStore's condition up to date by probes, and list a store for a person who asks.

Drills run while no probe does.

The operator holds no store keys, so a short-lived pod probes (model/command_pods.py). The rules are pure
functions: when a probe is due, its command, and the meaning of its result. `Stores` gathers their inputs and
carries their results out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from holdfast_core import logs
from holdfast_core.api import (
    CheckpointStore,
    CheckpointStoreStatus,
    StoreCondition,
    StoreFeatures,
    changed,
)
from holdfast_core.clock import Clock
from holdfast_core.names import LIST_ANNOTATION
from holdfast_operator.apply.command_runs import LOOK_AGAIN_SECONDS, CommandRuns
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.loop.drills import Drills
from holdfast_operator.loop.usages import Usages
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandReport,
    CommandUnderway,
    StoreCommand,
)
from holdfast_operator.model.job import store_view
from holdfast_operator.model.ownership import StoreVerb, store_key
from holdfast_operator.watch.cache import ClusterCache

AGAIN_SOONEST = timedelta(seconds=2)
AGAIN_LATEST = timedelta(minutes=2)
"""Shortest and longest time between two probes of an unavailable store. Between these limits the wait
equals the time for which the store had been unavailable at the last probe, so each wait is about twice the
one before. The first probes come soon because a Secret or the namespace's service account is often created
just after the store; later ones are rare so that a long outage costs few pods."""

PROBE_FAILED = "ProbeFailed"
LIST_FAILED = "ListFailed"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    available: bool
    reason: str
    message: str
    features: dict[str, bool] | None


def probe_due(store: CheckpointStore, newest_job_start: datetime | None, now: datetime) -> bool:
    """Return whether the store must be probed now.

    A probe is due after creation or a change of the spec, when a new job uses the store, and from time to
    time (AGAIN_SOONEST, AGAIN_LATEST) while the store is not available.

    Args:
        newest_job_start: Creation of the newest job that uses the store and has no round yet.
    """
    last_probe = store.status.last_probe
    if last_probe is None or store.status.observed_generation != store.generation:
        return True
    if newest_job_start is not None and newest_job_start > last_probe:
        return True
    return store.available is not True and now - last_probe >= _again(store)


def next_look_seconds(store: CheckpointStore, now: datetime) -> float | None:
    """Return the seconds until the next probe is due, or None if only an event can make one due."""
    last_probe = store.status.last_probe
    if last_probe is None or store.available is True:
        return None
    return max(1.0, (last_probe + _again(store) - now).total_seconds())


def _again(store: CheckpointStore) -> timedelta:
    known, last_probe = store.status.condition(StoreCondition.AVAILABLE), store.status.last_probe
    if last_probe is None or known is None:
        return AGAIN_SOONEST
    return min(max(last_probe - known.last_transition_time, AGAIN_SOONEST), AGAIN_LATEST)


def probe_command(store: CheckpointStore) -> StoreCommand:
    """Return the command of the next probe, or of the one that is under way."""
    return StoreCommand(
        verb=StoreVerb.PROBE,
        arguments=("probe-store",),
        seed=f"{store.generation} {store.status.last_probe}",
        key=store_key(store.namespace, store.name),
    )


LIST_SECONDS = 3600
"""Deadline of a list: it reads every manifest, and those of a large gang have a megabyte each."""
MAX_REQUEST_CHARACTERS = 1024


def list_command(store: CheckpointStore) -> StoreCommand | None:
    """Return the command of the list that a person asks for by an annotation, or None."""
    request = (store.metadata.annotations or {}).get(LIST_ANNOTATION, "")
    if not request or len(request) > MAX_REQUEST_CHARACTERS:
        return None
    return StoreCommand(
        verb=StoreVerb.LIST,
        arguments=("list-store",),
        seed=request,
        key=store_key(store.namespace, store.name),
        variables={"HOLDFAST_LIST": request},
        limit_seconds=LIST_SECONDS,
    )


_REASONS = {
    CommandFailure.SECRET_NOT_FOUND: "SecretNotFound",
    CommandFailure.REFUSED: "ProbeRefused",
    CommandFailure.FAILED: PROBE_FAILED,
}


def result_of(state: CommandReport | CommandFailed) -> ProbeResult:
    """Return the result that the end of the probe's pod means. A report of another form is a failed probe."""
    if isinstance(state, CommandFailed):
        return ProbeResult(False, _REASONS[state.failure], state.message, None)
    available, features = state.data.get("available"), state.data.get("features")
    if not isinstance(available, bool):
        text = "the probe's pod failed: its report has no `available` that is true or false"
        return ProbeResult(False, PROBE_FAILED, text, None)
    known = ("conditionalPut", "checksum", "multipart", "rangeGet")
    return ProbeResult(
        available=available,
        reason=(state.text("reason") or ("Probed" if available else PROBE_FAILED))[:128],
        message=state.text("message")[:2000],
        features=None
        if not isinstance(features, dict)
        else {k: v for k in known if isinstance(v := features.get(k), bool)},
    )


def store_status(
    store: CheckpointStore, result: ProbeResult, now: datetime
) -> CheckpointStoreStatus:
    """Return the status for this result. Features on which the probe did not report stay as they are."""
    known = store.status.features or StoreFeatures()
    status = store.status.with_condition(
        StoreCondition.AVAILABLE,
        result.available,
        result.reason,
        result.message,
        now,
        store.generation,
    )
    return changed(
        status,
        features=StoreFeatures.from_dict({**known.to_dict(), **(result.features or {})}),
        last_probe=now,
        observed_generation=store.generation,
    )


class Stores:
    """Reconciler of CheckpointStores."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ClusterCache,
        events: Events,
        commands: CommandRuns,
        drills: Drills,
        usages: Usages,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._events = events
        self._commands = commands
        self._drills = drills
        self._usages = usages
        self._clock = clock

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Run one pass over the store.

        Returns:
            Seconds after which the next pass is due without an event, or None if no pass is due.

        Raises:
            ApiError: A request failed.
            ConflictError: The store changed since it was read.
        """
        store = self._cache.stores.get(namespace, name)
        if store is None:
            # A deleted store's pods are garbage-collected; those of an unreadable store stay.
            return None
        await self._list(store)
        if store.deleting:
            for verb in StoreVerb:
                await self._commands.end(store, verb)
            return None
        command, view = probe_command(store), store_view(store)
        state = await self._commands.look(store, command, view)
        if state is None:
            now = self._clock.utc_now()
            if not probe_due(store, self._cache.jobs.newest_start(namespace, name), now):
                drill_seconds = await self._drills.reconcile(store)
                usage_seconds = await self._usages.reconcile(store)
                waits = (next_look_seconds(store, now), drill_seconds, usage_seconds)
                return min((seconds for seconds in waits if seconds is not None), default=None)
            state = await self._commands.start(store, command, view)
        if not isinstance(state, CommandUnderway):
            await self._write(store, result_of(state))
            await self._commands.end(store, StoreVerb.PROBE)
        return LOOK_AGAIN_SECONDS

    async def _list(self, store: CheckpointStore) -> None:
        """Start the pod of the list that a person asks for. Its log is the result, so the pod stays."""
        command, view = list_command(store), store_view(store)
        if command is None or store.deleting:
            await self._commands.end(store, StoreVerb.LIST)
        elif await self._commands.look(store, command, view) is None:
            state = await self._commands.start(store, command, view)
            if isinstance(state, CommandFailed):
                await self._events.emit(store, "Warning", LIST_FAILED, state.message)

    async def _write(self, store: CheckpointStore, result: ProbeResult) -> None:
        status = store_status(store, result, self._clock.utc_now())
        await self._cluster.write_status(store, status)
        if store.available is result.available:
            return
        logs.info(
            f"store {result.reason}: {result.message}", namespace=store.namespace, store=store.name
        )
        kind = "Normal" if result.available else "Warning"
        await self._events.emit(store, kind, result.reason, result.message)
