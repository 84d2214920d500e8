"""The list of a store: a line for each checkpoint, of one namespace or one job of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.operator.builders import stored_manifest

from holdfast_core.contract import ListContract
from holdfast_core.errors import ConfigError
from holdfast_core.format import keys
from holdfast_core.format.manifest import manifest_digest
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.process.store_list import listed

NOW = datetime(2026, 11, 30, 2, tzinfo=UTC)
FIRST, SECOND = JobUid("uid-1"), JobUid("uid-2")


def put(tier: ObjectTier, uid: JobUid, step: int, round_: int = 0) -> bytes:
    """Put the manifest of a checkpoint. The list reads nothing else."""
    manifest = stored_manifest(uid, step, round_)
    document = manifest.to_bytes()
    tier.put_manifest(
        manifest.job.namespace, uid, CheckpointId(Step(step), RestartRound(round_)), document
    )
    return document


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ObjectTier]:
    with closing(ObjectTier(DirectoryObjectStore(tmp_path))) as found:
        yield found


def lines(tier: ObjectTier, namespace: str = "team", job: str | None = None) -> list[Any]:
    return list(listed(tier, ListContract(namespace, job), NOW, 2))


def test_each_checkpoint_of_the_namespace_has_a_line(tier: ObjectTier) -> None:
    document = put(tier, FIRST, 10)
    put(tier, FIRST, 20, 1)
    put(tier, SECOND, 5)
    found = lines(tier)
    assert [(line["jobUid"], line["step"], line["round"]) for line in found] == [
        (FIRST, 10, 0),
        (FIRST, 20, 1),
        (SECOND, 5, 0),
    ]
    first = found[0]
    assert first["manifest"] == manifest_digest(document)
    assert (first["namespace"], first["job"], first["worldSize"]) == ("team", "gpt", 8)
    assert first["bytes"] > 0
    assert first["committedAt"] <= "2026-11-30T02:00:00Z"


def test_a_job_is_chosen_by_its_uid_or_its_name(tier: ObjectTier) -> None:
    put(tier, FIRST, 10)
    put(tier, SECOND, 5)
    assert [line["jobUid"] for line in lines(tier, job=SECOND)] == [SECOND]
    assert [line["jobUid"] for line in lines(tier, job="gpt")] == [FIRST, SECOND]
    assert lines(tier, job="another") == []
    assert lines(tier, namespace="team-b") == []


@pytest.mark.fault("A manifest in the store is damaged when the store is imported")
def test_a_manifest_that_cannot_be_used_says_why(tier: ObjectTier) -> None:
    put(tier, FIRST, 10)
    job = tier.job("team", FIRST)
    other = CheckpointId(Step(20), RestartRound(0))
    job.put(keys.manifest_key(other), b'{"cut')
    good, bad = lines(tier)
    assert "error" not in good
    assert (bad["step"], "manifest" in bad) == (20, False)
    assert bad["error"]


@pytest.mark.parametrize("text", ["", "[]", '{"namespace": 1}', '{"namespace": "a", "x": 1}'])
def test_a_wrong_request_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOLDFAST_LIST"):
        ListContract.from_json(text)
