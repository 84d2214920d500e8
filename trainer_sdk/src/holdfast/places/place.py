"""`Place`, the interface between a Checkpointer and the place of its checkpoints.

In a pod (`pod`) the sidecar serves a rank, and the operator chooses the restore point. For a folder
(`folder`) each rank starts a persister, and the ranks agree on the restore point. Both processes receive
the same messages. All other differences are behind this interface: a Checkpointer never asks which kind of
place it has.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from holdfast.base.handle import SaveHandle
from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast.reading.opening import Checkpoints, SavedStep
from holdfast.slots.capacity import SlotAdvice
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import JobUid, RestartRound, Step
from holdfast_core.messages.schema import Timing


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a place before it is opened. It never changes."""

    job_uid: JobUid
    peer: str
    """Name of the process that serves this rank, for log and error messages."""
    slots: int
    """Slots of each rank, at least 1."""
    advice: SlotAdvice
    interval_steps: int | None
    """Optimizer steps between saves. None: the policy of the connection has them. 0 with `timing`."""
    round: RestartRound | None
    """Restart round. None: it is known when the place has started."""
    has_nothing: bool
    """Whether it is known without a request that there is nothing to restore."""
    knows_what_is_durable: bool
    """Whether the other process can answer a `Stage` for a slot that it has freed."""
    frees_older_steps: bool
    """Whether the other process, if it has three slots, frees the slot of a step as soon as a newer step is
    complete in memory."""
    shares_container: bool
    """Whether the other process runs in this process's container. It may then fill slots that this process
    has not touched, and this process can open its files."""

    timing: Timing | None = None
    """The interval as a time. None: it is a number of steps."""


@dataclass(frozen=True, slots=True)
class Directories:
    """Directories that this rank shares with the process that serves it."""

    slots: Path
    layouts: Path
    spare_slots: Path | None = None
    """Directory for slots that do not fit into `slots`. None: there is no such directory."""


class NextFetch(Enum):
    """What a rank does after it has tried to fetch its part of a checkpoint."""

    NONE = auto()
    """Keep what was fetched."""
    REPEAT = auto()
    """Fetch again: the connection was lost."""
    FAIL = auto()
    """Raise the error of the fetch: no other fetch can succeed."""
    OLDER = auto()
    """Start again: not all ranks can read this checkpoint."""


class Place(Protocol):
    """Where the checkpoints of one rank go, and the process that serves the rank there."""

    @property
    def traits(self) -> Traits: ...

    @property
    def where_to_look(self) -> str:
        """Advice for log messages: what to check when saves do not become durable."""
        ...

    def open(self, store: GangStore | None) -> Directories:
        """Prepare the place before the first connection, and return its directories.

        Args:
            store: The gang's store, or None for a gang of one rank.
        """
        ...

    def holds_slots(self) -> bool:
        """Return whether the directory of the slots still belongs to this process."""
        ...

    def close(self, *, wait: bool) -> None:
        """Release the place after the connection has ended.

        With `wait`, this waits a bounded time until all staged saves are durable.
        """
        ...

    # ------------------------------------------------------------------ restore

    def start(self, session: Session) -> None:
        """Open a link of the session. In a folder, also agree on the round and the restore point.

        Call it at the opening, and again for `NextFetch.OLDER` and after `roll_back`.
        """
        ...

    def reason_to_give_up(self, session: Session, waited_seconds: float) -> HoldfastError | None:
        """Return why no connection can be expected, as an error, or None if there may be one."""
        ...

    def after_fetch(self, step: Step | None, error: HoldfastError | None) -> NextFetch:
        """Agree with the other ranks whether the fetched checkpoint is the one to load.

        Args:
            step: The step that this rank has fetched. None: the fetch failed, or there is no checkpoint.
            error: Why the fetch failed.

        Raises:
            CorruptionError: A step that the script asked for cannot be read.
        """
        ...

    def roll_back(self, session: Session, step: Step | None) -> None:
        """Make the next `start` choose `step`, or the newest committed step. Every rank must call it.

        Raises ConfigError where the place has no rollback or no such step.
        """
        ...

    def describe(self, step: Step, tier: str) -> str:
        """Describe where this rank has read `step`, for the line that tells the user."""
        ...

    @property
    def location(self) -> str:
        """Name of the place in messages for the user."""
        ...

    @property
    def run_id(self) -> str:
        """Identity of the training, the same on all ranks and in all its restarts.

        Call it after `start`. Raises ConfigError where there is none.
        """
        ...

    # ------------------------------------------------------------------ its checkpoints

    def list(self) -> tuple[SavedStep, ...]:
        """Return the committed checkpoints, oldest first. Raises ConfigError where a script has no list."""
        ...

    def checkpoints(self) -> Checkpoints:
        """Open the checkpoints of this place for reading. Raises ConfigError where that is not possible."""
        ...

    def delete(self, step: Step, *, even_last: bool) -> bool:
        """Delete the checkpoint of a step. Return False if there is none. Raises ConfigError."""
        ...

    # ------------------------------------------------------------------ save

    def take_for_training(self) -> None:
        """Acquire the right to save, for all ranks. Only the first call has an effect.

        Raises ConfigError where this run may not save.
        """
        ...

    def keep_for_training(self) -> None:
        """Make sure before a save that this run still has the right to save. Raises ConfigError."""
        ...

    def wait_for_saves(self, session: Session) -> None:
        """Wait a bounded time until this rank's saves do not need its connection any more."""
        ...

    def is_safe(self, session: Session, handle: SaveHandle, *, waited: bool) -> bool:
        """Return whether an unfinished save needs nothing more from this process.

        Args:
            session: The session, whose connection is about to end.
            handle: The save.
            waited: Whether `wait_for_saves` was called.
        """
        ...


logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_LOG_AFTER_SECONDS = 15.0


def wait_connected(
    session: Session,
    place: Place,
    longest_seconds: float = math.inf,
    *,
    may_close: bool = True,
) -> RestartRound:
    """Wait until the session is connected, and return the round.

    Kubernetes restarts the sidecar's container, and a folder's disk may be slow.

    Args:
        session: The session.
        place: The place that it connects to.
        longest_seconds: Longest wait. Without it there is no limit.
        may_close: Close the session if no connection can be expected. A training that goes on without a save
            keeps it, because the connection may come back.

    Raises:
        UnavailableError: There is no connection after that time.
        HoldfastError: The place knows that no connection can be expected.
    """
    began = time.monotonic()
    log_at = began + _LOG_AFTER_SECONDS
    outage = Outage(session, place)
    while not session.wait_connected(min(_POLL_SECONDS, longest_seconds)):
        if time.monotonic() - began >= longest_seconds:
            raise UnavailableError(f"there is no connection to {place.traits.peer}")
        if time.monotonic() >= log_at:
            logger.warning("still waiting for a reply of %s", place.traits.peer)
            log_at = math.inf
        try:
            outage.expect_end()
        except HoldfastError:
            if may_close:
                session.close()
            raise
    return session.current_round


class Outage:
    """The time for which a session has had no connection, as seen by a caller that waits for its peer."""

    def __init__(self, session: Session, place: Place, refusal_seconds: float = 0.0) -> None:
        """Create an outage that has not begun.

        Args:
            session: The session.
            place: The place that it connects to.
            refusal_seconds: For how long a peer that refuses this rank may still change its mind: a folder
                on a network can be away for a moment.
        """
        self._session = session
        self._place = place
        self._refusal_seconds = refusal_seconds
        self._began: float | None = None

    def expect_end(self) -> None:
        """Raise a HoldfastError if the place knows that no connection can be expected any more.

        Call it repeatedly while waiting: the outage is as long as the calls without a connection.
        """
        if self._session.is_connected:
            self._began = None
            return
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        is_refused = self._session.hello_error is not None
        if is_refused and now - self._began < self._refusal_seconds:
            return
        error = self._place.reason_to_give_up(self._session, now - self._began)
        if error is not None:
            try:
                raise error from self._session.hello_error
            finally:
                # The error refers to this frame and its callers by its traceback. If the frame referred to
                # the error, the state of a restore would stay in memory until the next garbage collection.
                del error
