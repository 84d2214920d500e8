"""The oracle itself must be able to fail: each invariant is broken on purpose. A correct run must pass."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from minio import Minio
from minio.error import S3Error
from testbed.driver.oracle import Evidence, compare_digests, judge, stored_objects

MANIFEST = "b3:" + "1" * 64
SHARD = "b3:" + "2" * 64
MANIFEST_KEY = "manifests/s000000000020/r000000.json"
SHARD_KEY = "shards/s000000000020-r000000/rank000000-2222222222222222.shard"
STORED = {
    MANIFEST_KEY: json.dumps({"shards": [{"rank": 0, "blake3": SHARD}]}),
    SHARD_KEY: "etag",
}
PACKED = {
    MANIFEST_KEY: STORED[MANIFEST_KEY],
    SHARD_KEY.replace(".shard", ".pack"): "etag",
    "references/s000000000010-r000000/by-s000000000020-r000000": "etag",
}


def status(round_: int, persisted: tuple[int, int] | None = None, restored: int | None = None):
    result: dict = {"restartRound": round_}
    if persisted is not None:
        result["lastPersisted"] = {"step": persisted[0], "round": persisted[1]}
    if restored is not None:
        result["restorePoint"] = {"step": restored, "round": 0, "manifest": MANIFEST}
    return result


def checkpoint(step: int = 20, round_: int = 0, manifest: str = MANIFEST, name: str = "a"):
    return {
        "metadata": {"name": name},
        "spec": {"step": step},
        "status": {"phase": "Committed", "round": round_, "manifest": manifest},
    }


def evidence(history=(), checkpoints=(), stored=STORED, uploads=()) -> Evidence:
    return Evidence(list(history), list(checkpoints), stored, list(uploads), copies=1)


CORRECT = evidence(
    [status(0), status(0, (20, 0)), status(1, (20, 0), 30), status(1, (40, 1), 30)], [checkpoint()]
)

BROKEN = {
    "a committed checkpoint without its manifest": (
        evidence(checkpoints=[checkpoint()], stored={}),
        "I1",
    ),
    "a manifest that names a shard that is gone": (
        evidence(checkpoints=[checkpoint()], stored={MANIFEST_KEY: STORED[MANIFEST_KEY]}),
        "I1",
    ),
    "a pack that needs a checkpoint whose objects are gone": (
        evidence(checkpoints=[checkpoint()], stored=PACKED),
        "I1",
    ),
    "two manifests for one step and round": (
        evidence(checkpoints=[checkpoint(), checkpoint(manifest=SHARD, name="b")]),
        "I3",
    ),
    "a second restore point for one round": (
        evidence([status(1, restored=30), status(1, restored=20)]),
        "I3",
    ),
    "a restore below what was persisted": (
        evidence([status(1, (20, 0), restored=10)]),
        "I4",
    ),
    "a start from nothing after a commit": (
        evidence([{**status(0), "lastCommittedStep": 10}, {**status(1), "restorePoint": {}}]),
        "I4",
    ),
    "a round that goes back": (evidence([status(2), status(1)]), "I5"),
    "a commit by an older round": (evidence([status(2, (40, 2)), status(2, (50, 1))]), "I5"),
    "a multipart upload left behind": (evidence(uploads=["shards/x"]), "I7"),
}


def test_a_sound_run_has_no_problems():
    assert judge(CORRECT) == []


def test_a_pack_serves_for_a_shard_while_what_it_needs_is_there():
    stored = PACKED | {"shards/s000000000010-r000000/rank000000-3333333333333333.shard": "etag"}
    assert judge(evidence(checkpoints=[checkpoint()], stored=stored)) == []


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_invariant_is_named(case):
    found, invariant = BROKEN[case]
    assert [p[:2] for p in judge(found)] == [invariant], judge(found)


def test_digests_are_compared_for_every_rank():
    assert compare_digests({0: "a", 1: "b"}, {0: "a", 1: "b"}) == []
    assert len(compare_digests({0: "a", 1: "b"}, {0: "a"})) == 1
    assert len(compare_digests({0: "a"}, {0: "x"})) == 1
    assert compare_digests({}, {}) != [], "an empty reference proves nothing"


def test_a_rollback_that_the_lineage_records_breaks_no_invariant() -> None:
    def back(*history: dict, reached: int) -> str:
        lineage = [{"base": "s10-r0", "rolledBackFrom": reached}]
        return "".join(judge(evidence([*history[:-1], {**history[-1], "lineage": lineage}])))

    base = status(0, (20, 0)), status(1, (20, 0), 10)
    assert back(*base, reached=23) == ""
    assert "I4" in back(*base, reached=15)
    again = status(1, (20, 1)), status(2, (10, 0), 10)
    assert back(*again, reached=20) == "", "round 1 is off the lineage"
    assert "I5" in back(*again, reached=19)


class PrunedStore:
    """A store in which the manifest of step 10 is deleted between its listing and its read."""

    def list_objects(self, *_: object, **__: object) -> list[Any]:
        names = ("manifests/s000000000010/r000000.json", MANIFEST_KEY, SHARD_KEY)
        return [SimpleNamespace(object_name=f"e2e/team/uid/{n}", etag="etag") for n in names]

    def get_object(self, _: str, name: str) -> io.BytesIO:
        if "s000000000010" in name:
            none = cast(Any, None)
            raise S3Error(none, "NoSuchKey", "it does not exist", name, "", "")
        return io.BytesIO(STORED[MANIFEST_KEY].encode())


def test_a_manifest_that_is_pruned_after_the_listing_is_not_stored():
    assert stored_objects(cast(Minio, PrunedStore()), "team", "uid") == STORED
