"""What the methods of a Checkpointer return: the progress of a save, and a checkpoint before it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import SaveFailedError
from holdfast_core.ids import Level, RestartRound, Step


class SaveTimeoutError(SaveFailedError, TimeoutError):
    """The save did not reach the level within the time-out. It may still reach it later."""


class SaveHandle:
    """Progress of one save of one rank.

    The level of a save only rises. All methods are thread-safe.
    """

    def __init__(
        self,
        step: Step,
        round_: RestartRound,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the handle of a save that has reached no level.

        Args:
            step: The step.
            round_: The round of the save.
            waiting: Returns a context that is open while the main thread waits for a level.
        """
        self.step = step
        self.round = round_
        self._waiting = waiting
        self._condition = threading.Condition()
        self._level: Level | None = None
        self._failures: dict[Level, str] = {}
        self._unreported: dict[Level, str] = {}
        self.overtaken = False
        """Whether a newer save replaced this one, or it was dropped before it was handed over. It reaches no
        further level, but does not count as failed."""
        self.lost_its_store = False
        """Whether another run took the store before this save was uploaded. It counts as failed."""

    @property
    def level(self) -> Level | None:
        """The highest level reached, or None before the first."""
        return self._level

    @property
    def failure(self) -> str | None:
        """Why the lowest failed level was not reached, or None while no level failed.

        A level that does not exist here, such as "persisted" without an object store, has not failed. Nor has
        a save that a newer one replaced.
        """
        with self._condition:
            return next((self._failures[lv] for lv in Level if lv in self._failures), None)

    @property
    def settled(self) -> bool:
        """Whether the local level was reached or has failed."""
        with self._condition:
            return self._reached(Level.LOCAL) or bool(self._why(Level.LOCAL))

    @property
    def durable(self) -> bool:
        """Whether the save has reached the local level."""
        return self._reached(Level.LOCAL)

    def wait(self, level: Level | str = Level.LOCAL, timeout: float | None = None) -> None:
        """Block until the checkpoint (all ranks' shards of this step) has reached `level`.

        level: the level or its name, such as "local".
        timeout: seconds to wait at most; None waits without a limit.

        Raises SaveFailedError when the level cannot be reached (any more), for example "persisted" without an
        object store, SaveTimeoutError (which is also a
        TimeoutError) at the time-out, and ValueError for an unknown level.
        """
        if level == "memory":
            raise ValueError("there is no level 'memory' any more: wait for 'local'")
        wanted = Level(level)
        is_main = threading.current_thread() is threading.main_thread()
        with self._waiting() if is_main else nullcontext(), self._condition:
            done = self._condition.wait_for(lambda: self._decided(wanted), timeout)
            if not done:
                raise SaveTimeoutError(
                    f"save of step {self.step} in round {self.round} did not become {wanted} within "
                    f"{timeout} s; level reached so far: {self._level or 'none'}"
                )
            if not self._reached(wanted):
                raise SaveFailedError(
                    f"save of step {self.step} in round {self.round} did not become {wanted}: "
                    f"{self._why(wanted)}"
                )

    def reach(self, level: Level) -> None:
        """For the connection: record that the checkpoint has reached `level`."""
        with self._condition:
            if self._level is None or level.includes(self._level):
                self._level = level
            self._condition.notify_all()

    def fail(self, level: Level, why: str) -> None:
        """For the connection: record that `level` and the levels above it will not be reached.

        This has no effect if `level` was already reached.
        """
        with self._condition:
            if self._reached(level):
                return
            self._failures.setdefault(level, why)
            self._condition.notify_all()

    def report_no_more(self, level: Level, why: str) -> None:
        """For the connection: record that no report of `level` and the levels above it arrives.

        Waits for these levels end with SaveFailedError. This is no failure of the save: the levels do not
        exist here, a newer save has replaced it, or it may still reach them. A report that arrives all the
        same counts. This has no effect if `level` was already reached.
        """
        with self._condition:
            if self._reached(level):
                return
            self._unreported.setdefault(level, why)
            self._condition.notify_all()

    def adopt(self, other: SaveHandle) -> None:
        """For the connection: take over the levels of another save of the same step and the same bytes."""
        if other is self:
            return
        with other._condition:
            level = other._level
            failures, unreported = dict(other._failures), dict(other._unreported)
        self.overtaken |= other.overtaken
        self.lost_its_store |= other.lost_its_store
        if level is not None:
            self.reach(level)
        for failed, why in failures.items():
            self.fail(failed, why)
        for silent, why in unreported.items():
            self.report_no_more(silent, why)

    def _reached(self, level: Level) -> bool:
        return self._level is not None and self._level.includes(level)

    def _decided(self, level: Level) -> bool:
        return self._reached(level) or bool(self._why(level))

    def _why(self, level: Level) -> str:
        needed = [lv for lv in Level if level.includes(lv)]
        reasons = {**self._unreported, **self._failures}
        return next((reasons[lv] for lv in needed if lv in reasons), "")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and size of a saved tensor or array.

    dtype: name of the type in torch and numpy, such as "float32".
    shape: shape of the whole tensor, of which each rank may have saved a part.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint that `Checkpointer.restore` loads, without the bytes of its tensors.

    step: number of optimizer steps.
    tensors: the tensors that belong to all ranks together, by name, such as "model.weight".
    objects: the state that rank 0 saved, with a TensorInfo in the place of each tensor and array, the value
      in the place of an enum member, and a plain tuple in the place of a named tuple.
    """

    step: int
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, Any]
