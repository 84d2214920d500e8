"""How often a job that trains undisturbed is looked at.

Nothing waits for routine news: the progress of the ranks, the goodput, the age of the newest checkpoint. With
few jobs they are seconds old. With a thousand jobs they would take all of the operator's time, so they are as
old as the time in which the operator gets round to each job.
"""

from __future__ import annotations

JOBS_PER_SECOND = 25.0
"""Jobs that are looked at in a second without an urgent reason. A look is an answer to a poll and a pass, and
some write the status. It takes some 5 ms of processor time."""


def routine_seconds(jobs: int) -> float:
    """Return the shortest time between two routine looks at one of so many jobs."""
    return jobs / JOBS_PER_SECOND
