"""Run commands in short-lived pods with the keys of a store (`operator/model/command_pods.py`)."""

from __future__ import annotations

from holdfast_core.api import CheckpointStore
from holdfast_core.clock import Clock
from holdfast_core.contract import StoreVerb
from holdfast_operator.kube.api import ApiError, NameTakenError
from holdfast_operator.kube.cluster import FORBIDDEN, Cluster
from holdfast_operator.model import labels
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandState,
    CommandUnderway,
    CommandView,
    StoreCommand,
    render_command,
    state_of,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.watch.cache import ClusterCache

LOOK_AGAIN_SECONDS = 2.0
"""Time after which a pass looks at a pod that is under way. A pod that does not start causes no event."""


class CommandRuns:
    """Creator, reader and remover of the pods of commands.

    All methods raise ApiError where a request failed; the next pass repeats the call.
    """

    def __init__(
        self, cluster: Cluster, cache: ClusterCache, sidecar: SidecarSettings, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._sidecar = sidecar
        self._clock = clock
        self._first_seen: dict[tuple[str, StoreVerb], tuple[str, float]] = {}
        """By store and verb: uid of the newest pod, and monotonic seconds at which it was first seen."""

    async def run(
        self, store: CheckpointStore, command: StoreCommand, *, due: bool = True
    ) -> CommandState | None:
        """Return the state of the command's pod, which is created if there is none and the command is due.

        None: there is no pod. A pod that is refused has failed. The store's other pods of this verb are
        removed: their results were written, or nobody wants them. A pod that cannot be parsed counts as under
        way, because it may be this one.
        """
        name, found = command.pod_name(store), None
        for pod in self._cache.pods.commands(store, command.verb):
            if pod.name == name:
                found = pod
            else:
                await self._remove(store, pod)
        if self._cache.pods.unreadable(store.namespace, store.uid):
            return CommandUnderway()
        if found is None:
            return await self._start(store, command) if due else None
        now, key = self._clock.monotonic(), (store.uid, command.verb)
        uid, since = self._first_seen.get(key, ("", now))
        if uid != found.uid:
            since = now
        self._first_seen[key] = found.uid, since
        return state_of(found, command, store, now - since)

    async def _start(
        self, store: CheckpointStore, command: StoreCommand
    ) -> CommandUnderway | CommandFailed:
        body = render_command(store, command, self._sidecar)
        try:
            why = await self._cluster.refusal_of_pod(store.namespace, body)
            if why is None:
                await self._cluster.create_owned(body)
        except NameTakenError as error:
            return CommandFailed(CommandFailure.REFUSED, str(error))
        except ApiError as error:
            # `refusal_of_pod` passes over an exceeded quota, because the pods of jobs wait for it. A webhook
            # that fails has the status of a server that is sick, and may last as long as a refusal.
            if error.status != FORBIDDEN and "webhook" not in str(error):
                raise
            why = str(error)
        if why is None:
            return CommandUnderway()
        text = f"the {command.verb}'s pod cannot be created in the namespace: {why}"
        return CommandFailed(CommandFailure.REFUSED, text)

    async def end(self, store: CheckpointStore, verb: StoreVerb) -> None:
        """Remove the store's pods of this verb. Call it after the result was written."""
        self._first_seen.pop((store.uid, verb), None)
        for pod in self._cache.pods.commands(store, verb):
            await self._remove(store, pod)

    async def _remove(self, store: CheckpointStore, pod: CommandView) -> None:
        if not pod.terminating:
            await self._cluster.delete(labels.POD, store.namespace, pod.name, pod.uid)
