"""Messages between a rank and its sidecar or persister, over successive connections.

A session keeps the handles of unfinished saves, sends `Stage` again after a reconnect, and collects
requests to save or stop. It does not decide which steps are saved.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
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
    LevelReached,
    LocalRole,
    Policy,
    Progress,
    SaveFailed,
    SaveRequested,
    Stage,
    Staged,
    StopRequested,
)
from holdfast_core.shm.slot_header import SlotState

logger = logging.getLogger(__name__)

_MAX_HANDLES = 64
"""Number of saves to keep. Levels of older saves may be reached very late, or never."""
_ANSWER_SECONDS = 3600.0
"""Time-out of a request. A fill may read a whole shard from a slow disk. If the other side ends, the
connection ends, so that a request never waits this long for it."""
_LOSSES_AT_THE_END = 5
"""Lost or failed connections in a row, after which `wait_settled` stops waiting."""


@dataclass(slots=True)
class _Staged:
    """A save that was handed over, with its slot and its handle."""

    stage: Stage
    slot: Slot
    handle: SaveHandle
    is_repeated: bool = False
    """Whether the step was handed over before in this round. The other side acknowledges it only when its
    bytes are known to be those of the earlier save, or when no shard of the earlier save is left."""
    acknowledged: bool = False

    @property
    def has_failed(self) -> bool:
        return self.handle.settled and not self.handle.durable


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
        self._lock = threading.Condition()
        self._saves: dict[tuple[int, int], list[_Staged]] = {}
        """The saves of each step and round, oldest first. A step may be saved more than once."""
        self._tokens: set[str] = set()
        self._save_requested = False
        self._stop_requested = False
        self._is_interrupted = False
        self._loss_logged = False
        self._deferred_handle: SaveHandle | None = None
        self._deferred: _Staged | None = None
        self._progress: Progress | None = None
        """The newest progress. It is sent after a reconnect, because a restarted sidecar has no record."""
        self.connections = 0
        """Number of connections so far."""
        self.losses = 0
        """Connections that ended or could not be opened since the last HelloReply."""
        self.lost_because = ""
        self.round = round_
        self.policy: Policy | None = None
        self.node_bytes = 0
        """Bytes of the node volume for this rank. 0: not known."""
        self.hello_error: HoldfastError | None = None
        self._link: Link | None = None
        self._is_open = False

    # ------------------------------------------------------------------ the connection

    def open(self, link: Link) -> None:
        """Start `link`, whose callbacks are this session's. It connects again until `close`."""
        self._link = link
        self._is_open = True
        self.hello_error = None  # of an earlier link
        link.start()

    def close(self) -> None:
        """Send what is queued and end the connection. Saves cannot be handed over any more."""
        self._is_open = False
        if self._link is not None:
            self._link.close()

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_connected

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait until requests can be sent. Return False at the time-out."""
        return self._link is not None and self._link.wait_connected(timeout_seconds)

    def request(self, message: Any, *kinds: type[Any]) -> Any:
        """Send a request and return its reply, which is of one of `kinds`.

        Raises UnavailableError for a lost connection and for a reply of another kind, and the error of a
        refusal.
        """
        if self._link is None:
            raise UnavailableError(f"there is no connection to {self.peer}")
        reply = self._link.request(message, _ANSWER_SECONDS)
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
        return Hello(
            PROTOCOL_VERSION,
            self._job_uid,
            LocalRole.RANK,
            self.rank,
            self.round,
        )

    def hello_accepted(self, reply: HelloReply) -> None:
        with self._lock:
            self.connections += 1
            self.losses = 0
            self.hello_error = None
            if self.round is None:
                self.round = reply.round
            self.policy = reply.policy or self.policy
            self.node_bytes = reply.node_bytes

    def connected(self) -> None:
        with self._lock:
            again = [s for s in self._all() if not s.handle.settled]
            if self._loss_logged:
                logger.warning("connected to %s again: saves continue", self.peer)
                self._loss_logged = False
            progress = self._progress
        if progress is not None and self._link is not None:
            self._link.notify(replace(progress, blocked_seconds=0.0, saves_skipped=0))
        for save in again:
            # A FREE slot was already written by the sidecar before it restarted, and its level is still to
            # be reported. A slot that holds a newer save by now must not be staged for the old one.
            if self._knows_what_is_durable or _state_of(save) not in (None, SlotState.FREE):
                self._submit(save)
            else:
                self._acknowledge(save)

    def disconnected(self, reason: str) -> None:
        with self._lock:
            self.losses += 1
            self.lost_because = reason
            self._lock.notify_all()
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
            case LevelReached():
                for save in self._saves_of(message.step, message.round):
                    save.handle.reach(message.level)
                self._settled()
            case SaveFailed():
                for save in self._saves_of(message.step, message.round):
                    _note_failed(save.handle, message)
                self._settled()
            case SaveRequested():
                self._note_request(message.token, stop=False)
            case StopRequested():
                self._note_request(message.token, stop=True)
            case _:
                logger.warning("ignored a message that is not for ranks: %s", message)

    # ------------------------------------------------------------------ the training thread

    def stage(self, stage: Stage, slot: Slot, handle: SaveHandle) -> None:
        """Hand over a FULL slot, or keep it if `defer` was called for this save.

        If the other side refuses it, the handle reports the failure and the slot is FREE again.
        """
        save = _Staged(stage, slot, handle)
        with self._lock:
            dropped = handle.settled
            kept = not dropped and handle is self._deferred_handle
            if kept:
                self._deferred = save
        if dropped:
            slot.abandon()
        elif not kept:
            self._take(save)

    def defer(self, handle: SaveHandle) -> None:
        """Keep the slot of this save until `hand_over_deferred` or `drop_deferred`.

        Only one save can be deferred.
        """
        with self._lock:
            self._deferred_handle = handle

    def hand_over_deferred(self) -> None:
        """Hand over the deferred save."""
        with self._lock:
            save = self._deferred
            self._deferred_handle, self._deferred = None, None
        if save is not None:
            self._take(save)

    def drop_deferred(self, why: str) -> None:
        """Drop the deferred save and free its slot. It counts as overtaken, not as failed."""
        with self._lock:
            handle, save = self._deferred_handle, self._deferred
            self._deferred_handle, self._deferred = None, None
        if handle is not None:
            handle.overtaken = True
            handle.report_no_more(Level.LOCAL, why)
        if save is not None:
            save.slot.abandon()

    def progress(self, message: Progress) -> bool:
        """Send the newest finished step. Return False where it could not be queued.

        It is sent again after a reconnect.
        """
        with self._lock:
            self._progress = message
        return self._link is not None and self._link.notify(message)

    def take_save_request(self) -> bool:
        """Return whether a save was requested, and clear the request."""
        with self._lock:
            requested, self._save_requested = self._save_requested, False
            return requested

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested or self._is_interrupted

    def request_stop(self) -> None:
        """Record a request to stop. A signal handler calls this, so it must not acquire a lock."""
        self._stop_requested = True

    def interrupt(self) -> None:
        """Record a request to stop by Ctrl-C, which lasts until `forget_interrupt`."""
        self._is_interrupted = True

    def forget_interrupt(self) -> bool:
        """Clear the request of `interrupt`. Return False if another request to stop remains."""
        self._is_interrupted = False
        return not self._stop_requested

    def wait_acknowledged(self, timeout_seconds: float, repeated_seconds: float = 0.0) -> bool:
        """Wait until every save is acknowledged or settled. Return False at the time-out.

        Args:
            timeout_seconds: Longest wait for all saves.
            repeated_seconds: Longest further wait, while the connection lasts, for saves of steps that were
                saved before. Their reply waits until the earlier save is digested, maybe until it is written.
        """

        def missing() -> list[_Staged]:
            return [s for s in self._all() if not (s.acknowledged or s.handle.settled)]

        def is_over() -> bool:
            return not self.is_connected or not all(save.is_repeated for save in missing())

        with self._lock:
            if not self._lock.wait_for(lambda: not missing(), timeout_seconds):
                self._lock.wait_for(lambda: not missing() or is_over(), repeated_seconds)
            return not missing()

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until every save is local or has failed. Return whether that is so.

        This returns early when several connections in a row have failed.
        """
        with self._lock:
            self._lock.wait_for(
                lambda: self.losses >= _LOSSES_AT_THE_END or self._all_settled(), timeout_seconds
            )
            return self._all_settled()

    def report_no_more_uploads(self, why: str) -> None:
        """Record that no report arrives any more that a save so far is in the object store.

        Otherwise `wait("persisted")` would wait forever.
        """
        for save in self._all():
            save.handle.report_no_more(Level.PERSISTED, why)

    def was_acknowledged(self, handle: SaveHandle) -> bool:
        """Return whether the other side has acknowledged this save."""
        with self._lock:
            return any(s.handle is handle and s.acknowledged for s in self._all())

    # ------------------------------------------------------------------ inside

    def _take(self, save: _Staged) -> None:
        self._submit(self._add(save))

    def _add(self, save: _Staged) -> _Staged:
        with self._lock:
            same = self._saves.setdefault((save.stage.step, save.stage.round), [])
            save.is_repeated = bool(same)
            same.append(save)
            self._forget_old()
        return save

    def _submit(self, save: _Staged) -> None:
        if self._link is None or not self._is_open:
            raise UnavailableError(f"there is no connection to {self.peer}")
        self._link.submit(save.stage).add_done_callback(partial(self._answered, save))

    def _all_settled(self) -> bool:
        return all(s.handle.settled for s in self._all())

    def _all(self) -> list[_Staged]:
        with self._lock:
            return [save for same in self._saves.values() for save in same]

    def _saves_of(self, step: int, round_: int) -> list[_Staged]:
        """Return the saves that a message about this step means.

        These are the saves whose bytes are those of the step's shard. A save that failed before a later one
        of its step was handed over is not among them.
        """
        with self._lock:
            same = self._saves.get((step, round_), [])
            return [
                save
                for save in same
                if (save.acknowledged or not save.is_repeated)
                and (save is same[-1] or not save.has_failed)
            ]

    def _acknowledge(self, save: _Staged) -> None:
        """Record that the other side has taken the save.

        A repeated save then has the levels of the earlier saves of its step. They were reported before. If
        a newer step has replaced the step, it has replaced this save, too.
        """
        save.acknowledged = True
        if not save.is_repeated:
            return
        key = save.stage.step, save.stage.round
        with self._lock:
            replaced = [other for other in self._saves.get(key, []) if other.handle.overtaken]
        for other in (*self._saves_of(*key), *replaced):
            save.handle.adopt(other.handle)

    def _forget_old(self) -> None:
        """Drop the oldest saves above the limit, settled ones first.

        An unsettled save that is dropped has failed: its outcome did not arrive before that of many later
        saves.
        """
        while len(kept := self._all()) > _MAX_HANDLES:
            save = next((s for s in kept if s.handle.settled), kept[0])
            key = (save.stage.step, save.stage.round)
            self._saves[key].remove(save)
            if not self._saves[key]:
                del self._saves[key]
            save.handle.fail(
                Level.LOCAL,
                f"{self.peer} did not report the outcome of this save, nor of {_MAX_HANDLES} "
                "later saves",
            )

    def _answered(self, save: _Staged, future: Future[Any]) -> None:
        try:
            self._take_answer(save, future)
        except BaseException as error:
            # concurrent.futures only logs an exception, and the save would wait forever.
            logger.exception("handling the reply to the save of step %d", save.stage.step)
            save.handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")
        self._settled()

    def _take_answer(self, save: _Staged, future: Future[Any]) -> None:
        try:
            reply = future.result()
        except UnavailableError:
            return  # `connected` sends it again
        except HoldfastError as error:
            state, slot = _state_of(save), save.slot
            is_left = state is SlotState.OWNED and not self._knows_what_is_durable
            if is_left and slot is not None and not slot.is_lost():
                # The sidecar took it before it restarted. The new process continues or frees it.
                self._acknowledge(save)
            else:
                if state is not None and slot is not None:
                    slot.abandon()  # the other side refused it and will not free the slot
                save.handle.fail(Level.LOCAL, str(error))
        else:
            if isinstance(reply, Staged):
                self._acknowledge(save)

    def _settled(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _note_request(self, token: str, *, stop: bool) -> None:
        with self._lock:
            if token in self._tokens:
                return
            self._tokens.add(token)
            if stop:
                self._stop_requested = True
            else:
                self._save_requested = True


def _note_failed(handle: SaveHandle, message: SaveFailed) -> None:
    why = f"{message.reason}: {message.message}"
    handle.overtaken |= message.reason == OVERTAKEN
    handle.lost_its_store |= message.reason == STORE_TAKEN
    if message.reason in (NO_OBJECT_TIER, OVERTAKEN):
        handle.report_no_more(message.level, why)
    else:
        handle.fail(message.level, why)


def _state_of(save: _Staged) -> SlotState | None:
    """Return the slot's state, or None where the slot holds another save by now or is not mapped."""
    try:
        header = save.slot.header()
    except (FormatError, ValueError):
        return None
    is_its = (header.step, header.round) == (save.stage.step, save.stage.round)
    return header.state if is_its else None
