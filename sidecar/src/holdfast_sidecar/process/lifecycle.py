"""SEAL and ROUND: how a sidecar moves from one round to the next (docs/protocol.md).

SEAL: 1. the new round is in force in memory, so that nothing of the old one is accepted any more;
2. it is durable; 3. everything that worked for the old round is stopped; 4. the ranks are ended;
5. slots that were handed over are written, those that wait in memory if their step is committed;
6. the inventory is the reply.
ROUND: 1. durable; 2. in force; 3. a new round begins: off-lineage steps are deleted, rehydration,
rendezvous, coordinator; a higher version only changes members, copies and the coordinator.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, RestartRound, TierName
from holdfast_core.messages.schema import Inventory, Round, Seal
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.rounds import Caller, RoundState, refuse
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.coordinator.commit import Coordinator
from holdfast_sidecar.process.inventory import held_manifests, held_shards
from holdfast_sidecar.process.parts import Parts
from holdfast_sidecar.save.flow import own_shard
from holdfast_sidecar.upkeep.prune import delete_off_lineage, delete_orphans, protected_steps
from holdfast_sidecar.wire.client import raise_refused


class Lifecycle:
    """One SEAL or ROUND at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = asyncio.Lock()
        self._tasks = Tasks()
        self._unsettled: RoundState | None = None
        """The state before a SEAL that is not settled yet. An inventory names its round: the operator
        would take one that names the new round for the answer to the SEAL, and choose the restore point
        without what is still being written."""
        self._settle_from: tuple[RestartRound, float] | None = None
        """Since when (monotonic) the seal of a round waits for writes."""

    async def resume(self) -> None:
        """Before anybody is served: an earlier life of this process may have died in a seal."""
        state = self._parts.keeper.state
        if state.version_floor or state.round == self._parts.settings.contract.birth_round:
            return
        if await self._parts.stager.take_left(await self._manifests()):
            self._unsettled = replace(state, round=RestartRound(state.round - 1))
            self._tasks.spawn(self._resume_seal(state.round), "seal of an earlier life")

    async def close(self) -> None:
        await self._tasks.cancel()
        if self._parts.coordinator is not None:
            await self._parts.coordinator.close()

    # ------------------------------------------------------------------ SEAL

    async def seal(self, caller: Caller, message: Seal) -> Inventory:
        """Idempotent for the round that is sealed already. Raises StaleRoundError."""
        parts = self._parts
        self._check(caller, message)
        if message.round > parts.keeper.state.round:
            logs.info("sealed", round=message.round)
            parts.pacing.hurry()
            self._unsettled = self._unsettled or parts.keeper.state
            parts.keeper.state = parts.keeper.state.sealed_for(message.round)
            parts.stager.seal()
            # Here, and not when the seal is settled: the slots are the next round's from now on.
            parts.filler.stop(f"round {message.round} is sealed")
        async with self._lock:
            self._check(caller, message)
            await self._settle_seal(message.round)
            return await self.inventory()

    async def _settle_seal(self, round_: RestartRound) -> None:
        """Also run again for a repeated SEAL: each part is quick when there is nothing to do."""
        parts = self._parts
        if parts.keeper.state.held is not None or parts.keeper.state.round != round_:
            return
        await self._record(round_, 0)
        if parts.coordinator is not None:
            coordinator, parts.coordinator = parts.coordinator, None
            await coordinator.close()
        await asyncio.gather(parts.flow.reset(), parts.rehydrator.reset(), parts.starter.reset())
        await parts.starter.end_ranks(round_)
        await self._settle_writes(round_)
        parts.gang.reset()
        parts.failures.clear()
        self._is_settled(round_)

    async def _resume_seal(self, round_: RestartRound) -> None:
        async with self._lock:
            state = self._parts.keeper.state
            if state.held is None and state.round == round_:
                await self._settle_writes(round_)
            self._is_settled(round_)

    def _is_settled(self, round_: RestartRound) -> None:
        """Unless a newer SEAL has come meanwhile."""
        if self._parts.keeper.state.round == round_:
            self._unsettled = None

    async def _settle_writes(self, round_: RestartRound) -> None:
        """Writes under way, then what waits in memory."""
        parts, settings = self._parts, self._parts.settings
        if self._settle_from is None or self._settle_from[0] != round_:
            self._settle_from = (round_, parts.clock.monotonic())
        started = self._settle_from[1]

        def left(seconds: float) -> float:
            return max(0.0, started + seconds - parts.clock.monotonic())

        settled = await parts.stager.settle(left(settings.settle_seconds))
        if not settled:
            logs.warning("writes of the old round are not done", seconds=settings.settle_seconds)
        await parts.pools.drain_writes(left(settings.settle_seconds))
        # Now no manifest of the old round can come any more, and what has one is all there is. A disk
        # that was too slow for the write under way is too slow for another before the round goes on.
        seconds = left(settings.seal_seconds)
        if not settled or not await parts.stager.write_held(await self._manifests(), seconds):
            logs.warning("steps in memory are not written", seconds=settings.seal_seconds)

    async def _record(self, round_: RestartRound, version: int) -> None:
        parts = self._parts
        held = await parts.pools.read.run(parts.node.read_round)
        if held is not None and held >= (round_, version):
            return
        await parts.pools.meta.run(parts.node.write_round, round_, version)

    # ------------------------------------------------------------------ ROUND

    async def round(self, caller: Caller, message: Round) -> Inventory:
        """Raises StaleRoundError, RefusedError (NOT_SEALED, NOT_NEWER)."""
        async with self._lock:
            self._check(caller, message)
            parts = self._parts
            before = parts.keeper.state.held
            await self._record(message.round, message.version)
            # A SEAL does not wait for the lock: it may have come while the record was written, and a
            # ROUND of the old round must not unseal the new one.
            self._check(caller, message)
            parts.keeper.state = parts.keeper.state.holding(message)
            self._unsettled = None
            parts.metrics.level(pending=parts.flow.pending, round_=message.round)
            if before is None:
                logs.info("round begins", round=message.round, step=message.restore_point.step)
                await self._begin(message)
            else:
                await self._continue(before, message)
            return await self.inventory()

    def _check(self, caller: Caller, message: Seal | Round) -> None:
        refused = refuse(self._parts.keeper.state, caller, message)
        if refused is not None:
            raise_refused(refused)

    async def _begin(self, message: Round) -> None:
        parts = self._parts
        uid = parts.settings.contract.job_uid
        await parts.pools.shard.run(delete_off_lineage, parts.node, uid, message)
        if message.restore_point.own_checkpoint is not None:
            # Here already: the first save of the round may need the room.
            await parts.pools.shard.run(
                delete_orphans,
                parts.node,
                uid,
                before=message.round,
                below=message.restore_point.own_checkpoint.step,
                protected=protected_steps(message),
            )
        await self._resume_own_shards(message.round)
        parts.stager.recover(parts.keeper.state, await self._manifests())
        parts.pacing.begin()
        self._coordinate(message)
        parts.rehydrator.begin(message)
        parts.starter.begin()
        parts.reporter.changed()

    async def _continue(self, before: Round, message: Round) -> None:
        parts = self._parts
        if before.coordinator != message.coordinator:
            if parts.coordinator is not None:
                coordinator, parts.coordinator = parts.coordinator, None
                await coordinator.close()
            self._coordinate(message)
            parts.flow.retell()
            parts.stager.coordinator_changed()
        elif parts.coordinator is not None:
            parts.coordinator.update(message)
        parts.rehydrator.kick()
        parts.starter.evaluate()
        parts.flow.wake()
        parts.reporter.changed()

    def _coordinate(self, message: Round) -> None:
        parts = self._parts
        if message.coordinator != parts.keeper.state.worker:
            return
        parts.coordinator = Coordinator(
            parts.settings,
            message,
            parts.node,
            parts.store,
            peers=parts.peers,
            pools=parts.pools,
            failures=parts.failures,
            clock=parts.clock,
        )
        parts.coordinator.start()

    async def _manifests(self) -> frozenset[CheckpointId]:
        """Of this job, on this node."""
        uid = self._parts.settings.contract.job_uid
        found = await self._parts.pools.read.run(self._parts.node.list_manifests)
        return frozenset(checkpoint for job_uid, checkpoint in found if job_uid == uid)

    async def _resume_own_shards(self, round_: RestartRound) -> None:
        """After a restart of this process in the middle of a round: own shards of it that are on
        the node tier go on from there."""
        parts = self._parts
        own = parts.keeper.state.own_ranks
        uid = parts.settings.contract.job_uid
        manifests = await self._manifests()
        for record in await parts.pools.read.run(parts.node.list_shards):
            header = record.header
            if (header.job_uid, header.round) == (uid, round_) and header.rank in own:
                committed = record.checkpoint in manifests
                parts.flow.add(own_shard(record, committed=committed))

    async def restored(self) -> None:
        """The restore point is here: copy its own shards again to targets that lack them, and see
        whether the ranks may start."""
        parts = self._parts
        restored = parts.rehydrator.restored
        if restored is None:
            return
        for ref in restored.refs.values():
            if ref.job_uid != parts.settings.contract.job_uid:
                continue
            record = await parts.pools.read.run(parts.node.find, ref)
            if record is not None and record.header.round != parts.keeper.state.round:
                parts.flow.add(replace(own_shard(record, committed=True), reported=False))
        parts.starter.evaluate()

    def on_restored(self) -> None:
        self._tasks.spawn(self.restored(), "restored")

    # ------------------------------------------------------------------ inventory

    async def inventory(self) -> Inventory:
        parts = self._parts
        # Before anything is listed: a seal that is settled meanwhile would give its round to a list
        # that lacks what it had still to write, and the operator would choose an older step.
        state = self._unsettled or parts.keeper.state
        uid = parts.settings.contract.job_uid
        corrupt = functools.partial(parts.metrics.corruption, TierName.NODE)
        manifests = await parts.pools.read.run(held_manifests, parts.node, uid, corrupt)
        shards = await parts.pools.read.run(
            held_shards, parts.node, uid, parts.settings.slots_dir, dict(parts.stager.memory)
        )
        try:
            free = await parts.pools.read.run(parts.node.free_bytes)
            parts.metrics.free(free)
        except HoldfastError as error:
            parts.failures.note("node volume", TierName.NODE, error)
            free = 0
        return Inventory(
            worker=state.worker,
            pod=parts.settings.contract.pod_name,
            round=state.round,
            version=state.version,
            manifests=manifests,
            shards=shards,
            free_bytes=free,
            running_round=parts.gang.running_round,
        )
