"""Recorded samples and acts of the demo, for the screen and the plot."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    at_seconds: float
    """Seconds since the story began."""
    phase: str
    round: int
    step: int | None
    loss: float | None
    committed: int | None
    persisted: int | None
    tiers: dict[int, dict[str, int]] = field(default_factory=dict)
    """For each rank, the newest step in each tier, by tier name."""
    replicated: int | None = None
    """Newest step with copies on other nodes."""
    pods: tuple[str, ...] = ()
    """State of each pod in a word or two."""

    @property
    def sign(self) -> tuple[object, ...]:
        """Value that changes with every progress of the run.

        The round is left out, because it also grows while a job restarts again and again.
        """
        return (self.phase, self.step, self.committed, self.persisted, self.pods)

    def words(self) -> str:
        """Return the sample as one line for the user."""
        levels = (("step", self.step), ("committed", self.committed), ("persisted", self.persisted))
        shown = [f"{name} {'-' if value is None else value}" for name, value in levels]
        line = ", ".join([self.phase, f"round {self.round}", *shown])
        return f"{line}; pods: {', '.join(self.pods)}" if self.pods else line


@dataclass(frozen=True, slots=True)
class Recovery:
    """The operator's record of a recovery."""

    restored_step: int
    served_by: str
    """Tiers from which the shards came; empty if they are not recorded."""
    phases: dict[str, float]
    """Seconds by phase. The phases follow each other, so their sum is the total."""
    total_seconds: float
    lost_steps: int | None = None
    """Steps that were trained and are repeated. None if they are not known."""


@dataclass(slots=True)
class Act:
    """One failure: what was lost, and its recovery."""

    title: str
    lost: str
    """Description of what was lost."""
    source: str
    """Tier from which the bytes are expected to come."""
    needs_persisted: bool = False
    """Whether the act needs a persisted step, because it removes every local copy. Without one the job
    would wait for ever, by design."""
    began_seconds: float = 0.0
    step_before: int = 0
    recovery: Recovery | None = None

    @property
    def ended_seconds(self) -> float:
        """Seconds from the beginning of the story to the end of the recovery."""
        return self.began_seconds + (0.0 if self.recovery is None else self.recovery.total_seconds)

    def phases(self) -> dict[str, float]:
        """Return the seconds of the phases, rounded to tenths so that they still add up to the rounded
        total.
        """
        shown: dict[str, float] = {}
        passed = 0.0
        for name, seconds in ({} if self.recovery is None else self.recovery.phases).items():
            # The operator rounds phases and total to milliseconds. A sum that is not rounded as the total is
            # could become another tenth.
            after = round(passed + seconds, 3)
            tenths = round(round(after, 1) - round(passed, 1), 1)
            passed = after
            if tenths:
                shown[name] = tenths
        return shown


@dataclass(slots=True)
class Recorder:
    total_steps: int
    samples: list[Sample] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def latest(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def losses(self) -> list[tuple[float, int, float]]:
        """Return (seconds, step, loss) of each sample that has them, without consecutive repeats."""
        points: list[tuple[float, int, float]] = []
        for sample in self.samples:
            if sample.step is None or sample.loss is None:
                continue
            if points and points[-1][1:] == (sample.step, sample.loss):
                continue
            points.append((sample.at_seconds, sample.step, sample.loss))
        return points
