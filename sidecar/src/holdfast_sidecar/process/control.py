"""Handler of the messages and requests that the operator and other sidecars send to the control port.

The coordinator's plan is carried out here: levels for the ranks, writes, uploads, and steps that are deleted.
Manifests and layouts of checkpoints that are on this node are served and accepted. The gauges of the page
/metrics are set to the present state when the page is requested.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast_core import logs
from holdfast_core.errors import (
    HoldfastError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Level,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
)
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import (
    CoordinatorState,
    CopyRequest,
    FinishCommit,
    GangRequest,
    Inventory,
    Ok,
    Plan,
    Prune,
    Refusal,
    Round,
    Seal,
    StoreAddress,
    WorkerReports,
)
from holdfast_core.node.tier import BUFFER_LIMIT_BYTES, DiskNodeTier
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import (
    Caller,
    RoundState,
    fence,
    refuse,
    refuse_plan,
    refuse_reader,
    refuse_rendezvous,
    refuse_state,
)
from holdfast_sidecar.base.telemetry import Failures, Metrics
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.plan import missing
from holdfast_sidecar.gang.state import RankNotices, Sources, gauges
from holdfast_sidecar.process.components import Components
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.upkeep.prune import (
    delete_orphans,
    delete_steps,
    protected_steps,
)
from holdfast_sidecar.upkeep.scrub import Verifier
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.following import Follower
from holdfast_sidecar.wire.relaying import Relaying

_COMING_SECONDS = 5.0
"""How long a request waits for a manifest that this sidecar is about to have. It is less than the time-out
of a request."""


class Pruner:
    """Handler of the coordinator's plans."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        saves: SaveComponents,
        copies: IncomingCopies,
        notices: RankNotices,
        release: Callable[[RestartRound], None],
        failures: Failures,
    ) -> None:
        self._pod = pod
        self._tiers = tiers
        self._saves = saves
        self._copies = copies
        self._notices = notices
        self._release = release
        self._failures = failures
        self._tasks = Tasks()
        self._pruning: asyncio.Task[None] | None = None
        """The deletions of the newest plan that has any."""
        self._taken: Plan | None = None
        """The last plan."""
        saves.stager.changed.subscribe(self._slots_changed)

    async def close(self) -> None:
        await self._tasks.cancel()

    def take(self, wanted: Plan) -> None:
        """Begin what the plan wants: notices, writes, uploads, deletions. Free the slots of dropped steps."""
        before = self._taken
        known = (
            before if before is not None and before.round == wanted.round else Plan(wanted.round)
        )
        self._taken = wanted
        if wanted.released:
            self._release(wanted.round)
        message = missing(wanted, known)
        if message is None:
            return
        for reached in message.levels:
            self._notices.level(reached)
            if reached.level is Level.PERSISTED:
                self._saves.flow.reached_store(reached.step)
        if self._pod.state.worker == 0:
            self._notices.request(Plan(wanted.round, save_from=wanted.save_from, stop=wanted.stop))
        self._forget(message.drop)
        self._saves.stager.choose(message.write)
        if message.upload is not None:
            self._saves.flow.request_upload(message.upload)
        if message.drop or any(r.level is not Level.LOCAL for r in message.levels):
            # It names all that earlier plans drop, too. One task tries again what the disk does not delete.
            if self._pruning is not None:
                self._pruning.cancel()
            self._pruning = self._tasks.spawn(self._until_pruned(wanted), "prune")

    def _slots_changed(self) -> None:
        if self._again():
            # The rank receives the reply to its save first.
            asyncio.get_running_loop().call_soon(self._drop_again)

    def _drop_again(self) -> None:
        """Free the slots of dropped steps that ranks have saved again. Nothing else would free them."""
        self._forget(self._again())

    def _again(self) -> tuple[Step, ...]:
        stager, ranks = self._saves.stager, map(Rank, self._pod.state.own_ranks)
        waiting = {step for rank in ranks for step in stager.waiting(rank)}
        return tuple(sorted(waiting & self._saves.flow.dropped))

    def _forget(self, steps: tuple[Step, ...]) -> None:
        if not steps:
            return
        self._notices.dropped(steps)
        self._saves.flow.forget(steps)
        self._saves.stager.forget(frozenset(steps))

    async def _until_pruned(self, plan: Plan) -> None:
        """Repeat `_prune` after each error of the disk, with back-off. What stays would fill the volume."""
        backoff = self._pod.backoff()
        while True:
            try:
                await self._prune(plan)
            except (HoldfastError, OSError) as error:
                self._failures.note("pruning", TierName.NODE, error)
                await self._pod.clock.sleep(backoff.next_seconds())
            else:
                self._failures.healthy("pruning")
                return

    async def _prune(self, plan: Plan) -> None:
        """Delete the steps that a plan drops, and orphans below the newest replicated step in it.

        Nothing is deleted while sealed. What this round protects is never deleted.
        """
        accepted = self._pod.state.accepted
        if accepted is None or accepted.round != plan.round:
            return
        await self._delete(accepted, frozenset(plan.drop))
        kept = max((r.step for r in plan.levels if r.level is not Level.LOCAL), default=None)
        if kept is not None and not self._is_over(accepted):
            await self._tiers.pools.shard.run(
                delete_orphans,
                self._tiers.node,
                self._pod.job_uid,
                before=accepted.round,
                below=kept,
                protected=protected_steps(accepted),
            )

    async def _delete(self, accepted: Round, steps: frozenset[Step]) -> None:
        """Delete steps of this round from the node tier, manifests first."""
        if self._is_over(accepted):
            return
        going = steps - await self._protected(accepted, steps)
        if going and not self._is_over(accepted):
            self._copies.forget(going)
            try:
                await self._tiers.pools.shard.run(
                    delete_steps, self._tiers.node, self._pod.job_uid, going
                )
            finally:
                self._saves.stager.slot_writes.room.made()

    async def _protected(self, accepted: Round, steps: frozenset[Step]) -> frozenset[Step]:
        """Return the steps that this round protects.

        The manifests on the disk are read only if the restore point is among `steps`: the disk may hang.
        """
        if accepted.restore_point.step not in steps:
            return protected_steps(accepted)
        return protected_steps(accepted, await self._tiers.checkpoints(self._pod.job_uid))

    def _is_over(self, accepted: Round) -> bool:
        """Return whether a newer round was sealed since. Its inventory may list the shards to be deleted."""
        state = self._pod.state
        return state.accepted is None or state.round != accepted.round


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
    """Handler of requests for manifests and layouts. It stores the manifests that the plan names."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        saves: SaveComponents,
        failures: Failures,
        peers: Peers,
        built: Callable[[CheckpointId], bytes],
    ) -> None:
        """Create the handler.

        Args:
            pod, tiers, saves, failures: The parts of the sidecar that it works on.
            peers: Where other workers get manifests from.
            built: Returns a manifest that the own coordinator has built, or raises NotFoundError.
        """
        self._pod = pod
        self._node = tiers.node
        self._pools = tiers.pools
        self._saves = saves
        self._failures = failures
        self._peers = peers
        self._built = built
        self._tasks = Tasks()
        self._wanted: dict[CheckpointId, Digest] = {}
        """The manifests that the present plan names."""
        self._documents: dict[CheckpointId, bytes] = {}
        """Those of them that this process has. A relay sends them to its group from here: the disk would be
        read, and the manifest parsed, for each worker."""
        self._coming: dict[CheckpointId, asyncio.Event] = {}
        """Those of them that are being fetched or stored, with what is set when the document is here."""

    async def close(self) -> None:
        await self._tasks.cancel()

    async def get(self, job_uid: JobUid | None, checkpoint: CheckpointId) -> bytes:
        """Return the document of a manifest. One that the plan names is waited for.

        Args:
            job_uid: The job that owns the checkpoint. None means this pod's job.
            checkpoint: The checkpoint.

        Raises:
            NotFoundError: The manifest is not on this node.
            HoldfastError: It cannot be read, or is not valid.
        """
        uid = job_uid or self._pod.job_uid
        if uid == self._pod.job_uid:
            coming = self._coming.get(checkpoint)
            if coming is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_COMING_SECONDS):
                        await coming.wait()
            if checkpoint in self._documents:
                return self._documents[checkpoint]
        return await self._pools.read.run(self._read, uid, checkpoint)

    def _read(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        document = self._node.get_manifest(job_uid, checkpoint)
        parse_manifest_of(document, job_uid, checkpoint)
        return document

    async def layout(self, digest: Digest) -> bytes:
        """Return a layout from the node tier. Raises NotFoundError, CorruptionError."""
        return await self._pools.read.run(self._node.get_layout, digest)

    def take(self, plan: Plan) -> None:
        """Begin to store the manifests of the plan that this node lacks."""
        self._wanted = dict(plan.manifests)
        self._documents = {c: d for c, d in self._documents.items() if c in self._wanted}
        for checkpoint in self._wanted:
            has = self._saves.flow.is_committed(checkpoint.step, checkpoint.round)
            if not has and checkpoint not in self._coming:
                self._coming[checkpoint] = asyncio.Event()
                self._tasks.spawn(
                    self._bring(checkpoint, plan.round), f"manifest of step {checkpoint.step}"
                )

    async def _bring(self, checkpoint: CheckpointId, round_: RestartRound) -> None:
        """Fetch and store a manifest. This is repeated for as long as the plan of this round names it."""
        backoff, changes = self._pod.backoff(), logs.Changed()
        subject = f"manifest of step {checkpoint.step}"
        try:
            while (wanted := self._wanted.get(checkpoint)) is not None:
                try:
                    if fence(self._pod.state, round_) is not None:
                        return
                    document = await self._fetched(checkpoint, wanted)
                    if await self._store(checkpoint, document, round_):
                        return
                except UnavailableError as error:
                    changes.warning(subject, str(error))
                except HoldfastError as error:
                    self._failures.note(subject, TierName.NODE, error, step=checkpoint.step)
                await self._pod.clock.sleep(backoff.next_seconds())
        finally:
            self._coming.pop(checkpoint).set()
            # Nothing repeats it once the plan names it no more, and a full node is relieved while it lasts.
            self._failures.healthy(subject)

    async def _fetched(self, checkpoint: CheckpointId, wanted: Digest) -> bytes:
        """Return the document, from the own coordinator or on the way to it, and keep it for others.

        Raises:
            UnavailableError: It cannot be had now.
        """
        if checkpoint in self._documents:
            return self._documents[checkpoint]
        try:
            if self._pod.state.is_coordinator:
                document = self._built(checkpoint)
            else:
                document = await self._peers.planned_manifest(checkpoint)
        except HoldfastError as error:
            raise UnavailableError(str(error)) from error
        if (found := await self._pools.read.run(digest_of, document)) != wanted:
            raise UnavailableError(f"digest {found}, expected {wanted}")
        if checkpoint in self._wanted:
            self._documents[checkpoint] = document
        self._coming[checkpoint].set()
        return document

    async def _store(self, checkpoint: CheckpointId, document: bytes, round_: RestartRound) -> bool:
        """Write a manifest, durably, to the node tier. Return False if that has to be repeated.

        There is no `await` between the last check of the round and the queueing of the write. A SEAL that
        comes later therefore waits for the write.

        Raises:
            HoldfastError: The document is not the manifest of this checkpoint, or cannot be written.
        """
        uid, flow = self._pod.job_uid, self._saves.flow
        manifest = await self._pools.read.run(parse_manifest_of, document, uid, checkpoint)
        if fence(self._pod.state, round_) is not None:
            return True
        own = (manifest.ref(Rank(number)) for number in self._pod.state.own_ranks)
        if any(self._node.find(ref) is None for ref in own):
            flow.has_lost(checkpoint.step)
            return True
        await self._pools.meta.run(self._node.put_manifest, uid, checkpoint, document)
        flow.committed(checkpoint.step, checkpoint.round)
        # The table of a process that has just started may not have the shards yet.
        return flow.is_committed(checkpoint.step, checkpoint.round)


@dataclass(frozen=True, slots=True)
class Receivers:
    """The handlers of the messages that do not begin or end a round."""

    manifests: ManifestRequests
    copies: IncomingCopies
    verifier: Verifier
    notices: RankNotices
    relaying: Relaying
    follower: Follower


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
        raise_refused(refuse_state(self.state, caller))
        return await self._components.role.require().state(
            since, timeout_seconds, quiet_seconds, acknowledges=caller.operator
        )

    async def rendezvous(
        self, caller: Caller, round_: RestartRound, timeout_seconds: float
    ) -> StoreAddress:
        raise_refused(refuse_rendezvous(self.state, caller, round_))
        return await self._components.starter.rendezvous(round_, timeout_seconds)

    async def plan(
        self,
        caller: Caller,
        round_: RestartRound,
        coordinator: str,
        since: int,
        timeout_seconds: float,
    ) -> Plan:
        raise_refused(refuse_plan(self.state, caller, round_))
        member = self.state.member_of_pod(caller.pod)
        assert member is not None
        # The board of a coordinator has its own plan, which no other worker may get.
        board = self._receivers.follower.board
        source = self._components.role.plan if self.state.is_coordinator else board.newer
        return await source(member.worker, coordinator, since, timeout_seconds)

    async def manifest(
        self,
        caller: Caller,
        job_uid: JobUid | None,
        checkpoint: CheckpointId,
    ) -> bytes:
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
            case WorkerReports() if not self.state.is_coordinator:
                return await receivers.relaying.report(message)
            case WorkerReports():
                return self._components.role.require().report(message)
            case Prune():
                return await self._components.role.require().prune(message)
            case GangRequest():
                return self._components.role.require().request(path, message)
            case CopyRequest():
                return await receivers.copies.take(caller, message)
            case ShardRef():
                receivers.verifier.suspect(message)
            case _:
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    f"{type(message).__name__} is not a request that this sidecar serves",
                )
        return Ok(self.state.round)

    def _check(self, caller: Caller, message: Any) -> None:
        raise_refused(refuse(self.state, caller, message))

    def _check_reader(self, caller: Caller) -> None:
        raise_refused(refuse_reader(self.state, caller))
