"""Carry out the coordinator's plan: levels for the ranks, writes, uploads, and steps that are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Level, Rank, Step, TierName
from holdfast_core.messages.schema import Plan, Round
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.gang.state import RankNotices
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.upkeep.prune import (
    delete_orphans,
    delete_steps,
    protected_steps,
)


class Pruner:
    """Handler of the coordinator's plans."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        saves: SaveComponents,
        copies: IncomingCopies,
        notices: RankNotices,
        failures: Failures,
    ) -> None:
        self._pod = pod
        self._tiers = tiers
        self._saves = saves
        self._copies = copies
        self._notices = notices
        self._failures = failures
        self._tasks = Tasks()
        saves.stager.changed.subscribe(self._slots_changed)

    async def close(self) -> None:
        await self._tasks.cancel()

    def take(self, message: Plan) -> None:
        """Begin what the plan wants: notices, writes, uploads, deletions. Free the slots of dropped steps."""
        self._saves.flow.has_plan = True
        for reached in message.levels:
            self._notices.level(reached)
            if reached.level is Level.PERSISTED:
                self._saves.persisted(reached.step)
        if message.released:
            self._notices.release()
        self._forget(message.drop)
        self._saves.stager.choose(message.write)
        if message.upload is not None:
            self._saves.flow.request_upload(message.upload)
        kept = max((r.step for r in message.levels if r.level is not Level.LOCAL), default=None)
        if message.drop or kept is not None:
            self._tasks.spawn(self._until_done(lambda: self._prune(message, kept)), "prune")

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

    async def _until_done(self, prune: Callable[[], Awaitable[None]]) -> None:
        """Repeat `prune` after each error of the disk, with back-off. What stays would fill the volume."""
        backoff = self._pod.backoff()
        while True:
            try:
                await prune()
            except (HoldfastError, OSError) as error:
                self._failures.note("pruning", TierName.NODE, error)
                await self._pod.clock.sleep(backoff.next_seconds())
            else:
                self._failures.healthy("pruning")
                return

    async def _prune(self, message: Plan, kept: Step | None) -> None:
        """Delete the steps that a plan drops, and orphans below `kept`, the newest replicated step in it.

        Nothing is deleted while sealed. What this round protects is never deleted.
        """
        accepted = self._pod.state.accepted
        if accepted is None or accepted.round != message.round:
            return
        await self._delete(accepted, frozenset(message.drop))
        if kept is not None:
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
            await self._tiers.pools.shard.run(
                delete_steps, self._tiers.node, self._pod.job_uid, going
            )
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
