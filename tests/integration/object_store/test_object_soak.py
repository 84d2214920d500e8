"""A store with rare random faults: committed objects stay readable, and reads return the right bytes.

Each request fails with a probability. The seed determines the mixture of faults but not their sequence,
which depends on the scheduling of threads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    CutReply,
    CutRequest,
    DropRequestHeader,
    FlipReply,
    FlipRequest,
    HostileProxy,
    LoseReply,
    Matches,
    Seen,
    SetReplyHeader,
    on,
)
from tests.support.shards.builders import JOB_UID, shard_header
from tests.support.shards.shard_files import CopyWriters, write_shard

from holdfast_core.errors import CorruptionError, UnavailableError
from holdfast_core.ids import CheckpointId, RestartRound, ShardRef, Step
from holdfast_core.store.s3.client import CHECKSUM_HEADER
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
NAMESPACE = "team-a"
SIZES = [300_000] * 6 + [11 * MIB] * 3
TRIES = 20
"""Attempts by the caller, which retries as the sidecar does. Each makes up to five attempts per operation."""


def conditional_put(seen: Seen) -> bool:
    return seen.method == "PUT" and "if-none-match" in seen.headers


MIXTURE: list[tuple[float, Matches, Action]] = [
    (0.05, on(""), Answer(503, "SlowDown")),
    (0.02, on(""), LoseReply()),
    (0.03, on("PUT"), CutRequest(100)),
    (0.03, on("PUT"), CutRequest(100, reset=False)),
    (0.03, on("PUT"), FlipRequest(0)),
    (0.03, on("POST", query="uploadId="), LoseReply()),
    (0.05, conditional_put, DropRequestHeader("If-None-Match")),
    (0.03, on("HEAD"), Answer(404)),
    (0.03, on("GET", query=""), CutReply(1)),
    (0.05, on("GET", query=""), FlipReply(0)),
    (0.03, on("PUT", query="partNumber="), SetReplyHeader(CHECKSUM_HEADER, "AAAAAA==")),
]


def sometimes(probability: float, kind: Matches, rng: random.Random) -> Matches:
    def matches(seen: Seen) -> bool:
        return kind(seen) and rng.random() < probability

    return matches


def again_and_again(call: Callable[[], object]) -> None:
    for _ in range(TRIES - 1):
        try:
            call()
            return
        except UnavailableError:
            continue
    call()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_committed_is_unreadable_and_nothing_wrong_is_returned(
    tmp_path: Path,
    tier: ObjectTier,
    proxied: ObjectTier,
    proxy: HostileProxy,
    seed: int,
) -> None:
    rng = random.Random(seed)
    faults = [
        proxy.add(sometimes(probability, kind, rng), action, 1 << 30)
        for probability, kind, action in MIXTURE
    ]
    returned = 0
    for number, size in enumerate(SIZES):
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoint = CheckpointId(Step(number), RestartRound(0))
        document = b'{"number":%d}' % number
        with write_shard(folder, shard_header(size, step=number), os.urandom(size)) as shard:
            (path,) = folder.iterdir()
            truth, ref = path.read_bytes(), shard.record.ref
            again_and_again(lambda s=shard: proxied.upload_shard(NAMESPACE, s))  # type: ignore[misc]
            again_and_again(
                lambda c=checkpoint, d=document: proxied.put_manifest(  # type: ignore[misc]
                    NAMESPACE, JOB_UID, c, d
                )
            )
            # After the commit, the store itself, without the proxy, holds the whole object.
            assert tier.get_manifest(NAMESPACE, JOB_UID, checkpoint) == document
            assert copy_of(tier, ref, folder / "honest") == truth
            for attempt in range(3):
                try:
                    found = copy_of(proxied, ref, folder / f"hostile{attempt}")
                except (UnavailableError, CorruptionError):
                    continue
                returned += 1
                assert found == truth
    assert sum(fault.applied for fault in faults) > 10
    assert returned > len(SIZES)


def copy_of(tier: ObjectTier, ref: ShardRef, folder: Path) -> bytes:
    folder.mkdir()
    writers = CopyWriters(folder)
    tier.download_shard(NAMESPACE, ref, writers)
    return writers.opened[0].path.read_bytes()
