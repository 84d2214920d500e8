"""When a CheckpointStore is probed or listed for a person, and which Events its status causes. Pure.

The operator holds no store keys, so a short-lived pod probes (model/command_pods.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta

from holdfast_core.api import (
    CheckpointStore,
    CheckpointStoreStatus,
    StoreCondition,
    StoreFeatures,
    changed,
)
from holdfast_core.clock import parse_stamp
from holdfast_core.contract import ListContract, StoreVerb
from holdfast_core.errors import ConfigError
from holdfast_core.names import LIST_ANNOTATION
from holdfast_operator.decide.report.status import turned
from holdfast_operator.model.actions import EmitEvent, normal, warning
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandReport,
    StoreCommand,
)
from holdfast_operator.model.job import is_within

AGAIN_SOONEST = timedelta(seconds=2)
AGAIN_LATEST = timedelta(minutes=2)
"""Shortest and longest time between two probes of an unavailable store. Between these limits the wait
equals the time for which the store had been unavailable at the last probe, so each wait is about twice the
one before. The first probes come soon because a Secret or the namespace's service account is often created
just after the store; later ones are rare so that a long outage costs few pods."""

PROBE_FAILED = "ProbeFailed"
LIST_FAILED = "ListFailed"


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
        # A start in the future was stamped by an API server whose clock is ahead. Until its time has come, it
        # would be later than every probe.
        return newest_job_start <= now or not is_within(AGAIN_LATEST, last_probe, now)
    return store.available is not True and not is_within(_again(store), last_probe, now)


def next_look_seconds(store: CheckpointStore, now: datetime) -> float | None:
    """Return the seconds until the next probe is due, or None if only an event can make one due."""
    last_probe = store.status.last_probe
    if last_probe is None or store.available is True:
        return None
    again = _again(store)
    return max(1.0, min(last_probe + again - now, again).total_seconds())


def _again(store: CheckpointStore) -> timedelta:
    known, last_probe = store.status.condition(StoreCondition.AVAILABLE), store.status.last_probe
    if last_probe is None or known is None:
        return AGAIN_SOONEST
    return min(max(last_probe - known.last_transition_time, AGAIN_SOONEST), AGAIN_LATEST)


def probe_command(store: CheckpointStore) -> StoreCommand:
    """Return the command of the next probe, or of the one that is under way."""
    return StoreCommand(StoreVerb.PROBE, seed=f"{store.generation} {store.status.last_probe}")


LIST_SECONDS = 3600
"""Deadline of a list: it reads every manifest, and those of a large gang have a megabyte each."""
MAX_REQUEST_CHARACTERS = 1024
REQUEST_KEPT = timedelta(days=1)


def list_command(store: CheckpointStore, now: datetime) -> StoreCommand | None:
    """Return the command of the list that a person asks for by an annotation, or None.

    A request that is a day old was left by a command that was killed. Its pod would begin again whenever its
    node is removed.
    """
    request = (store.metadata.annotations or {}).get(LIST_ANNOTATION, "")
    if not request or len(request) > MAX_REQUEST_CHARACTERS:
        return None
    with suppress(ConfigError, ValueError):  # the pod says what is wrong with it
        if now - parse_stamp(ListContract.from_json(request).asked_at) > REQUEST_KEPT:
            return None
    return StoreCommand(StoreVerb.LIST, request, request, LIST_SECONDS)


_FEATURES = ("conditionalPut", "checksum", "multipart", "rangeGet")
_REASONS = {
    CommandFailure.SECRET_NOT_FOUND: "SecretNotFound",
    CommandFailure.REFUSED: "ProbeRefused",
    CommandFailure.FAILED: PROBE_FAILED,
}


def with_probe(
    store: CheckpointStore, state: CommandReport | CommandFailed, now: datetime
) -> CheckpointStoreStatus:
    """Return the status after the end of a probe's pod. A report of another form is a failed probe.

    Features on which the probe did not report stay as they are.
    """
    available, reason = False, PROBE_FAILED
    features = (store.status.features or StoreFeatures()).to_dict()
    if isinstance(state, CommandFailed):
        reason, text = _REASONS[state.failure], state.message
    elif not isinstance(state.data.get("available"), bool):
        text = "the probe's pod failed: its report has no `available` that is true or false"
    else:
        available, text = state.data["available"], state.text("message")[:2000]
        reason = (state.text("reason") or ("Probed" if available else PROBE_FAILED))[:128]
        found = state.data.get("features")
        known = found if isinstance(found, Mapping) else {}
        features |= {k: v for k in _FEATURES if isinstance(v := known.get(k), bool)}
    status = store.status.with_condition(
        StoreCondition.AVAILABLE, available, reason, text, now, store.generation
    )
    return changed(
        status,
        features=StoreFeatures.from_dict(features),
        last_probe=now,
        observed_generation=store.generation,
    )


def store_events(before: CheckpointStoreStatus, after: CheckpointStoreStatus) -> list[EmitEvent]:
    """Return an Event for each change of Available, and those about conditions that are bad or good again."""
    old, new = (status.condition(StoreCondition.AVAILABLE) for status in (before, after))
    events = [
        *turned(StoreCondition.LISTED, True, before, after),
        *turned(StoreCondition.QUOTA_PRESSURE, False, before, after),
    ]
    if new is None or (old is not None and old.status is new.status):
        return events
    event = normal if new.is_true else warning
    return [event(new.reason, new.message), *events]
