"""A FakeSidecar whose messages a test waits for, and which pushes rounds to a launcher."""

from __future__ import annotations

import threading
from typing import Any

from holdfast.testing import FakeSidecar
from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import (
    End,
    Finish,
    Fulfilled,
    HostStore,
    LocalRole,
    Refusal,
    Refused,
    RestorePoint,
    Run,
    TakeStacks,
)


class WatchedSidecar(FakeSidecar):
    """A fake sidecar of a test. Its arguments are those of FakeSidecar."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._condition = threading.Condition()
        self.released = True
        """Whether Finish is answered. Otherwise it is refused, as by a sidecar that is sealed."""

    def host_store(self) -> None:
        """Ask the launcher for a TCPStore process. Its StoreAddress arrives in `received`."""
        self._push(LocalRole.LAUNCHER, HostStore(self._round()))

    def run(self, port: int, address: str = "127.0.0.1", secret: str = "") -> None:
        """Let the launcher fork the ranks of this round.

        Args:
            port: Port of the round's store.
            address: Address of the round's store.
            secret: Secret of the round's store, from StoreAddress.
        """
        point = RestorePoint() if self.service is None else self.service.restore_point
        self._push(
            LocalRole.LAUNCHER,
            Run(
                self._round(),
                point,
                self._world_size,
                Rank(0),
                self._world_size,
                Worker(0),
                address,
                port,
                secret,
                self._policy,
            ),
        )

    def take_stacks(self, token: str) -> None:
        """Request the stacks of all ranks from the launcher, which sends `Stacks`."""
        self._push(LocalRole.LAUNCHER, TakeStacks(self._round(), token))

    def end(self, round_: int) -> None:
        self._push(LocalRole.LAUNCHER, End(RestartRound(round_)))

    def messages(self, kind: type[Any]) -> list[Any]:
        """Return the received messages of one type."""
        with self._condition:
            return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, kind: type[Any], count: int = 1, timeout_seconds: float = 120.0) -> Any:
        """Wait for the count-th message of a type and return it. Raises AssertionError at the time-out."""
        with self._condition:
            came = self._condition.wait_for(
                lambda: sum(isinstance(m, kind) for m in self.received) >= count, timeout_seconds
            )
            if not came:
                names = [type(message).__name__ for message in self.received]
                raise AssertionError(
                    f"no {kind.__name__} number {count} was received; received: {names[-20:]}"
                )
            return [m for m in self.received if isinstance(m, kind)][count - 1]

    def _note(self, message: Any) -> None:
        with self._condition:
            super()._note(message)
            self._condition.notify_all()

    def _intercept(self, message: Any) -> Any:
        if isinstance(message, Finish):
            if self.released:
                return Fulfilled()
            return Refused(Refusal.SEALED, "the sidecar waits for its ROUND", self._round())
        return super()._intercept(message)
