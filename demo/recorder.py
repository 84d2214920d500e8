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
    ended_seconds: float | None = None
    restored_step: int | None = None
    served_by: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase of the recovery -> seconds, as the operator recorded them."""

    @property
    def recovery_seconds(self) -> float | None:
        return None if self.ended_seconds is None else self.ended_seconds - self.began_seconds


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
