"""A coordinator builds manifests and layouts, and a member checks them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.sidecar import rank_document
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import round_message

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.manifest import manifest_digest, parse_manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, Step
from holdfast_core.messages.schema import (
    ManifestPut,
    RestorePoint,
    ShardInfo,
)
from holdfast_sidecar.coordinator.documents import Builder, check_put
from holdfast_sidecar.coordinator.ledger import StepEntry

PARENT = Digest("b3:" + "e" * 64)
MESSAGE = round_message(3, restore_point=RestorePoint(Step(5), RestartRound(1), PARENT))


def entry(order: tuple[int, ...] = (0, 1)) -> StepEntry:
    made = StepEntry(Step(9), RestartRound(3), 2)
    for rank in order:
        data = bytes([rank]) * 10
        made.shards[Rank(rank)] = ShardInfo(Rank(rank), 10, digest_of(data), digest_of(b"t" + data))
        made.layouts[Rank(rank)] = digest_of(rank_document(rank, 10))
    return made


def builder() -> Builder:
    made = Builder(CONTRACT, MESSAGE)
    for rank in (0, 1):
        document = rank_document(rank, 10)
        made.add(digest_of(document), document.decode())
    return made


def test_any_coordinator_writes_the_same_bytes() -> None:
    first = builder().build(entry((0, 1)))
    second = builder().build(entry((1, 0)))
    assert first == second
    manifest = parse_manifest(first.manifest)
    assert manifest.parent == PARENT
    assert manifest.layout == digest_of(first.layout)
    assert (manifest.step, manifest.restart_round, manifest.world_size) == (9, 3, 2)
    assert manifest_digest(first.manifest) == first.digest


@pytest.mark.parametrize(
    ("job_uid", "step", "round_"),
    [(JobUid("another"), 9, 3), (CONTRACT.job_uid, 8, 3), (CONTRACT.job_uid, 9, 2)],
    ids=["job", "step", "round"],
)
def test_a_manifest_with_the_name_of_another_is_refused(
    job_uid: JobUid, step: int, round_: int
) -> None:
    built = builder().build(entry())
    with pytest.raises(CorruptionError, match="renamed or copied"):
        parse_manifest_of(built.manifest, job_uid, CheckpointId(Step(step), RestartRound(round_)))


def test_a_layout_with_a_wrong_name_is_refused() -> None:
    made = Builder(CONTRACT, MESSAGE)
    document = rank_document(0, 10)
    with pytest.raises(CorruptionError):
        made.add(digest_of(b"other"), document.decode())
    junk = b'{"a":1}'
    with pytest.raises(FormatError):
        made.add(digest_of(junk), junk.decode())
    assert not made.has(digest_of(junk))


def test_without_a_rank_layout_nothing_is_built() -> None:
    with pytest.raises(FormatError, match="layouts of 2 ranks"):
        Builder(CONTRACT, MESSAGE).build(entry())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"step": Step(8)}, id="another step"),
        pytest.param({"round": RestartRound(2)}, id="another round"),
        pytest.param({"layout": "{}"}, id="another layout"),
        pytest.param({"manifest": "{}"}, id="no manifest"),
    ],
)
def test_a_manifest_put_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    built = builder().build(entry())
    put = ManifestPut(RestartRound(3), Step(9), built.manifest.decode(), built.layout.decode())
    assert check_put(put, CONTRACT).step == 9
    with pytest.raises(FormatError):
        check_put(replace(put, **change), CONTRACT)  # type: ignore[arg-type]


def test_another_jobs_manifest_is_refused() -> None:
    built = builder().build(entry())
    put = ManifestPut(RestartRound(3), Step(9), built.manifest.decode())
    with pytest.raises(FormatError):
        check_put(put, replace(CONTRACT, job_uid=JobUid("job-2")))
