from __future__ import annotations

import pytest

from holdfast_core.errors import FormatError
from holdfast_core.format.keys import (
    ManifestKey,
    NeededByKey,
    NeedsKey,
    ShardObject,
    ShardObjectKey,
    checked_job_uid,
    checkpoint_of_folder,
    job_prefix,
    layout_key,
    manifest_key,
    needed_by_key,
    needs_key,
    pack_key,
    parse_key,
    parts_of,
    references_prefix,
    shard_key,
    shards_prefix,
    stored_layout_key,
)
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef, Step

STEPS = range(10, 10_010, 10)
DIGEST = Digest("b3:" + "0123456789abcdef" * 4)
CHECKPOINT = CheckpointId(Step(1200), RestartRound(3))
LATER = CheckpointId(Step(1300), RestartRound(4))


def test_keys_are_as_the_protocol_spells_them() -> None:
    ref = ShardRef(JobUid("u"), Step(1200), RestartRound(3), Rank(7), DIGEST)
    assert shard_key(ref) == "shards/s000000001200-r000003/rank000007-0123456789abcdef.shard"
    assert layout_key(DIGEST) == "layouts/" + "0123456789abcdef" * 4 + ".json"
    assert pack_key(ref) == "shards/s000000001200-r000003/rank000007-0123456789abcdef.pack"
    assert shards_prefix(CHECKPOINT) == "shards/s000000001200-r000003/"
    assert references_prefix(CHECKPOINT) == "references/s000000001200-r000003/"
    assert (
        needed_by_key(CHECKPOINT, LATER)
        == "references/s000000001200-r000003/by-s000000001300-r000004"
    )
    assert (
        needs_key(LATER, CHECKPOINT, 1 << 40)
        == "references/s000000001300-r000004/needs-s000000001200-r000003-00000001099511627776"
    )
    assert stored_layout_key(ref) == (
        "shards/s000000001200-r000003/rank000007-0123456789abcdef.layout"
    )
    assert manifest_key(CHECKPOINT) == "manifests/s000000001200/r000003.json"
    assert job_prefix("team-a", JobUid("u-1")) == "team-a/u-1/"


def test_keys_parse_back() -> None:
    ref = ShardRef(JobUid("u"), Step(1200), RestartRound(3), Rank(7), DIGEST)
    assert parse_key(shard_key(ref)) == ShardObjectKey(CHECKPOINT, Rank(7), "0123456789abcdef")
    packed = ShardObjectKey(CHECKPOINT, Rank(7), "0123456789abcdef", ShardObject.PACK)
    assert parse_key(pack_key(ref)) == packed
    assert parse_key(needed_by_key(CHECKPOINT, LATER)) == NeededByKey(CHECKPOINT, LATER)
    assert parse_key(needs_key(LATER, CHECKPOINT, 7)) == NeedsKey(LATER, CHECKPOINT, 7)
    assert checkpoint_of_folder(shards_prefix(CHECKPOINT)) == CHECKPOINT
    assert checkpoint_of_folder(references_prefix(CHECKPOINT)) == CHECKPOINT
    assert checkpoint_of_folder("layouts/s000000001200-r000003/") is None
    layout = ShardObjectKey(CHECKPOINT, Rank(7), "0123456789abcdef", ShardObject.LAYOUT)
    assert parse_key(stored_layout_key(ref)) == layout
    assert parse_key(manifest_key(CHECKPOINT)) == ManifestKey(CHECKPOINT)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/manifests/s000000001200/r000003.json",
        "manifests/../manifests/s000000001200/r000003.json",
        "manifests/s000000001200/r000003.json\n",
        "manifests/s000000001200/r000003.json\0",
        "manifests/s1200/r3.json",
        "manifests/s00000000120٠/r000003.json",
        "manifests\\s000000001200\\r000003.json",
        "layouts/" + "0" * 64 + ".json",
        "shards/s000000001200-r000003/rank000007-0123456789abcde.shard",
        "shards/s000000001200-r000003/../rank000007-0123456789abcdef.shard",
    ],
)
def test_other_names_are_refused(key: str) -> None:
    with pytest.raises(FormatError):
        parse_key(key)


@pytest.mark.fault("A name or a link leads out of the cache")
@pytest.mark.parametrize("uid", ["", ".", "..", "a/b", "a\0", "-a", "a" * 129, "a b", "a\n", "ä"])
def test_hostile_job_uids_are_refused(uid: str) -> None:
    with pytest.raises(FormatError):
        checked_job_uid(JobUid(uid))


@pytest.mark.parametrize("namespace", ["", "..", "A", "a/b", "a.b", "-a", "a" * 64])
def test_hostile_namespaces_are_refused(namespace: str) -> None:
    with pytest.raises(FormatError):
        job_prefix(namespace, JobUid("u"))


@pytest.mark.parametrize(("step", "round_"), [(-1, 0), (10**12, 0), (0, 10**6), (0, -1)])
def test_numbers_without_a_key(step: int, round_: int) -> None:
    with pytest.raises(FormatError):
        manifest_key(CheckpointId(Step(step), RestartRound(round_)))


def test_the_shards_of_many_checkpoints_are_in_one_part_each() -> None:
    found = [CheckpointId(Step(step), RestartRound(0)) for step in STEPS]
    parts = parts_of("shards/", found)
    assert parts == [f"shards/s00000000{digit}" for digit in range(10)] + ["shards/s000000010"]
    for checkpoint in found:
        assert sum(shards_prefix(checkpoint).startswith(part) for part in parts) == 1
    assert parts_of("shards/", found[:20]) == ["shards/"]
    assert parts_of(shards_prefix(found[7]), found) == [shards_prefix(found[7])]
