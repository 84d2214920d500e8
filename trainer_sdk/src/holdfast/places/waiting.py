"""Waits for the process that serves a rank."""

from __future__ import annotations

import logging
import math
import time

from holdfast.connection.session import Session
from holdfast.places.place import Place
from holdfast_core.ids import RestartRound

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_LOG_AFTER_SECONDS = 15.0


def wait_connected(session: Session, place: Place) -> RestartRound:
    """Wait until the session is connected, without a time limit, and return the round.

    Kubernetes restarts the sidecar's container, and a folder's disk may be slow.

    Raises:
        HoldfastError: The place knows that no connection can be expected.
    """
    began = time.monotonic()
    log_at = began + _LOG_AFTER_SECONDS
    while not session.wait_connected(_POLL_SECONDS):
        if time.monotonic() >= log_at:
            logger.warning("still waiting for a reply of %s", place.traits.peer)
            log_at = math.inf
        error = place.reason_to_give_up(session, time.monotonic() - began)
        if error is not None:
            session.close()
            try:
                raise error from session.hello_error
            finally:
                # The error refers to this frame and its callers by its traceback. If the frame referred to
                # the error, the state of a restore would stay in memory until the next garbage collection.
                del error
    return session.current_round
