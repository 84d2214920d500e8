"""What the demo saw: samples of the run and the acts, for the screen and the picture."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    at_seconds: float
    """Since the story began."""
    phase: str
    round: int
    step: int | None
    loss: float | None
    committed: int | None
    persisted: int | None
    tiers: dict[int, dict[str, int]] = field(default_factory=dict)
    """rank -> tier name -> newest step there."""
    pods: tuple[str, ...] = ()
    """What each pod is doing, in a word or two."""

    @property
    def sign(self) -> tuple[object, ...]:
        """Changes whenever something moves. The number of the round is left out: it also grows while
        a job restarts and restarts."""
        return (self.phase, self.step, self.committed, self.persisted, self.pods)

    def text(self) -> str:
        """One line for a person."""
        levels = (("step", self.step), ("committed", self.committed), ("persisted", self.persisted))
        shown = [f"{name} {'-' if value is None else value}" for name, value in levels]
        line = ", ".join([self.phase, f"round {self.round}", *shown])
        return f"{line}; pods: {', '.join(self.pods)}" if self.pods else line


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the operator recorded of a recovery."""

    restored_step: int
    served_by: str
    """Tiers that the shards came from; "" where that is not known."""
    phases: dict[str, float]
    """Phase -> seconds. They follow each other, so their sum is the total."""
    total_seconds: float


@dataclass(slots=True)
class Act:
    """One failure: what was done, what it cost."""

    title: str
    lost: str
    """What is gone, in words."""
    source: str
    """Where the bytes are expected to come from."""
    needs_persisted: bool = False
    """Takes every local copy: without a step in the store the job would only wait, as it must."""
    began_seconds: float = 0.0
    step_before: int = 0
    recovery: Recovery | None = None

    @property
    def ended_seconds(self) -> float:
        """Where the recovery ends on the story's clock."""
        return self.began_seconds + (0.0 if self.recovery is None else self.recovery.total_seconds)

    def phases(self) -> dict[str, float]:
        """The phases in tenths of a second, rounded so that they still add up to the rounded total."""
        shown: dict[str, float] = {}
        passed = 0.0
        for name, seconds in ({} if self.recovery is None else self.recovery.phases).items():
            tenths = round(round(passed + seconds, 1) - round(passed, 1), 1)
            passed += seconds
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
        """(seconds, step, loss) without repeats."""
        points: list[tuple[float, int, float]] = []
        for sample in self.samples:
            if sample.step is None or sample.loss is None:
                continue
            if points and points[-1][1:] == (sample.step, sample.loss):
                continue
            points.append((sample.at_seconds, sample.step, sample.loss))
        return points
