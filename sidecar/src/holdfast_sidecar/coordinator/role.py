"""Whether this worker coordinates its gang now, and the Coordinator if it does."""

from __future__ import annotations

from holdfast_core.errors import RefusedError
from holdfast_core.messages.schema import Refusal, Round
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.commit import Coordinator
from holdfast_sidecar.wire.client import Peers


class CoordinatorRole:
    """Owner of the Coordinator, which exists while the current ROUND names this worker."""

    def __init__(self, pod: Pod, tiers: Tiers, peers: Peers, failures: Failures) -> None:
        self._pod = pod
        self._tiers = tiers
        self._peers = peers
        self._failures = failures
        self.coordinator: Coordinator | None = None
        """None while another worker coordinates, or while the sidecar is sealed."""

    @property
    def may_end(self) -> bool:
        """Whether no step waits for this worker to raise its level, or to report it to the operator."""
        return self.coordinator is None or self.coordinator.may_end

    def begin(self, message: Round) -> None:
        """Coordinate the round if its ROUND names this worker. No Coordinator may exist."""
        if message.coordinator == self._pod.state.worker:
            self.coordinator = Coordinator(
                self._pod, message, self._tiers, self._peers, self._failures
            )
            self.coordinator.start()

    async def end(self) -> None:
        """Stop coordinating, because the round is sealed or another worker coordinates it."""
        if self.coordinator is not None:
            coordinator, self.coordinator = self.coordinator, None
            await coordinator.close()

    def require(self) -> Coordinator:
        """Return the Coordinator. Raises RefusedError (NOT_COORDINATOR) if there is none."""
        if self.coordinator is None:
            raise RefusedError(
                Refusal.NOT_COORDINATOR,
                f"worker {self._pod.state.worker} is not the coordinator",
            )
        return self.coordinator
