"""The figures of `make bench-gpu`, from the measured loops."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.report import Figure, at_most, for_orientation

_EXTRA_TARGET = 0.2
_DCP_TARGET = 0.5


@dataclass(frozen=True, slots=True)
class Pair:
    """Two loops of equal length, in seconds."""

    without: float
    """The loop without a save."""
    with_save: float
    blocked: float
    """The host's time in the call that saves."""


@dataclass(slots=True)
class Costs:
    """What the saves of one library cost, as multiples of a blocking copy of the state measured with each."""

    extra: list[float] = field(default_factory=list)
    """How much longer a loop with a save took than one without."""
    blocked: list[float] = field(default_factory=list)
    """The host's time in the call that saves."""

    extra_behind: list[float] = field(default_factory=list)
    """The same, for saves that are called while the GPU still has a step to do."""

    def add(self, pair: Pair, copy: float) -> None:
        """Add a pair of loops whose saves find the GPU idle, and the time of a copy in seconds."""
        self.extra.append((pair.with_save - pair.without) / copy)
        self.blocked.append(pair.blocked / copy)

    def add_behind(self, pair: Pair, copy: float) -> None:
        """Add a pair of loops whose saves find the GPU at work, and the time of a copy in seconds."""
        self.extra_behind.append((pair.with_save - pair.without) / copy)


def figures_of(ours: Costs, dcp: Costs) -> list[Figure]:
    copies = "of a blocking copy"
    return [
        at_most(
            "G1 extra",
            ours.extra,
            copies,
            _EXTRA_TARGET,
            what="extra time of the steps after a save that finds the GPU idle",
        ),
        for_orientation(
            "G2 overlap",
            [1 - value for value in ours.extra],
            "of the copy",
            what="share of the copy that runs beside training",
        ),
        for_orientation("G3 blocked", ours.blocked, copies, what="the host's time in save"),
        at_most(
            "G4 blocked",
            [a / b for a, b in zip(ours.blocked, dcp.blocked, strict=True)],
            "of torch DCP's",
            _DCP_TARGET,
            what="the host's time in save, compared with async_save into page-locked memory",
        ),
        for_orientation("G5 dcp extra", dcp.extra, copies, what="G1 of torch DCP"),
        for_orientation("G6 dcp blocked", dcp.blocked, copies, what="G3 of torch DCP"),
        for_orientation(
            "G7 extra behind",
            ours.extra_behind,
            copies,
            what="extra time of the steps after a save that finds the GPU at work",
        ),
        for_orientation("G8 dcp behind", dcp.extra_behind, copies, what="G7 of torch DCP"),
    ]
