"""A FakeSidecar whose messages a test waits for, and which pushes rounds to a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support.hang import HANG_SECONDS

from holdfast.testing import FakeSidecar
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import (
    LauncherPlan,
    LauncherState,
    RestorePoint,
    Run,
    StoreAddress,
)


class WatchedSidecar(FakeSidecar):
    """A fake sidecar of a test. Its arguments are those of FakeSidecar."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._condition = threading.Condition()
        self.released = True
        """Whether a launcher that has finished is released."""

    def host_store(self) -> None:
        """Let the launcher run a TCPStore process. `launcher_state` has its address."""
        self._push_plan(LauncherPlan(self._round(), hosts_store=True))

    def run(self, port: int, address: str = "127.0.0.1", secret: str = "") -> None:
        """Let the launcher fork the ranks of this round.

        Args:
            port: Port of the round's store.
            address: Address of the round's store.
            secret: Secret of the round's store, from StoreAddress.
        """
        point = RestorePoint() if self.service is None else self.service.restore_point
        store = StoreAddress(self._round(), port, secret, address)
        run = Run(self._round(), point, self._world_size, Worker(0), store, self._policy)
        self._push_plan(LauncherPlan(self._round(), run=run))

    def take_stacks(self, token: str) -> None:
        """Request the stacks of all ranks from the launcher. `launcher_state` has them."""
        self._push_plan(LauncherPlan(self._round(), stacks_token=token))

    def release(self) -> None:
        """Let the launcher exit when its ranks have returned."""
        self.released = True
        self._push_plan(LauncherPlan(self._round(), released=True))

    def end(self, round_: int) -> None:
        """Let the launcher end the ranks of older rounds."""
        self._push_plan(LauncherPlan(RestartRound(round_)))

    def launcher_state(
        self,
        condition: Callable[[LauncherState], object],
        what: str,
        timeout_seconds: float = HANG_SECONDS,
    ) -> LauncherState:
        """Wait for a state of the launcher that meets a condition, and return the newest one.

        Raises AssertionError at the time-out.
        """

        def found() -> list[LauncherState]:
            states = (m for m in self.received if isinstance(m, LauncherState))
            return [state for state in states if condition(state)]

        with self._condition:
            assert self._condition.wait_for(found, timeout_seconds), what
            return found()[-1]

    def _push_plan(self, plan: LauncherPlan) -> None:
        for connection in self._connections:
            if connection.hello is not None and connection.hello.rank is None:
                connection.push(plan)

    def messages(self, kind: type[Any]) -> list[Any]:
        """Return the received messages of one type."""
        with self._condition:
            return [message for message in self.received if isinstance(message, kind)]

    def wait_for(
        self, kind: type[Any], count: int = 1, timeout_seconds: float = HANG_SECONDS
    ) -> Any:
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
        if self.released and isinstance(message, LauncherState) and message.finished:
            self.release()
