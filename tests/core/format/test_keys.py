from __future__ import annotations

import pytest

from holdfast_core.errors import FormatError
from holdfast_core.format.keys import (
    LayoutKey,
    ManifestKey,
    ReferencesKey,
    ShardKey,
    checked_job_uid,
    job_prefix,
    layout_key,
    manifest_key,
    pack_key,
    parse_key,
    references_key,
    shard_key,
)
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef, Step

DIGEST = Digest("b3:" + "0123456789abcdef" * 4)
CHECKPOINT = CheckpointId(Step(1200), RestartRound(3))


def test_keys_are_as_the_protocol_spells_them() -> None:
    ref = ShardRef(JobUid("u"), Step(1200), RestartRound(3), Rank(7), DIGEST)
    assert shard_key(ref) == "shards/s000000001200/r000003/rank000007-0123456789abcdef.shard"
    assert layout_key(DIGEST) == "layouts/" + "0123456789abcdef" * 4 + ".json"
    assert pack_key(ref) == "shards/s000000001200/r000003/rank000007-0123456789abcdef.pack"
    assert references_key(CHECKPOINT) == "references/s000000001200/r000003.json"
    assert manifest_key(CHECKPOINT) == "manifests/s000000001200/r000003.json"
    assert job_prefix("team-a", JobUid("u-1")) == "team-a/u-1/"


def test_keys_parse_back() -> None:
    ref = ShardRef(JobUid("u"), Step(1200), RestartRound(3), Rank(7), DIGEST)
    assert parse_key(shard_key(ref)) == ShardKey(CHECKPOINT, Rank(7), "0123456789abcdef")
    packed = ShardKey(CHECKPOINT, Rank(7), "0123456789abcdef", packed=True)
    assert parse_key(pack_key(ref)) == packed
    assert parse_key(references_key(CHECKPOINT)) == ReferencesKey(CHECKPOINT)
    assert parse_key(layout_key(DIGEST)) == LayoutKey(DIGEST)
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
        "layouts/" + "G" * 64 + ".json",
        "shards/s000000001200/r000003/rank000007-0123456789abcde.shard",
        "shards/s000000001200/r000003/../rank000007-0123456789abcdef.shard",
    ],
)
def test_other_names_are_refused(key: str) -> None:
    with pytest.raises(FormatError):
        parse_key(key)


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
