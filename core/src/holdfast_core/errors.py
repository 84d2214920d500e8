"""The one tree of errors. Every message says what was tried on what, what was expected and found.

`retryable` belongs to the class: the one retry wrapper (tiers.retry) reads it, nobody else does.
"""

from __future__ import annotations

from typing import ClassVar


class HoldfastError(Exception):
    """Base of all errors that Holdfast raises on purpose."""

    retryable: ClassVar[bool] = False


class ConfigError(HoldfastError):
    """A setting, a field or the environment is missing or wrong."""


class FormatError(HoldfastError):
    """Bytes are not what their format says: refused before anything is used."""


class CorruptionError(FormatError):
    """A digest, an identity or a length does not match. The copy must be quarantined."""


class UnsupportedStateError(HoldfastError):
    """A state dict holds something that cannot be saved; the message names its path."""


class StateDictError(HoldfastError):
    """The state_dict() of a part of the state raised; the message names its path and the error."""


class StateMismatchError(HoldfastError):
    """A restored state does not fit the one that is there (missing key, shape, dtype)."""


class CapacityError(HoldfastError):
    """Not enough room (shared memory, node volume, memory limit); says needed and available bytes."""


class TierError(HoldfastError):
    """A tier could not do what was asked."""


class NotFoundError(TierError):
    """The shard, manifest, layout or bucket is not there."""


class AlreadyExistsError(TierError):
    """put-if-absent found something else under this key."""


class AccessDeniedError(TierError):
    """The store refused the credentials; carries the server's words."""


class UnavailableError(TierError):
    """Refused, reset, timed out, 5xx: trying again may help."""

    retryable = True


class StaleRoundError(HoldfastError):
    """The request carries an older restart round than the receiver's (docs/guarantees.md R17)."""

    def __init__(self, message: str, *, own_round: int, own_version: int = 0) -> None:
        super().__init__(message)
        self.own_round = own_round
        self.own_version = own_version


class RefusedError(HoldfastError):
    """A well-formed request that the receiver must not serve now; `code` is one of the refusal
    codes of transfer.messages."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceError(HoldfastError):
    """An accelerator refused or failed a copy; carries its own words."""


class SaveFailedError(HoldfastError):
    """A save did not reach the level that was waited for."""


class StoppedError(HoldfastError):
    """The gang was asked to stop; raised only where the caller asked to wait."""
