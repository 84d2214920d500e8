"""Handler of the messages and requests that the operator and other sidecars send to the control port.

Manifests and layouts of checkpoints that are on this node are served and accepted here. The gauges of the
page /metrics are set to the present state when the page is requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, TierName
from holdfast_core.messages.report import Relay
from holdfast_core.messages.schema import (
    CoordinatorState,
    CopyRequest,
    FinishCommit,
    GangRequest,
    Inventory,
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
from holdfast_core.node.tier import BUFFER_LIMIT_BYTES, DiskNodeTier
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import (
    Caller,
    RoundState,
    fence,
    refuse,
    refuse_reader,
    refuse_rendezvous,
    refuse_state,
)
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.plan import check_put
from holdfast_sidecar.gang.report import Sources, gauges
from holdfast_sidecar.gang.state import RankNotices
from holdfast_sidecar.process.components import Components
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.process.pruning import Pruner
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.upkeep.scrub import Verifier
from holdfast_sidecar.wire.client import raise_refused
from holdfast_sidecar.wire.relaying import Relaying


class MetricsPage:
    """Renderer of the page, for the plain server."""

    def __init__(
        self, metrics: Metrics, components: Components, sources: Sources, disk: DiskNodeTier
    ) -> None:
        self._metrics = metrics
        self._components = components
        self._sources = sources
        self._disk = disk

    def render(self) -> bytes:
        metrics, components = self._metrics, self._components
        metrics.level(pending=components.saves.flow.pending, round_=components.current().round)
        metrics.gang(gauges(components.current(), self._sources))
        coordinator = components.role.coordinator
        if coordinator is not None:
            metrics.committed(coordinator.levels())
            metrics.overdue(coordinator.overdue_seconds)
            metrics.overtaken(coordinator.dropped)
            if coordinator.interval is not None:
                metrics.interval(coordinator.interval)
        found = () if coordinator is None else coordinator.stragglers
        metrics.stragglers({s.rank: s.factor for s in found})
        metrics.buffers(self._disk.buffers.allocated_bytes, BUFFER_LIMIT_BYTES)
        return metrics.render()


class ManifestRequests:
    """Handler of requests for manifests and layouts, and of ManifestPut."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        saves: SaveComponents,
        failures: Failures,
    ) -> None:
        self._pod = pod
        self._node = tiers.node
        self._pools = tiers.pools
        self._saves = saves
        self._failures = failures

    async def get(self, job_uid: JobUid | None, checkpoint: CheckpointId) -> ManifestDocument:
        """Return the manifest.

        Args:
            job_uid: The job that owns the checkpoint. None means this pod's job.
            checkpoint: The checkpoint.

        Raises:
            NotFoundError: The manifest is not on this node.
            HoldfastError: It cannot be read, or is not valid.
        """
        return await self._pools.read.run(self._read, job_uid or self._pod.job_uid, checkpoint)

    def _read(self, job_uid: JobUid, checkpoint: CheckpointId) -> ManifestDocument:
        document = self._node.get_manifest(job_uid, checkpoint)
        parse_manifest_of(document, job_uid, checkpoint)
        return ManifestDocument(document.decode())

    async def layout(self, digest: Digest) -> bytes:
        """Return a layout from the node tier. Raises NotFoundError, CorruptionError."""
        return await self._pools.read.run(self._node.get_layout, digest)

    async def put(self, message: ManifestPut) -> Ok:
        """Write a manifest, durably, to the node tier.

        There is no `await` between the last check of the round and the queueing of the write. A SEAL that
        comes later therefore waits for the write.

        Raises:
            FormatError: The manifest is not the one that the message names.
            NotFoundError: This sidecar has no shard of an own rank that the manifest names.
            RefusedError: CONFLICT if another manifest of this checkpoint exists.
            CapacityError: The node tier has no room.
        """
        manifest = await self._pools.read.run(check_put, message, self._pod.contract)
        refused = fence(self._pod.state, message.round)
        if refused is not None:
            raise_refused(refused)
        for number in self._pod.state.own_ranks:
            ref = manifest.ref(Rank(number))
            if self._node.find(ref) is None:
                raise NotFoundError(
                    f"step {message.step}: the shard of rank {number} that the manifest names is not "
                    f"on the node tier of worker {self._pod.state.worker}"
                )
        try:
            await self._pools.meta.run(self._write, message, manifest)
        except AlreadyExistsError as error:
            self._failures.note_text(
                f"manifest of step {message.step}",
                TierName.NODE,
                "Conflict",
                str(error),
                step=message.step,
            )
            raise RefusedError(Refusal.CONFLICT, str(error)) from error
        except CapacityError as error:
            self._failures.note("manifests", TierName.NODE, error, step=message.step)
            raise
        self._failures.healthy("manifests")
        self._saves.flow.committed(message.step, message.round)
        return Ok(message.round)

    def _write(self, message: ManifestPut, manifest: Manifest) -> None:
        self._node.put_manifest(manifest.job.uid, manifest.checkpoint, message.manifest.encode())


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
                self._components.saves.flow.has_plan = True
                receivers.notices.request(path, message)
            case ManifestPut():
                return await receivers.manifests.put(message)
            case CopyRequest():
                return await receivers.copies.take(caller, message)
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
