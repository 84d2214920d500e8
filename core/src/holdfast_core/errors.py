"""Exception hierarchy of Holdfast.

Every message states the operation, its object, and the expected and the actual result. `retryable`
is an attribute of the class. The object store's client reads it to decide about a retry.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class HoldfastError(Exception):
    """Base of all errors that Holdfast raises on purpose."""

    retryable: ClassVar[bool] = False


class ConfigError(HoldfastError):
    """A setting, a field or the environment is missing or wrong."""


class ForbiddenByStateError(ConfigError):
    """What was named exists, and its state forbids the deed: it is in use, pinned, or of somebody else."""


class FormatError(HoldfastError):
    """Bytes do not conform to their format. They are refused before any part of them is used."""


class UnknownVersionError(FormatError):
    """The format version is not one that this release reads. The bytes are not damaged."""


class CorruptionError(FormatError):
    """A digest, an identity or a length does not match. The copy must be quarantined."""


class CutError(CorruptionError):
    """The bytes end too early: an object or a file was cut, or its end was replaced."""


class SwappedError(CorruptionError):
    """The bytes are intact, but they belong to another name: a file or an object was renamed or copied."""


class UnreadableError(CorruptionError):
    """One file cannot be read (an I/O error, no permission), or its name belongs to no regular file.

    Another copy is used instead, as for a damaged file. This file stays where it is: its bytes may be intact,
    and a later attempt may read them. It is no error of the whole volume. `may_pass` says whether another
    attempt after some seconds may succeed.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class UnsupportedStateError(HoldfastError):
    """A state dict contains a value that cannot be saved; the message names its path."""


class StateDictError(HoldfastError):
    """The state_dict() method of an object in the state raised; the message names path and error."""


class StateMismatchError(HoldfastError):
    """A checkpoint does not fit the state it is restored into (missing key, shape, dtype)."""


class CapacityError(HoldfastError):
    """Space is exhausted (shared memory, node volume, memory limit, store).

    The message states the needed and the available bytes where they are known.
    """


class TierError(HoldfastError):
    """A tier could not execute an operation."""


class NotFoundError(TierError):
    """The shard, manifest, layout or bucket does not exist."""


class AlreadyExistsError(TierError):
    """A put-if-absent found different content under this key."""


class AccessDeniedError(TierError):
    """The store refused the credentials; the message contains the server's reply."""


class UnavailableError(TierError):
    """A temporary failure (connection refused or reset, time-out, HTTP 5xx). A retry may succeed."""

    retryable = True


class StaleRoundError(HoldfastError):
    """A request has an older restart round than its receiver (docs/guarantees.md R17).

    `own_round` and `own_version` are the receiver's restart round and its ROUND message's version.
    """

    def __init__(self, message: str, *, own_round: int, own_version: int = 0) -> None:
        super().__init__(message)
        self.own_round = own_round
        self.own_version = own_version


class Refusal(StrEnum):
    """Why a receiver refuses a well-formed request. tests/sidecar/base/test_refusals.py lists the rules."""

    STALE_ROUND = "StaleRound"
    """The round of the request is older than the receiver's."""
    FUTURE_ROUND = "FutureRound"
    """The receiver is not sealed for the round of the request yet."""
    SEALED = "Sealed"
    """The receiver is sealed for its round and has not received the ROUND message yet. The sender tries
    again later."""
    NOT_NEWER = "NotNewer"
    """The version of a ROUND message is not above the one that the receiver holds for that round."""
    NOT_SEALED = "NotSealed"
    """The receiver was not sealed for the round of a ROUND message."""
    NOT_MEMBER = "NotMember"
    """The sender's certificate names no current member of the job, or only the operator may send this
    message."""
    NOT_COORDINATOR = "NotCoordinator"
    NOT_ASSIGNED = "NotAssigned"
    """ROUND.copies does not assign this copy to the sender and the receiver."""
    NO_SPACE = "NoSpace"
    CONFLICT = "Conflict"
    """The receiver has a different digest for the same step and round, or a copy that does not verify."""
    PROTECTED = "Protected"
    """Prune names a checkpoint that must stay: the restore point, a pinned step, the newest persisted step,
    one that is being uploaded, or another job's."""
    BUSY = "Busy"
    NOT_FOUND = "NotFound"
    BAD_REQUEST = "BadRequest"


class RefusedError(HoldfastError):
    """The receiver refused a well-formed request."""

    def __init__(self, code: Refusal, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceError(HoldfastError):
    """A copy to or from an accelerator failed; the message contains the accelerator's error."""


class SaveFailedError(HoldfastError):
    """A save did not reach the level that the caller waited for."""
