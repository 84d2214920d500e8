"""Messages between a rank and its sidecar or persister, over successive connections.

A session keeps the handles of unfinished saves, sends `Stage` again after a reconnect, and collects requests
to save or stop, which arrive as messages, as a signal or as Ctrl-C. It does not decide which steps are
saved.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.connection.link import Link
from holdfast.slots.staging import Slot
from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.ids import JobUid, Level, Rank, RestartRound
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    PROTOCOL_VERSION,
    STORE_TAKEN,
    Hello,
    HelloReply,
    Ok,
    Plan,
    Policy,
    Progress,
    Stage,
    StepOutcome,
)
from holdfast_core.shm.slot_file import SlotState


class Requests:
    """The requests that a rank has not fulfilled yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._save_from: int | None = None
        """A save of this step or of a later one was requested, and not taken yet."""
        self._taken = -1
        """The step of the newest call of `take_save` that returned True."""
        self._stop = False
        self._is_interrupted = False

    @property
    def stop(self) -> bool:
        """Whether the training is to stop."""
        return self._stop or self._is_interrupted

    def note(self, message: Plan) -> None:
        """Record what was requested in this round. What `take_save` has returned before is ignored."""
        with self._lock:
            wanted = message.save_from
            if wanted is not None and wanted > self._taken:
                self._save_from = max(wanted, self._save_from or 0)
            self._stop = self._stop or message.stop

    def take_save(self, step: int) -> bool:
        """Return whether a save of `step`, which is done, or of a later one was requested. Clear the request.

        Other ranks may have done later steps when the save was requested. Then it waits for these steps.
        """
        with self._lock:
            if self._save_from is None or step < self._save_from:
                return False
            self._save_from, self._taken = None, step
            return True

    def request_stop(self) -> None:
        """Record a request to stop. A signal handler calls this, so it must not acquire a lock."""
        self._stop = True

    def interrupt(self) -> None:
        """Record a request to stop by Ctrl-C, which lasts until `forget_interrupt`."""
        self._is_interrupted = True

    def forget_interrupt(self) -> bool:
        """Clear the request of `interrupt`. Return False if another request to stop remains."""
        self._is_interrupted = False
        return not self._stop


_MAX_HANDLES = 64
"""Number of saves to keep. Levels of older saves may be reached very late, or never."""


@dataclass(slots=True)
class HandedOver:
    """A save that was handed over, with its slot and its handle."""

    stage: Stage
    slot: Slot
    handle: SaveHandle
    is_repeated: bool = False
    """Whether the step was handed over before in this round. The other side acknowledges it only when its
    bytes are known to be those of the earlier save, or when no shard of the earlier save is left."""
    acknowledged: bool = False

    @property
    def state(self) -> SlotState | None:
        """The slot's state, or None where the slot holds another save by now or is not mapped."""
        try:
            header = self.slot.header()
        except (FormatError, ValueError):
            return None
        is_its = (header.step, header.round) == (self.stage.step, self.stage.round)
        return header.state if is_its else None


