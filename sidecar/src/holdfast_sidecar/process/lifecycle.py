"""SEAL and ROUND: how a sidecar moves from one round to the next (docs/protocol.md).

On SEAL, the sidecar
1. takes the new round into its state, so that it accepts nothing of the old round any more;
2. records the new round durably;
3. stops everything that works for the old round;
4. ends the ranks;
5. waits for the writes of slots that were handed over, then writes slots held in memory whose step is
   committed, both within time limits;
6. replies with the inventory.

On ROUND, it records the round and version durably and takes them into its state. If the round is new, it
deletes steps off the lineage and starts the coordinator (if it is the one), rehydration and rendezvous. A
higher version of the same round only changes members, copies and the coordinator.
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
    """Handler of SEAL and ROUND. One of them is carried out at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = asyncio.Lock()
        self._tasks = Tasks()
        self._unsettled: RoundState | None = None
        """The state before a SEAL that still waits for writes. Meanwhile, inventories name the round of
        this state: the operator takes an inventory that names the new round as the reply to SEAL, and would
        choose the restore point without the steps that are still being written."""
        self._settle_from: tuple[RestartRound, float] | None = None
        """The sealed round, and the monotonic seconds since which its seal waits for writes."""

    async def resume(self) -> None:
        """Continue the seal during which an earlier process of this pod died, if there was one.

        Call this before any request is served.
        """
        state = self._parts.keeper.state
        if state.version_floor or state.round == self._parts.settings.contract.birth_round:
            return
        if await self._parts.stager.take_left(await self._manifests()):
            self._unsettled = replace(state, round=RestartRound(state.round - 1))
            self._tasks.spawn(
                self._resume_seal(state.round),
                "SEAL that was received before a restart of the sidecar",
            )

    async def close(self) -> None:
        await self._tasks.cancel()
        if self._parts.coordinator is not None:
            await self._parts.coordinator.close()

    # ------------------------------------------------------------------ SEAL

    async def seal(self, caller: Caller, message: Seal) -> Inventory:
        """Seal the round and wait, within the time limits, for its writes. Return the inventory.

        A repeated SEAL of the same round is allowed.

        Raises:
            StaleRoundError: The round is older than the current one.
            RefusedError: NOT_MEMBER if the caller is not the operator.
        """
        parts = self._parts
        self._check(caller, message)
        if message.round > parts.keeper.state.round:
            logs.info("sealed", round=message.round)
            parts.pacing.hurry()
            self._unsettled = self._unsettled or parts.keeper.state
            parts.keeper.state = parts.keeper.state.sealed_for(message.round)
            parts.stager.seal()
            # Fills stop now and not when the seal is settled: from now on the slots belong to the next round.
            parts.filler.stop(f"round {message.round} is sealed")
        async with self._lock:
            self._check(caller, message)
            await self._settle_seal(message.round)
            return await self.inventory()

    async def _settle_seal(self, round_: RestartRound) -> None:
        """Carry out steps 2 to 5 of a SEAL. A repeated SEAL runs them again, which is fast if all is done."""
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
        """Let inventories name the new round, unless a newer SEAL has come meanwhile."""
        if self._parts.keeper.state.round == round_:
            self._unsettled = None

    async def _settle_writes(self, round_: RestartRound) -> None:
        """Wait for the writes under way, then write the committed steps that are held in memory.

        The time limits count from the first SEAL of the round.
        """
        parts, settings = self._parts, self._parts.settings
        if self._settle_from is None or self._settle_from[0] != round_:
            self._settle_from = (round_, parts.clock.monotonic())
        started = self._settle_from[1]

        def left(seconds: float) -> float:
            return max(0.0, started + seconds - parts.clock.monotonic())

        settled = await parts.stager.settle(left(settings.settle_seconds))
        if not settled:
            logs.warning(
                "writes of the old round are still in progress", seconds=settings.settle_seconds
            )
        await parts.pools.drain_writes(left(settings.settle_seconds))
        # From here on no manifest of the old round can arrive, so the held steps that have one are known.
        # If the disk was too slow for the writes under way, it is too slow for further ones in this time.
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
        """Begin a round that was sealed, or take over a higher version of the current one.

        Raises:
            StaleRoundError: The round is older than the current one.
            RefusedError: NOT_SEALED, NOT_NEWER, or NOT_MEMBER if the caller is not the operator.
        """
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
            # Orphans are deleted before the first replicated step, because the first save may need the room.
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
        """Return the checkpoints of this job whose manifest is on this node."""
        uid = self._parts.settings.contract.job_uid
        found = await self._parts.pools.read.run(self._parts.node.list_manifests)
        return frozenset(checkpoint for job_uid, checkpoint in found if job_uid == uid)

    async def _resume_own_shards(self, round_: RestartRound) -> None:
        """Add own shards of this round that are on the node tier to the flow.

        There are some if this process has restarted during the round.
        """
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
        """Start the ranks if they may start, after the restore point has arrived on this node.

        Own shards of the restore point that an older round saved are copied again to targets that lack them.
        """
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
        # The state is read before anything is listed. If a seal were settled while the list is made, the
        # inventory would name its round but lack what the seal has just written, and the operator would
        # choose an older step.
        state = self._unsettled or parts.keeper.state
        uid = parts.settings.contract.job_uid
        corrupt = functools.partial(parts.metrics.corruption, TierName.NODE)
        manifests = await parts.pools.read.run(held_manifests, parts.node, uid, corrupt)
        shards = await parts.pools.read.run(
            held_shards, parts.node, uid, parts.settings.slots_dir, dict(parts.stager.memory)
        )
        try:
            parts.metrics.free(await parts.pools.read.run(parts.node.free_bytes))
        except HoldfastError as error:
            parts.failures.note("node volume", TierName.NODE, error)
        return Inventory(
            worker=state.worker,
            pod=parts.settings.contract.pod_name,
            round=state.round,
            version=state.version,
            manifests=manifests,
            shards=shards,
        )
