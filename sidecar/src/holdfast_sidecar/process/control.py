"""Handler of the messages and requests that the operator and other sidecars send to the control port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import (
    CheckpointId,
    JobUid,
    Level,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
)
from holdfast_core.messages.schema import (
    Ask,
    Certificate,
    CoordinatorState,
    Holding,
    HoldNotice,
    Inventory,
    LevelNotice,
    ManifestDocument,
    ManifestPut,
    Ok,
    PersistRequest,
    Prepared,
    Prune,
    Refusal,
    Rendezvous,
    Replicated,
    Round,
    Seal,
    Suspect,
    Uploaded,
    WorkerReport,
)
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Backoff
from holdfast_sidecar.base.rounds import (
    Caller,
    RoundState,
    refuse,
    refuse_reader,
    refuse_rendezvous,
    refuse_state,
)
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.coordinator.commit import Coordinator
from holdfast_sidecar.coordinator.documents import check_put
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.process.local import Local
from holdfast_sidecar.process.parts import Parts
from holdfast_sidecar.upkeep.prune import (
    delete_manifests,
    delete_orphans,
    delete_steps,
    protected_steps,
)
from holdfast_sidecar.wire.certificates import Certificates
from holdfast_sidecar.wire.client import raise_refused


class Control:
    """Handler of the control server, and of messages that this sidecar sends to its own worker."""

    def __init__(
        self, parts: Parts, lifecycle: Lifecycle, local: Local, certificates: Certificates
    ) -> None:
        self._parts = parts
        self._lifecycle = lifecycle
        self._local = local
        self._certificates = certificates
        self._tasks = Tasks()

    async def close(self) -> None:
        await self._tasks.cancel()

    @property
    def state(self) -> RoundState:
        return self._parts.keeper.state

    # ------------------------------------------------------------------ reads

    async def inventory(self, caller: Caller) -> Inventory:
        self._check_reader(caller)
        return await self._lifecycle.inventory()

    async def coordinator_state(
        self, caller: Caller, since: int, timeout_seconds: float
    ) -> CoordinatorState:
        refused = refuse_state(self.state, caller)
        if refused is not None:
            raise_refused(refused)
        return await self._coordinator().state(since, timeout_seconds, acknowledges=caller.operator)

    async def rendezvous(
        self, caller: Caller, round_: RestartRound, timeout_seconds: float
    ) -> Rendezvous:
        refused = refuse_rendezvous(self.state, caller, round_)
        if refused is not None:
            raise_refused(refused)
        return await self._parts.starter.rendezvous(round_, timeout_seconds)

    async def manifest(
        self, caller: Caller, job_uid: JobUid | None, checkpoint: CheckpointId
    ) -> ManifestDocument:
        self._check_reader(caller)
        parts = self._parts
        uid = job_uid or parts.settings.contract.job_uid
        document = await parts.pools.read.run(parts.node.get_manifest, uid, checkpoint)
        manifest = parse_manifest_of(document, uid, checkpoint)
        try:
            digest = manifest.layout
            layout = (await parts.pools.read.run(parts.node.get_layout, digest)).decode()
        except NotFoundError:
            layout = None
        return ManifestDocument(document.decode(), layout)

    def metrics(self) -> bytes:
        parts = self._parts
        parts.metrics.level(pending=parts.flow.pending, round_=self.state.round)
        parts.metrics.gang(parts.reporter.now())
        if parts.coordinator is not None:
            parts.metrics.committed(parts.coordinator.levels())
            parts.metrics.overdue(parts.coordinator.overdue_seconds)
        parts.metrics.buffers(*parts.node.buffer_bytes())
        return parts.metrics.render()

    def flushed(self) -> bool:
        """Return whether the pod may end.

        The preStop hook calls this, so the limit on background bytes is lifted.
        """
        self._parts.pacing.hurry()
        return self._parts.flushed

    # ------------------------------------------------------------------ messages

    async def dispatch(self, caller: Caller, path: str, message: Any) -> Any:
        """Serve one message and return its reply.

        Raises:
            StaleRoundError, RefusedError: The refusal table (`base/rounds.py`) does not allow the message
                now, or its handler refuses it.
            HoldfastError: The handler fails.
        """
        match message:
            case Seal():
                if message.round > self.state.round:
                    self._check(caller, message)
                    self._local.sealed()
                return await self._lifecycle.seal(caller, message)
            case Round():
                return await self._lifecycle.round(caller, message)
        self._check(caller, message)
        match message:
            case Prepared():
                return self._coordinator().prepared(message)
            case Holding():
                return self._coordinator().holding(message)
            case Replicated():
                return self._coordinator().replicated(message)
            case Uploaded():
                return self._coordinator().uploaded(message)
            case WorkerReport():
                return self._coordinator().report(message)
            case Prune():
                return await self._coordinator().prune(message)
            case Ask():
                return self._ask(caller, path, message)
            case ManifestPut():
                return await self._put_manifest(message)
            case LevelNotice():
                return self._level(message)
            case HoldNotice():
                self._hold(message)
            case PersistRequest():
                self._parts.flow.want(message)
            case Suspect():
                await self._suspect(message)
            case Certificate():
                await self._parts.pools.meta.run(self._certificates.renew, message)
            case _:
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    (f"{type(message).__name__} is not a request that this sidecar serves"),
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

    def _coordinator(self) -> Coordinator:
        coordinator = self._parts.coordinator
        if coordinator is None:
            raise RefusedError(
                Refusal.NOT_COORDINATOR, f"worker {self.state.worker} is not the coordinator"
            )
        return coordinator

    def _ask(self, caller: Caller, path: str, message: Ask) -> Ok:
        if caller.operator:
            return self._coordinator().ask(path, message)
        self._local.ask(path, message)
        return Ok(self.state.round)

    async def _put_manifest(self, message: ManifestPut) -> Ok:
        """Write a manifest, durably, to the node tier.

        There is no `await` between the check of the round and the queueing of the write. A SEAL that comes
        later therefore waits for the write.

        Raises:
            FormatError: The manifest is not the one that the message names.
            NotFoundError: This sidecar has no shard of an own rank that the manifest names.
            RefusedError: CONFLICT if another manifest of this checkpoint exists; BUSY while a shard in
                memory is being digested.
            CapacityError: The node tier has no room.
        """
        parts = self._parts
        manifest = check_put(message, parts.settings.contract)
        for number in self.state.own_ranks:
            rank = Rank(number)
            ref = manifest.ref(rank)
            held = parts.stager.find(rank, manifest.checkpoint) if message.held else None
            if parts.node.find(ref) is None and (held is None or held.ref != ref):
                if message.held and parts.stager.may_find(rank, manifest.checkpoint):
                    raise RefusedError(
                        Refusal.BUSY, f"step {message.step} of rank {rank} is being digested again"
                    )
                raise NotFoundError(
                    f"step {message.step}: the shard of rank {rank} that the manifest names is not "
                    f"on the node tier of worker {self.state.worker}, nor in its memory"
                )
        try:
            await parts.pools.meta.run(self._write_manifest, message, manifest)
        except AlreadyExistsError as error:
            parts.failures.note_text(
                f"manifest of step {message.step}",
                TierName.NODE,
                "Conflict",
                str(error),
                step=message.step,
            )
            raise RefusedError(Refusal.CONFLICT, str(error)) from error
        except CapacityError as error:
            parts.failures.note("manifests", TierName.NODE, error, step=message.step)
            raise
        parts.failures.healthy("manifests")
        parts.stager.committed(message.step, message.round)
        if not message.held:
            parts.flow.committed(message.step, message.round)
        return Ok(message.round)

    def _write_manifest(self, message: ManifestPut, manifest: Manifest) -> None:
        node = self._parts.node
        if message.layout is not None:
            node.put_layout(message.layout.encode())
        node.put_manifest(manifest.job.uid, manifest.checkpoint, message.manifest.encode())

    def _level(self, message: LevelNotice) -> Ok:
        self._local.level(message)
        if not message.released:
            # If shards of this step were in memory only, the copies to peers begin now.
            self._parts.flow.committed(message.step, message.step_round)
        self._forget(message.prune)
        if message.prune or message.level is not Level.LOCAL:
            self._tasks.spawn(self._until_done(lambda: self._prune(message)), "prune")
        return Ok(message.round)

    def _hold(self, message: HoldNotice) -> None:
        self._local.in_memory(message.memory)
        self._drop(frozenset(message.prune), message.chosen)

    def drop(self, steps: frozenset[Step]) -> None:
        """Delete steps that this pod holds in memory and that the coordinator's reply to HOLDING drops."""
        self._drop(steps, self._parts.stager.chosen)

    def _drop(self, steps: frozenset[Step], chosen: Step | None) -> None:
        self._forget(tuple(steps))
        self._parts.stager.choose(chosen)
        held = self.state.held
        if steps and held is not None:
            self._tasks.spawn(self._until_done(lambda: self._delete(held, steps)), "prune")

    def _forget(self, steps: tuple[Step, ...]) -> None:
        if not steps:
            return
        self._local.dropped(steps)
        self._parts.flow.forget(steps)
        self._parts.stager.forget(frozenset(steps))

    async def _until_done(self, prune: Callable[[], Awaitable[None]]) -> None:
        """Repeat `prune` after each error of the disk, with back-off. What stays would fill the volume."""
        parts, settings = self._parts, self._parts.settings
        backoff = Backoff(settings.backoff_first_seconds, settings.backoff_last_seconds)
        while True:
            try:
                await prune()
            except (HoldfastError, OSError) as error:
                parts.failures.note("pruning", TierName.NODE, error)
                await parts.clock.sleep(backoff.next_seconds())
            else:
                parts.failures.healthy("pruning")
                return

    async def _prune(self, message: LevelNotice) -> None:
        """Delete the steps that a LevelNotice names, and orphans below a replicated step.

        Nothing is deleted while sealed. What this round protects is never deleted.
        """
        parts = self._parts
        held = parts.keeper.state.held
        if held is None or held.round != message.round:
            return
        await self._delete(held, frozenset(message.prune))
        if message.level is not Level.LOCAL:
            await parts.pools.shard.run(
                delete_orphans,
                parts.node,
                parts.settings.contract.job_uid,
                before=held.round,
                below=message.step,
                protected=protected_steps(held),
            )

    async def _delete(self, held: Round, steps: frozenset[Step]) -> None:
        """Delete steps of this round from the node tier, manifests first, and free their slots.

        Manifests of steps in memory are deleted in the `meta` pool, so that their slots become free without
        waiting for the shard writes that kept them in memory.
        """
        parts = self._parts
        if self._is_over(held):
            return
        uid = parts.settings.contract.job_uid
        going = steps - await self._protected(held, steps)
        if self._is_over(held):
            return
        in_memory = parts.stager.dropped & going
        try:
            if in_memory:
                await parts.pools.meta.run(delete_manifests, parts.node, uid, in_memory)
        finally:
            parts.stager.release(steps)
        if going and not self._is_over(held):
            await parts.pools.shard.run(delete_steps, parts.node, uid, going)
            parts.stager.room.made()

    async def _protected(self, held: Round, steps: frozenset[Step]) -> frozenset[Step]:
        """Return the steps that this round protects.

        The manifests on the disk are read only if the restore point is among `steps`: the disk may hang.
        """
        parts = self._parts
        if held.restore_point.step not in steps:
            return protected_steps(held)
        found = await parts.pools.read.run(parts.node.list_manifests)
        uid = parts.settings.contract.job_uid
        return protected_steps(held, [c for job, c in found if job == uid])

    def _is_over(self, held: Round) -> bool:
        """Return whether a newer round was sealed since. Its inventory may list the shards to be deleted."""
        state = self.state
        return state.held is None or state.round != held.round

    async def _suspect(self, message: Suspect) -> None:
        """Start to verify the own copy of a shard of which another member received corrupt bytes."""
        ref = ShardRef(
            message.job_uid, message.step, message.step_round, message.rank, message.blake3
        )
        self._tasks.spawn(self._verify(ref), "verify")

    async def _verify(self, ref: ShardRef) -> None:
        parts = self._parts
        try:
            await self._verify_or_quarantine(ref)
        except NotFoundError:
            return
        except (HoldfastError, OSError) as error:
            parts.failures.note("verification", TierName.NODE, error)
        else:
            parts.failures.healthy("verification")

    async def _verify_or_quarantine(self, ref: ShardRef) -> None:
        parts = self._parts
        try:
            await parts.pools.fill.run(self._verify_blocking, ref)
        except CorruptionError as error:
            parts.metrics.corruption(TierName.NODE)
            logs.warning("quarantined a bad copy", rank=ref.rank, step=ref.step, error=str(error))
            await parts.pools.meta.run(parts.node.quarantine, ref, str(error))

    def _verify_blocking(self, ref: ShardRef) -> None:
        with self._parts.node.open_shard(ref) as reader:
            reader.verify()