class HandedOverSaves:
    """The newest saves of a rank. Thread-safe.

    Args:
        peer: Name of the other side for error messages.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.changed = threading.Condition()
        """Notified when a save is settled or acknowledged. Its lock protects the session, too."""
        self._saves: dict[tuple[int, int], list[HandedOver]] = {}
        """The saves of each step and round, oldest first. A step may be saved more than once."""
        self._deferred_handle: SaveHandle | None = None
        self._deferred: HandedOver | None = None

    def all(self) -> list[HandedOver]:
        with self.changed:
            return [save for same in self._saves.values() for save in same]

    def all_settled(self) -> bool:
        return all(s.handle.settled for s in self.all())

    def was_acknowledged(self, handle: SaveHandle) -> bool:
        """Return whether the other side has acknowledged this save."""
        return any(s.handle is handle and s.acknowledged for s in self.all())

    def add(self, save: HandedOver) -> None:
        with self.changed:
            same = self._saves.setdefault((save.stage.step, save.stage.round), [])
            save.is_repeated = bool(same)
            same.append(save)
            self._forget_old()

    def note(self, message: StepOutcome) -> None:
        """Record a level, or a failure."""
        for save in self._of(message.step, message.round):
            if not message.failed:
                save.handle.reach(message.level)
            else:
                _note_failed(save.handle, message)
        self.settled()

    def acknowledge(self, save: HandedOver) -> None:
        """Record that the other side has taken the save.

        A repeated save then has the levels of the earlier saves of its step. They were reported before. If
        a newer step has replaced the step, it has replaced this save, too.
        """
        save.acknowledged = True
        if not save.is_repeated:
            return
        key = save.stage.step, save.stage.round
        with self.changed:
            replaced = [other for other in self._saves.get(key, []) if other.handle.overtaken]
        for other in (*self._of(*key), *replaced):
            save.handle.adopt(other.handle)

    def settled(self) -> None:
        """Wake those who wait for saves."""
        with self.changed:
            self.changed.notify_all()

    def report_no_more_uploads(self, why: str) -> None:
        """Record that no report arrives any more that a save so far is in the object store.

        Otherwise `wait("persisted")` would wait forever.
        """
        for save in self.all():
            save.handle.report_no_more(Level.PERSISTED, why)

    def defer(self, handle: SaveHandle) -> None:
        """Keep the slot of this save until it is handed over or dropped. Only one save can be deferred."""
        with self.changed:
            self._deferred_handle = handle

    def keep_if_deferred(self, save: HandedOver) -> bool:
        """Keep the slot of a deferred save. Return False if the save is not deferred."""
        with self.changed:
            if save.handle is not self._deferred_handle:
                return False
            self._deferred = save
            return True

    def take_deferred(self) -> tuple[SaveHandle | None, HandedOver | None]:
        """Return the deferred save, which is deferred no more. Its slot may not be full yet."""
        with self.changed:
            found = self._deferred_handle, self._deferred
            self._deferred_handle, self._deferred = None, None
            return found

    def drop_deferred(self, why: str) -> None:
        """Drop the deferred save and free its slot. It counts as overtaken, not as failed."""
        handle, save = self.take_deferred()
        if handle is not None:
            handle.overtaken = True
            handle.report_no_more(Level.LOCAL, why)
        if save is not None:
            save.slot.abandon()

    def _of(self, step: int, round_: int) -> list[HandedOver]:
        """Return the saves that a message about this step means.

        These are the saves whose bytes are those of the step's shard. A save that failed before a later one
        of its step was handed over is not among them.
        """
        with self.changed:
            same = self._saves.get((step, round_), [])
            return [
                save
                for save in same
                if (save.acknowledged or not save.is_repeated)
                and (save is same[-1] or save.handle.durable or not save.handle.settled)
            ]

    def _forget_old(self) -> None:
        """Drop the oldest saves above the limit, settled ones first.

        An unsettled save that is dropped has failed: its outcome did not arrive before that of many later
        saves.
        """
        while len(kept := self.all()) > _MAX_HANDLES:
            save = next((s for s in kept if s.handle.settled), kept[0])
            key = (save.stage.step, save.stage.round)
            self._saves[key].remove(save)
            if not self._saves[key]:
                del self._saves[key]
            save.handle.fail(
                Level.LOCAL,
                f"{self._peer} did not report the outcome of this save, nor of {_MAX_HANDLES} "
                "later saves",
            )


def _note_failed(handle: SaveHandle, message: StepOutcome) -> None:
    why = f"{message.reason}: {message.message}"
    handle.overtaken |= message.reason == OVERTAKEN
    handle.lost_its_store |= message.reason == STORE_TAKEN
    if message.reason in (NO_OBJECT_TIER, OVERTAKEN):
        handle.report_no_more(message.level, why)
    else:
        handle.fail(message.level, why)


logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 3600.0
"""Time-out of a request. A fill may read a whole shard from a slow disk. If the other side ends, the
connection ends, so that a request never waits this long for it."""
_LOSSES_AT_THE_END = 5
"""Lost or failed connections in a row, after which `wait_settled` stops waiting."""


class Session:
    """A rank's session with its sidecar or persister. Call `open` before use.

    It is thread-safe: the training thread and the link's thread use it.

    Args:
        job_uid: Job that Hello names.
        rank: This rank.
        round_: Restart round, or None to take it from the first HelloReply.
        peer: Name of the other side for log and error messages.
        knows_what_is_durable: Whether the other side can answer a `Stage` for a slot that it has freed.
            If so, the session sends `Stage` again forevery unsettled save after a reconnect.
    """

    def __init__(
        self,
        job_uid: JobUid,
        rank: Rank,
        round_: RestartRound | None,
        peer: str = "the sidecar",
        *,
        knows_what_is_durable: bool = False,
    ) -> None:
        self._job_uid = job_uid
        self.peer = peer
        self._knows_what_is_durable = knows_what_is_durable
        self.rank = rank
        self.saves = HandedOverSaves(peer)
        self.requests = Requests()
        self._loss_logged = False
        self._progress: Progress | None = None
        """The newest progress. It is sent after a reconnect, because a restarted sidecar has no record."""
        self.losses = 0
        """Connections that ended or could not be opened since the last HelloReply."""
        self.lost_because = ""
        self.round = round_
        self.policy: Policy | None = None
        self.node_bytes = 0
        """Bytes of the node volume for this rank. 0: not known."""
        self.hello_error: HoldfastError | None = None
        self._link: Link | None = None

    # ------------------------------------------------------------------ the connection

    def open(self, link: Link) -> None:
        """Start `link`, whose callbacks are this session's. It connects again until `close`."""
        self._link = link
        self.hello_error, self.losses = None, 0  # of an earlier link
        link.start()

    def close(self) -> None:
        """Send what is queued and end the connection. Saves cannot be handed over any more."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @property
    def is_open(self) -> bool:
        """Whether it has a link, which connects again after each loss."""
        return self._link is not None

    @property
    def is_connected(self) -> bool:
        link = self._link  # another thread may close the session
        return link is not None and link.is_connected

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait until requests can be sent. Return False at the time-out."""
        link = self._link
        return link is not None and link.wait_connected(timeout_seconds)

    def request(self, message: Any, *kinds: type[Any]) -> Any:
        """Send a request and return its reply, which is of one of `kinds`.

        Raises UnavailableError for a lost connection and for a reply of another kind, and the error of a
        refusal.
        """
        reply = self._opened().request(message, _ANSWER_SECONDS)
        if not isinstance(reply, kinds):
            raise UnavailableError(
                f"{type(message).__name__}: the reply is of unexpected type {type(reply).__name__}"
            )
        return reply

    @property
    def current_round(self) -> RestartRound:
        """The restart round, or round 0 before it is known."""
        return RestartRound(0) if self.round is None else self.round

    # ------------------------------------------------------------------ LinkEvents

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self._job_uid, self.rank, self.round)

    def hello_accepted(self, reply: HelloReply) -> None:
        with self.saves.changed:
            self.losses = 0
            self.hello_error = None
            if self.round is None:
                self.round = reply.round
            self.policy = reply.policy or self.policy
            self.node_bytes = reply.node_bytes

    def connected(self) -> None:
        with self.saves.changed:
            again = [s for s in self.saves.all() if not s.handle.settled]
            if self._loss_logged:
                logger.warning("connected to %s again: saves continue", self.peer)
                self._loss_logged = False
            progress, link = self._progress, self._link
        if progress is not None and link is not None:
            link.notify(progress)
        for save in again:
            # A FREE slot was already written by the sidecar before it restarted, and its level is still to
            # be reported. A slot that holds a newer save by now must not be staged for the old one. Of a slot
            # whose file was replaced, only the other side knows whether it was written.
            is_known = self._knows_what_is_durable or save.slot.is_closed
            if is_known or save.state not in (None, SlotState.FREE):
                self._submit(save)
            else:
                self.saves.acknowledge(save)
        self.saves.settled()

    def disconnected(self, reason: str) -> None:
        with self.saves.changed:
            self.losses += 1
            self.lost_because = reason
            self.saves.changed.notify_all()
            if self._loss_logged:
                return
            self._loss_logged = True
        # Before the first connection nothing trains: the start waits, and says why it fails.
        what = (
            "" if self.policy is None else ": training continues, and saves fail until it is back"
        )
        logger.warning("no connection to %s (%s)%s", self.peer, reason, what)

    def refused(self, error: HoldfastError) -> None:
        was_connected, logged_before = self.policy is not None, str(self.hello_error)
        self.hello_error = error
        if was_connected and str(error) != logged_before:
            logger.warning("%s cannot serve this rank: %s", self.peer, error)

    def push(self, message: Any) -> None:
        match message:
            case StepOutcome():
                self.saves.note(message)
            case Plan():
                self.requests.note(message)
            case _:
                logger.warning("ignored a message that is not for ranks: %s", message)

    # ------------------------------------------------------------------ the training thread

    def stage(self, stage: Stage, slot: Slot, handle: SaveHandle) -> None:
        """Hand over a FULL slot, or keep it if this save was deferred (`HandedOverSaves.defer`).

        If the other side refuses it, the handle reports the failure and the slot is FREE again.
        """
        save = HandedOver(stage, slot, handle)
        with self.saves.changed:
            dropped = handle.settled
            kept = not dropped and self.saves.keep_if_deferred(save)
        if dropped:
            slot.abandon()
        elif not kept:
            self._take(save)

    def hand_over_deferred(self) -> None:
        """Hand over the deferred save."""
        _, save = self.saves.take_deferred()
        if save is not None:
            self._take(save)

    def progress(self, message: Progress) -> None:
        """Send the newest finished step. It is sent again after a reconnect."""
        with self.saves.changed:
            self._progress, link = message, self._link
        if link is not None:
            link.notify(message)

    def wait_acknowledged(self, timeout_seconds: float, repeated_seconds: float = 0.0) -> bool:
        """Wait until every save is acknowledged or settled. Return False at the time-out.

        Args:
            timeout_seconds: Longest wait for all saves.
            repeated_seconds: Longest further wait, while the connection lasts, for saves of steps that were
                saved before. Their reply waits until the earlier save is digested, maybe until it is written.
        """

        def missing() -> list[HandedOver]:
            return [s for s in self.saves.all() if not (s.acknowledged or s.handle.settled)]

        def is_over() -> bool:
            return not self.is_connected or not all(save.is_repeated for save in missing())

        with self.saves.changed:
            if not self.saves.changed.wait_for(lambda: not missing(), timeout_seconds):
                self.saves.changed.wait_for(lambda: not missing() or is_over(), repeated_seconds)
            return not missing()

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until every save is local or has failed. Return whether that is so.

        This returns early when several connections in a row have failed.
        """
        with self.saves.changed:
            self.saves.changed.wait_for(
                lambda: self.losses >= _LOSSES_AT_THE_END or self.saves.all_settled(),
                timeout_seconds,
            )
            return self.saves.all_settled()

    # ------------------------------------------------------------------ inside

    def _opened(self) -> Link:
        link = self._link
        if link is None:
            raise UnavailableError(f"there is no connection to {self.peer}")
        return link

    def _take(self, save: HandedOver) -> None:
        self.saves.add(save)
        self._submit(save)

    def _submit(self, save: HandedOver) -> None:
        self._opened().submit(save.stage).add_done_callback(partial(self._answered, save))

    def _answered(self, save: HandedOver, future: Future[Any]) -> None:
        try:
            self._take_answer(save, future)
        except BaseException as error:
            # concurrent.futures only logs an exception, and the save would wait forever.
            logger.exception("handling the reply to the save of step %d", save.stage.step)
            save.handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")
        self.saves.settled()

    def _take_answer(self, save: HandedOver, future: Future[Any]) -> None:
        try:
            reply = future.result()
        except UnavailableError:
            return  # `connected` sends it again
        except HoldfastError as error:
            state, slot = save.state, save.slot
            is_left = state is SlotState.OWNED and not self._knows_what_is_durable
            if is_left and slot is not None and not slot.is_lost():
                # The sidecar took it before it restarted. The new process continues or frees it.
                self.saves.acknowledge(save)
            else:
                if state is not None and slot is not None:
                    slot.abandon()  # the other side refused it and will not free the slot
                save.handle.fail(Level.LOCAL, str(error))
        else:
            if save.is_repeated and not save.acknowledged and save.slot.is_closed:
                save.handle.fail(
                    Level.LOCAL, "its slot was replaced before its bytes were compared"
                )
            elif isinstance(reply, Ok):
                self.saves.acknowledge(save)
