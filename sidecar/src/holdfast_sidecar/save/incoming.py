"""What this worker takes from other members: copies of their shards (CopyRequest), and their chunk tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.errors import (
    CapacityError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    TierError,
    UnavailableError,
)
from holdfast_core.ids import Digest, ShardRef, Step, Worker, worker_of
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import CopyReply, CopyRequest, Refusal
from holdfast_core.shards.file import Trailer
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import Caller, RoundState, fence
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.wire.bulk import BulkPeers, Members

_TABLES_SECONDS = 60.0
"""Time-out for fetching the chunk tables of all other ranks together, checked before each fetch. After
it the upload begins with the tables that have arrived."""


class OtherTables:
    """Source of chunk tables for `ShardUploader`."""

    def __init__(
        self,
        current: Callable[[], RoundState],
        bulk: BulkPeers,
        clock: Clock,
        *,
        procs_per_worker: int,
    ) -> None:
        self._current = current
        self._bulk = bulk
        self._clock = clock
        self._procs_per_worker = procs_per_worker

    def fetch(self, refs: Sequence[ShardRef]) -> Iterator[Trailer]:
        """Yield the tables of these shards, each from the worker that saved the shard.

        A worker whose fetch fails is not asked again.
        """
        silent: set[Worker] = set()
        deadline = self._clock.monotonic() + _TABLES_SECONDS
        for ref in refs:
            worker = worker_of(ref.rank, self._procs_per_worker)
            member = self._current().member(worker)
            if member is None or worker in silent or self._clock.monotonic() > deadline:
                continue
            try:
                yield self._bulk.fetch_table(member, ref)
            except (HoldfastError, OSError) as error:
                silent.add(worker)
                logs.warning(
                    "reading a chunk table failed", rank=ref.rank, worker=worker, error=str(error)
                )


class IncomingCopies:
    """The copies that this worker makes. All methods run on the event loop."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        members: Members,
        drops: Callable[[Step], bool],
    ) -> None:
        """Create the copies. `drops` returns whether plans of this round drop a step."""
        self._pod = pod
        self._tiers = tiers
        self._members = members
        self._drops = drops
        self._reply_seconds = pod.settings.call_seconds / 3
        """Longest wait for the end of a copy before its request is answered."""
        self._running: dict[ShardRef, asyncio.Task[int]] = {}
        self._pieces: dict[ShardRef, int] = {}
        """Pieces that each running copy has reached. The threads of the copies count them."""
        self._pruned: set[ShardRef] = set()
        """Running copies of steps that are pruned."""
        self._all_pieces = 0
        """Pieces of all copies. A copy that waits for a thread progresses as the copies before it do."""

    async def take(self, caller: Caller, request: CopyRequest) -> CopyReply:
        """Copy the shard from the caller, and reply when it is durable or when it takes long.

        A request that is repeated waits for the copy that runs. The caller's request has passed
        `rounds.refuse`.

        Raises:
            RefusedError: The shard is of another job (NotAssigned), this node has no room (NoSpace), or
                the copy failed and may succeed later (Busy).
            CorruptionError: The bytes of the caller did not verify.
            NotFoundError: The caller does not have the shard, or its step was pruned here.
            StaleRoundError: The round was sealed meanwhile.
        """
        ref = request.shard
        if ref.job_uid != self._pod.contract.job_uid:
            raise RefusedError(
                Refusal.NOT_ASSIGNED,
                f"a copy of a shard of job {ref.job_uid}: this is a sidecar of job "
                f"{self._pod.contract.job_uid}",
            )
        if ref not in self._running and request.layout is None and await self._holds(ref):
            return CopyReply(durable=True)
        if ref.round == self._pod.state.round and self._drops(ref.step):
            # The caller has not received this plan yet. Nothing would delete the copy before the next round.
            raise _was_pruned(ref)
        if ref not in self._running:
            task = asyncio.create_task(self._copy(caller, request), name=f"copy of {ref}")
            self._running[ref], self._pieces[ref] = task, 0
            task.add_done_callback(partial(self._ended, ref))
        task = self._running[ref]
        done, _ = await asyncio.wait((task,), timeout=self._reply_seconds)
        if not done:
            return CopyReply(durable=False, pieces=self._pieces[ref] or self._all_pieces)
        try:
            return CopyReply(durable=True, received_bytes=task.result())
        except CapacityError as error:
            raise RefusedError(Refusal.NO_SPACE, str(error)) from error
        except NotFoundError:
            raise
        except TierError as error:
            raise RefusedError(Refusal.BUSY, str(error)) from error

    def forget(self, steps: frozenset[Step]) -> None:
        """End the running copies of steps that are to be deleted from this node, and keep none of them."""
        self._pruned |= {ref for ref in self._running if ref.step in steps}

    async def _holds(self, ref: ShardRef) -> bool:
        return await self._tiers.pools.read.run(self._tiers.node.find, ref) is not None

    async def _copy(self, caller: Caller, request: CopyRequest) -> int:
        member = self._pod.state.member_of_pod(caller.pod)
        if member is None:
            raise UnavailableError(f"{caller.pod} is not a member of round {self._pod.state.round}")
        if request.layout is not None:
            await self._keep_layout(member.worker, request.layout)
            if await self._holds(request.shard):
                return 0
        copied = await self._tiers.pools.copy.run(
            self._members.bulk.copy,
            member,
            request.shard,
            background=True,
            may_go_on=partial(self._expect_round, request),
        )
        if request.shard in self._pruned:  # the steps were deleted before the copy was there
            await self._tiers.pools.shard.run(self._tiers.node.delete_shard, request.shard)
            raise _was_pruned(request.shard)
        return copied.received_bytes

    async def _keep_layout(self, worker: Worker, digest: Digest) -> None:
        """Store a layout that this worker has, unless it is on this node.

        Ranks of another number or with other placements can then read the copy, too.

        Raises:
            NotFoundError: The worker does not have it.
            CorruptionError: The worker has sent another one.
            CapacityError: This node has no room for it, nor for the copy.
        """
        node, meta = self._tiers.node, self._tiers.pools.meta
        if not await meta.run(node.keep_layout, digest):
            document = await self._members.control.layout(worker, digest)
            await meta.run(node.put_layout, document)

    def _expect_round(self, request: CopyRequest) -> None:
        """Count a piece of the copy. Called in its thread.

        Raises StaleRoundError or RefusedError if the round of the request is over, and NotFoundError if the
        step was pruned.
        """
        if request.shard in self._pruned:
            raise _was_pruned(request.shard)
        raise_refused(fence(self._pod.state, request.round))
        self._pieces[request.shard] += 1
        self._all_pieces += 1

    def _ended(self, ref: ShardRef, task: asyncio.Task[int]) -> None:
        self._running.pop(ref)
        self._pieces.pop(ref)
        self._pruned.discard(ref)
        if not task.cancelled():
            task.exception()  # a caller that still waits receives it, and another one starts again

    async def close(self) -> None:
        for task in tuple(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def _was_pruned(ref: ShardRef) -> NotFoundError:
    return NotFoundError(f"{ref}: step {ref.step} was pruned on this node")
