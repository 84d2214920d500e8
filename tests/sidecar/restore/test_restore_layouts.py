"""The layout that a rank receives for its shard, and the documents from which it is made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sidecar.reshard_world import Turning
from tests.support.shards.builders import (
    JOB,
    BytesSource,
    rank_layout,
    rank_payload,
    shard_header,
)
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import (
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.format.layout import merge_layouts, parse_layout
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import Digest, Rank, RestartRound, TierName, Worker
from holdfast_core.messages.schema import (
    Fill,
    Policy,
    Refusal,
    Restore,
    RestorePoint,
    RestoreReply,
    Round,
)
from holdfast_core.tiers.local_commit import build_manifest
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.fill import Filler
from holdfast_sidecar.restore.rehydrate import Restored
from holdfast_sidecar.save.layouts import RankLayouts

NOW = RestartRound(1)
RANK = Rank(1)
OWN = rank_layout(rank=RANK, world_size=2)
MERGED = merge_layouts(rank_layout(rank=rank, world_size=2) for rank in range(2)).to_bytes()


class Pod:
    """Worker 1 of two with one rank each, whose shard is in its node tier.

    Also stands for the Rehydrator, with the restore point, and the checkpoint's layout where it is available.
    """

    def __init__(self, root: Path) -> None:
        self.directory = root / "layouts"
        self.node = MemoryTier()
        payloads = [rank_payload(rank=rank, world_size=2) for rank in range(2)]
        records = [
            self.node.write_shard(
                shard_header(
                    len(data),
                    rank=rank,
                    world_size=2,
                    layout=digest_of(rank_layout(rank=rank, world_size=2)),
                ),
                BytesSource(data),
            )
            for rank, data in enumerate(payloads)
        ]
        manifest = parse_manifest(build_manifest(JOB, records, parent=None, layout=MERGED))
        self.payload_bytes = len(payloads[RANK])
        self.document: bytes | HoldfastError = MERGED
        self.clock = Turning()
        self.restored = Restored(
            RestorePoint(manifest.step, manifest.restart_round),
            manifest,
            {RANK: records[RANK].ref},
            {RANK: self.payload_bytes},
            {RANK: TierName.NODE},
        )

    async def layout(self, restored: Restored) -> bytes:
        assert restored is self.restored
        if isinstance(self.document, HoldfastError):
            raise self.document
        return self.document

    def ask(self, message: Restore | Fill) -> Any:
        state = RoundState(Worker(1), 1, NOW, accepted=round_of_two())

        async def scenario() -> Any:
            pools = Pools(disk=1, fetch=1, store=1)
            absent: Any = None
            pod: Any = SimpleNamespace(patience=self.clock.patience)
            saves: Any = SimpleNamespace(
                layouts=RankLayouts(self.directory, self.node, pools), stager=absent
            )
            filler = Filler(
                pod,
                Tiers(self.node, None, pools),
                saves,
                self,  # type: ignore[arg-type]
                absent,
                Metrics(),
            )
            try:
                if isinstance(message, Restore):
                    return await filler.restore(state, message)
                return await filler.fill(state, message)
            finally:
                pools.close()

        return asyncio.run(scenario())

    def restore(self, *, with_layout: bool = False) -> RestoreReply:
        reply = self.ask(Restore(NOW, RANK, with_layout=with_layout))
        assert isinstance(reply, RestoreReply)
        assert (reply.world_size, reply.payload_bytes) == (2, self.payload_bytes)
        return reply

    def given(self, digest: Digest | None) -> bytes | None:
        """Return the document that the rank reads."""
        return None if digest is None else (self.directory / f"{hex_of(digest)}.json").read_bytes()


def round_of_two() -> Round:
    return Round(NOW, 1, RestorePoint(), Worker(0), Worker(0), 2, (), (), Policy(interval_steps=1))


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_pod_that_saved_the_shard_has_its_layout(pod: Pod) -> None:
    pod.node.put_layout(OWN)
    pod.document = NotFoundError("no place has the checkpoint's layout")
    reply = pod.restore()
    assert (pod.given(reply.rank_layout), reply.layout) == (OWN, None)


def test_a_new_pod_cuts_it_out_of_the_checkpoints(pod: Pod) -> None:
    reply = pod.restore()
    assert (pod.given(reply.rank_layout), reply.layout) == (OWN, None)


def test_a_rank_that_asks_has_the_checkpoints_layout_too(pod: Pod) -> None:
    reply = pod.restore(with_layout=True)
    assert (pod.given(reply.rank_layout), pod.given(reply.layout)) == (OWN, MERGED)


@pytest.mark.parametrize(
    "document",
    [
        NotFoundError("no place has it"),
        CorruptionError("flipped"),
        MERGED[:-1],
        replace(parse_layout(MERGED), ranks=parse_layout(MERGED).ranks[::-1]).to_bytes(),
    ],
    ids=["nowhere", "flipped", "cut", "not that of its digests"],
)
def test_a_shard_is_restored_without_its_layout(pod: Pod, document: bytes | HoldfastError) -> None:
    """The shard is valid without its layout, so the loss of the document must not lose a checkpoint."""
    pod.document = document
    reply = pod.restore()
    assert (reply.rank_layout, reply.layout) == (None, None)


def test_a_requested_layout_that_no_place_has_is_reported(pod: Pod) -> None:
    pod.document = NotFoundError("layout at worker 0: it has none")
    with pytest.raises(NotFoundError, match="worker 0"):
        pod.restore(with_layout=True)


def test_another_number_of_ranks_must_send_its_layout(pod: Pod) -> None:
    point, manifest = pod.restored.point, pod.restored.manifest
    pod.restored = Restored(point, manifest, {}, {}, {}, MERGED)
    reply = pod.ask(Restore(NOW, RANK))
    assert (reply.world_size, reply.rank_layout, pod.given(reply.layout)) == (2, None, MERGED)
    with pytest.raises(RefusedError, match="expected one, because another number"):
        pod.ask(Fill(NOW, RANK, ()))


def test_a_plan_is_made_with_the_layout_that_the_manifest_names_only(pod: Pod) -> None:
    pod.document = rank_layout(rank=RANK, world_size=4)
    pod.directory.mkdir()
    (pod.directory / f"{hex_of(digest_of(OWN))}.json").write_bytes(OWN)
    with pytest.raises(CorruptionError, match="the manifest says"):
        pod.ask(Fill(NOW, RANK, (), digest_of(OWN)))


def test_a_rank_gets_its_shard_although_the_layout_cannot_be_written(pod: Pod) -> None:
    """Slots may have filled the shared volume."""
    pod.node.put_layout(OWN)
    pod.directory.write_text("no folder: stands for a volume that takes no more")
    assert pod.restore().rank_layout is None


def test_a_layout_that_was_given_before_is_not_written_again(pod: Pod) -> None:
    pod.node.put_layout(OWN)
    given = pod.restore()
    before = {path.name: path.stat().st_ino for path in pod.directory.iterdir()}
    assert pod.restore() == given
    assert {path.name: path.stat().st_ino for path in pod.directory.iterdir()} == before


def test_a_layout_that_was_cut_short_is_given_again(pod: Pod) -> None:
    pod.node.put_layout(OWN)
    pod.directory.mkdir()
    (pod.directory / f"{hex_of(digest_of(OWN))}.json").write_bytes(OWN[:10])
    assert pod.given(pod.restore().rank_layout) == OWN


def test_a_layout_whose_holder_comes_back_is_waited_for(pod: Pod) -> None:
    """Without the layout, a rank with other offsets and the same shapes would accept this part as its own."""
    pod.document = UnavailableError("worker 0: connection refused")

    def back(waits: int) -> None:
        if waits == 3:
            pod.document = MERGED

    pod.clock.at = back
    assert pod.given(pod.restore().rank_layout) == OWN
    assert pod.clock.waits == 3


@pytest.mark.parametrize("with_layout", [False, True])
def test_a_layout_whose_holder_stays_away_is_no_missing_one(pod: Pod, with_layout: bool) -> None:
    pod.document = UnavailableError("worker 0: connection refused")
    with pytest.raises(RefusedError, match=r"cannot be read now: worker 0: connection") as caught:
        pod.restore(with_layout=with_layout)
    assert caught.value.code == Refusal.BUSY


def test_a_layout_is_not_waited_for_beyond_its_round(pod: Pod) -> None:
    pod.document = UnavailableError("worker 0: connection refused")
    later = replace(pod.restored)

    def sealed(waits: int) -> None:
        pod.restored = later

    pod.clock.at = sealed
    with pytest.raises(RefusedError, match="the round of the restore ended"):
        pod.restore()
    assert pod.clock.waits == 1
