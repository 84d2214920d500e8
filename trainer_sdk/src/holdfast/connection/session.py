"""Messages between a rank and its sidecar or persister, over successive connections.

A session keeps the handles of unfinished saves, sends `Stage` again after a reconnect, and collects
requests to save or stop. It does not decide which steps are saved.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.connection.handed_over import HandedOver, HandedOverSaves
from holdfast.connection.link import Link
from holdfast.connection.requests import Requests
from holdfast.slots.staging import Slot
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import JobUid, Level, Rank, RestartRound
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
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
from holdfast_core.shm.slot_file import SlotState

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
        self.hello_error = None  # of an earlier link
        link.start()

    def close(self) -> None:
        """Send what is queued and end the connection. Saves cannot be handed over any more."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

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
        return Hello(PROTOCOL_VERSION, self._job_uid, LocalRole.RANK, self.rank, self.round)

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
            link.notify(replace(progress, blocked_seconds=0.0, saves_skipped=0))
        for save in again:
            # A FREE slot was already written by the sidecar before it restarted, and its level is still to
            # be reported. A slot that holds a newer save by now must not be staged for the old one.
            if self._knows_what_is_durable or save.state not in (None, SlotState.FREE):
                self._submit(save)
            else:
                self.saves.acknowledge(save)

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
            case LevelReached() | SaveFailed():
                self.saves.note(message)
            case SaveRequested():
                self.requests.note(message.token, stop=False)
            case StopRequested():
                self.requests.note(message.token, stop=True)
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

    def progress(self, message: Progress) -> bool:
        """Send the newest finished step. Return False where it could not be queued.

        It is sent again after a reconnect.
        """
        with self.saves.changed:
            self._progress, link = message, self._link
        return link is not None and link.notify(message)

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
            if isinstance(reply, Staged):
                self.saves.acknowledge(save)
