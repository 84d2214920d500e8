"""Waits for the process that serves a rank."""

from __future__ import annotations

import logging
import math
import time

from holdfast.connection.session import Session
from holdfast.places.place import Place
from holdfast_core.errors import UnavailableError
from holdfast_core.ids import RestartRound

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
    while not session.wait_connected(min(_POLL_SECONDS, longest_seconds)):
        if time.monotonic() - began >= longest_seconds:
            raise UnavailableError(f"there is no connection to {place.traits.peer}")
        if time.monotonic() >= log_at:
            logger.warning("still waiting for a reply of %s", place.traits.peer)
            log_at = math.inf
        error = place.reason_to_give_up(session, time.monotonic() - began)
        if error is not None:
            if may_close:
                session.close()
            try:
                raise error from session.hello_error
            finally:
                # The error refers to this frame and its callers by its traceback. If the frame referred to
                # the error, the state of a restore would stay in memory until the next garbage collection.
                del error
    return session.current_round
