"""How many workers a gang has now. Pure."""

from __future__ import annotations

from holdfast_core.api import Gang


def present_workers(job: Gang) -> int:
    """Return the number of workers of the present gang.

    It differs from spec.workers after a user has changed it, until the gang has stopped. Before the first
    round they are equal.
    """
    return len(job.status.members) or job.spec.workers
