"""Messages that the coordinator still has to send to each member.

Each member has its own task, which sends one message at a time, so a member that hangs delays no other. The
next message follows from what the member has not acknowledged yet. A message that failed is therefore sent
again if it is still needed.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError, NotFoundError, StaleRoundError
from holdfast_core.ids import Digest, Level, Step, Worker
from holdfast_core.messages.schema import (
    GangRequest,
    LevelNotice,
    ManifestPut,
    Ok,
    PersistRequest,
    Round,
    WriteNext,
)
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Backoff
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.base.tree import relay_of
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry
from holdfast_sidecar.wire.client import Peers

_MAX_RECENT = 1024
_REPEATED_PRUNES = 64
_PUTS_KEPT = 4


@dataclass(slots=True)
class _Acknowledged:
    """Record of what one member has acknowledged."""

    levels: dict[Step, Level] = field(default_factory=dict)
    persists: dict[Step, PersistRequest] = field(default_factory=dict)
    pruned: int = 0
    """Number of acknowledged entries of `Outbox._prunes`."""
    again: frozenset[Step] = frozenset()
    """Steps that are to be deleted once more, although their prune is acknowledged."""
    chosen: Step | None = None
    requests: int = 0
    """Number of acknowledged entries of `Outbox._requests`."""
    released: bool = False

    def request_acknowledged(self) -> None:
        self.requests += 1

    def was_released(self) -> None:
        self.released = True


class Recent:
    """Append-only list that keeps its newest `_MAX_RECENT` entries and counts all of them.

    A member that has not acknowledged the older entries does not receive them any more.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of entries that were ever added."""
        self._kept: deque[Step] = deque(maxlen=_MAX_RECENT)

    def add(self, step: Step) -> None:
        self.count += 1
        self._kept.append(step)

    def after(self, count: int) -> tuple[Step, ...]:
        """Return the kept entries that were added after the first `count`."""
        new = min(self.count - count, len(self._kept))
        return tuple(self._kept)[len(self._kept) - new :]


class Outbox:
    """Sender of the coordinator's messages to all members of the round."""

    def __init__(
        self,
        settings: Settings,
        peers: Peers,
        ledger: Ledger,
        clock: Clock,
        on_manifest: Callable[[Step, Worker], None],
        on_lost: Callable[[Step], None],
    ) -> None:
        """Create the sender; `start` begins to send.

        Args:
            on_manifest: Called when a member has stored the manifest of a step.
            on_lost: Called when a member answers that it lacks its shard of a step.
        """
        self._settings = settings
        self._peers = peers
        self._ledger = ledger
        self._clock = clock
        self._on_manifest = on_manifest
        self._on_lost = on_lost
        self._tasks = Tasks()
        self._wakes: dict[Worker, asyncio.Event] = {}
        self._acknowledged: dict[Worker, _Acknowledged] = {}
        self._requests: list[tuple[str, GangRequest]] = []
        self._prunes = Recent()
        self._urgent_prunes = 0
        """Number of entries of `_prunes` up to the last one whose slot a rank needs."""
        self._persist: dict[Step, PersistRequest] = {}
        self._puts: dict[Digest | None, ManifestPut] = {}
        """The newest messages with manifests. All members share them: one has megabytes in a large gang."""
        self._released = False
        self._released_at: float | None = None
        self._message: Round | None = None
        self._own: Worker | None = None

    def start(self, message: Round) -> None:
        self._message = message
        self._own = message.coordinator
        for worker in self._ledger.workers:
            self._acknowledged[worker] = _Acknowledged()
            self._wakes[worker] = asyncio.Event()
        sending = ((self._serve(w), f"sending to worker {w}") for w in self._ledger.workers)
        self._tasks.spawn(self._tasks.spawn_all(sending), "sending to all workers")

    def update(self, message: Round) -> None:
        """Take over a higher version of the ROUND. A member whose pod was replaced gets everything again."""
        before = self._message
        self._message = message
        pods = {} if before is None else {m.worker: m.pod for m in before.members}
        for member in message.members:
            if pods.get(member.worker) != member.pod and member.worker in self._acknowledged:
                self._acknowledged[member.worker] = _Acknowledged()
        self.wake()

    async def close(self) -> None:
        await self._tasks.cancel()

    def wake(self) -> None:
        """Look again for messages to all members. Call this when the ledger has changed for all of them."""
        for event in self._wakes.values():
            event.set()

    # ------------------------------------------------------------------ what is to be sent

    def request(self, path: str, message: GangRequest) -> bool:
        """Queue a request for worker 0. Return False if the same one was queued before in this round."""
        if (path, message) in self._requests:
            return False
        self._requests.append((path, message))
        if (event := self._wakes.get(Worker(0))) is not None:
            event.set()
        return True

    def prune(self, steps: tuple[Step, ...], *, in_slots: bool = False) -> None:
        """Forget these steps and have members delete them, except for those on their way to the store.

        Args:
            steps: The steps.
            in_slots: They wait in slots, which ranks need for their next saves. Members are sent these before
                anything else, because they may take long to store a manifest.
        """
        going = [step for step in steps if step not in self._ledger.on_way_to_store]
        if not going:
            return
        self._ledger.forget(steps)
        for step in going:
            self._prunes.add(step)
            self._persist.pop(step, None)
            for record in self._acknowledged.values():
                record.levels.pop(step, None)
                record.persists.pop(step, None)
        if in_slots:
            self._urgent_prunes = self._prunes.count
        self.wake()

    def prune_again(self, worker: Worker, steps: frozenset[Step]) -> None:
        """Have one member delete pruned steps that it lists in slots, unless their prune is on its way.

        A broadcast would let one late report of each worker cause a message to every other one.
        """
        record = self._acknowledged[worker]
        known = record.again.union(self._prunes.after(record.pruned))
        if not steps <= known:
            record.again |= steps - known
            self._wakes[worker].set()

    def persist(self, request: PersistRequest) -> None:
        """Send this request to all members. It replaces an earlier one for the same step."""
        if self._persist.get(request.step) != request:
            self._persist[request.step] = request
            self.wake()

    def release(self) -> None:
        """Notify all members that their pods may end, the own pod last."""
        if not self._released:
            self._released = True
            self._released_at = self._clock.monotonic()
            self.wake()

    def repeat(self, worker: Worker) -> None:
        """Send everything again to a member whose sidecar has restarted and has only the data on its disk."""
        record = _Acknowledged()
        # The last prunes are sent again: the sidecar may have ended before it had deleted those steps.
        record.pruned = max(0, self._acknowledged[worker].pruned - _REPEATED_PRUNES)
        self._acknowledged[worker] = record
        self._wakes[worker].set()

    # ------------------------------------------------------------------ one member

    async def _serve(self, worker: Worker) -> None:
        settings = self._settings
        backoff = Backoff(settings.backoff_first_seconds, settings.backoff_last_seconds)
        changed = logs.Changed()
        while True:
            self._wakes[worker].clear()
            chosen = self._next(worker)
            if chosen is None:
                await self._wait(worker)
                continue
            message, path, acknowledged = chosen
            try:
                await self._peers.call(worker, message, Ok, path=path)
            except StaleRoundError:
                return
            except HoldfastError as error:
                if isinstance(error, NotFoundError) and isinstance(message, ManifestPut):
                    self._on_lost(message.step)
                    continue
                changed.log(f"worker {worker}", f"{type(message).__name__}: {error}")
                await self._clock.sleep(backoff.next_seconds())
            else:
                backoff.reset()
                changed.healthy(f"worker {worker}")
                acknowledged()

    async def _wait(self, worker: Worker) -> None:
        """Wait until there may be something to send. The release of some pods also depends on time."""
        limit = 0.5 if self._released and self._released_before(worker) else None
        try:
            async with asyncio.timeout(limit):
                await self._wakes[worker].wait()
        except TimeoutError:
            return

    def _next(self, worker: Worker) -> tuple[Any, str | None, Callable[[], None]] | None:
        """Return the next message for this member, or None if nothing is missing.

        Returns:
            The message, its path if it is not the default for its type, and a function to call when the
            message is acknowledged.
        """
        record = self._acknowledged[worker]
        if worker == 0 and record.requests < len(self._requests):
            path, message = self._requests[record.requests]
            return message, path, record.request_acknowledged
        if (write_next := self._write_next(worker)) is not None:
            return write_next
        for step in sorted(self._ledger.steps):
            entry = self._ledger.steps[step]
            put = self._manifest_for(worker, entry)
            if put is not None:
                return put, None, functools.partial(self._on_manifest, step, worker)
            request = self._persist.get(step)
            if request is not None and entry.local and record.persists.get(step) != request:
                return request, None, functools.partial(record.persists.__setitem__, step, request)
            known, level = record.levels.get(step), entry.level
            if level is not None and (known is None or not known.includes(level)):
                return self._notice(worker, step, level)
        if record.pruned < self._prunes.count and (newest := self._newest()) is not None:
            return self._notice(worker, newest.step, newest.level or Level.LOCAL)
        if self._may_release(worker) and not record.released:
            return self._release_notice(worker)
        return None

    def _manifest_for(self, worker: Worker, entry: StepEntry) -> ManifestPut | None:
        """Return the manifest of a step if this member is to receive it now.

        The own node tier stores it first, so that a manifest that any member has also exists here.
        """
        if entry.manifest is None or worker in entry.acknowledged:
            return None
        if worker != self._own and self._own not in entry.acknowledged:
            return None
        key = entry.manifest_digest
        if key not in self._puts:
            if len(self._puts) >= _PUTS_KEPT:
                self._puts.pop(next(iter(self._puts)))
            self._puts[key] = ManifestPut(self._ledger.round, entry.step, entry.manifest.decode())
        return self._puts[key]

    def _notice(
        self, worker: Worker, step: Step, level: Level
    ) -> tuple[LevelNotice, None, Callable[[], None]]:
        record = self._acknowledged[worker]
        count = self._prunes.count
        prune = self._prunes.after(record.pruned)

        def acknowledged() -> None:
            record.levels[step] = level
            record.pruned = count

        notice = LevelNotice(self._ledger.round, step, self._ledger.round, level, prune)
        return notice, None, acknowledged

    def _write_next(self, worker: Worker) -> tuple[WriteNext, None, Callable[[], None]] | None:
        """Return the message about steps that wait in slots, if this member lacks any of it.

        It also carries all prunes while no step is local yet, because a LevelNotice must name a local step.
        """
        record, chosen = self._acknowledged[worker], self._ledger.chosen
        pruned = self._prunes.count
        urgent = record.pruned < (pruned if self._newest() is None else self._urgent_prunes)
        if record.chosen == chosen and not urgent:
            return self._prune_again(record) if record.again else None

        def acknowledged() -> None:
            record.chosen, record.pruned = chosen, pruned

        message = WriteNext(self._ledger.round, chosen, self._prunes.after(record.pruned))
        return message, None, acknowledged

    def _prune_again(self, record: _Acknowledged) -> tuple[WriteNext, None, Callable[[], None]]:
        again = record.again

        def acknowledged() -> None:
            record.again -= again

        return (
            WriteNext(self._ledger.round, record.chosen, tuple(sorted(again))),
            None,
            acknowledged,
        )

    def _newest(self) -> StepEntry | None:
        return self._ledger.newest(Level.LOCAL)

    def _may_release(self, worker: Worker) -> bool:
        """Return whether this member may be released now.

        A relay is released after the workers that it passes the release on to, and the own pod is last: these
        have acknowledged their release, or `release_seconds` have passed.
        """
        if not self._released or self._released_at is None:
            return False
        waited = self._clock.monotonic() - self._released_at
        return waited > self._settings.release_seconds or all(
            self._acknowledged[other].released for other in self._released_before(worker)
        )

    def _released_before(self, worker: Worker) -> list[Worker]:
        """Return the workers that are released before this one."""
        message = self._message
        if worker == self._own:
            return [other for other in self._acknowledged if other != worker]
        if message is None or relay_of(message, worker) != worker:
            return []
        group = range(worker + 1, min(worker + message.fan_in, message.workers))
        return [Worker(other) for other in group]

    def _release_notice(self, worker: Worker) -> tuple[LevelNotice, None, Callable[[], None]]:
        newest = self._newest()
        step = Step(0) if newest is None else newest.step
        level = Level.LOCAL if newest is None or newest.level is None else newest.level
        notice = LevelNotice(self._ledger.round, step, self._ledger.round, level, released=True)
        return notice, None, self._acknowledged[worker].was_released
