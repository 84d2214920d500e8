"""Run commands in short-lived pods with the keys of a store (`operator/model/command_pods.py`)."""

from __future__ import annotations

from holdfast_core.clock import Clock
from holdfast_operator.kube.api import NameTakenError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model import labels
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandOwner,
    CommandState,
    CommandUnderway,
    CommandView,
    StoreCommand,
    render_command,
    state_of,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import StoreView
from holdfast_operator.model.ownership import StoreVerb
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
        self._first_seen: dict[str, float] = {}
        """Monotonic seconds at which this process first saw a pod, by uid."""

    async def look(
        self, owner: CommandOwner, command: StoreCommand, store: StoreView
    ) -> CommandState | None:
        """Return the state of the command's pod, or None if there is none.

        The owner's other pods of this verb are removed: their results were written, or nobody wants them.
        A pod that cannot be parsed counts as under way, because it may be this one.
        """
        name, found = command.pod_name(owner), None
        for pod in self._cache.pods.commands(owner.namespace, owner.uid, command.verb):
            if pod.name == name:
                found = pod
            else:
                await self._remove(owner, pod)
        if self._cache.pods.unreadable(owner.namespace, owner.uid):
            return CommandUnderway()
        if found is None:
            return None
        now = self._clock.monotonic()
        age = now - self._first_seen.setdefault(found.uid, now)
        return state_of(found, command, store, age)

    async def start(
        self, owner: CommandOwner, command: StoreCommand, store: StoreView
    ) -> CommandUnderway | CommandFailed:
        """Create the command's pod. A pod that is refused has failed."""
        body = render_command(owner, store, command, self._sidecar)
        refusal = await self._cluster.refusal_of_pod(owner.namespace, body)
        if refusal is not None:
            text = f"the {command.verb}'s pod cannot be created in the namespace: {refusal}"
            return CommandFailed(CommandFailure.REFUSED, text)
        try:
            await self._cluster.create_owned(body)
        except NameTakenError as error:
            return CommandFailed(CommandFailure.REFUSED, str(error))
        return CommandUnderway()

    async def end(self, owner: CommandOwner, verb: StoreVerb) -> None:
        """Remove the owner's pods of this verb. Call it after the result was written."""
        for pod in self._cache.pods.commands(owner.namespace, owner.uid, verb):
            await self._remove(owner, pod)

    async def _remove(self, owner: CommandOwner, pod: CommandView) -> None:
        self._first_seen.pop(pod.uid, None)
        if not pod.terminating:
            await self._cluster.delete(labels.POD, owner.namespace, pod.name, pod.uid)
