"""The story, which is the same on both stages: four failures, each recovered, and a bit-identical result.

A stage implements how to start, inspect and break the job. The story decides when to do so, and what to
show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from demo.picture import draw
from demo.recorder import Act, Recorder, Recovery, Sample
from demo.screen import Screen, phases_lines
from demo.waits import DemoFailed, wait_while_moving

T = TypeVar("T")


class Stage(Protocol):
    """Where the story runs: the kind cluster, or processes on this machine."""

    total_steps: int
    transient: tuple[type[Exception], ...]
    """Exceptions that a query of the stage may raise while its target is busy. The query is then
    retried."""

    def reference_digests(self, say: Callable[[str], None]) -> dict[int, str]:
        """Return the digest of each rank after an uninterrupted run. Raises DemoFailed."""
        ...

    def start(self) -> None: ...

    def sample(self) -> Sample:
        """Return the current state. The story sets `at_seconds`."""
        ...

    def acts(self) -> list[tuple[Act, Callable[[], None]]]:
        """Return the failures in order, each with the function that causes it."""
        ...

    def recovery(self) -> Recovery | None:
        """Return the record of the current round's recovery, or None until it is complete."""
        ...

    def is_complete(self) -> bool:
        """Return whether the job is complete. Raises DemoFailed if it failed."""
        ...

    def final_digests(self) -> dict[int, str]: ...

    def failed(self, happened: str) -> DemoFailed:
        """Return the failure to show to the user. Write all details to a log that it names."""
        ...


class Teller:
    def __init__(self, stage: Stage, title: str, picture: Path) -> None:
        self.stage = stage
        self.settle_steps = stage.total_steps // 6
        """Steps to train after a recovery before the next failure: a sixth of the run, which leaves room
        for four failures."""
        self.title = title
        self.picture = picture
        self.recorder = Recorder(stage.total_steps)
        self.began = time.monotonic()

    def tell(self) -> bool:
        """Run the whole story. Returns whether the result is bit-identical to an uninterrupted run."""
        with Screen(self.recorder, self.title) as screen:
            reference = self.stage.reference_digests(screen.note)
            self.began = time.monotonic()
            screen.note("starting the job")
            self.stage.start()
            self._until(screen, "the first step with copies on other nodes", self._first_copies)
            for act, cause in self.stage.acts():
                self._play(screen, act, cause)
            screen.note("no more failures: training to the end")
            self._until(screen, "completion", self.stage.is_complete)
            final = self.stage.final_digests()
            elapsed = time.monotonic() - self.began
        same = bool(reference) and final == reference
        screen.summary()
        verdict = f"weights, optimizer, RNG and data of {len(final)} ranks: " + (
            "bit-identical to an uninterrupted run"
            if same
            else "DIFFERENT from an uninterrupted run"
        )
        for rank in sorted(reference):
            mark = "=" if final.get(rank) == reference[rank] else "!"
            screen.console.print(
                f"  rank {rank}: {final.get(rank, 'none')[:24]} {mark}= {reference[rank][:24]}",
                highlight=False,
            )
        draw(self.recorder, self.picture, title=self.title, verdict=verdict)
        for line in (*verdict.split(": "), f"{elapsed:.0f} s; picture: {self.picture}"):
            screen.console.print(line, highlight=False)
        return same

    def _first_copies(self) -> bool:
        """A pod that is deleted before takes the only copy of its shard of the only step with it."""
        latest = self.recorder.latest
        return latest is not None and (latest.replicated or 0) > 0

    def _play(self, screen: Screen, act: Act, cause: Callable[[], None]) -> None:
        if act.needs_persisted:
            self._until(
                screen,
                "a step in the object store",
                lambda: (s := self.recorder.latest) is not None and s.persisted is not None,
            )
        before = self.stage.sample()
        act.began_seconds = time.monotonic() - self.began
        act.step_before = before.step or 0
        round_before = before.round
        self.recorder.acts.append(act)
        screen.note(f"✗ {act.title} at step {act.step_before}: {act.lost}")
        cause()
        self._until(
            screen,
            f"training to continue after: {act.title}",
            lambda: self._trains_in_later_round(round_before),
        )
        recovery = self._until(
            screen, f"the record of the recovery from: {act.title}", self.stage.recovery
        )
        act.recovery = recovery
        screen.note(
            f"✓ back at step {recovery.restored_step} from {recovery.served_by or act.source} "
            f"in {recovery.total_seconds:.1f} s"
        )
        for line in phases_lines(act):
            screen.note(f"    {line}")
        floor = recovery.restored_step + self.settle_steps
        self._until(
            screen,
            f"step {floor}",
            lambda: (s := self.recorder.latest) is not None and (s.step or 0) >= floor,
        )

    def _trains_in_later_round(self, round_before: int) -> bool:
        latest = self.recorder.latest
        return latest is not None and latest.round > round_before and latest.phase == "Running"

    def _until(self, screen: Screen, what: str, done: Callable[[], T | None]) -> T:
        """Poll and update the screen until `done` returns a true value, and return it.

        Each poll records a sample for the plot.
        """

        def look() -> T | None:
            try:
                sample = replace(self.stage.sample(), at_seconds=time.monotonic() - self.began)
                self.recorder.samples.append(sample)
                screen.refresh()
                return done()
            except self.stage.transient:
                return None

        def sign() -> object:
            latest = self.recorder.latest
            return None if latest is None else latest.sign

        return wait_while_moving(what, look, sign, self.stage.failed)
