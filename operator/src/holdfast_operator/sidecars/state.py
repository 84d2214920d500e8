"""What this process knows of the sidecars of a job, and the state of the calls to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from holdfast_core.ids import Digest, JobUid, RestartRound
from holdfast_core.messages.schema import CoordinatorState, PruneReply, RestorePoint
from holdfast_operator.model.job import AckedRound, InventoryView, Reachable, SidecarView
from holdfast_operator.model.keys import Key
from holdfast_operator.sidecars.allowance import Allowance
from holdfast_operator.sidecars.call_slots import Standing
from holdfast_operator.sidecars.client import Target
from holdfast_operator.sidecars.manifests import Manifests

SILENT_AFTER = 3
"""Failures in a row after which calls to a pod use the few slots of silent pods (Standing.SILENT)."""
POLL_BURST = 20
POLL_SECONDS_EACH = 0.25
"""Seconds per poll after a burst of POLL_BURST. Each answer may cause a pass over the job, so a coordinator
whose state changes all the time must not take the operator's time from other jobs."""


@dataclass(slots=True)
class PodCalls:
    """State of the calls to one pod's sidecar. Times are monotonic unless stated otherwise."""

    view: SidecarView
    target: Target
    manifests: Manifests
    """The manifests of the pod's job."""
    wanted: frozenset[Digest] = frozenset()
    """Digests of the manifests of its latest inventory, until all of them are there."""
    answered: bool = False
    """Whether the sidecar has answered this operator process at least once."""
    answered_at: float | None = None
    """When it last answered. This is not in `view`, because a changed view requests a pass."""
    failures: int = 0
    """Failures in a row."""
    failing_since: float | None = None
    """When the first of these failures was recorded."""
    logged_at: float | None = None
    """When its silence was last logged."""
    not_before: float = 0.0
    """Earliest time of the next call, set by the back-off after a failure."""
    called_at: float | None = None
    """When the last call got its slot. None makes an inventory call due."""
    is_reported: bool = False
    """Whether `view` has the round and its content from the coordinator's state. The sidecar itself has not
    answered this process with them yet."""
    round_received: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the sidecar may have received a ROUND that makes it the coordinator."""
    under_way: set[str] = field(default_factory=set)
    starts: tuple[bool, int] = (False, 0)
    """Whether the sidecar has started, and its restart count. A change ends the back-off."""

    @property
    def has_launcher(self) -> bool:
        """Return whether the launcher was connected when the sidecar last sent its inventory."""
        return self.view.inventory is not None and self.view.inventory.launcher

    @property
    def standing(self) -> Standing:
        """Return which slots a call to the pod uses."""
        if self.failures >= SILENT_AFTER:
            return Standing.SILENT
        return Standing.ANSWERS if self.answered and not self.failures else Standing.UNKNOWN

    @property
    def knows_sidecar(self) -> bool:
        """Return whether the sidecar itself has answered this process with the round that it is in."""
        view = self.view
        own = view.acked is not None or view.sealed_round is not None
        return view.inventory is not None or (own and not self.is_reported)

    def newest(self, inventory: InventoryView) -> InventoryView:
        """Return this inventory, or the known one if that is of a newer round.

        The manifests of an inventory may be sent after those of a SEAL that began later. A sidecar's round
        never goes back.
        """
        known = self.view.inventory
        return known if known is not None and known.round > inventory.round else inventory


@dataclass(slots=True)
class JobCalls:
    """State of the calls to one job's sidecars."""

    key: Key
    uid: JobUid
    manifests: Manifests
    pods: dict[str, PodCalls] = field(default_factory=dict)
    """By uid of the pod."""
    round: RestartRound | None = None
    gang: frozenset[str] = frozenset()
    """Uids of the pods for which the coordinator of a gang that trains can answer."""
    awaits_coordinator: bool = False
    """Whether the coordinator of a gang that trains has neither answered this process nor failed to."""
    coordinator_pod: str | None = None
    """Identity of the polled sidecar: uid, IP and restarts of its pod, and the round."""
    poll: asyncio.Task[None] | None = None
    state: CoordinatorState | None = None
    since: int = 0
    """Version of the coordinator's state up to which everything is durable in the API. A failed poll and a
    new coordinator reset it to 0, so that the next poll returns the state without waiting for a change."""
    acted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `since` grows."""
    act_seconds: float = 0.0
    """Longest wait of the poll for the pass that acts on its answer."""
    refused_seconds: float = 0.0
    """Longest wait of the poll for a ROUND after the sidecar has answered that it does not coordinate."""
    pruned: dict[tuple[RestorePoint, ...], PruneReply] = field(default_factory=dict)
    """Replies to prunes that no pass has read yet, by the checkpoints to delete."""
    requests: set[str] = field(default_factory=set)
    """Names of the requests that are being sent."""
    polls: Allowance = field(default_factory=lambda: Allowance(POLL_BURST, POLL_SECONDS_EACH))

    def pod(self, name: str) -> PodCalls | None:
        return next((p for p in self.pods.values() if p.target.pod == name), None)

    def take_report(self, state: CoordinatorState) -> None:
        """Take from the coordinator's state what it says about sidecars that this process does not know yet.

        A new process would otherwise call every sidecar of the cluster before it knows that nothing has
        happened (ADR 0005). Sidecars for which the coordinator no longer answers are called, and so are those
        that did not answer their first call.
        """
        accepted = state.accepted if state.round == self.round else None
        for uid, pod in self.pods.items():
            if pod.knows_sidecar:
                pod.is_reported = False
            elif accepted is not None and uid in self.gang and not pod.failures:
                acked = AckedRound(state.round, accepted.version, accepted.content, pod.starts[1])
                pod.is_reported = True
                pod.view = replace(
                    pod.view, reachable=Reachable.YES, sealed_round=state.round, acked=acked
                )
            elif pod.is_reported:
                pod.is_reported = False
                reachable = Reachable.YES if pod.answered else Reachable.UNKNOWN
                pod.view = SidecarView(pod.view.worker, pod.view.pod_uid, reachable)

    @property
    def listed(self) -> set[Digest]:
        """Return the digests of all manifests that the job's sidecars list."""
        inventories = (p.view.inventory for p in self.pods.values())
        found = {m.manifest for i in inventories if i is not None for m in i.manifests}
        return found.union(*(p.wanted for p in self.pods.values()))
