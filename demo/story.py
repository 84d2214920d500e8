"""The story, told once for both stages: four failures, each recovered, the same bits in the end.

A stage knows how to start the job, look at it and break it; the story knows when, and what to show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from demo.picture import draw
from demo.recorder import Act, Recorder, Sample
from demo.screen import Screen


class Stage(Protocol):
    """Where the story plays: the kind cluster, or processes on this machine."""

    total_steps: int

    def reference_digests(self, say: Callable[[str], None]) -> dict[int, str]:
        """Rank -> digest of an uninterrupted run (made once, then remembered)."""
        ...

    def start(self) -> None: ...

    def sample(self) -> Sample:
        """What is known now; `at_seconds` is set by the story."""
        ...

    def acts(self) -> list[tuple[Act, Callable[[], None]]]:
        """The failures in order, each with the function that causes it."""
        ...

    def recovery(self) -> tuple[int | None, str, dict[str, float]]:
        """Of the last recovery: restored step, the tiers that served it, seconds of each phase."""
        ...

    def is_complete(self) -> bool:
        """Raises with everything a person needs if the job failed."""
        ...

    def final_digests(self) -> dict[int, str]: ...

    def explain(self) -> str:
        """State for a person when something took too long."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    recovery_timeout_seconds: float = 120.0
    finish_timeout_seconds: float = 300.0


class StoryFailed(Exception):
    """The story did not go on: what was waited for, and the state."""


class Teller:
    def __init__(self, stage: Stage, title: str, picture: Path, timing: Timing) -> None:
        self.stage = stage
        self.settle_steps = stage.total_steps // 6
        """Steps to train after a recovery before the next failure: four of them over the run."""
        self.title = title
        self.picture = picture
        self.timing = timing
        self.recorder = Recorder(stage.total_steps)
        self.began = time.monotonic()

    def tell(self) -> bool:
        """Run the whole story. True if the bits are those of the uninterrupted run."""
        with Screen(self.recorder, self.title) as screen:
            reference = self.stage.reference_digests(screen.note)
            self.began = time.monotonic()
            screen.note("starting the job")
            self.stage.start()
            self._until(screen, "the first committed step", self._first_commit, 240)
            for act, cause in self.stage.acts():
                self._play(screen, act, cause)
            screen.note("no more failures: training to the end")
            self._until(
                screen, "completion", self.stage.is_complete, self.timing.finish_timeout_seconds
            )
            final = self.stage.final_digests()
            elapsed = time.monotonic() - self.began
        same = bool(reference) and final == reference
        screen.summary()
        verdict = f"final weights, optimizer, RNG and data position of {len(final)} ranks: " + (
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
        screen.console.print(
            f"{verdict}\n{elapsed:.0f} s; picture: {self.picture}", highlight=False
        )
        return same

    def _first_commit(self) -> bool:
        latest = self.recorder.latest
        return latest is not None and (latest.committed or 0) > 0 and (latest.step or 0) > 0

    def _play(self, screen: Screen, act: Act, cause: Callable[[], None]) -> None:
        if act.needs_persisted:
            self._until(
                screen,
                "a step in the object store",
                lambda: (s := self.recorder.latest) is not None and s.persisted is not None,
                self.timing.recovery_timeout_seconds,
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
            f"training to go on after: {act.title}",
            lambda: self._trains_in_later_round(round_before),
            self.timing.recovery_timeout_seconds,
        )
        act.ended_seconds = time.monotonic() - self.began
        act.restored_step, act.served_by, act.phases = self.stage.recovery()
        phases = ", ".join(f"{k} {v:.1f} s" for k, v in act.phases.items())
        screen.note(
            f"✓ back at step {act.restored_step} from {act.served_by or act.source} "
            f"in {act.recovery_seconds:.1f} s ({phases})"
        )
        floor = (act.restored_step or 0) + self.settle_steps
        self._until(
            screen,
            f"step {floor}",
            lambda: (s := self.recorder.latest) is not None and (s.step or 0) >= floor,
            self.timing.recovery_timeout_seconds,
        )

    def _trains_in_later_round(self, round_before: int) -> bool:
        latest = self.recorder.latest
        return latest is not None and latest.round > round_before and latest.phase == "Running"

    def _until(
        self, screen: Screen, what: str, done: Callable[[], bool], timeout_seconds: float
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            sample = replace(self.stage.sample(), at_seconds=time.monotonic() - self.began)
            self.recorder.samples.append(sample)
            screen.refresh()
            if done():
                return
            if time.monotonic() > deadline:
                raise StoryFailed(
                    f"waited {timeout_seconds:.0f} s for {what}\n{self.stage.explain()}"
                )
            time.sleep(0.25)
