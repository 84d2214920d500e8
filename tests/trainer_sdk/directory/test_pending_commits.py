"""What ranks of a folder are told of saves that another rank finishes, or that rank 0 commits and prunes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, payload, rank_layout_and_plan

from holdfast.directory.choice import JOB_UID
from holdfast.directory.commit import Committer
from holdfast.directory.open_folder import OpenFolder, ServiceOptions
from holdfast.directory.saves import PendingCommits
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import Policy, StepOutcome
from holdfast_core.shards.file import ShardHeader

ROUND = RestartRound(1)
STEPS = (10, 20)


@dataclasses.dataclass(frozen=True, slots=True)
class LateCommitter(Committer):
    """A committer of a process that does not run for a while after it has looked for a checkpoint."""

    looked: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """What other processes do in this time, once."""

    def is_complete(self, checkpoint: CheckpointId) -> bool:
        found = super(LateCommitter, self).is_complete(checkpoint)
        self._others_run()
        return found

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        found = super(LateCommitter, self).is_committed(checkpoint)
        if 0 not in self.own_ranks:
            self._others_run()
        return found

    def _others_run(self) -> None:
        while self.looked:
            self.looked.pop()()


class Process:
    """The persister of one of two ranks."""

    def __init__(self, root: Path, rank: int, keep_last: int) -> None:
        self.rank = rank
        self.told: list[StepOutcome] = []
        options = ServiceOptions(
            root,
            root / "slots",
            root / "layouts",
            2,
            range(rank, rank + 1),
            Policy(0, 2, keep_last, peer_copies=0),
            round=ROUND,
            choose_restore=False,
        )
        folder = OpenFolder.open(options)
        fields = {f.name: getattr(folder.committer, f.name) for f in dataclasses.fields(Committer)}
        self.committer = LateCommitter(**fields)
        self.folder = dataclasses.replace(folder, committer=self.committer)
        self.commits = PendingCommits(self.folder, None, lambda: None)

    def save(self, *steps: int) -> None:
        """Make the shards of this rank durable, and wait for their commits."""
        for step in steps:
            layout, plan = rank_layout_and_plan(rank=self.rank, world_size=2, rows_per_rank=10)
            self.folder.tier.put_layout(layout)
            size, digest = plan.total_bytes, digest_of(layout)
            header = ShardHeader(JOB_UID, ROUND, Step(step), Rank(self.rank), 2, digest, size)
            source = BytesSource(payload(size, seed=step * 10 + self.rank))
            record = self.folder.tier.write_shard(header, source)
            self.committer.prepare(record, layout_digests(layout))
            self.commits.add(CheckpointId(Step(step), ROUND), [self.told.append])

    def steps(self, *, failed: bool) -> list[int]:
        """Return the steps that are local, or will never be."""
        found = (one for one in self.told if one.level is Level.LOCAL)
        return [one.step for one in found if one.failed is failed]


Make = Callable[..., tuple[Process, Process]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def ranks(keep_last: int = 3) -> tuple[Process, Process]:
        first, second = (Process(tmp_path, rank, keep_last) for rank in (0, 1))
        return first, second

    return ranks


@pytest.mark.fault("A rank of a folder writes two saves while rank 0 looks for them")
def test_saves_that_a_rank_writes_while_rank_0_looks_are_both_committed(make: Make) -> None:
    first, second = make()
    first.save(*STEPS)
    first.committer.looked.append(lambda: second.save(*STEPS))
    first.commits.commit_complete()
    first.commits.commit_complete()
    assert (first.steps(failed=False), first.steps(failed=True)) == ([*STEPS], [])


@pytest.mark.fault("Rank 0 of a folder commits two saves while another rank looks for them")
@pytest.mark.parametrize("keep_last", [3, 1])
def test_saves_that_rank_0_commits_while_a_rank_looks_are_both_local(
    make: Make, keep_last: int
) -> None:
    """With one kept checkpoint, the second commit also prunes the first one."""
    first, second = make(keep_last)
    for each in (first, second):
        each.save(*STEPS)
    second.committer.looked.append(first.commits.commit_complete)
    second.commits.commit_complete()
    second.commits.commit_complete()
    assert (second.steps(failed=False), second.steps(failed=True)) == ([*STEPS], [])


def test_a_save_that_another_rank_never_finished_fails_when_a_later_one_is_committed(
    make: Make,
) -> None:
    first, second = make(1)
    first.save(*STEPS)
    second.save(20)
    for each in (first, second):
        each.commits.commit_complete()
    assert (first.steps(failed=False), first.steps(failed=True)) == ([20], [10])
    assert second.steps(failed=False) == [20]
