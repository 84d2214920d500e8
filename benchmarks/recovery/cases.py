"""What is measured, case by case. Each repetition is one `Entry`, and leaves the cluster as it was."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import testbed.faults as faults
from testbed.driver.jobs import Job, Training
from testbed.driver.jobset import JOBSET
from testbed.driver.kube import Kube
from testbed.driver.oracle import compare_digests

from benchmarks.recovery import jobs
from benchmarks.recovery.journal import Entry
from benchmarks.recovery.peers.jobset import JobSetOfDcp
from benchmarks.recovery.peers.peer import Measured, Peer
from benchmarks.recovery.peers.plain_job import PlainJob

EXACT = Training(workers=3, steps=150, sleep_per_step=0.1, layers=1, width=32)
"""Training of B4. Three workers: a sum of two terms does not depend on their order."""
LONG = Training(steps=1_000_000, sleep_per_step=0.15)
"""Training of B1 to B3 and B6. With a pause of 0.05 s in each step, a gang saved 1 GiB almost every second.
The saves, their copies and the uploads to a MinIO on the same two cores left little for a recovery."""
SUBSETS = [c for k in range(1, 6) for c in combinations(range(5), k)]
"""B6: every loss of one to five of five workers."""
COPIES = 2
"""Copies of each shard on other nodes in B6."""


@dataclass(frozen=True, slots=True)
class Options:
    """Size of what is measured."""

    repetitions: int
    state_mib: int
    """State of one rank besides the small model."""

    @property
    def long(self) -> Training:
        return replace(LONG, workers=4, state_mib=self.state_mib)


Measure = Callable[[int], Entry]
Case = tuple[str, int, Measure]
"""Name, number of repetitions, and what measures one of them."""


def groups(kube: Kube, options: Options) -> Iterator[list[Case]]:
    """Yield the cases that share one job. The job starts with the first repetition that is missing."""
    yield _times(kube, options)
    yield _adopted(kube, options)
    yield [("B4", options.repetitions, _Exact(kube))]
    yield [("B6", len(SUBSETS), _Subsets(kube))]
    yield _of_peer(PlainJob(kube, options.state_mib), options)
    if JOBSET.is_served(kube.api):
        yield _of_peer(JobSetOfDcp(kube, options.state_mib), options)


def _of_peer(peer: Peer, options: Options) -> list[Case]:
    """B1 and B2 in what people have today."""
    return [
        (name, options.repetitions, _OfPeer(name, measure))
        for name, measure in (
            (f"{peer.NAME} B1", peer.killed_rank),
            (f"{peer.NAME} B2", peer.deleted_pod),
        )
    ]


def _entry(case: str, repetition: int, seconds: float | None, details: dict[str, object]) -> Entry:
    rounded = None if seconds is None else round(seconds, 3)
    return Entry(case, repetition, rounded, round(os.getloadavg()[0], 1), details)


def _times(kube: Kube, options: Options) -> list[Case]:
    """B1 to B3: one fault at a time in one long training."""
    running = _Running(lambda: jobs.start(kube, "recovery", options.long))

    def measured(case: str, cause: Callable[[int], jobs.Cause], limit_seconds: float) -> Case:
        return running.measured(case, options, cause, limit_seconds)

    def apart(worker: int) -> jobs.Cause:
        three = tuple((worker + n) % options.long.workers for n in range(3))
        return jobs.deleted_pods(three, seconds_apart=0.5)

    return [
        measured("B1", jobs.killed_rank, 120),
        measured("B1-oom", jobs.out_of_memory, 180),
        measured("B2", lambda worker: jobs.deleted_pods((worker,)), 180),
        measured("B2-apart", apart, 240),
        measured("B3", jobs.killed_node, 240),
    ]


def _adopted(kube: Kube, options: Options) -> list[Case]:
    """B1 and B2 in a Job of batch/v1 whose pods are adopted, to compare with a TrainingJob's."""
    running = _Running(lambda: jobs.start_adopted(kube, "adopted", options.long))
    return [
        running.measured("adopted B1", options, jobs.killed_rank, 120),
        running.measured("adopted B2", options, lambda w: jobs.deleted_pods((w,)), 240),
    ]


class _Running:
    """A long training, which the first repetition starts."""

    def __init__(self, start: Callable[[], Job]) -> None:
        self._start = start
        self._job: Job | None = None

    def measured(
        self,
        case: str,
        options: Options,
        cause: Callable[[int], jobs.Cause],
        limit_seconds: float,
    ) -> Case:
        """Return a case whose repetitions cause the fault in one worker after the other."""

        def measure(repetition: int) -> Entry:
            if self._job is None:
                self._job = self._start()
                self._job.wait_step(12)
            worker = repetition % options.long.workers
            try:
                found = jobs.recovery(self._job, cause(worker), limit_seconds)
            finally:
                faults.heal_nodes()
            return _entry(case, repetition, *found)

        return case, options.repetitions, measure


class _Exact:
    """B4: a whole training under faults that the repetition's number decides, compared bit by bit."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._calm: dict[int, str] = {}

    def __call__(self, repetition: int) -> Entry:
        if not self._calm:
            calm = replace(EXACT, sleep_per_step=0.0)
            job = jobs.start(self._kube, "exact-calm", calm)
            job.wait_complete()
            self._calm = job.final_digests()
            job.delete()
        chance = random.Random(repetition)
        schedule = chance.sample(sorted(_FAULTS), 2)
        job = jobs.start(self._kube, "exact", EXACT)
        try:
            for number, name in enumerate(schedule):
                job.wait_step(30 + 50 * number + chance.randrange(10))
                before = job.round
                _FAULTS[name](chance.randrange(EXACT.workers))(job)
                job.wait_round(before + 1, 240)
            job.wait_complete()
            problems = compare_digests(self._calm, job.final_digests())
        finally:
            faults.heal_nodes()
        details = {"schedule": schedule, "identical": not problems, "rounds": job.round}
        job.delete()
        return _entry("B4", repetition, None, details)


_FAULTS: dict[str, Callable[[int], jobs.Cause]] = {
    "rank": jobs.killed_rank,
    "pod": lambda worker: jobs.deleted_pods((worker,)),
    "two pods": lambda worker: jobs.deleted_pods((worker, (worker + 1) % EXACT.workers)),
    "all pods": lambda _: jobs.deleted_pods(tuple(range(EXACT.workers))),
    "node": jobs.killed_node,
    "memory": jobs.out_of_memory,
}


class _Subsets:
    """B6: the pods of a subset of five workers are deleted at once, with what their nodes hold."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._job: Job | None = None

    def __call__(self, repetition: int) -> Entry:
        if self._job is None:
            training = replace(LONG, workers=5)
            self._job = jobs.start(self._kube, "subsets", training, copies=COPIES)
            self._job.wait_step(12)
        lost = SUBSETS[repetition]
        seconds, details = jobs.recovery(self._job, jobs.deleted_pods(lost), 240)
        level = "replicated_before" if len(lost) <= COPIES else "persisted_before"
        kept = (details["restored_step"] or -1) >= details[level]
        return _entry("B6", repetition, seconds, {**details, "lost": list(lost), "kept": kept})


@dataclass(frozen=True, slots=True)
class _OfPeer:
    case: str
    measure: Callable[[int], Measured]

    def __call__(self, repetition: int) -> Entry:
        found = self.measure(repetition)
        return _entry(self.case, repetition, found.seconds, {"lost_steps": found.lost_steps})
