"""The refusal that an error of a request handler becomes, for sidecars and for a folder's persister."""

from __future__ import annotations

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    StateMismatchError,
)
from holdfast_core.messages.schema import Refusal


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal code of an error. BUSY, after which the caller retries, stands for all others."""
    match error:
        case StaleRoundError():
            return Refusal.STALE_ROUND
        case RefusedError():
            return Refusal(error.code)
        case NotFoundError():
            return Refusal.NOT_FOUND
        case CorruptionError() | AlreadyExistsError():
            return Refusal.CONFLICT
        case FormatError() | StateMismatchError():
            return Refusal.BAD_REQUEST
    return Refusal.BUSY
