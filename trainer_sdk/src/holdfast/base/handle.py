"""What `save` returns: where the save stands, and a way to wait for a level."""

from __future__ import annotations

import threading

from holdfast_core.errors import SaveFailedError
from holdfast_core.ids import Level, RestartRound, Step


class SaveTimeoutError(SaveFailedError, TimeoutError):
    """The level was not reached within the time that was waited; it may still be."""


class SaveHandle:
    """One save of one rank. Levels only rise; a failure names the lowest level not reached.

    Thread-safe: waited for by anybody, updated by the connection's thread.
    """

    def __init__(self, step: Step, round_: RestartRound) -> None:
        self.step = step
        self.round = round_
        self._condition = threading.Condition()
        self._level: Level | None = None
        self._failures: dict[Level, str] = {}
        self.overtaken = False
        """It gave way to a newer step: no level above the reached one comes, and nothing failed."""

    @property
    def level(self) -> Level | None:
        """The highest level reached; None before the first."""
        return self._level

    @property
    def failure(self) -> str | None:
        """Why a level was not reached, in words; None while nothing failed."""
        with self._condition:
            return next((self._failures[lv] for lv in Level if lv in self._failures), None)

    @property
    def settled(self) -> bool:
        """Nothing more will happen to the local level: it was reached, or failed."""
        with self._condition:
            return self._reached(Level.LOCAL) or bool(self._why(Level.LOCAL))

    @property
    def durable(self) -> bool:
        """It has reached level local."""
        return self._reached(Level.LOCAL)

    def wait(self, level: Level | str = Level.LOCAL, timeout: float | None = None) -> None:
        """Block until the checkpoint (all ranks' shards of this step) has reached `level`.

        `timeout` in seconds. Raises SaveFailedError when it cannot be reached any more,
        SaveTimeoutError (a TimeoutError too) when the time is over, ValueError for no level.
        """
        wanted = Level(level)
        with self._condition:
            done = self._condition.wait_for(lambda: self._decided(wanted), timeout)
            if not done:
                raise SaveTimeoutError(
                    f"save of step {self.step} in round {self.round}: not {wanted} within "
                    f"{timeout} s; reached so far: {self._level or 'nothing'}"
                )
            if not self._reached(wanted):
                raise SaveFailedError(
                    f"save of step {self.step} in round {self.round} did not become {wanted}: "
                    f"{self._why(wanted)}"
                )

    def reach(self, level: Level) -> None:
        """For the connection: the checkpoint has reached `level`."""
        with self._condition:
            if self._level is None or level.includes(self._level):
                self._level = level
            self._condition.notify_all()

    def fail(self, level: Level, why: str) -> None:
        """For the connection: `level`, and what is above it, will not be reached. One that was reached
        has not failed."""
        with self._condition:
            if self._reached(level):
                return
            self._failures.setdefault(level, why)
            self._condition.notify_all()

    def _reached(self, level: Level) -> bool:
        return self._level is not None and self._level.includes(level)

    def _decided(self, level: Level) -> bool:
        return self._reached(level) or bool(self._why(level))

    def _why(self, level: Level) -> str:
        needed = [lv for lv in Level if level.includes(lv)]
        return next((self._failures[lv] for lv in needed if lv in self._failures), "")
