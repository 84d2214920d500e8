"""Runs that start at the same time in one folder get different rounds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, rank_layout_and_plan
from tests.support.trainer.launched import until

from holdfast.directory.choice import JOB_UID
from holdfast.directory.commit import Committer
from holdfast.directory.open_folder import ServiceOptions, claim_round, keep_round
from holdfast.directory.persister import DirectoryService
from holdfast_core.errors import NotFoundError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import Policy
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader

ZERO = RestartRound(0)


def started(root: Path) -> DirectoryService:
    policy = Policy(interval_steps=1, keep_last=3)
    service = DirectoryService.start(
        ServiceOptions(root / "ckpt", root / "slots", root / "layouts", 2, range(2), policy)
    )
    return service


def test_each_run_reserves_a_higher_round(tmp_path: Path) -> None:
    rounds = tmp_path / "rounds"
    assert [claim_round(rounds, ZERO, "a") for _ in range(4)] == [0, 1, 2, 3]
    assert claim_round(rounds, RestartRound(9), "a") == 9
    assert [path.name for path in rounds.iterdir()] == ["r000009"]


def claim_many(rounds: Path, begin: Any, taken: Any) -> None:
    begin.wait(HANG_SECONDS)
    for _ in range(25):
        taken.put(claim_round(rounds, ZERO, "run"))


@pytest.mark.fault("Several runs start in a folder together")
def test_two_processes_never_reserve_the_same_round(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin, taken = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=claim_many, args=(tmp_path / "rounds", begin, taken))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [taken.get(timeout=HANG_SECONDS) for _ in range(100)]
    for process in processes:
        process.join(HANG_SECONDS)
    assert len(set(found)) == 100


@pytest.mark.fault("Two runs take rounds between another run's listing and its file")
def test_a_round_whose_file_was_removed_meanwhile_is_not_reserved_again(tmp_path: Path) -> None:
    """After one run has listed the rounds, two others take the next rounds and remove the older file."""
    rounds, go = tmp_path / "rounds", tmp_path / "go"
    rounds.mkdir()
    with failpoints(f"directory.before_round=wait:{go}@1") as points, ThreadPoolExecutor(1) as pool:
        late = pool.submit(claim_round, rounds, ZERO, "late")
        until(lambda: points.hits("directory.before_round") == 1, "the late run has listed them")
        assert [claim_round(rounds, ZERO, "other") for _ in range(2)] == [0, 1]
        go.touch()
        assert late.result(timeout=HANG_SECONDS) == 2


def test_runs_that_start_together_reserve_different_rounds(tmp_path: Path) -> None:
    services = [started(tmp_path) for _ in range(5)]
    assert [service.round for service in services] == [0, 1, 2, 3, 4]
    for service in services:
        service.finish(0)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(100))


def strange(path: Path) -> None:
    path.with_name("r00000x").touch()
    path.with_name(".nfs000012").touch()


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.fault("The folder's record of its round is damaged")
@pytest.mark.parametrize("damage", [empty, zeros, strange, gone])
def test_damage_to_a_reservation_hides_no_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    started(tmp_path).finish(0)
    first = started(tmp_path)
    checkpoint = prepared(tmp_path, {0: "a", 1: "a"}, first.round)
    first.finish(0)
    damage(tmp_path / "ckpt/rounds/r000001")
    (tmp_path / "ckpt/tier/round.json").write_text("{damaged")
    second = started(tmp_path)
    assert second.round == 2
    assert (second.restore_point.step, second.restore_point.round) == (5, checkpoint.round)
    second.finish(0)


def test_a_round_is_kept_in_a_folder_that_was_deleted(tmp_path: Path) -> None:
    rounds = tmp_path / "rounds"
    keep_round(rounds, RestartRound(4), "a")
    assert claim_round(rounds, ZERO, "b") == 5
    keep_round(rounds, RestartRound(4), "a")
    assert [path.name for path in rounds.iterdir()] == ["r000005"]


def prepared(root: Path, runs: dict[int, str], round_: RestartRound) -> CheckpointId:
    """Write durable shards of step 5 with their records. `runs` maps each rank to the run that saves its
    shard."""
    tier = DiskNodeTier(root / "ckpt/tier", fill_limit=1.0)
    tier.open()
    for rank, run in runs.items():
        layout, plan = rank_layout_and_plan(rank=rank, world_size=2, rows_per_rank=10)
        tier.put_layout(layout)
        header = ShardHeader(
            JOB_UID, round_, Step(5), Rank(rank), 2, digest_of(layout), plan.total_bytes
        )
        record = tier.write_shard(header, BytesSource(payload(plan.total_bytes, seed=rank)))
        committer = Committer(tier, root / "ckpt/records", 2, range(2), 3, run)
        committer.prepare(record, layout_digests(layout))
    return CheckpointId(Step(5), round_)


@pytest.mark.fault("Two runs in one round have shards of one step")
def test_shards_of_two_runs_are_never_committed_together(tmp_path: Path) -> None:
    """The runs may even have the same round: after a file system lost a name, or in a copied folder."""
    checkpoint = prepared(tmp_path, {0: "a", 1: "b"}, ZERO)
    tier = DiskNodeTier(tmp_path / "ckpt/tier", fill_limit=1.0)
    tier.open()
    committer = Committer(tier, tmp_path / "ckpt/records", 2, range(2), 3, "a")
    with pytest.raises(NotFoundError, match=r"r000000-a/s5-r0/1\.json"):
        committer.commit(checkpoint)
    committer.commit_left()
    assert not committer.is_committed(checkpoint)


def test_a_manifest_names_the_run(tmp_path: Path) -> None:
    checkpoint = prepared(tmp_path, {0: "a", 1: "a"}, ZERO)
    tier = DiskNodeTier(tmp_path / "ckpt/tier", fill_limit=1.0)
    tier.open()
    Committer(tier, tmp_path / "ckpt/records", 2, range(2), 3, "b").commit_left()
    assert parse_manifest(tier.get_manifest(JOB_UID, checkpoint)).job.name == "a"
