"""Copy and upload the shards of this pod's own ranks once they are durable on the node tier.

`plan.next_actions` computes the actions that are still missing. This module runs them, with a bounded
number in parallel, and retries each failed action with exponential back-off. A dead peer or object
store delays only the actions that need it. The reports of this worker list the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from holdfast_core import logs
from holdfast_core.errors import (
    CorruptionError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
    Worker,
    age_of,
)
from holdfast_core.messages.codec import MAX_LISTED, MAX_REPORTED
from holdfast_core.messages.schema import (
    CopyReply,
    CopyRequest,
    Failure,
    PersistRequest,
    Refusal,
    ReportedShard,
    StoredAs,
)
from holdfast_core.save.place import RankLayouts
from holdfast_core.shards.file import ShardRecord
from holdfast_core.store.commit import ShardUploader
from holdfast_core.tasks import Backoff, Signal, Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.incoming import OtherTables
from holdfast_sidecar.save.plan import (
    Action,
    OwnShard,
    ShardKey,
    Verb,
    expects_commit,
    idle,
    next_actions,
    startable,
    table,
)
from holdfast_sidecar.wire.bulk import Members

_KEEP_LAYOUT_SECONDS = 900.0
"""Less than the time after which a node tier deletes a layout that nothing names."""
_UNREAD_ATTEMPTS = 5
"""Attempts to send a shard that its disk does not return. With the pauses between them they take seconds, in
which a disk that fails for a moment works again."""
_MOST_DROPPED = 1024
"""Dropped steps that are remembered: as many as the coordinator remembers."""
_REPORTS = "reporting shards to the coordinator"
"""Subject of the failure that the coordinator does not accept a shard."""
_PASSING = frozenset(
    {
        Refusal.SEALED,
        Refusal.FUTURE_ROUND,
        Refusal.NOT_MEMBER,
        Refusal.BUSY,
    }
)
"""Refusals that are expected while a round has not reached every sidecar yet, or while a peer is busy.
They are retried and not reported as failures."""


def own_shard(record: ShardRecord, *, committed: bool = False) -> OwnShard:
    """Return the table entry of a shard that is durable on this node and that nothing was done with yet."""
    return OwnShard(record.ref, record.info, record.header.layout, committed=committed)


class Flow:
    """Table of this pod's own shards in the current round, with the tasks that run their actions.

    The table also holds the own shards of the restore point that assigned peers lack. All methods run on
    the event loop.
    """

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        members: Members,
        layouts: RankLayouts,
        telemetry: Telemetry,
        on_change: Callable[[], None],
    ) -> None:
        self._pod = pod
        self._current = pod.current
        self._tiers = tiers
        tables = OtherTables(
            pod.current,
            members.bulk,
            pod.clock,
            procs_per_worker=pod.contract.procs_per_worker,
        )
        self._uploader = (
            None
            if tiers.store is None
            else ShardUploader(
                pod.contract.namespace,
                tiers.node,
                tiers.store,
                own_ranks=pod.contract.procs_per_worker,
                other_tables=tables.fetch,
            )
        )
        self._members = members
        self._layouts = layouts
        self._metrics = telemetry.metrics
        self._failures = telemetry.failures
        self._on_change = on_change
        self.gone: Signal[[ShardRef]] = Signal()
        """Called with an own shard that this node has lost, or can no longer read."""
        self._shards: dict[ShardKey, OwnShard] = {}
        self._running: set[Action] = set()
        self._paused: set[Action] = set()
        self._backoffs: dict[Action, Backoff] = {}
        self._failing: set[Worker] = set()
        """Targets of which a failed copy is among the failures."""
        self._unread = Counter[ShardKey]()
        """How often the disk did not return a shard that was to be sent."""
        self._tasks = Tasks()
        self._upload_request: PersistRequest | None = None
        self.resuming = False
        """Whether own shards of this round that are on the node tier are still to be added. A report without
        them would say that they are lost."""
        self._layouts_at: dict[tuple[Worker, Rank], tuple[Digest, float]] = {}
        """The layout of a rank that a worker was last asked in this round to keep, and when."""
        self.known: frozenset[ReportedShard] | None = None
        """What the current coordinator has received of the table and accepts. None: it has not received
        a whole table yet."""
        self._report_failed = False
        """Whether the last report did not reach the coordinator."""
        self.dropped = frozenset[Step]()
        """The newest steps that plans of this round drop."""
        self.persisted: Step | None = None
        """Newest step of which all shards and the manifest are in the object store. A seal keeps it."""
        self.lost = frozenset[Step]()
        """Steps of this round whose manifest names an own shard that is not on this node any more."""

    # ------------------------------------------------------------------ events

    def add(self, shard: OwnShard) -> None:
        """Add a shard that is durable on this node, of the current round or of the restore point.

        A shard that is in the table already keeps its entry.
        """
        known = self._shards.get(shard.key)
        if known is not None and known.ref == shard.ref:
            return
        upload_requested = self._is_requested(shard.key)
        # A save that comes after its step was dropped would stay on this node.
        pruned = shard.reported and self.drops(shard.key.step)
        self._shards[shard.key] = replace(shard, upload_requested=upload_requested, pruned=pruned)
        self.wake()

    def committed(self, step: Step, round_: RestartRound) -> None:
        """Record that the manifest of this step is durable on this node."""
        for key, shard in tuple(self._shards.items()):
            if (key.step, key.round) == (step, round_):
                self._shards[key] = replace(shard, committed=True)
        self.wake()
        self._on_change()

    def is_committed(self, step: Step, round_: RestartRound) -> bool:
        """Return whether the manifest of this step is durable on this node, as far as the table says."""
        found = [s for k, s in self._shards.items() if (k.step, k.round) == (step, round_)]
        return bool(found) and all(shard.committed for shard in found)

    def drops(self, step: Step) -> bool:
        """Return whether plans of this round drop the step."""
        return step in self.dropped

    def has_lost(self, step: Step) -> None:
        """Record that an own shard of this committed step is not on this node any more."""
        self.lost |= {step}
        self._on_change()

    def reached_store(self, step: Step) -> None:
        """Record that all shards and the manifest of the step are in the object store."""
        self.persisted = step if self.persisted is None else max(step, self.persisted)

    def request_upload(self, request: PersistRequest) -> None:
        """Upload the own shards of this committed step.

        An earlier request has ended: its step was persisted or given up. A shard that is already stored is
        uploaded again only where `request.whole` is set and the stored shard refers to earlier checkpoints.
        Without an object store the request is ignored.
        """
        if self._uploader is None:
            return
        self._upload_request = request
        for key, shard in tuple(self._shards.items()):
            wanted = self._is_requested(key)
            if wanted or shard.upload_requested:
                stored = shard.uploaded
                if stored is not None and stored.references and wanted and request.whole:
                    stored = None
                self._shards[key] = replace(shard, upload_requested=wanted, uploaded=stored)
        self.wake()

    def _is_requested(self, key: ShardKey) -> bool:
        request = self._upload_request
        return request is not None and request.checkpoint == CheckpointId(key.step, key.round)

    def coordinator_changed(self) -> None:
        """Record that another worker coordinates the round, which has received no report yet."""
        self.known, self._report_failed = None, False

    def reported(
        self,
        sent: tuple[ReportedShard, ...],
        refused: Failure | None,
    ) -> None:
        """Record that the coordinator of this round has received a report, and what it replied.

        Args:
            sent: `table` when the report was sent.
            refused: A shard that the coordinator does not accept.
        """
        self._report_failed = False
        self.known = frozenset(s for s in sent if refused is None or s.step != refused.step)
        if refused is None:
            self._failures.healthy(_REPORTS)
        else:
            self._failures.note_text(
                _REPORTS, TierName.PEER, refused.reason, refused.message, step=refused.step
            )

    def report_failed(self) -> None:
        """Record that a report did not reach the coordinator."""
        self._report_failed = True

    def forget(self, steps: tuple[Step, ...]) -> None:
        """Drop the shards of pruned steps and the requests to upload them, also those that come later."""
        self.dropped = frozenset(sorted(self.dropped.union(steps))[-_MOST_DROPPED:])
        self.lost -= set(steps)
        self._shards = {k: s for k, s in self._shards.items() if k.step not in steps}
        if self._upload_request is not None and self._upload_request.checkpoint.step in steps:
            self._upload_request = None
        self._backoffs = {a: b for a, b in self._backoffs.items() if a.key.step not in steps}
        self._on_change()

    async def reset(self) -> None:
        """Cancel all actions and clear the table, because a newer round was sealed."""
        if self._tiers.store is not None:
            self._tiers.store.end_uploads()  # they run in threads
        await self._tasks.cancel()
        self._shards.clear()
        self._running.clear()
        self._paused.clear()
        self._backoffs.clear()
        self._failing.clear()
        self._unread.clear()
        self._upload_request = None
        self._layouts_at.clear()
        self.dropped = self.lost = frozenset()
        self.coordinator_changed()

    @property
    def idle(self) -> bool:
        return idle(self._shards.values(), self._current().copy_targets())

    @property
    def stuck(self) -> bool:
        """Whether everything that is missing has failed at least once, as when a peer is gone."""
        actions = next_actions(self._shards.values(), self._current().copy_targets())
        reports = self.is_known or self._report_failed
        return reports and all(a in self._backoffs for a in actions)

    @property
    def table(self) -> tuple[ReportedShard, ...]:
        """What a report lists of the own shards: see `plan.table`."""
        return table(self._shards.values(), self._current().copy_targets(), MAX_REPORTED)

    async def manifests(self) -> tuple[CheckpointId, ...]:
        """Return the newest checkpoints of the job whose manifest is on this node, oldest first."""
        found = await self._tiers.checkpoints(self._pod.job_uid)
        return tuple(sorted(found, key=age_of)[-MAX_LISTED:])

    @property
    def is_known(self) -> bool:
        """Whether the coordinator has received the present table."""
        return frozenset(self.table) <= (self.known or frozenset())

    @property
    def expects_commit(self) -> bool:
        return expects_commit(self._shards.values())

    @property
    def pending(self) -> int:
        return len(next_actions(self._shards.values(), self._current().copy_targets()))

    def shards(self) -> tuple[OwnShard, ...]:
        return tuple(self._shards.values())

    def unlisted(self, rank: Rank) -> tuple[Step, ...]:
        """Return the rank's durable steps of this round that `table` does not have yet."""
        return tuple(
            k.step
            for k, s in self._shards.items()
            if k.rank == rank and s.reported and not s.pruned and s.digests is None
        )

    def wake(self) -> None:
        """Start every action that may start now. While the sidecar is sealed, none may."""
        state = self._current()
        if state.accepted is None:
            return
        targets = state.copy_targets()
        # Nothing is copied to the others any more, so no success would end their failures.
        for target in self._failing.difference(targets):
            self._failing.discard(target)
            self._failures.healthy(_copies_to(target))
        actions = next_actions(self._shards.values(), targets)
        ready = [a for a in actions if a not in self._paused]
        for action in startable(ready, frozenset(self._running)):
            self._running.add(action)
            self._tasks.spawn(self._run(action), f"{action.verb} {action.key}")

    # ------------------------------------------------------------------ one action

    async def _run(self, action: Action) -> None:
        shard = self._shards.get(action.key)
        try:
            if shard is not None:
                await self._do(action, shard)
                self._failures.healthy(_subject(action))
            self._backoffs.pop(action, None)
        except StaleRoundError:
            self._pause(action)
        except NotFoundError as error:
            if action.verb in (Verb.COPY, Verb.UPLOAD) and self._gone(action):
                self._backoffs.pop(action, None)
            elif action.verb is Verb.COPY and action not in self._backoffs:
                self._pause(action)  # The target has pruned the step, and this node is about to.
            else:
                self._failed(action, error)
        except CorruptionError as error:
            await self._handle_corruption(action, error)
        except Exception as error:  # noqa: BLE001 - without a retry the shard would silently stay here
            self._failed(action, error)
        finally:
            self._running.discard(action)
        self.wake()
        self._on_change()

    def _failed(self, action: Action, error: BaseException) -> None:
        if not (isinstance(error, RefusedError) and error.code in _PASSING):
            self._note(action, _tier(action), error)
        self._pause(action)

    def _note(self, action: Action, tier: TierName, error: BaseException) -> None:
        self._failures.note(_subject(action), tier, error, step=action.key.step)
        if action.target is not None:
            self._failing.add(action.target)

    def _pause(self, action: Action) -> None:
        backoff = self._backoffs.setdefault(action, self._pod.backoff())
        self._paused.add(action)
        self._tasks.spawn(self._resume(action, backoff.next_seconds()), "pause")

    async def _resume(self, action: Action, seconds: float) -> None:
        await self._pod.clock.sleep(seconds)
        self._paused.discard(action)
        self.wake()

    def _gone(self, action: Action) -> bool:
        """Return whether the shard itself is no longer on this node. Its entry is removed then."""
        shard = self._shards.get(action.key)
        if shard is None:
            return True
        if self._tiers.node.find(shard.ref) is not None:
            return False
        self._lose(shard)
        return True

    def _lose(self, shard: OwnShard) -> None:
        """Remove the entry of a shard that is not on this node any more.

        Without it this worker can neither upload nor copy the step, for which the coordinator would wait.
        """
        self._shards.pop(shard.key, None)
        self._unread.pop(shard.key, None)
        if shard.reported and shard.committed and not shard.uploaded:
            self.lost |= {shard.key.step}
        self.gone(shard.ref)

    async def _handle_corruption(self, action: Action, error: CorruptionError) -> None:
        """Handle bytes of an own shard that did not verify at their receiver, or when they were read.

        The copy on this node is read again, and is quarantined only if this read finds it damaged. A peer
        with faulty memory must not cause the quarantine of a good copy. A copy that the disk does not return
        stays where it is. Its upload is given up when it could not be read again and again: the later steps
        wait for it.
        """
        shard = self._shards.get(action.key)
        if shard is None:
            return
        try:
            damage = await self._tiers.quarantine_if_damaged(shard.ref, self._metrics)
        except UnreadableError as failure:
            self._unread[shard.key] += 1
            if self._unread[shard.key] < _UNREAD_ATTEMPTS:
                self._failed(action, failure)
            else:
                self._lose(shard)
                self._note(action, TierName.NODE, failure)
            return
        except Exception as failure:  # noqa: BLE001 - as in _run
            self._failed(action, failure)
            return
        if damage is None:
            self._failed(action, UnavailableError(f"{error}; but the copy on this node is intact"))
            return
        self._lose(shard)
        self._note(action, TierName.NODE, damage)

    async def _do(self, action: Action, shard: OwnShard) -> None:
        match action.verb:
            case Verb.DESCRIBE:
                self._update(shard, digests=await self._layouts.digests(shard.layout))
            case Verb.COPY:
                await self._copy(shard, action.target)
            case Verb.UPLOAD:
                await self._upload(shard)
            case Verb.DELETE:
                await self._tiers.pools.shard.run(self._tiers.node.delete_shard, shard.ref)
                self._shards.pop(shard.key, None)

    def _update(
        self,
        shard: OwnShard,
        *,
        digests: LayoutDigests | None = None,
        uploaded: StoredAs | None = None,
        copied: Worker | None = None,
    ) -> None:
        """Set one fact in the table's current entry of the shard.

        `shard` is the entry as it was when the action started. The current one may have other facts.
        """
        now = self._shards.get(shard.key)
        if now is None or now.ref != shard.ref:
            return
        self._shards[shard.key] = replace(
            now,
            digests=digests or now.digests,
            uploaded=uploaded or now.uploaded,
            copied=now.copied if copied is None else now.copied | {copied},
        )

    async def _copy(self, shard: OwnShard, target: Worker | None) -> None:
        state = self._current()
        member = None if target is None else state.member(target)
        if target is None or member is None:
            raise UnavailableError(f"worker {target} is not a member of round {state.round}")
        request = CopyRequest(state.round, shard.ref, await self._layout_to_keep(shard, target))
        started = self._pod.clock.monotonic()
        sent = await self._copied(target, request)
        self._metrics.sent(TierName.PEER, sent)
        self._metrics.stored(
            TierName.PEER, shard.info.payload_bytes, self._pod.clock.monotonic() - started
        )
        if request.layout is not None:
            self._layouts_at[target, shard.ref.rank] = request.layout, started
        self._update(shard, copied=target)

    async def _layout_to_keep(self, shard: OwnShard, target: Worker) -> Digest | None:
        """Return the shard's layout if the target is to keep it now, which it is asked for at times.

        The target deletes a layout that none of its shards has named for long.
        """
        asked, at = self._layouts_at.get((target, shard.ref.rank), (None, 0.0))
        if asked == shard.layout and self._pod.clock.monotonic() - at < _KEEP_LAYOUT_SECONDS:
            return None
        return None if await self._layout(shard) is None else shard.layout

    async def _layout(self, shard: OwnShard) -> bytes | None:
        """Return the shard's layout. None if it is lost.

        The shard is then copied or uploaded without it: ranks with the same placements restore it.
        """
        try:
            return await self._layouts.document(shard.layout)
        except (NotFoundError, CorruptionError) as error:
            logs.warning(
                "a shard is copied without its layout", ref=str(shard.ref), error=str(error)
            )
            return None

    async def _copied(self, target: Worker, request: CopyRequest) -> int:
        """Let the target copy a shard, and return when it is durable there, with the bytes that it received.

        Raises:
            CorruptionError: The bytes did not verify at the target.
            NotFoundError: This node did not have the shard.
            HoldfastError: The target refuses the copy, has failed, or is unreachable.
        """
        clock, settings = self._pod.clock, self._pod.settings
        pieces, since = 0, clock.monotonic()
        try:
            while True:
                reply = await self._members.control.call(target, request, CopyReply)
                if reply.durable:
                    return reply.received_bytes
                if reply.pieces != pieces:
                    pieces, since = reply.pieces, clock.monotonic()
                elif clock.monotonic() - since > settings.disk_quiet_seconds:
                    raise UnavailableError(
                        f"worker {target} copies {request.shard}, but has made no progress for "
                        f"{settings.disk_quiet_seconds:.0f} s"
                    )
                await clock.sleep(settings.backoff_first_seconds)
        except RefusedError as error:
            match error.code:
                case Refusal.CONFLICT:
                    raise CorruptionError(str(error)) from error
                case Refusal.BUSY:
                    raise UnavailableError(str(error)) from error
            raise

    async def _upload(self, shard: OwnShard) -> None:
        started = self._pod.clock.monotonic()
        if self._uploader is None:
            raise UnavailableError("this job has no object store")
        await self._layout(shard)  # stores a lost layout again, for the upload
        request = self._upload_request
        if not self._is_requested(shard.key):
            return  # the step was given up meanwhile
        stored_as = await self._tiers.pools.upload.run(self._uploader.upload, shard.ref, request)
        if self._upload_request != request and stored_as.references:
            return  # the request has changed meanwhile: upload again as the newer one requires
        self._metrics.stored(
            TierName.OBJECT, shard.info.payload_bytes, self._pod.clock.monotonic() - started
        )
        self._update(shard, uploaded=stored_as)


def _tier(action: Action) -> TierName:
    """Return the tier to which a failure of the action is attributed."""
    match action.verb:
        case Verb.UPLOAD:
            return TierName.OBJECT
        case Verb.COPY:
            return TierName.PEER
        case Verb.DESCRIBE | Verb.DELETE:
            return TierName.NODE


def _copies_to(target: Worker | None) -> str:
    return f"sending copies to worker {target}"


def _subject(action: Action) -> str:
    """Return the subject under which failures of the action are kept."""
    match action.verb:
        case Verb.COPY:
            return _copies_to(action.target)
        case Verb.UPLOAD:
            return "uploads"
        case Verb.DESCRIBE:
            return "reading layouts"
        case Verb.DELETE:
            return "deleting steps that were given up"
