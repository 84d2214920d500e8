"""Handler of the messages and requests that the operator and other sidecars send to the control port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import RefusedError
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound
from holdfast_core.messages.report import Relay
from holdfast_core.messages.schema import (
    CoordinatorState,
    CopyRequest,
    FinishCommit,
    GangRequest,
    Inventory,
    KeepLayout,
    ManifestDocument,
    ManifestPut,
    Ok,
    Plan,
    Prune,
    Refusal,
    Rendezvous,
    Round,
    Seal,
    Suspect,
    WorkerReport,
)
from holdfast_sidecar.base.rounds import (
    Caller,
    RoundState,
    refuse,
    refuse_reader,
    refuse_rendezvous,
    refuse_state,
)
from holdfast_sidecar.gang.notices import RankNotices
from holdfast_sidecar.process.components import Components
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.process.manifests import ManifestRequests
from holdfast_sidecar.process.pruning import Pruner
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.upkeep.verify import Verifier
from holdfast_sidecar.wire.client import raise_refused
from holdfast_sidecar.wire.relaying import Relaying


@dataclass(frozen=True, slots=True)
class Receivers:
    """The handlers of the messages that do not begin or end a round."""

    manifests: ManifestRequests
    copies: IncomingCopies
    pruner: Pruner
    verifier: Verifier
    notices: RankNotices
    relaying: Relaying


class Control:
    """Handler of the control server, and of messages that this sidecar sends to its own worker."""

    def __init__(self, components: Components, lifecycle: Lifecycle, receivers: Receivers) -> None:
        self._components = components
        self._lifecycle = lifecycle
        self._receivers = receivers

    @property
    def state(self) -> RoundState:
        return self._components.current()

    # ------------------------------------------------------------------ reads

    async def inventory(self, caller: Caller) -> Inventory:
        self._check_reader(caller)
        return await self._lifecycle.inventory()

    async def coordinator_state(
        self, caller: Caller, since: int, timeout_seconds: float, quiet_seconds: float
    ) -> CoordinatorState:
        refused = refuse_state(self.state, caller)
        if refused is not None:
            raise_refused(refused)
        return await self._components.role.require().state(
            since, timeout_seconds, quiet_seconds, acknowledges=caller.operator
        )

    async def rendezvous(
        self, caller: Caller, round_: RestartRound, timeout_seconds: float
    ) -> Rendezvous:
        refused = refuse_rendezvous(self.state, caller, round_)
        if refused is not None:
            raise_refused(refused)
        return await self._components.starter.rendezvous(round_, timeout_seconds)

    async def manifest(
        self,
        caller: Caller,
        job_uid: JobUid | None,
        checkpoint: CheckpointId,
    ) -> ManifestDocument:
        self._check_reader(caller)
        return await self._receivers.manifests.get(job_uid, checkpoint)

    async def layout(self, caller: Caller, digest: Digest) -> bytes:
        self._check_reader(caller)
        return await self._receivers.manifests.layout(digest)

    # ------------------------------------------------------------------ messages

    async def dispatch(self, caller: Caller, path: str, message: Any) -> Any:
        """Serve one message and return its reply.

        Raises:
            StaleRoundError, RefusedError: The refusal table (`base/rounds.py`) does not allow the message
                now, or its handler refuses it.
            HoldfastError: The handler fails.
        """
        receivers = self._receivers
        match message:
            case Seal():
                if message.round > self.state.round:
                    self._check(caller, message)
                    receivers.notices.sealed()
                return await self._lifecycle.seal(caller, message)
            case Round():
                return await self._lifecycle.round(caller, message)
            case FinishCommit():
                return await self._lifecycle.finish_commit(caller, message)
        self._check(caller, message)
        match message:
            case Relay():
                return await receivers.relaying.serve(message, self.dispatch)
            case WorkerReport() if not self.state.is_coordinator:
                return await receivers.relaying.to_coordinator(path, message)
            case WorkerReport():
                return self._components.role.require().report(message)
            case Prune():
                return await self._components.role.require().prune(message)
            case GangRequest() if caller.operator:
                return self._components.role.require().request(path, message)
            case GangRequest():
                receivers.notices.request(path, message)
            case ManifestPut():
                return await receivers.manifests.put(message)
            case CopyRequest():
                return await receivers.copies.take(caller, message)
            case KeepLayout():
                return await receivers.manifests.keep_layout(message)
            case Plan():
                receivers.pruner.take(message)
            case Suspect():
                receivers.verifier.suspect(message)
            case _:
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    f"{type(message).__name__} is not a request that this sidecar serves",
                )
        return Ok(self.state.round)

    def _check(self, caller: Caller, message: Any) -> None:
        refused = refuse(self.state, caller, message)
        if refused is not None:
            raise_refused(refused)

    def _check_reader(self, caller: Caller) -> None:
        refused = refuse_reader(self.state, caller)
        if refused is not None:
            raise_refused(refused)
