"""The figures of `make bench-gpu`, from the measured loops."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.report import Figure, at_most, for_orientation

_EXTRA_TARGET = 0.2
_DCP_TARGET = 0.5


@dataclass(slots=True)
class Costs:
    """What the saves of one library cost, as multiples of a blocking copy of the state measured with each."""

    extra: list[float] = field(default_factory=list)
    """How much longer a loop with a save took than one without."""
    blocked: list[float] = field(default_factory=list)
    """The host's time in the call that saves."""

    def add(self, without: float, with_save: float, blocked: float, copy: float) -> None:
        """Add one pair of loops, all in seconds."""
        self.extra.append((with_save - without) / copy)
        self.blocked.append(blocked / copy)


def figures_of(ours: Costs, dcp: Costs) -> list[Figure]:
    copies = "of a blocking copy"
    return [
        at_most(
            "G1 extra",
            ours.extra,
            copies,
            _EXTRA_TARGET,
            what="extra time of the steps after a save",
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
    ]
