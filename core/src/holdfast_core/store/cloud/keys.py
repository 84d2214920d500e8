"""What the store needs of the keys of a cloud. Each cloud has a module with its keys and settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from holdfast_core.contract import StoreConfig


class CloudKeys(Protocol):
    """One consistent set of credentials. Clients of equal ones can take the place of each other."""

    @property
    def advice_on_tokens(self) -> str:
        """What a person checks if the identity gets no token."""
        ...

    def secrets(self) -> tuple[str, ...]:
        """Return the strings that must never appear in a log, a condition or an error."""
        ...

    def open(self, config: StoreConfig, options: dict[str, Any], retries: Any) -> Any:
        """Return obstore's client of the container or bucket.

        Args:
            config: Where it is.
            options: obstore's options of the HTTP client.
            retries: obstore's policy of retries.

        Raises:
            ConfigError: The keys cannot be used.
        """
        ...


class CloudCredentials(Protocol):
    """Source of a store's keys. Safe for use by many threads. Its methods raise ConfigError."""

    def retrieve(self) -> CloudKeys:
        """Return the current keys, possibly from a cache."""
        ...

    def refresh(self) -> CloudKeys:
        """Return the current keys without the cache. The store calls it when a key was refused."""
        ...


@dataclass(frozen=True, slots=True)
class FixedKeys:
    """Keys that do not change while the process runs: those of the environment, or an identity."""

    keys: CloudKeys

    def retrieve(self) -> CloudKeys:
        """See CloudCredentials."""
        return self.keys

    def refresh(self) -> CloudKeys:
        """See CloudCredentials."""
        return self.keys
