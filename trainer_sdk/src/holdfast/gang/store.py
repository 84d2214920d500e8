"""Client of the gang's TCPStore, by whose keys the ranks reach agreement.

torch's store has no authentication, so that any process that reaches its port may write into it. Ranks
therefore sign their values with the secret of the round. The launcher passes the secret in their
environment, and it is never stored. A value without a valid signature counts as absent. torch is needed
only where there is more than one rank.

A build of torch without libuv, such as Debian's python3-torch, rejects its own default (`use_libuv=True`),
and `init_process_group` with a launcher's store cannot select the other backend. Both backends use the same
protocol and the same server (`open_store`).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import sys
import time
from datetime import timedelta
from typing import Any, Protocol

from holdfast.base.settings import RankSettings
from holdfast_core.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(minutes=30)
"""Ranks of a large job start minutes apart. The launcher, not this time-out, detects a missing rank."""
_POLL_SECONDS = 0.2
_SIGNATURE_BYTES = hashlib.sha256().digest_size

_instances = itertools.count()


class PlainStore(Protocol):
    """The part of torch.distributed.Store that `GangStore` uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        """Wait until the key exists and return its value."""
        ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the key if its value is `expected`, or if it has none and `expected` is empty.

        Returns the value that the key has then.
        """
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the counter of this name, and return its new value."""
        ...


class GangStore:
    """Keys and values of the ranks of this round. Values of other writers count as absent.

    Args:
        plain: Store of the signed values.
        context: Round and Checkpointer that the keys belong to. A value signed for another context is
            not valid here.
        secret: Secret of the round. None: the launcher provides none (torchrun), and every value is
            accepted.
    """

    def __init__(self, plain: PlainStore, context: str = "", secret: bytes | None = None) -> None:
        self._plain = plain
        self._context = context
        self._secret = secret
        self._has_warned = False

    def publish(self, key: str, value: str) -> None:
        """Write a value. All ranks can read it when this returns."""
        self._plain.set(key, self._signed(key, value))
        self._plain.get(key)

    def read(self, key: str) -> str | None:
        """Return the value that a rank of this round wrote, or None. This does not wait for it."""
        return self._verified(key, self._plain.get(key)) if self._plain.check([key]) else None

    def has(self, key: str) -> bool:
        """Return whether any process has written the key, with or without a valid signature."""
        return self._plain.check([key])

    def decide(self, key: str, value: str) -> str | None:
        """Write a value unless the key has one. All ranks can read it when this returns.

        Returns the value that the key has, which is the same for all ranks. None: it is not signed.
        """
        return self._verified(key, self._plain.compare_set(key, "", self._signed(key, value)))

    def count(self, key: str) -> int:
        """Add 1 to a counter and return it. A counter is not signed: any process may raise it."""
        return self._plain.add(key, 1)

    def wait(self, key: str) -> str:
        """Wait until a rank of this round has written the key, and return its value.

        Raises UnavailableError if only values without a valid signature appear within 30 minutes, and
        torch's exception if the key does not appear within torch's time-out.
        """
        deadline = time.monotonic() + _TIMEOUT.total_seconds()
        while True:
            value = self._verified(key, self._plain.get(key))
            if value is not None:
                return value
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"the gang's store has no value of this round under {key!r} after {_TIMEOUT}"
                )
            time.sleep(_POLL_SECONDS)

    def _signed(self, key: str, value: str) -> str:
        return value if self._secret is None else f"{self._signature(key, value)}{value}"

    def _verified(self, key: str, raw: bytes) -> str | None:
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = ""
        if self._secret is None:
            return text
        length = 2 * _SIGNATURE_BYTES
        signature, value = text[:length], text[length:]
        if hmac.compare_digest(signature.encode(), self._signature(key, value).encode()):
            return value
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ignored the value under %r in the gang's store: it is not signed with the secret of "
                "this round; another process on the network writes into the store",
                key,
            )
        return None

    def _signature(self, key: str, value: str) -> str:
        parts = (self._context.encode(), key.encode(), value.encode())
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._secret or b"", message, hashlib.sha256).hexdigest()


def connect_store(settings: RankSettings) -> GangStore | None:
    """Connect to the gang's store. Return None for a gang of one rank.

    Keys have a prefix for this Checkpointer, and for this round where the store may outlive a round. Raises
    ConfigError when there is no store.
    """
    if settings.world_size == 1:
        return None
    from torch import distributed as untyped

    distributed: Any = untyped  # torch's stubs do not export its stores

    prefix = f"holdfast/{next(_instances)}"
    if settings.agent_store:
        prefix = f"{prefix}/{settings.round or 0}"
        store = open_store(
            settings.master_address,
            settings.master_port,
            is_master=False,
            timeout=_TIMEOUT,
            use_libuv=False,
        )
    elif distributed.is_initialized():
        # The process group has a store of its own in each round. Under torchrun the round of its ranks may
        # differ by node: each torchrun counts the restarts of its own ranks.
        store = distributed.distributed_c10d._get_default_store()
    else:
        raise ConfigError(
            f"{settings.world_size} ranks, but no store through which they can agree: start them "
            "with `holdfast run` or torchrun, or call torch.distributed.init_process_group before "
            "the Checkpointer"
        )
    secret = None if settings.store_secret is None else settings.store_secret.encode()
    return GangStore(distributed.PrefixStore(prefix, store), prefix, secret)


def open_store(*arguments: Any, **options: Any) -> Any:
    """Open a TCPStore, with torch's default backend first. Raises what torch raises."""
    from torch import distributed as untyped

    distributed: Any = untyped  # torch's stubs do not export its stores
    try:
        return distributed.TCPStore(*arguments, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
    return distributed.TCPStore(*arguments, **{**options, "use_libuv": False})


def tolerate_missing_libuv() -> None:
    """Make `init_process_group("gloo")` (env://) of this process open its store with `open_store`.

    A build with libuv behaves as before. This does nothing in a process that has not imported
    torch.distributed.
    """
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = open_store
